"""`watch`: which compilations there were, what each was for, and what would have prevented it.

How it listens: by wrappers around two functions of torch._dynamo.convert_frame, `_compile`, which makes every compilation, and
`get_and_maybe_log_recompilation_reasons`, which finds the guards that failed. They are called in the same way in torch 2.11 to
2.14, and the tests hold every supported torch to it. What else there is would not do: callbacks of `on_compile_start` say neither
which function nor why, and torch._dynamo.reset() drops them; `CompilationMetrics` have one reason, as text, of the last 64
compilations of all threads; logged artifacts are text too, and take a global setting; `error_on_recompile` can't count. Above
all, only here is the failing call at hand, with the values that guards are about.
"""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any

import torch
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text
from torch._dynamo import exc
from torch.utils import _pytree as pytree

from postlude.errors import EnvironmentUnsupported, RecompileLimitExceeded
from postlude.shapes import spec as specs
from postlude.shapes.causes import RESUMED, Cause, Scene, arguments, declare, explain, leaf
from postlude.shapes.places import Place
from postlude.shapes.printing import code as printed


@dataclass(frozen=True)
class Compile:
    """One compilation of one function.

    Attributes:
        id: Dynamo's name for it, as in its logs: ``"0/1"`` is the second compilation of the first function.
        function: the function's qualified name.
        file: where it is defined.
        line: the line there.
        seconds: how long it took; a backward graph that is compiled later is not in it.
        causes: for each earlier compilation of the function, the most recently used first, why it did not serve this call. Empty
            for a first compilation.
        failed: what Dynamo said where it gave up, and runs this call uncompiled; else None.
    """

    id: str
    function: str
    file: str
    line: int
    seconds: float
    causes: tuple[Cause, ...] = ()
    failed: str | None = None

    @property
    def cause(self) -> Cause | None:
        """Why the most recently used compilation did not serve; None for a first compilation."""
        return self.causes[0] if self.causes else None


class Watch:
    """Listens while the function that it wraps runs, or in a ``with`` block. Printing shows a table.

    Attributes:
        compiles: every compilation that this thread made while it listened, in order.
        given_up: those that Dynamo gave up: the calls run uncompiled, and so do later ones for which nothing is compiled.
        calls: how often the wrapped function was called through it.
        limit: recompilations that are allowed; None for any number.
    """

    def __init__(self, fn: Callable[..., Any] | None, limit: int | None) -> None:
        self.compiles: list[Compile] = []
        self.given_up: list[Compile] = []
        self.calls = 0
        self.limit = limit
        self._fn = fn
        self._seen: dict[CodeType, _Seen] = {}
        self._entered: list[Token[tuple[Watch, ...]]] = []
        if fn is not None:
            self.__wrapped__ = fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped function."""
        if self._fn is None:
            raise TypeError("This watch wraps no function: use it in a with statement, or call watch(fn).")
        self.calls += 1
        with self:
            return self._fn(*args, **kwargs)

    def __enter__(self) -> Watch:
        self._entered.append(_watching.set((*_watching.get(), self)))
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        _watching.reset(self._entered.pop())

    def __getattr__(self, name: str) -> Any:
        """Whatever else the wrapped function or module has: a watched module stands in for the module."""
        if name.startswith("__") or (fn := self.__dict__.get("_fn")) is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(fn, name)

    # What was seen -------------------------------------------------------------------------------------------------------

    @property
    def recompiles(self) -> list[Compile]:
        """Compilations of functions that had been compiled before."""
        return [one for one in self.compiles if one.causes]

    def counts(self) -> dict[str, int]:
        """Number of compilations by function."""
        return dict(Counter(one.function for one in self.compiles))

    def spec(self) -> str:
        """Code of a `ShapesSpec` for each function in whose arguments sizes or integers were seen to vary.

        Only calls that led to a compilation are seen. That two sizes mean the same is not concluded from their being equal: put
        one variable in place of two that always go together.
        """
        found = []
        for code, seen in self._seen.items():
            if entries := declare(seen.leaves(), code):
                found.append(
                    f"# {code.co_qualname}, {code.co_filename}:{code.co_firstlineno}\n{printed(specs.ShapesSpec(entries))}"
                )
        return "\n".join(found)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table that `print` shows too."""
        yield Text(self._summary(), style="bold")
        rows = [*self.compiles, *self.given_up]
        if not rows:
            return
        table = Table("compile", "function", "seconds", "because", show_edge=False)
        for one in rows:
            because = one.cause.what if one.cause else "first compilation"
            gave_up = f". Dynamo gave up, this call runs uncompiled: {one.failed}" if one.failed else ""
            where = f"{one.function} ({Path(one.file).name}:{one.line})"
            table.add_row(one.id, Text(where), f"{one.seconds:.2f}", Text(because + gave_up))
        yield table
        remedies: dict[str, list[str]] = {}
        for one in rows:
            if one.cause is not None:
                remedies.setdefault(remedy(one.cause), []).append(one.id)
        for text, ids in remedies.items():
            if text:
                yield Text(f"{', '.join(ids)}  {text}")
        if spec := self.spec():
            yield Text(f"What varied in these calls, as a spec:\n{spec}")

    def _summary(self) -> str:
        calls = f" in {_many(self.calls, 'call')}" if self.calls else ""
        if not self.compiles and not self.given_up:
            return f"Nothing was compiled{calls}: it had been compiled before, or is not compiled at all."
        seconds = sum(one.seconds for one in self.compiles)
        given_up = f"; Dynamo gave up {_many(len(self.given_up), 'time')}" if self.given_up else ""
        again = _many(len(self.recompiles), "recompilation")
        return f"{_many(len(self.compiles), 'compilation')}{calls} in {seconds:.1f} s, {again}{given_up}"

    def __repr__(self) -> str:
        return f"<Watch: {self._summary()}>"

    def __str__(self) -> str:
        console = Console(width=160)
        with console.capture() as text:
            console.print(self)
        return text.get()

    # What the hooks tell ---------------------------------------------------------------------------------------------------

    def _note(self, attempt: _Attempt) -> None:
        """A function is about to be compiled."""
        self._seen.setdefault(attempt.code, _Seen(attempt.code)).note(attempt.local)

    def _explain(self, attempt: _Attempt, reasons: Sequence[str]) -> None:
        """The reasons for which nothing that was compiled before serves."""
        code = attempt.code
        scene = Scene(code, attempt.local, attempt.scope, self._seen[code].varied)
        attempt.causes[self] = causes = tuple(explain(reason, scene) for reason in reasons)
        if causes and self.limit is not None and len(self.recompiles) >= self.limit:
            told = [one.cause.what for one in self.recompiles if one.cause]
            raise RecompileLimitExceeded(
                f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})",
                self.limit,
                [*told, causes[0].what],
                remedy(causes[0]),
                self.spec(),
            )

    def _add(self, attempt: _Attempt, compile_id: str, seconds: float, failed: str | None) -> None:
        """The compilation is over."""
        code = attempt.code
        causes = attempt.causes.get(self, ())
        one = Compile(compile_id, code.co_qualname, code.co_filename, code.co_firstlineno, seconds, causes, failed)
        (self.compiles if failed is None else self.given_up).append(one)


def watch(fn: Callable[..., Any] | None = None, limit: int | None = None) -> Watch:
    """Count compilations, and say what each was for and what would have prevented it.

        model = postlude.shapes.watch(torch.compile(model))     # in its calls: stands in for the model
        ...
        print(model)

        with postlude.shapes.watch(limit=4) as seen:            # or in a block
            serve()
        print(seen.spec())

    It sees what this thread compiles while it listens, whatever the backend: compiled functions and modules, parts of them that
    are compiled (`Module.compile()`), and what goes on behind graph breaks.

    Args:
        fn: a compiled function or module, or something that calls some.
        limit: recompilations that are allowed: 0 for none. The next one is an error, raised before anything is compiled.

    Raises:
        RecompileLimitExceeded: (in a call) there would be more recompilations than `limit`.
        EnvironmentUnsupported: there is no way to listen to this torch.
        ValueError: `limit` is negative.
    """
    if limit is not None and limit < 0:
        raise ValueError(f"limit={limit}: expected the number of recompilations that are allowed, 0 or more, or None")
    _listen()
    return Watch(fn, limit)


def remedy(cause: Cause) -> str:
    """What to do about a cause, with the line of spec where there is one; empty where nothing is known to help."""
    subject = f"{cause.origin} {cause.place}".strip()
    text = f"{subject}: {cause.advice}" if subject and cause.advice else cause.advice
    return f"{text}\n    {cause.spec}" if cause.spec else text


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


# Sizes from call to call -------------------------------------------------------------------------------------------------


@dataclass
class _Seen:
    """The sizes and integers in the arguments of those calls of one function that were compiled."""

    code: CodeType
    sizes: dict[Place, tuple[int, ...] | int] = field(default_factory=dict)
    varied: dict[Place, set[int | None]] = field(default_factory=dict)

    def note(self, local: Mapping[str, Any]) -> None:
        """Compare the arguments of one more call with those of the last."""
        if self.code.co_name.startswith(RESUMED):
            return
        named = {name: local[name] for name in arguments(self.code) if name in local}
        for path, value in pytree.tree_flatten_with_path(named)[0]:
            if isinstance(value, torch.Tensor):
                size: tuple[int, ...] | int = tuple(value.shape)
            elif isinstance(value, int) and not isinstance(value, bool):
                size = value
            else:
                continue
            if (place := _place(path)) is None:
                continue
            before = self.sizes.get(place, size)
            self.sizes[place] = size
            if isinstance(size, tuple) and isinstance(before, tuple) and len(size) == len(before):
                differ: set[int | None] = {dim for dim in range(len(size)) if size[dim] != before[dim]}
            else:
                differ = {None} if isinstance(size, int) and isinstance(before, int) and size != before else set()
            if differ:
                self.varied.setdefault(place, set()).update(differ)

    def leaves(self) -> dict[Place, specs.LeafSpec]:
        """A spec for each tensor and integer that varied."""
        return {place: leaf(place, self.sizes[place], dims) for place, dims in self.varied.items()}


def _place(path: Sequence[Any]) -> Place | None:
    """A pytree's key path as a place."""
    place = Place(path[0].key)
    for key in path[1:]:
        if isinstance(key, pytree.GetAttrKey):
            place = place.attribute(key.name)
        elif isinstance(key, pytree.SequenceKey):
            place = place.item(key.idx)
        elif isinstance(key, pytree.MappingKey) and isinstance(key.key, str):
            place = place.item(key.key)
        else:  # an int as a dict's key can't be told from an index
            return None
    return place


# Listening ---------------------------------------------------------------------------------------------------------------

_watching: ContextVar[tuple[Watch, ...]] = ContextVar("watching", default=())
_attempt: ContextVar[_Attempt | None] = ContextVar("attempt", default=None)
_lock = threading.Lock()

#: What Dynamo raises to itself where it gives a function up.
_GAVE_UP = (exc.Unsupported, exc.FailOnRecompileLimitHit)


@dataclass
class _Attempt:
    """A compilation under way: of a function called with these arguments (and what it closes over) and globals."""

    code: CodeType
    scope: Mapping[str, Any]
    local: Mapping[str, Any]
    causes: dict[Watch, tuple[Cause, ...]] = field(default_factory=dict)


def _listen() -> None:
    """Wrap Dynamo's two functions, once per process; while nobody watches they only pass calls on."""
    from torch._dynamo import convert_frame as convert

    convert_frame: Any = convert

    with _lock:
        make: Any = convert_frame._compile
        if hasattr(make, "postlude_listens"):
            return
        find: Any = getattr(convert_frame, "get_and_maybe_log_recompilation_reasons", None)
        if find is None or list(inspect.signature(make).parameters)[:3] != ["code", "globals", "locals"]:
            raise EnvironmentUnsupported(
                f"postlude.shapes.watch can't listen to torch {torch.__version__}: its Dynamo compiles in another way than in"
                " torch 2.11 to 2.14. Use one of these, or TORCH_LOGS=recompiles."
            )

        @functools.wraps(make)
        def compile_frame(code: CodeType, scope: Any, local: Any, *args: Any, **kwargs: Any) -> Any:
            watches = _watching.get()
            if not watches:
                return make(code, scope, local, *args, **kwargs)
            attempt = _Attempt(code, scope, local)
            for one in watches:
                one._note(attempt)
            token = _attempt.set(attempt)
            start = time.perf_counter()
            failed = None
            try:
                made = make(code, scope, local, *args, **kwargs)
                done = made.guarded_code is not None  # otherwise there was nothing to compile
            except _GAVE_UP as error:
                done, failed = True, str(error).strip().partition("\n")[0]
                raise
            except BaseException:
                done = False  # the user's own error, or a frame that is not meant to be compiled
                raise
            finally:
                _attempt.reset(token)
                for one in watches if done else ():
                    one._add(attempt, str(kwargs.get("compile_id")), time.perf_counter() - start, failed)
            return made

        @functools.wraps(find)
        def find_reasons(*args: Any, **kwargs: Any) -> Any:
            reasons = find(*args, **kwargs)
            attempt = _attempt.get()
            if attempt is not None and not attempt.causes:  # torch 2.11 looks twice
                for one in _watching.get():
                    one._explain(attempt, reasons)
            return reasons

        compile_frame.postlude_listens = True  # type: ignore[attr-defined]
        convert_frame._compile = compile_frame
        convert_frame.get_and_maybe_log_recompilation_reasons = find_reasons
