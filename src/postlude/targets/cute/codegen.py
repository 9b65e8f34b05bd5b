"""Region -> the source of a Python module on QuACK's CuTe DSL mainloops.

For each group it has an epilogue function, which is called for each element of the accumulator while the kernel is traced, and a
`launch` function, which tells the kernel what tensor is what.
"""

import re
from collections.abc import Callable

import torch

from postlude.ir import Apply, Const, Extent, Region, Round, Statement, to_text
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
    "quack.epilogue": ("gemm_epilogue", "unpack"),
    "quack.epilogue.ops": ("ColVecLoad", "RowVecLoad", "Scalar", "TileLoad"),
    "postlude.targets.cute": ("functions as f",),
    "postlude.targets.cute.operands": ("PairedRowLoad", "ScalarLoad"),
    "postlude.targets.cute.tracing": ("interleave", "permute", "run"),
}

#: The op that loads each kind of operand. A row is loaded in another way where the accumulator holds pairs.
_LOADS = {"row": "RowVecLoad", "col": "ColVecLoad", "tile": "TileLoad", "scalar": "ScalarLoad"}


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
        parts += [_Epilogue(region, form).source(f"epilogue{suffix}"), _launch(region, form, f"launch{suffix}")]
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
        kinds = {name: "value" if kind == "row" else kind for name, kind in kinds.items()}
    return kinds | {f"extent_{axis}": "scalar" for axis in extents(form)}


def extents(form: Form) -> dict[str, str]:
    """Axis -> the expression of its size, for every axis whose size the program uses."""
    sizes: dict[str, str] = {}
    for statement in form.group.statements:
        if isinstance(statement, Extent):
            owner = next(a for a in form.of_kind("left", "right") if statement.axis in a.axes)
            sizes[statement.axis] = f"{owner.name}.shape[{owner.axes.index(statement.axis)}]"
    return sizes


def stored(form: Form) -> dict[str, str]:
    """Name of each result in the epilogue function -> the argument. The first tile is the GEMM's own result `D`."""
    results = [a.name for a in form.of_kind("result")]
    if form.paired:
        return {name: name for name in results}
    return {"D" if index == 0 else name: name for index, name in enumerate(results)}


class _Epilogue:
    """Writes one epilogue function."""

    def __init__(self, region: Region, form: Form) -> None:
        self.region = region
        self.form = form
        self.statements: dict[str, Statement] = {s.name: s for s in form.group.statements}
        self.names = {region.operands[a.position].name: a.name for a in form.of_kind("row", "col", "tile", "scalar")}
        self.names |= {c.name: ("acc", "acc1")[i] for i, c in enumerate(form.group.contractions)}
        self.lines: list[str] = []
        #: The values that a float32 result depends on, or an op whose value jumps.
        self.exact = form.group.behind(r.value for _, r in form.group.yields if r.dtype == torch.float32)
        self.exact |= form.group.before_jumps()

    def source(self, name: str) -> str:
        form = self.form
        values = [self.visit(result.value) for _, result in form.group.yields]
        returned = ", ".join(f'"{key}": {value}' for key, value in zip(stored(form), values, strict=True))
        body = [*self._opening(), *self.lines, f"return {{{returned}}}"]
        parameters = ", ".join(["acc", *load_kinds(form)])
        return "\n".join([self._decorator(), f"def {name}({parameters}):", *(f"    {line}" for line in body), ""])

    def _decorator(self) -> str:
        form = self.form
        aux = [name for name in stored(form) if name != "D"]
        arguments = []
        loads = dict(_LOADS, row="PairedRowLoad") if form.paired else _LOADS
        ops = {a.name: f'{loads[a.kind]}("{a.name}")' for a in form.of_kind("row", "col", "tile", "scalar")}
        ops |= {f"extent_{axis}": f'Scalar("extent_{axis}")' for axis in extents(form)}
        if ops:
            arguments.append("ops={" + ", ".join(f'"{name}": {op}' for name, op in ops.items()) + "}")
        if aux:
            arguments.append("outputs=(" + " ".join(f'"{name}",' for name in aux) + ")")
        if form.paired:
            arguments.append('mode="acc_pair"')
        return _call("@gemm_epilogue", arguments)

    def _opening(self) -> list[str]:
        if not self.form.paired:
            return []
        halves = [f"{a.name} = {a.name}.a" for a in self.form.of_kind("row")]
        return [f"{'acc1, acc' if self.form.reverse else 'acc, acc1'} = unpack(acc)", *halves]

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


def _literal(value: float) -> str:
    text = repr(value)
    return f'float("{text}")' if text.lstrip("-") in ("inf", "nan") else text


def _launch(region: Region, form: Form, name: str) -> str:
    arranged = {region.operands[a.position].name: _arranged(form, a) for a in form.arguments if a.kind != "result"}
    contractions = form.group.contractions
    rights = [arranged[c.right] for c in contractions]
    if form.reverse:
        rights.reverse()
    right = f"interleave({', '.join(rights)})" if form.paired else rights[0]
    given = [arranged[contractions[0].left], right, stored(form).get("D", "None"), "stream"]
    given += [f"{a.name}={_arranged(form, a)}" for a in form.of_kind("row", "col", "tile", "scalar")]
    given += [f"extent_{axis}=cutlass.Float32({size})" for axis, size in extents(form).items()]
    given += [f"{key}={argument}" for key, argument in stored(form).items() if key != "D"]
    parameters = ["gemm: cutlass.Constexpr", *(f"{a.name}: cute.Tensor" for a in form.arguments), "stream: cuda.CUstream"]
    head = ["@cute.jit", f"def {name}(", *(f"    {p}," for p in parameters), "):"]
    body = _call("run", ["gemm", *given]).replace("\n", "\n    ")
    return "\n".join([*head, f"    {body}", ""])


def _call(function: str, arguments: list[str]) -> str:
    """A call on one line, or with an argument on each where that would be long."""
    line = f"{function}({', '.join(arguments)})"
    return line if len(line) <= 100 else "\n".join([f"{function}(", *(f"    {a}," for a in arguments), ")"])


def _arranged(form: Form, argument: Argument) -> str:
    """An operand with its dimensions in the order that the kernel takes."""
    contracted = next(iter({a for a in form.of_kind("left")[0].axes if a not in ("b", "m")}))
    order = {"left": ("b", "m", contracted), "right": ("b", form.group.column, contracted)}
    wanted = [axis for axis in order.get(argument.kind, ("b", "m", form.group.column)) if axis in argument.axes]
    dims = tuple(argument.axes.index(axis) for axis in wanted)
    return argument.name if dims == tuple(range(len(dims))) else f"permute({argument.name}, {dims})"
