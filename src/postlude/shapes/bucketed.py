"""`bucketed`: calls of any size, computed at a few declared sizes, with the results cut back. What CUDA graphs want."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from postlude.errors import OutputSizesUnknown, ShapeViolation, SpecError
from postlude.shapes.decorate import as_spec, spec_of
from postlude.shapes.expressions import Binary, IntVar, expression
from postlude.shapes.places import Place, Step
from postlude.shapes.rules import Rules, rules_for, values_of, violation
from postlude.shapes.spec import DictSpec, ObjectSpec, SeqSpec, TensorSpec
from postlude.shapes.text import parse

#: Variables and their sizes. Those of `outputs`, which may be other objects of the same names, have the same.
Values = dict[IntVar, int]

#: For each tensor of the results, in the order of the pytree: its dimensions to be cut, and the variable or expression that is
#: their size.
Cuts = list[dict[int, Any]]


class Bucketed:
    """A function that is called with sizes of a few declared ones only. Made by `bucketed`.

    Attributes:
        sizes: the declared sizes, ascending, by the variable's name.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        rules: Rules,
        sizes: dict[IntVar, Sequence[int]],
        outputs: Any,
        fill: dict[Place, Any],
        run: bool,
    ) -> None:
        self.__wrapped__ = fn
        self.sizes = {rules.names[variable]: tuple(allowed) for variable, allowed in sizes.items()}
        self._signature = inspect.signature(_target(fn))
        self._rules = rules
        self._allowed = sizes
        self._outputs: dict[Any, TensorSpec] | None = outputs
        self._in_order = outputs is not None and all(isinstance(key, int) for key in outputs)
        self._fill = fill
        self._run_beyond = run
        self._probed: dict[Any, Cuts] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function with padded arguments, and cut what it returns."""
        bound = self._bind(args, kwargs)
        values = values_of(self._rules, bound.arguments)
        targets = self._targets(values)
        if targets == values:
            return self.__wrapped__(*args, **kwargs)
        cuts = self._cuts(bound, targets) if self._outputs is None else None
        padded = self._padded(bound, targets)
        versions = [new._version if not new.is_inference() else None for _, new in padded]
        found = self.__wrapped__(*bound.args, **bound.kwargs)
        for (old, new), version in zip(padded, versions, strict=True):
            if version is not None and new._version != version:  # the function writes to its argument: so it did to the caller's
                old.copy_(_cut(new, dict(enumerate(old.shape))))
        return self._cut_back(found, cuts, values, targets)

    def __getattr__(self, name: str) -> Any:
        """Whatever else the function or module has."""
        if name.startswith("__") or "__wrapped__" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.__wrapped__, name)

    def warm_up(self, *args: Any, **kwargs: Any) -> None:
        """Call the function once with every combination of declared sizes, so that later calls find it compiled and recorded.

        Args:
            *args: an example, of any sizes that the spec allows. Tensors that vary are replaced by such full of their padding.
            **kwargs: the same by name.
        """
        values = values_of(self._rules, self._bind(args, kwargs).arguments)
        for combination in itertools.product(*self._allowed.values()):
            bound = self._bind(args, kwargs)
            self._padded(bound, values | dict(zip(self._allowed, combination, strict=True)), empty=True)
            self.__wrapped__(*bound.args, **bound.kwargs)

    def check(self, *args: Any, **kwargs: Any) -> None:
        """Compare a padded call with one that is not padded: says whether padding is kept out of the results.

        Raises:
            AssertionError: they differ by more than `torch.testing.assert_close` allows: rows that are padding have an influence.
        """
        torch.testing.assert_close(self(*args, **kwargs), self.__wrapped__(*args, **kwargs))

    # Arguments -----------------------------------------------------------------------------------------------------------

    def _bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
        bound = self._signature.bind(*args, **kwargs)
        if (found := violation(self._rules, bound.arguments)) is not None:
            raise found
        return bound

    def _targets(self, values: Values) -> Values:
        """The sizes with which the function is called."""
        targets = dict(values)
        for variable, allowed in self._allowed.items():
            if variable not in values:  # it belongs to an argument that was left out
                continue
            index = bisect_left(allowed, values[variable])
            if index < len(allowed):
                targets[variable] = allowed[index]
            elif not self._run_beyond:
                name = self._rules.names[variable]
                measure = next(m for m in self._rules.measures if variable in set(m.expression.variables()))
                rule = f"{name} <= {allowed[-1]}"
                raise ShapeViolation(
                    self._rules.function,
                    f"{name} = {values[variable]} (from {measure})",
                    f"{rule}, the largest of the bucketed sizes of {name}",
                    argument=str(measure.place),
                    dimension=measure.dimension,
                    value=values[variable],
                    rule=rule,
                )
        return targets

    def _padded(self, bound: inspect.BoundArguments, targets: Values, *, empty: bool = False) -> list[tuple[Tensor, Tensor]]:
        """Put padded tensors in the place of those whose sizes are not the target's. Both, for each.

        Args:
            bound: the arguments; changed.
            targets: the sizes that are wanted.
            empty: nothing of the tensors is kept but for what is not bucketed: all is padding.
        """
        made = []
        for place, measures in itertools.groupby(self._rules.measures, lambda measure: measure.place):
            wanted = {m.dimension: m.expression.evaluate(targets) for m in measures if {*m.expression.variables()} <= {*targets}}
            try:
                value = place.find(bound.arguments)
            except (LookupError, AttributeError, TypeError):
                continue  # it was left out
            if isinstance(value, Tensor):
                shape = [wanted.get(dim, size) for dim, size in enumerate(value.shape)]
                if empty:
                    new = value.new_full(shape, self._filling(place))
                elif shape != list(value.shape):
                    missing = [n - size for n, size in zip(shape, value.shape, strict=True)]
                    sides = [side for count in reversed(missing) for side in (0, count)]
                    new = torch.nn.functional.pad(value, sides, value=self._filling(place))
                else:
                    continue
                made.append((value, new))
            elif isinstance(value, int):
                new = wanted[None]
            else:
                continue
            bound.arguments[place.argument] = _replaced(bound.arguments[place.argument], place.steps, new)
        return made

    def _filling(self, place: Place) -> Any:
        """The padding of what is at a place, or of what it lies in."""
        for count in range(len(place.steps), -1, -1):
            if (at := Place(place.argument, place.steps[:count])) in self._fill:
                return self._fill[at]
        return 0

    # Results -------------------------------------------------------------------------------------------------------------

    def _cut_back(self, found: Any, cuts: Cuts | None, values: Values, targets: Values) -> Any:
        leaves, tree = pytree.tree_flatten(found)
        if cuts is None:
            cuts = self._declared_cuts(found)
        for index, dims in enumerate(cuts):
            leaf = leaves[index]
            if not dims:
                continue
            expected = {dim: size.evaluate(targets) for dim, size in dims.items()}
            if any(leaf.shape[dim] != size for dim, size in expected.items()):
                raise OutputSizesUnknown(
                    self._rules.function,
                    f"a result of shape {tuple(leaf.shape)}, where"
                    f" {', '.join(f'{size} in dimension {dim}' for dim, size in expected.items())} was expected",
                )
            leaves[index] = _cut(leaf, {dim: size.evaluate(values) for dim, size in dims.items()})
        return pytree.tree_unflatten(leaves, tree)

    def _declared_cuts(self, found: Any) -> Cuts:
        """The cuts that `outputs` declares: by the place in the results, or by the number of the tensor in them."""
        undone = dict(self._outputs or {})
        cuts: Cuts = []
        tensors = itertools.count()
        for path, leaf in pytree.tree_flatten_with_path(found)[0]:
            declared = undone.pop(next(tensors) if self._in_order else _keys(path), ()) if isinstance(leaf, Tensor) else ()
            if declared and len(declared) != leaf.ndim:
                raise OutputSizesUnknown(self._rules.function, f"a result of {leaf.ndim} dimensions, {len(declared)} in outputs=")
            cuts.append({dim: size for dim, entry in enumerate(declared) if (size := expression(entry)) is not None})
        if undone:
            raise OutputSizesUnknown(self._rules.function, f"no tensor at {next(iter(undone))!r}, which outputs= describes")
        return cuts

    def _cuts(self, bound: inspect.BoundArguments, targets: Values) -> Cuts:
        """Which dimensions of the results grow with which variable: found by calls with fake tensors of different sizes."""
        leaves, tree = pytree.tree_flatten((bound.args, bound.kwargs))
        key = (tree, *[(leaf.ndim, leaf.dtype) if isinstance(leaf, Tensor) else _hashable(leaf) for leaf in leaves])
        if key not in self._probed:
            self._probed[key] = self._probe(bound, targets)
        return self._probed[key]

    def _probe(self, bound: inspect.BoundArguments, targets: Values) -> Cuts:
        present = [variable for variable in self._allowed if variable in targets]
        base = {variable: self._allowed[variable][-1] for variable in present}
        other = {variable: self._another(variable) for variable in present}
        first = self._fake_results(bound, targets | base)
        cuts: Cuts = [{} for _ in first]
        for variable in present:
            changed = self._fake_results(bound, targets | base | {variable: other[variable]})
            if [one and len(one) for one in first] != [two and len(two) for two in changed]:
                raise OutputSizesUnknown(self._rules.function, "a structure of the results that depends on sizes")
            for cut, one, two in zip(cuts, first, changed, strict=True):
                for dim, (a, b) in enumerate(zip(one or (), two or (), strict=True)):
                    if a == b:
                        continue
                    if (a, b) != (base[variable], other[variable]) or dim in cut:
                        raise OutputSizesUnknown(
                            self._rules.function,
                            f"a result whose dimension {dim} depends on {self._rules.names[variable]} but is not it: {a} for"
                            f" {base[variable]}, {b} for {other[variable]}",
                        )
                    cut[dim] = variable
        return cuts

    def _another(self, variable: IntVar) -> int:
        """A size that is not the largest declared one."""
        allowed = self._allowed[variable]
        size = allowed[-2] if len(allowed) > 1 else allowed[-1] - variable.multiple_of
        if size < 0 or variable.broken_rule(size) is not None:
            name = self._rules.names[variable]
            raise OutputSizesUnknown(
                self._rules.function, f"{name} has one possible size, so that nothing shows what depends on it"
            )
        return size

    def _fake_results(self, bound: inspect.BoundArguments, sizes: Values) -> list[tuple[int, ...] | None]:
        """The shapes of the results for arguments of some sizes; None for what is no tensor."""
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        target = _target(self.__wrapped__)
        with _faked(target, mode), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            leaves, tree = pytree.tree_flatten((bound.args, bound.kwargs))
            fakes = [mode.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            args, kwargs = pytree.tree_unflatten(fakes, tree)
            try:
                with mode, _NoWrites():
                    arguments = self._signature.bind(*args, **kwargs)
                    self._padded(arguments, sizes, empty=True)
                    found = self.__wrapped__(*arguments.args, **arguments.kwargs)
            except Exception as error:
                raise OutputSizesUnknown(
                    self._rules.function, f"a failure with fake tensors ({type(error).__name__}: {error})"
                ) from error
        shapes: list[tuple[int, ...] | None] = []
        for leaf in pytree.tree_leaves(found):
            if not isinstance(leaf, (Tensor, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))):
                raise OutputSizesUnknown(self._rules.function, f"a {type(leaf).__name__} in the results, which is no pytree")
            shapes.append(tuple(leaf.shape) if isinstance(leaf, Tensor) else None)
        return shapes


def bucketed(
    fn: Callable[..., Any],
    sizes: Mapping[str, Sequence[int]],
    *,
    spec: Any = None,
    outputs: Any = None,
    fill: Mapping[str, Any] | None = None,
    beyond: Literal["raise", "run"] = "raise",
) -> Bucketed:
    """Round sizes up to declared ones: arguments are padded at their ends, and results cut back.

        fast = bucketed(
            torch.compile(model, mode="reduce-overhead", dynamic=False),
            sizes={"batch": (1, 4, 16), "length": range(64, 1025, 64)},
            spec="batch length, batch length",
            fill={"input_ids": tokenizer.pad_token_id, "attention_mask": 0},
        )

    What a row of padding must not do to other rows is the function's business: pass the mask that it takes, and fill that with
    what masks out. Sums and means over a padded dimension are wrong unless the function masks them. `Bucketed.check` compares one
    call with the unpadded one.

    Args:
        fn: a function or module, compiled or not.
        sizes: for variables of the spec by name: the sizes that `fn` may be called with, ascending; ``range(64, 1025, 64)``
            rounds up to multiples of 64.
        spec: what the sizes of the arguments are called: a `ShapesSpec` or what makes one, or its short form; by default the spec
            of `fn` itself (`dynamic_spec`). A size that is computed from variables (``2 * n``) is padded to its new value, and an
            integer argument is set to it.
        outputs: the same for the results: a spec of tensors in the structure of the results (`TensorSpec`, `SeqSpec`, `DictSpec`,
            `ObjectSpec`), or the short form. By default `fn` is called with fake tensors of several sizes, which shows what
            dimensions are that of which variable; where one is but computed from a variable, they must be declared.
        fill: padding by argument, or by place in one (``"batch['ids']"``); 0, or False, where nothing is said.
        beyond: what a size above the largest does: ``"raise"``, or ``"run"``: that size is left as it is.

    Raises:
        SpecError: there is no spec, or `sizes` or `fill` name what is not in it.
        ShapeViolation: (in a call) the arguments break the spec, or are larger than the largest size.
        OutputSizesUnknown: (in a call) which parts of the results are padding can't be found out, or is not as declared.
    """
    target = _target(fn)
    signature = inspect.signature(target)
    resolved = spec_of(getattr(fn, "_orig_mod", fn)) if spec is None else spec
    if resolved is None:
        raise SpecError("there is none, and the function has none", "bucketed(fn, sizes, spec=...)")
    resolved = parse(resolved, list(signature.parameters)) if isinstance(resolved, str) else as_spec(resolved)
    rules = rules_for(resolved, signature, str(getattr(target, "__qualname__", type(target).__name__)))
    by_name = {name: variable for variable, name in rules.names.items()}
    allowed: dict[IntVar, Sequence[int]] = {}
    for name, choices in sizes.items():
        if name not in by_name:
            raise SpecError(f"sizes= names {name!r}", f"one of the variables {', '.join(by_name)}")
        if not choices or any(a >= b for a, b in itertools.pairwise(choices)) or choices[0] < 0:
            raise SpecError(f"sizes= gives {name} the sizes {choices!r}", "one or more sizes in ascending order")
        for size in choices:
            if (broken := by_name[name].broken_rule(size)) is not None:
                raise SpecError(f"sizes= gives {name} the size {size}", f"sizes with {broken}")
        allowed[by_name[name]] = choices
    places = {Place.parse(place): value for place, value in (fill or {}).items()}
    for place in places:
        if not any(
            m.place.argument == place.argument and m.place.steps[: len(place.steps)] == place.steps for m in rules.measures
        ):
            raise SpecError(
                f"fill= names {str(place)!r}", f"one of {', '.join(dict.fromkeys(str(m.place) for m in rules.measures))}"
            )
    if beyond not in ("raise", "run"):
        raise ValueError(f"beyond={beyond!r}: expected 'raise' or 'run'")
    declared = None if outputs is None else _declared(outputs, by_name)
    return Bucketed(fn, rules, allowed, declared, places, beyond == "run")


# Specs of results --------------------------------------------------------------------------------------------------------


def _declared(outputs: Any, by_name: Mapping[str, IntVar]) -> dict[Any, TensorSpec]:
    """What is declared of each tensor of the results, by its place in them, or by its number for the short form."""
    if isinstance(outputs, str):
        entries = parse(outputs, [f"result{number}" for number in range(outputs.count(",") + 1)]).params.named
        found: dict[Any, Any] = {int(name.removeprefix("result")): entry for name, entry in entries.items()}
    else:
        found = dict(_tensors(outputs))
    return {path: TensorSpec([_renamed(dim, by_name) for dim in declared]) for path, declared in found.items()}


def _tensors(spec: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], TensorSpec]]:
    if isinstance(spec, TensorSpec):
        yield path, spec
    elif isinstance(spec, (DictSpec, ObjectSpec, Mapping)):
        for key, entry in spec.items():
            yield from _tensors(entry, (*path, key))
    elif isinstance(spec, (SeqSpec, list, tuple)):
        for index, entry in enumerate(spec):
            yield from _tensors(entry, (*path, index))
    elif spec is not None:
        raise SpecError(f"outputs= has {spec!r}", "TensorSpecs in sequences, dicts or objects")


def _renamed(size: Any, by_name: Mapping[str, IntVar]) -> Any:
    """A size in the variables of the arguments' spec."""
    if isinstance(size, IntVar):
        if any(size is variable for variable in by_name.values()):
            return size
        if size.name not in by_name:
            raise SpecError(f"outputs= names {size.name!r}", f"one of the variables {', '.join(by_name)}")
        return by_name[size.name]
    if isinstance(size, Binary):
        return Binary(size.symbol, _renamed(size.left, by_name), _renamed(size.right, by_name))
    return size


def _keys(path: Sequence[Any]) -> tuple[Any, ...]:
    """A pytree's key path in plain keys."""
    return tuple(next(getattr(key, name) for name in ("idx", "key", "name") if hasattr(key, name)) for key in path)


# Small parts -------------------------------------------------------------------------------------------------------------


def _target(fn: Any) -> Any:
    """What has the signature."""
    inner = getattr(fn, "_orig_mod", fn)
    return inner.forward if isinstance(inner, torch.nn.Module) else inner


def _cut(tensor: Tensor, sizes: Mapping[int, int]) -> Tensor:
    for dim, size in sizes.items():
        tensor = tensor.narrow(dim, 0, size)
    return tensor


def _replaced(value: Any, steps: Sequence[Step], new: Any) -> Any:
    """A value with something else at a place in it; what is on the way there is copied, not changed."""
    if not steps:
        return new
    step = steps[0]
    if step.attribute is not None:
        inner = _replaced(getattr(value, step.attribute), steps[1:], new)
        if dataclasses.is_dataclass(value) and not isinstance(value, type) and not isinstance(value, Mapping):
            return dataclasses.replace(value, **{step.attribute: inner})
        changed = copy.copy(value)
        setattr(changed, step.attribute, inner)
        return changed
    inner = _replaced(value[step.item], steps[1:], new)
    if isinstance(value, tuple):
        items = [*value]
        items[step.item] = inner  # type: ignore[index]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    changed = copy.copy(value)
    changed[step.item] = inner
    return changed


def _hashable(value: Any) -> Any:
    """What tells one argument that is no tensor from another."""
    try:
        hash(value)
    except TypeError:
        return type(value), id(value)
    return type(value), value


class _NoWrites(TorchDispatchMode):
    """Refuses to write to real tensors: with none but real ones among its arguments, an operator runs for real."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at what the operator writes to."""
        kwargs = kwargs or {}
        for index, argument in enumerate(func._schema.arguments):
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(value, Tensor) and not isinstance(value, FakeTensor):
                raise RuntimeError("it writes to a tensor that is neither an argument nor the module's")
        return func(*args, **kwargs)


@contextmanager
def _faked(target: Any, mode: FakeTensorMode) -> Iterator[None]:
    """Modules hold fake tensors; afterwards they have the attributes that they had before."""
    module = getattr(target, "__self__", None)
    modules = [*module.modules()] if isinstance(module, torch.nn.Module) else []
    tables: list[dict[str, Any]] = [
        table for one in modules for table in (vars(one), one._buffers, one._parameters, one._modules)
    ]
    before = [dict(table) for table in tables]
    try:
        for table in tables:
            table.update({name: mode.from_tensor(value) for name, value in table.items() if isinstance(value, Tensor)})
        yield
    finally:
        for table, old in zip(tables, before, strict=True):
            table.clear()
            table.update(old)
