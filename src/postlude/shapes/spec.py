"""What may vary in the arguments of a function: the data classes of a spec.

Names and meaning are those of torch.fx.experimental.dynamic_spec in torch 2.14. A spec is data: what checks calls, compiles and
prints is in the modules beside this one. Two specs are equal if they print the same code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from postlude.errors import SpecError
from postlude.shapes.expressions import Expression, IntVar, Relation, ShapeVar

#: Taken from the call: another value is another compilation.
STATIC = None

#: A size or an integer argument: varies, follows from what varies, is this number, or is taken from the call.
LeafIntSpec: TypeAlias = Expression | int | None

Key = TypeVar("Key", bound="str | int")


class _Printed:
    """A part of a spec. It prints as the code that makes it."""

    def __repr__(self) -> str:
        from postlude.shapes.printing import code

        return code(self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, type(self)):
            return NotImplemented
        return repr(self) == repr(other)

    __hash__ = object.__hash__


class TensorSpec(_Printed):
    """A tensor: one entry for each of its dimensions."""

    def __init__(self, dims: Sequence[LeafIntSpec]) -> None:
        self.dims = tuple(dims)
        for index, dim in enumerate(self.dims):
            _demand(f"dimension {index} of a TensorSpec", dim, (Expression, int, type(None)))
            if isinstance(dim, int) and dim < 0:
                raise SpecError(f"dimension {index} of a TensorSpec is {dim}", "a size that is 0 or more")

    def __len__(self) -> int:
        return len(self.dims)

    def __getitem__(self, index: int) -> LeafIntSpec:
        return self.dims[index]

    def __iter__(self) -> Iterator[LeafIntSpec]:
        return iter(self.dims)


class _MappingSpec(_Printed):
    """Specs by name."""

    def __init__(self, entries: Mapping[Any, IntermediateSpec] | None = None) -> None:
        self.entries: dict[Any, IntermediateSpec] = dict(entries or {})
        for key, entry in self.entries.items():
            _demand(f"entry {key!r} of a {type(self).__name__}", entry, _INTERMEDIATE)

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.entries)

    def __contains__(self, key: object) -> bool:
        return key in self.entries

    def items(self) -> Any:
        """Pairs of a name and a spec."""
        return self.entries.items()


class ObjectSpec(_MappingSpec):
    """Attributes of an object: a dataclass, a Hugging Face ModelOutput, a module. What is not named is static."""


class DictSpec(_MappingSpec):
    """Entries of a dict, by str or int keys. What is not named is static."""

    def __init__(self, entries: Mapping[Key, IntermediateSpec] | None = None) -> None:
        super().__init__(entries)
        for key in self.entries:
            _demand("a key of a DictSpec", key, (str, int))


class SeqSpec(_Printed):
    """The first elements of a list or tuple. What follows them is static."""

    def __init__(self, entries: Sequence[IntermediateSpec]) -> None:
        self.entries = tuple(entries)
        for index, entry in enumerate(self.entries):
            _demand(f"entry {index} of a SeqSpec", entry, _INTERMEDIATE)

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[IntermediateSpec]:
        return iter(self.entries)


class ParamsSpec(_Printed):
    """The parameters of a function by name; "*args" takes a list of specs and "**kwargs" a dict of them.

    A parameter that is not named is static.
    """

    def __init__(self, params: Mapping[str, Any] | None = None) -> None:
        self.named: dict[str, IntermediateSpec] = {}
        self.varargs: tuple[IntermediateSpec, ...] = ()
        self.varkw: dict[str, IntermediateSpec] = {}
        for key, value in (params or {}).items():
            if key == "*args":
                _demand("'*args' of a ParamsSpec", value, (list, tuple))
                self.varargs = SeqSpec(value).entries
            elif key == "**kwargs":
                _demand("'**kwargs' of a ParamsSpec", value, (dict,))
                self.varkw = DictSpec(value).entries
            elif not key.isidentifier():
                raise SpecError(f"{key!r} in a ParamsSpec", "the name of a parameter, '*args' or '**kwargs'")
            else:
                _demand(f"parameter {key!r}", value, _INTERMEDIATE)
                self.named[key] = value


class ShapesSpec(_Printed):
    """All that a function promises about the shapes of its arguments.

    Args:
        params: specs of the parameters; for a module those of `forward`, without self.
        assumptions: relations between variables that every call meets: `a <= b`, `n % 8 == 0`, `a + b == c`.
        guard_free: sizes are unbacked symbols. Nothing can be specialised, so there is never a recompilation; code that branches
            on a size is then an error where it is compiled. Otherwise they are backed symbols, with hints: such code works, and
            the other branch is another compilation.

    Raises:
        SpecError: a part of it is not what belongs there.
    """

    def __init__(
        self,
        params: ParamsSpec | Mapping[str, Any] | None = None,
        *,
        assumptions: Sequence[Relation] | None = None,
        guard_free: bool = False,
    ) -> None:
        self.params = params if isinstance(params, ParamsSpec) else ParamsSpec(params)
        self.assumptions = tuple(assumptions or ())
        self.guard_free = guard_free
        for index, assumption in enumerate(self.assumptions):
            _demand(f"assumptions[{index}]", assumption, (Relation,))


LeafSpec: TypeAlias = LeafIntSpec | TensorSpec
IntermediateSpec: TypeAlias = LeafSpec | ObjectSpec | DictSpec | SeqSpec

_INTERMEDIATE = (Expression, int, type(None), TensorSpec, ObjectSpec, DictSpec, SeqSpec)


def _demand(what: str, value: object, kinds: tuple[type, ...]) -> None:
    if not isinstance(value, kinds) or isinstance(value, bool):
        names = ", ".join("STATIC" if kind is type(None) else kind.__name__ for kind in kinds)
        raise SpecError(f"{what} is {value!r}", f"one of {names}")


__all__ = [
    "STATIC",
    "DictSpec",
    "IntVar",
    "IntermediateSpec",
    "LeafIntSpec",
    "LeafSpec",
    "ObjectSpec",
    "ParamsSpec",
    "SeqSpec",
    "ShapeVar",
    "ShapesSpec",
    "TensorSpec",
]
