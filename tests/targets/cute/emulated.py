"""Generated modules on a CPU: their functions are called with arrays, and a few lines stand for CuTe DSL and QuACK.

What is shown is what the generated text computes, with functions.py as it is: which function is called for what, in which order,
and what becomes of totals. CUDA's own functions are taken to round correctly; the fast instructions are off by as much as PTX's
documentation allows.
"""

import inspect
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from postlude.ir import Region
from postlude.targets.aten.interpreter import axis_sizes
from postlude.targets.cute import codegen
from postlude.targets.cute.form import Argument, Form, forms
from tests.targets.cpp.numerics import empty_results

Pair = namedtuple("Pair", "a b")


class Values(np.ndarray):
    """A Float32, or a Boolean, in all elements at once."""

    def to(self, kind: Callable[[Any], "Values"]) -> "Values":
        return kind(self)


def _float32(value: Any) -> Values:
    return np.asarray(value, dtype=np.float32).view(Values)


def _boolean(value: Any) -> Values:
    return np.asarray(value, dtype=bool).view(Values)


def _rounded_to(dtype: torch.dtype) -> Callable[[Any], Values]:
    return lambda value: _float32(torch.from_numpy(np.array(value)).to(dtype).float().numpy())


def _precise(name: str) -> Callable[..., Values]:
    """A function of torch in double precision, rounded once."""
    function = getattr(torch, name)

    def call(*arguments: Any, **options: Any) -> Values:
        if options.get("fastmath"):
            return _off(call(*arguments), 2.0**-22)
        value = function(*(torch.from_numpy(np.array(a, dtype=np.float64)) for a in arguments)).numpy()
        return value.view(Values) if value.dtype == bool else _float32(value)

    return call


def _off(value: Values, by: float) -> Values:
    """As far from the right value as an instruction may be, in both directions, without what flushing to zero loses."""
    signs = np.where(np.arange(value.size).reshape(value.shape) % 2, 1.0, -1.0)
    return _float32(np.where(np.abs(value) < np.finfo(np.float32).tiny, 0.0, value.astype(np.float64) * (1 + signs * by)))


_MATH = {
    name: _precise(name)
    for name in (
        *("abs", "copysign", "floor", "ceil", "trunc", "sqrt", "exp", "exp2", "expm1", "log", "log1p", "log2", "log10", "pow"),
        *("rsqrt", "tanh", "erf", "erfc", "sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "isnan", "isinf"),
    )
} | {
    "roundeven": _precise("round"),
    "rem": _precise("fmod"),
    "max": lambda x, y, propagate_nan: np.maximum(x, y),
    "min": lambda x, y, propagate_nan: np.minimum(x, y),
    "div": lambda x, y, full: _off(x / y, 2.0**-22),
    "rcp": lambda x, approx, ftz: _off(1 / x, 2.0**-23),
}


def _stand_ins() -> dict[str, ModuleType]:
    cute = ModuleType("cutlass.cute")
    cute.math = SimpleNamespace(**_MATH)  # type: ignore[attr-defined]
    cutlass = ModuleType("cutlass")
    of_cutlass = {
        "cute": cute,
        "Float32": _float32,
        "Boolean": _boolean,
        "BFloat16": _rounded_to(torch.bfloat16),
        "Float16": _rounded_to(torch.float16),
        "select_": lambda condition, x, y: np.where(condition, x, y).view(Values),
    }
    for name, value in of_cutlass.items():
        setattr(cutlass, name, value)
    epilogue = ModuleType("quack.epilogue")
    epilogue.F2 = Pair  # type: ignore[attr-defined]
    return {"cutlass": cutlass, "cutlass.cute": cute, "quack": ModuleType("quack"), "quack.epilogue": epilogue}


@contextmanager
def _standing_in() -> Iterator[dict[str, ModuleType]]:
    modules = _stand_ins()
    real = {name: sys.modules.pop(name, None) for name in modules}
    sys.modules.update(modules)
    try:
        yield modules
    finally:
        for name, module in real.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module


@lru_cache
def functions() -> ModuleType:
    """functions.py, of arrays."""
    path = Path(codegen.__file__).with_name("functions.py")
    module = ModuleType("functions")
    with _standing_in():
        exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    return module


def _namespace(source: str) -> dict[str, Any]:
    """What a generated module defines."""

    def gemm_epilogue(ops: Any = None, outputs: Any = (), reduces: Any = None, mode: str = "") -> Any:
        def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
            function.reduces = reduces or {}  # type: ignore[attr-defined]
            return function

        return wrap

    def op(kind: str) -> Callable[..., tuple[str, ...]]:
        return lambda *arguments: (kind, *arguments)

    loads = ("ColVecLoad", "RowVecLoad", "Scalar", "TileLoad", "PairedRowLoad", "PairedTileLoad", "ScalarLoad")
    with _standing_in() as modules:
        names: dict[str, Any] = {name: op(name) for name in (*loads, "RowTotals", "ColumnTotals")}
        names |= {"f": functions(), "gemm_epilogue": gemm_epilogue, "pack": Pair, "unpack": tuple, "cutlass": modules["cutlass"]}
        text = source[source.index("@gemm_epilogue") :]
        launches = text.split("@cute.jit\n")
        kept = [launches[0], *(part[part.index("\n\n\n") :] for part in launches[1:] if "\n\n\n" in part)]
        exec(compile("".join(kept), "<generated>", "exec"), names)
    return names


def run(region: Region, operands: Sequence[Tensor]) -> list[Tensor]:
    """What the kernels leave in their results."""
    results = empty_results(region, operands)
    names = _namespace(codegen.generate(region))
    sizes = axis_sizes(region, [tuple(t.shape) for t in operands])
    for form in forms(region):
        with np.errstate(all="ignore"):
            _run_group(region, form, names, [*operands, *results], sizes)
    return results


def _run_group(region: Region, form: Form, names: dict[str, Any], tensors: list[Tensor], sizes: dict[str, int]) -> None:
    suffix = codegen.suffix_of(region, form)
    epilogue = names[f"epilogue{suffix}"]
    column = form.group.column
    left = form.of_kind("left")[0]
    (contracted,) = set(left.axes) - {"b", "m"}
    rows = _arranged(left, tensors, ("b", "m", contracted), sizes)
    products = []
    for contraction in form.group.contractions:
        right = next(a for a in form.of_kind("right") if region.operands[a.position].name == contraction.right)
        columns = _arranged(right, tensors, ("b", column, contracted), sizes)
        products.append(_float32(rows.astype(np.float64) @ columns.astype(np.float64).swapaxes(-1, -2)))
    accumulator: Any = Pair(*products) if form.paired else products[0]
    values: dict[str, Any] = {}
    for argument in form.of_kind("row", "col", "tile", "scalar", "vector"):
        value = _arranged(argument, tensors, ("b", "m", column), sizes)
        values[argument.name] = Pair(value, None) if form.paired and argument.kind in ("row", "tile") else value
    values |= {f"extent_{axis}": _float32(size) for axis, size in sizes.items()}
    taken = [name for name in inspect.signature(epilogue).parameters if name != "acc"]
    found = epilogue(accumulator, **{name: values[name] for name in taken})
    for key, name in codegen.stored(form).items():
        _store(form, name, found[key], tensors, products[0].shape)
    totals = {}
    for name, (kind, _, combine) in epilogue.reduces.items():
        value = found[name]
        if form.paired:
            value, other = value
            assert other == (0 if combine == "add" else -np.inf)
        dim = -1 if kind == "RowTotals" else -2
        whole = np.broadcast_to(value, products[0].shape)
        totals[name] = _float32(
            whole.sum(dim, keepdims=True, dtype=np.float64)
            if combine == "add"
            else whole.max(dim, keepdims=True, initial=-np.inf)
        )
    for argument in form.of_kind("vector", "row", "col", "tile"):
        values[argument.name] = _arranged(argument, tensors, ("b", "m", column), sizes)
    for axis in codegen.finishing(region, form):
        finish = names[f"finish{suffix}_{axis}"]
        made = finish(**{name: (values | totals)[name] for name in inspect.signature(finish).parameters})
        for name, value in made.items():
            _store(form, name, value, tensors, totals[next(iter(totals))].shape)


def _arranged(argument: Argument, tensors: list[Tensor], wanted: tuple[str, ...], sizes: dict[str, int]) -> Values:
    """A tensor as an array with these axes, of size 1 where it has none."""
    shape = [-1 if axis == "b" else sizes[axis] for axis in argument.axes]
    dims = [argument.axes.index(axis) for axis in wanted if axis in argument.axes]
    tensor = tensors[argument.position].float()
    if argument.axes[:1] == ("b",) or 0 not in tensor.shape:
        tensor = tensor.reshape(shape).permute(dims)
    missing = tuple(position for position, axis in enumerate(wanted) if axis not in argument.axes)
    return _float32(np.expand_dims(tensor.numpy(), missing))


def _store(form: Form, name: str, value: Any, tensors: list[Tensor], shape: tuple[int, ...]) -> None:
    argument = next(a for a in form.arguments if a.name == name)
    result = tensors[argument.position]
    kept = {"b": 0, "m": 1, form.group.column: 2}
    dims = [kept[axis] for axis in argument.axes]
    whole = [shape[dim] if dim in dims else 1 for dim in range(3)]
    value = torch.from_numpy(np.array(np.broadcast_to(value, np.broadcast_shapes(np.shape(value), tuple(whole)))))
    result.copy_(value.reshape(result.shape).to(result.dtype))
