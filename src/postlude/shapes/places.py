"""Where in a call's arguments something is: an argument's name, and the way into it."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from postlude.errors import SpecError


@dataclass(frozen=True)
class Step:
    """One attribute, or one item (the key of a dict, the index of a sequence)."""

    attribute: str | None = None
    item: str | int | None = None

    def __str__(self) -> str:
        return f"[{self.item!r}]" if self.attribute is None else f".{self.attribute}"


@dataclass(frozen=True)
class Place:
    """An argument or something within one. Prints as Python would reach it: ``batch['ids']``, ``out.states[1]``."""

    argument: str
    steps: tuple[Step, ...] = ()

    def __str__(self) -> str:
        return self.argument + "".join(map(str, self.steps))

    @property
    def identifier(self) -> str:
        """The place as a name for a variable: ``out_states_1``."""
        return re.sub(r"\W+", "_", str(self)).strip("_")

    def attribute(self, name: str) -> Place:
        return Place(self.argument, (*self.steps, Step(attribute=name)))

    def item(self, key: str | int) -> Place:
        return Place(self.argument, (*self.steps, Step(item=key)))

    def find(self, arguments: Mapping[str, Any]) -> Any:
        """What is there in a call with these arguments.

        Raises:
            LookupError, AttributeError: nothing is.
        """
        value = arguments[self.argument]
        for step in self.steps:
            value = value[step.item] if step.attribute is None else getattr(value, step.attribute)
        return value

    @staticmethod
    def parse(text: str) -> Place:
        """The place that prints as this text.

        Raises:
            SpecError: it is not of that form.
        """
        try:
            node: ast.expr = ast.parse(text, mode="eval").body
            steps: list[Step] = []
            while not isinstance(node, ast.Name):
                if isinstance(node, ast.Attribute):
                    steps.append(Step(attribute=node.attr))
                elif isinstance(node, ast.Subscript) and isinstance(key := ast.literal_eval(node.slice), (str, int)):
                    steps.append(Step(item=key))
                else:
                    raise ValueError(text)
                node = node.value
        except (SyntaxError, ValueError) as error:
            raise SpecError(f"{text!r} as a place in arguments", "a name with attributes and constant subscripts") from error
        return Place(node.id, tuple(reversed(steps)))
