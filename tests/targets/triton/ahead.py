"""Compiles kernels for GPUs that are not there: ``python -m tests.targets.triton.ahead sm_90``.

A process of its own, since kernels that were made for Triton's interpreter can't be compiled. Prints one line of JSON for each
kernel: what it is, and what went wrong or how much shared memory it takes.
"""

import json
import sys
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from postlude.ir import OPS, Region, parse, verify
from postlude.targets.triton.codegen import CHAINED, WORKSPACE
from postlude.targets.triton.configs import Config
from postlude.targets.triton.launcher import constants_of, load_module

TARGETS = {
    "sm_75": GPUTarget("cuda", 75, 32),
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx1100": GPUTarget("hip", "gfx1100", 32),
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
        kinds.append({"partials": "*fp64" if wide else "*fp32", "counters": "*i32", "splits": "i32"}[name])
    chained = CHAINED[config.form] if config.chained else ()
    kinds += ["i32"] * len(chained)
    kinds += ["i32"] * len(source.sizes)
    kinds += [1 if axes[s.tensor][-1] == s.axis else "i32" for s in source.strides]
    constants = constants_of(config, even_k=even, index=tl.int32, precision="ieee")
    function = getattr(module, config.form)
    signature, fixed, attributes = {}, {}, {}
    for position, name in enumerate(function.arg_names):
        kind = kinds[position] if position < len(kinds) else None
        if kind is None or kind == 1:
            signature[name] = "constexpr"
            fixed[(position,)] = 1 if kind == 1 else constants[name]
        else:
            signature[name] = kind
            if name not in ("m", "b", "splits", *chained):
                attributes[(position,)] = [["tt.divisibility", 16]]
    options = {"num_warps": config.warps, "num_stages": config.stages} | ({"launch_pdl": True} if config.chained else {})
    return triton.compile(ASTSource(function, signature, fixed, attributes), target=target, options=options)


#: Configurations that between them have every form, orientation and way through a kernel.
FORMS = (
    Config("gemv", 1, 4, 512, 4, 1),
    Config("gemv", 4, 8, 128, 4, 3),
    Config("gemm", 16, 32, 64, 4, 3),
    Config("gemm", 16, 64, 64, 4, 2, split_k=4, swap=True),
    Config("gemm", 64, 64, 32, 4, 2),
)

LINEAR_GELU = """region(m, n, k); %x = operand [m, k] {0}; %w = operand [n, k] {0}; %row = operand [n] {0};
%acc = contract %x, %w : {1}; %0 = add %acc, %row; %1 = const 0.7071067811865476; %2 = mul %0, %1; %3 = erf %2; %4 = mul %0, %3;
yield [m, n] {0} %4"""

GROUPS = """region(b, m, n, n1, k); %x = operand [b, m, k] bf16; %w = operand [b, n, k] bf16; %w1 = operand [b, n, k] bf16;
%w2 = operand [b, k, n1] bf16; %keep = operand [b, m] bool; %one = operand [] f32; %acc = contract %x, %w : f32;
%acc1 = contract %x, %w1 : f32; %acc2 = contract %x, %w2 : f32; %0 = sigmoid %acc; %1 = mul %0, %acc1; %2 = where %keep, %1, %one;
%3 = gt %2, %one; %4 = mul %acc2, %one; yield [b, m, n] bf16 %2; yield [b, m, n] bool %3; yield [b, m, n1] f32 %4"""


def every_op(short: str) -> str:
    """A Region with every op of the IR."""
    lines = [f"region(m, n, k); %x = operand [m, k] {short}; %w = operand [n, k] {short}; %acc = contract %x, %w : {short}"]
    total, truth = "%acc", ""
    lines.append("%truth = gt %acc, %acc")
    truth = "%truth"
    for name, op in OPS.items():
        floats = iter(["%acc", total])
        inputs = [next(floats) if kind == "float" else truth for kind in op.inputs]
        lines.append(f"%_{name} = {name} {', '.join(inputs)}")
        if op.result == "bool":
            truth = f"%_{name}"
        else:
            lines.append(f"%total_{name} = add {total}, %_{name}")
            total = f"%total_{name}"
    return "; ".join([*lines, f"yield [m, n] {short} {total}", f"yield [m, n] bool {truth}"])


def cases(arch: str) -> list[tuple[str, str, Config, bool]]:
    """(name, program, configuration, whether blocks divide k) of what is compiled for an architecture."""
    found = [(f"linear_gelu bf16 {c}", LINEAR_GELU.format("bf16", "f32"), c, True) for c in FORMS]
    found += [
        (f"linear_gelu {short} {c}", LINEAR_GELU.format(short, wide), c, False)
        for short, wide in (("f16", "f32"), ("f32", "f32"), ("f64", "f64"))
        for c in (FORMS[0], Config("gemm", 16, 16, 32, 4, 2))
    ]
    found += [(f"groups {c}", GROUPS, c, False) for c in (FORMS[0], FORMS[3])]
    found += [(f"every op in {short}", every_op(short), FORMS[0], True) for short in ("f32", "f64")]
    if arch in ("sm_90", "sm_100"):
        chained = [replace(c, chained=True) for c in (FORMS[0], FORMS[3])]
        found += [
            (f"chained {program[:20]} {c}", program, c, True)
            for program in (LINEAR_GELU.format("bf16", "f32"), GROUPS)
            for c in chained
        ]
    return found


def main(arch: str) -> None:
    """Compile all cases of an architecture."""
    for name, program, config, even in cases(arch):
        region = parse(program)
        verify(region)
        try:
            compiled = compile_for(region, config, TARGETS[arch], even)
            print(json.dumps({"case": name, "shared": compiled.metadata.shared}), flush=True)
        except Exception as error:
            print(json.dumps({"case": name, "error": f"{type(error).__name__}: {error}"[-2000:]}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
