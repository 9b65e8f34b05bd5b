"""Region -> the source of a Python module on QuACK's CuTe DSL mainloops.

For each group it has an epilogue function, which is called for each element of the accumulator while the kernel is traced, and a
`launch` function, which tells the kernel what tensor is what. Where a group reduces rows or columns, functions named `finish` say
what becomes of the totals.
"""

import re
from collections.abc import Callable, Iterable

import torch

from postlude.ir import Apply, Const, Extent, Reduce, Region, Round, Statement, Yield, sensitive, to_text
from postlude.targets.cute import peephole
from postlude.targets.cute.form import Argument, Form, forms
from postlude.targets.cute.ops import EXPRESSIONS, FAST_EXPRESSIONS, POWERS

_DOCSTRING = '''\
"""{text}

Written by Postlude. An epilogue function is called once for each element of the accumulator, in float32.
"""
'''

_MODULES = ("import cuda.bindings.driver as cuda", "import cutlass", "import cutlass.cute as cute")

#: Module -> what generated code may use of it.
_IMPORTS = {
    "quack.epilogue": ("gemm_epilogue", "pack", "unpack"),
    "quack.epilogue.ops": ("ColVecLoad", "RowVecLoad", "Scalar", "TileLoad"),
    "postlude.targets.cute": ("functions as f",),
    "postlude.targets.cute.operands": ("PairedRowLoad", "PairedTileLoad", "ScalarLoad"),
    "postlude.targets.cute.reductions": ("ColumnTotals", "RowTotals", "finish", "parts_of"),
    "postlude.targets.cute.tracing": ("interleave", "one_batch", "permute", "run"),
}

#: The op that loads each kind of operand, and what stands for it where the accumulator holds pairs.
_LOADS = {"row": "RowVecLoad", "col": "ColVecLoad", "tile": "TileLoad", "scalar": "ScalarLoad"}
_PAIRED_LOADS = _LOADS | {"row": "PairedRowLoad", "tile": "PairedTileLoad"}

#: How the parts of a reduction are put together, and what an epilogue hands over so that they are.
_COMBINED = {"sum": ("add", "{0}"), "max": ("max", "{0}"), "min": ("max", "f.neg({0})")}


def generate(region: Region, reverse: bool = False) -> str:
    """The module's source.

    Args:
        region: the program.
        reverse: for pairs of contractions: whether the second right operand lies below the first in memory.

    Raises:
        UnsupportedRegion: this target has no kernel of the Region's form.
    """
    kernels = forms(region, reverse)
    parts = []
    for form in kernels:
        suffix = suffix_of(region, form)
        finishes = finishing(region, form)
        parts.append(_Epilogue(region, form).source(f"epilogue{suffix}"))
        parts += [_Finish(region, form, axis).source(f"finish{suffix}_{axis}") for axis in finishes]
        parts.append(_launch(region, form, finishes, suffix))
    body = "\n\n".join(parts)
    docstring = _DOCSTRING.format(text=to_text(region, lines=True))
    return f"{docstring}\n{_imports(body)}\n\n{body}"


def _imports(body: str) -> str:
    used = set(re.findall(r"\w+", body))
    lines = []
    for module, names in _IMPORTS.items():
        if needed := [name for name in names if name.split()[-1] in used]:
            lines.append(f"from {module} import {', '.join(needed)}")
    theirs = [line for line in lines if "postlude" not in line]
    own = [line for line in lines if "postlude" in line]
    return "\n".join([*_MODULES, *theirs, *([""] if own else []), *own, ""])


def suffix_of(region: Region, form: Form) -> str:
    """What a group's functions are named by; nothing where there is one group."""
    return f"_{form.group.column}" if len(region.groups) > 1 else ""


def load_kinds(form: Form) -> dict[str, str]:
    """Epilogue operand -> how the kernel's loop sees it, as QuACK names that."""
    kinds = {a.name: a.kind for a in form.of_kind("row", "col", "tile", "scalar")}
    if form.paired:
        kinds = {name: "value" if kind in ("row", "tile") else kind for name, kind in kinds.items()}
    return kinds | {f"extent_{axis}": "scalar" for axis in extents(form, _in_tiles(form))}


def _in_tiles(form: Form) -> set[str]:
    """The statements that are computed for each element, those that reductions take too."""
    tiles = [y.value for _, y in form.group.yields if y.value not in form.group.reduced]
    return form.group.behind([*tiles, *(r.input for r in form.reductions)])


def extents(form: Form, names: set[str]) -> dict[str, str]:
    """Axis -> the expression of its size, for every axis whose size one of these statements is."""
    sizes: dict[str, str] = {}
    for statement in form.group.statements:
        if isinstance(statement, Extent) and statement.name in names:
            owner = next(a for a in form.of_kind("left", "right") if statement.axis in a.axes)
            dim = owner.axes.index(statement.axis) - len(owner.axes)
            sizes[statement.axis] = f"{owner.name}.shape[{dim}]"
    return sizes


def stored(form: Form) -> dict[str, str]:
    """Name of each tile in the epilogue function -> the argument. The first is the GEMM's own result `D`."""
    results = [a.name for a in form.of_kind("result")]
    if form.paired:
        return {name: name for name in results}
    return {"D" if index == 0 else name: name for index, name in enumerate(results)}


def total(reduction: Reduce) -> str:
    """A reduction's name in the generated code."""
    return f"total{reduction.name}"


def finishing(region: Region, form: Form) -> dict[str, list[tuple[str, Yield]]]:
    """By the axis along which totals lie, what is stored of them: name of the argument, and the result."""
    found: dict[str, list[tuple[str, Yield]]] = {}
    for argument in form.of_kind("total"):
        result = region.yields[argument.position - len(region.operands)]
        found.setdefault(argument.axes[-1], []).append((argument.name, result))
    return found


class _Writer:
    """Writes a function of values by name."""

    def __init__(self, region: Region, form: Form) -> None:
        self.region = region
        self.form = form
        self.statements: dict[str, Statement] = {s.name: s for s in form.group.statements}
        self.names: dict[str, str] = {}
        self.lines: list[str] = []
        #: The values that a float32 result depends on, or an op that multiplies errors.
        self.exact = form.group.behind(r.value for _, r in form.group.yields if r.dtype == torch.float32)
        self.exact |= sensitive(form.group)

    def visit(self, root: str) -> str:
        """Write what `root` needs, then `root`; returns its name. Iterative: programs can be long chains."""
        stack = [(root, False)]
        while stack:
            name, ready = stack.pop()
            if name in self.names:
                continue
            statement = self.statements[name]
            if isinstance(statement, Const):
                self.names[name] = _literal(statement.value)
                continue
            if isinstance(statement, Extent):
                self.names[name] = f"extent_{statement.axis}"
                continue
            expression, inputs = self._expression(statement)
            if not ready:
                stack.append((name, True))
                stack.extend((i, False) for i in reversed(list(inputs.values())))
                continue
            value = expression({letter: self.names[i] for letter, i in inputs.items()})
            self.names[name] = f"v{len(self.lines)}"
            self.lines.append(f"{self.names[name]} = {value}")
        return self.names[root]

    def _expression(self, statement: Statement) -> tuple[Callable[[dict[str, str]], str], dict[str, str]]:
        """How to write a statement from the names of its inputs, and the inputs by the letter that stands for each."""
        inputs = {str(i): name for i, name in enumerate(statement.inputs)}
        if isinstance(statement, Round):
            short = "bf16" if statement.dtype == torch.bfloat16 else "f16"
            template = "{0}" if statement.dtype == torch.float32 else f"f.to_{short}({{0}})"
            return lambda names: template.format(names["0"]), inputs
        assert isinstance(statement, Apply)
        if statement.name not in self.exact and (rule := peephole.match(statement.name, self.statements)):
            text, letters = rule
            return lambda names: text.format(**names), letters
        template = self._template(statement)
        return lambda names: template.format(*(names[str(i)] for i in range(len(statement.inputs)))), inputs

    def _template(self, statement: Apply) -> str:
        constants = [s.value for i in statement.inputs if isinstance(s := self.statements.get(i), Const)]
        if statement.op == "pow" and isinstance(self.statements.get(statement.inputs[1]), Const) and constants[-1] in POWERS:
            return POWERS[constants[-1]]
        scalar = any(not self.region.types[i].axes for i in statement.inputs)
        if scalar and not constants and statement.op in ("add", "sub", "mul"):
            # A scalar is a single number where an element may be a pair.
            return f"f.{statement.op}({{0}}, {{1}})"
        if statement.name not in self.exact and statement.op in FAST_EXPRESSIONS:
            return FAST_EXPRESSIONS[statement.op]
        return EXPRESSIONS[statement.op]


class _Epilogue(_Writer):
    """Writes what is computed for each element of the accumulator."""

    def __init__(self, region: Region, form: Form) -> None:
        super().__init__(region, form)
        self.names = {region.operands[a.position].name: a.name for a in form.of_kind("row", "col", "tile", "scalar")}
        self.names |= {c.name: ("acc", "acc1")[i] for i, c in enumerate(form.group.contractions)}

    def source(self, name: str) -> str:
        form = self.form
        results = [result.value for _, result in form.group.yields if result.value not in form.group.reduced]
        returned = dict(zip(stored(form), [self._stored(value) for value in results], strict=True))
        for reduction in form.reductions:
            value = _COMBINED[reduction.kind][1].format(self.visit(reduction.input))
            if form.paired:
                # Both columns of a pair belong to one column of the result.
                other = "0.0" if reduction.kind == "sum" else 'float("-inf")'
                value = f"pack({value}, cutlass.Float32({other}))"
            returned[total(reduction)] = value
        body = [*self._opening(), *self.lines, f"return {_dict(returned)}"]
        parameters = ", ".join(["acc", *load_kinds(form)])
        return "\n".join([self._decorator(), f"def {name}({parameters}):", *(f"    {line}" for line in body), ""])

    def _stored(self, name: str) -> str:
        value = self.visit(name)
        return f"f.where({value}, 1.0, 0.0)" if self.region.types[name].value == "bool" else value

    def _decorator(self) -> str:
        form = self.form
        aux = [name for name in stored(form) if name != "D"]
        arguments = []
        loads = _PAIRED_LOADS if form.paired else _LOADS
        ops = {a.name: f'{loads[a.kind]}("{a.name}")' for a in form.of_kind("row", "col", "tile", "scalar")}
        ops |= {f"extent_{axis}": f'Scalar("extent_{axis}")' for axis in extents(form, _in_tiles(form))}
        if ops:
            arguments.append(f"ops={_dict(ops)}")
        if aux:
            arguments.append("outputs=(" + " ".join(f'"{name}",' for name in aux) + ")")
        if form.reductions:
            totals = {}
            for reduction in form.reductions:
                kind, combine = "ColumnTotals" if reduction.axis == "m" else "RowTotals", _COMBINED[reduction.kind][0]
                totals[total(reduction)] = f'{kind}("{total(reduction)}", "{combine}")'
            arguments.append(f"reduces={_dict(totals)}")
        if form.paired:
            arguments.append('mode="acc_pair"')
        return _call("@gemm_epilogue", arguments)

    def _opening(self) -> list[str]:
        operands = self.form.of_kind("row", "col", "tile", "scalar")
        lines = [f"{a.name} = f.true({a.name})" for a in operands if a.dtype == torch.bool]
        if not self.form.paired:
            return lines
        halves = [f"{a.name} = {a.name}.a" for a in operands if a.kind in ("row", "tile")]
        return [f"{'acc1, acc' if self.form.reverse else 'acc, acc1'} = unpack(acc)", *halves, *lines]


class _Finish(_Writer):
    """Writes what is computed of totals that lie along one axis."""

    def __init__(self, region: Region, form: Form, axis: str) -> None:
        super().__init__(region, form)
        self.results = finishing(region, form)[axis]
        self.needed = form.group.behind(result.value for _, result in self.results)
        #: Totals by name; what else the function takes.
        self.totals = [r for r in form.reductions if r.name in self.needed]
        behind = self.needed & form.group.reduced - {r.name for r in self.totals}
        read = {i for s in form.group.statements if s.name in behind for i in s.inputs}
        taken = [a for a in form.of_kind("row", "col", "vector", "scalar") if region.operands[a.position].name in read]
        self.vectors = [a.name for a in taken if a.kind != "scalar"]
        self.scalars = [a.name for a in taken if a.kind == "scalar"]
        self.truths = [a.name for a in taken if a.dtype == torch.bool]
        self.extents = extents(form, read)
        self.names = {region.operands[a.position].name: a.name for a in taken} | {r.name: total(r) for r in self.totals}

    def source(self, name: str) -> str:
        lines = [f"{truth} = f.true({truth})" for truth in self.truths]
        lines += [f"{total(r)} = f.neg({total(r)})" for r in self.totals if r.kind == "min"]
        returned = {}
        for argument, result in self.results:
            value = self.visit(result.value)
            returned[argument] = f"f.where({value}, 1.0, 0.0)" if self.region.types[result.value].value == "bool" else value
        extents = [f"extent_{axis}" for axis in self.extents]
        parameters = ", ".join([*map(total, self.totals), *self.vectors, *self.scalars, *extents])
        body = [*lines, *self.lines, f"return {_dict(returned)}"]
        return "\n".join([f"def {name}({parameters}):", *(f"    {line}" for line in body), ""])

    def call(self, name: str) -> str:
        """The launch of the kernel that calls it."""
        arguments = ["gemm", name, "parts", "stream"]
        arguments.append(f"results={_dict({argument: argument for argument, _ in self.results})}")
        arguments += [f"vectors={_dict({v: v for v in self.vectors})}"] if self.vectors else []
        arguments += [f"scalars={_dict({s: s for s in self.scalars})}"] if self.scalars else []
        sizes = {f"extent_{axis}": f"cutlass.Float32({size})" for axis, size in self.extents.items()}
        return _call("finish", [*arguments, *([f"extents={_dict(sizes)}"] if sizes else [])])


def _dict(items: dict[str, str]) -> str:
    return "{" + ", ".join(f'"{key}": {value}' for key, value in items.items()) + "}"


def _literal(value: float) -> str:
    text = repr(value)
    return f'float("{text}")' if text.lstrip("-") in ("inf", "nan") else text


def _launch(region: Region, form: Form, finishes: Iterable[str], suffix: str) -> str:
    arranged = {region.operands[a.position].name: _arranged(form, a) for a in form.arguments if a.kind not in ("result", "total")}
    contractions = form.group.contractions
    left, rights = arranged[contractions[0].left], [arranged[c.right] for c in contractions]
    if form.reverse:
        rights.reverse()
    right = f"interleave({', '.join(rights)})" if form.paired else rights[0]
    given = [left, right, stored(form).get("D", "None"), "stream"]
    results = {a.name: _arranged(form, a) for a in form.of_kind("result")}
    given[2] = results.get(given[2], given[2])
    given += [f"{a.name}={_arranged(form, a)}" for a in form.of_kind("row", "col", "tile", "scalar")]
    given += [f"extent_{axis}=cutlass.Float32({size})" for axis, size in extents(form, _in_tiles(form)).items()]
    given += [f"{key}={results[argument]}" for key, argument in stored(form).items() if key != "D"]
    parameters = ["gemm: cutlass.Constexpr", *(f"{a.name}: cute.Tensor" for a in form.arguments)]
    parameters += ["workspace: cute.Tensor"] if form.reductions else []
    calls = []
    if form.reductions:
        calls.append(f"parts = parts_of(gemm, workspace, {left}, {right})")
        given.append("**parts")
    calls.append(_call("run", ["gemm", *given]))
    calls += [_Finish(region, form, axis).call(f"finish{suffix}_{axis}") for axis in finishes]
    head = ["@cute.jit", f"def launch{suffix}(", *(f"    {p}," for p in [*parameters, "stream: cuda.CUstream"]), "):"]
    return "\n".join([*head, *("    " + call.replace("\n", "\n    ") for call in calls), ""])


def _call(function: str, arguments: list[str]) -> str:
    """A call on one line, or with an argument on each where that would be long."""
    line = f"{function}({', '.join(arguments)})"
    return line if len(line) <= 100 else "\n".join([f"{function}(", *(f"    {a}," for a in arguments), ")"])


def _arranged(form: Form, argument: Argument) -> str:
    """A tensor with its dimensions in the order that the kernel takes; those of a batch may be several."""
    contracted = next(iter({a for a in form.of_kind("left")[0].axes if a not in ("b", "m")}))
    order = {"left": ("b", "m", contracted), "right": ("b", form.group.column, contracted)}
    wanted = [axis for axis in order.get(argument.kind, ("b", "m", form.group.column)) if axis in argument.axes]
    dims = tuple(argument.axes.index(axis) for axis in wanted)
    name = f"one_batch({argument.name}, {len(dims) - 1})" if argument.axes[:1] == ("b",) and len(dims) > 2 else argument.name
    return name if dims == tuple(range(len(dims))) else f"permute({name}, {dims})"
