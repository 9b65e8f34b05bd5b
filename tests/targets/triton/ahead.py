"""Compiles kernels for GPUs that are not there: ``python -m tests.targets.triton.ahead sm_90``.

A process of its own, since kernels that were made for Triton's interpreter can't be compiled. Prints one line of JSON for each
kernel: what it is, and what went wrong or how much shared memory it takes.
"""

import json
import sys
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from postlude.ir import OPS, Region, parse
from postlude.targets.triton.codegen import WORKSPACE
from postlude.targets.triton.configs import Config, Device, Problem, fitted, rules
from postlude.targets.triton.launcher import load_module

#: Architecture -> Triton's target and bytes of shared memory.
TARGETS = {
    "sm_75": (GPUTarget("cuda", 75, 32), 64 << 10),
    "sm_80": (GPUTarget("cuda", 80, 32), 163 << 10),
    "sm_90": (GPUTarget("cuda", 90, 32), 227 << 10),
    "sm_100": (GPUTarget("cuda", 100, 32), 227 << 10),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64 << 10),
    "gfx1100": (GPUTarget("hip", "gfx1100", 32), 64 << 10),
}

POINTERS = {torch.float32: "*fp32", torch.float64: "*fp64", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.bool: "*i1"}


def compile_for(region: Region, config: Config, target: GPUTarget, even: bool = True) -> Any:
    """Compile one kernel of a Region for dense, aligned tensors; weights and all others lie along their last axis."""
    source, module = load_module(region, config.block_m if config.form == "gemv" else 1, chained=config.chained)
    dtypes = [*(o.dtype for o in region.operands), *(y.dtype for y in region.yields)]
    axes = [*(o.axes for o in region.operands), *(y.axes for y in region.yields)]
    wide = region.contractions[0].accumulate == torch.float64
    kinds: list[Any] = [POINTERS[dtype] for dtype in dtypes]
    for name in WORKSPACE[config.form]:
        kinds.append("*i32" if name == "counters" else "*fp64" if wide else "*fp32")
    kinds += ["i32"] * len(source.sizes)
    kinds += [1 if axes[s.tensor][-1] == s.axis else "i32" for s in source.strides]
    constants = {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
        "SPLIT_K": config.split_k,
        "STAGES": config.stages,
        "SWAP": config.swap,
        "PRECISION": "ieee",
        "EVEN_K": even,
        "INDEX": tl.int32,
    }
    function = getattr(module, config.form)
    signature, fixed, attributes = {}, {}, {}
    for position, name in enumerate(function.arg_names):
        kind = kinds[position] if position < len(kinds) else None
        if kind is None or kind == 1:
            signature[name] = "constexpr"
            fixed[(position,)] = 1 if kind == 1 else constants[name]
        else:
            signature[name] = kind
            if name not in ("m", "b"):
                attributes[(position,)] = [["tt.divisibility", 16]]
    options = {"num_warps": config.warps, "num_stages": config.stages} | ({"launch_pdl": True} if config.chained else {})
    return triton.compile(ASTSource(function, signature, fixed, attributes), target=target, options=options)
