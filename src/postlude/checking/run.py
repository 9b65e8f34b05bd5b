"""The check, step by step. Each step adds to one `Check`; a side that fails is a row of it, not an end."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from postlude.checking import memory, startup
from postlude.checking.accuracy import Error, as_good, bar, distance
from postlude.checking.clock import race, speedup
from postlude.checking.exact import widen, widened
from postlude.checking.machine import roofs
from postlude.checking.regions import inspect
from postlude.checking.result import EAGER, INDUCTOR, POSTLUDE, SIDES, Check, Compiling, Limits, Side, Speed, Tensors
from postlude.checking.sides import Runner, Settings, collecting_warnings, counting, forget
from postlude.checking.state import State, random_state, same_bits
from postlude.checking.verdict import judge
from postlude.errors import CheckError, PostludeError
from postlude.loading import Inputs

#: Runs of each side that are compared bit by bit.
RUNS = 3

Progress = Callable[[str], object]


def check(
    model: Callable[..., Any],
    inputs: Any,
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
    dynamic: bool | None = None,
    max_slowdown: float = Limits.slowdown,
    max_error: float | None = Limits.error,
    seconds: float = 1.0,
    compile_times: bool = True,
    target: str | None = None,
    progress: Progress = lambda text: None,
) -> Check:
    """Run a model by eager, Inductor and Postlude, and say whether Postlude is right, and faster.

    Gradients are checked and timed too if a module of the model is in training mode, or if there is no module and an input wants
    a gradient. The model is left as it was: weights, buffers, gradients, attributes, flags, random numbers.

    Args:
        model: a module or function, not compiled.
        inputs: example inputs: a tensor, a tuple of arguments, or a dict of arguments by name; or a list of these, several sets.
        options: as for ``torch.compile``, for both compilers; Postlude's own for Postlude alone.
        mode: as for ``torch.compile``, for both compilers.
        dynamic: as for ``torch.compile``, for both compilers.
        max_slowdown: how many times the latency of the faster of eager and Inductor Postlude may take, beyond the spread.
        max_error: the largest relative error (Frobenius norm) that an output or gradient may have; by default as much as eager's
            own with some room for chance (`postlude.checking.accuracy`).
        seconds: how long each side is timed for each set of inputs.
        compile_times: whether to measure compile times too, which takes several compilations with empty caches.
        target: TARGET of the command line by which another process finds the model; compile times are then those of processes.
        progress: told in a few words what is going on.

    Returns:
        The result: prints as tables; ``to_json()``, ``to_html()``, ``passed``, ``verdict``.

    Raises:
        CheckError: the model fails in eager, or gives no tensors.
        OptionError: an option that no compiler has.
    """
    begin = time.perf_counter()
    function: Any = getattr(model, "_orig_mod", model)  # what torch.compile was given
    sets = input_sets(inputs)
    settings = Settings(options, mode, dynamic)
    state = State(function)
    try:
        run = _Run(function, sets, settings, state, Limits(max_slowdown, max_error), target, progress)
        run.everything(seconds, compile_times)
    finally:
        state.restore()
        forget()
    run.found.seconds = time.perf_counter() - begin
    return run.found


def input_sets(inputs: Any) -> tuple[Inputs, ...]:
    """The sets of inputs that a caller means."""
    if isinstance(inputs, Inputs):
        return (inputs,)
    if isinstance(inputs, tuple) and inputs and all(isinstance(one, Inputs) for one in inputs):
        return inputs
    if isinstance(inputs, list):
        return tuple(single for one in inputs for single in input_sets(one))
    if isinstance(inputs, dict) and all(isinstance(key, str) for key in inputs):
        return (Inputs(kwargs=inputs),)
    return (Inputs(inputs if isinstance(inputs, tuple) else (inputs,)),)


def wants_gradients(function: Callable[..., Any], sets: Sequence[Inputs], state: State) -> bool:
    """Whether the model is there for training."""
    leaves = [leaf for one in sets for leaf in tree_leaves((one.args, one.kwargs)) if isinstance(leaf, Tensor)]
    asked = any(leaf.requires_grad for leaf in leaves)
    return state.training and (asked or bool(state.parameters)) if state.modules else asked


class _Run:
    """One check under way."""

    def __init__(
        self,
        function: Callable[..., Any],
        sets: tuple[Inputs, ...],
        settings: Settings,
        state: State,
        limits: Limits,
        target: str | None,
        progress: Progress,
    ) -> None:
        from postlude.doctor import environment

        self.function = function
        self.sets = sets
        self.settings = settings
        self.state = state
        self.target = target
        self.progress = progress
        self.device = _device(sets, state)
        self.training = wants_gradients(function, sets, state)
        self.calls: dict[str, Callable[..., Any]] = {EAGER: function}
        #: Outputs and gradients of the first run, by side and set of inputs.
        self.tensors: dict[str, list[dict[str, Tensor]]] = {}
        self.found = Check(
            target=target or str(getattr(function, "__name__", type(function).__name__)),
            device=str(self.device),
            training=self.training,
            draws=False,
            input_sets=[_described(one) for one in sets],
            limits=limits,
            reference="",
            environment=environment(),
            sides={name: Side() for name in SIDES},
        )

    def everything(self, seconds: float, compile_times: bool) -> None:
        """All steps in order."""
        self.eager()
        with ExitStack() as after:
            for side in (INDUCTOR, POSTLUDE):
                if compile_times:
                    # What was compiled there is not compiled again: here, nor for the Regions one by one.
                    variables = after.enter_context(startup.empty_caches())
                    self.compile_times(side, variables)
                    after.enter_context(startup.environment(variables))
                self.compiled(side)
            self.stability()
            self.accuracy()
            self.speed(seconds)
            self.memory()
            self.regions()
        judge(self.found)

    def runner(self, side: str, index: int) -> Runner:
        """What calls a side with a set of inputs."""
        return Runner(self.calls[side], self.sets[index], self.state, self.training)

    @property
    def running(self) -> list[str]:
        """Sides that have not failed."""
        return [name for name in self.calls if self.found.sides[name].failed is None]

    def eager(self) -> None:
        """The model by itself: what it gives, and whether it draws random numbers.

        Raises:
            CheckError: it fails, or gives no tensors.
        """
        self.progress("Running the model in eager...")
        self.tensors[EAGER] = []
        for index, _ in enumerate(self.sets):
            with self._failing_in_eager(index):
                found = self.runner(EAGER, index).tensors()
            if not any(tensor.ndim or tensor.is_floating_point() for tensor in found.values()):
                raise CheckError(
                    f"The model's output has no tensors for set {index} of the inputs: there is nothing to compare. Expected"
                    " tensors, or lists, dicts, dataclasses and the like that hold some."
                )
            self.tensors[EAGER].append(found)
        with self._failing_in_eager(0):
            again = self.runner(EAGER, 0).tensors()
            seeded = self.state.random
            torch.manual_seed(torch.initial_seed() + 1)
            self.state.random = random_state()
            other = self.runner(EAGER, 0).tensors()
            self.state.random = seeded
        first = self.tensors[EAGER][0]
        self.found.draws = not _different(first, again) and bool(_different(first, other))

    def compile_times(self, side: str, variables: dict[str, str]) -> None:
        """Cold and warm, with caches of the side's own."""
        self.found.compiled_how = (
            "first call in a new process, without imports and loading the model; cold: all caches empty; warm: as the cold one"
            " left them"
            if self.target
            else "first call in this process; cold: empty cache folders; warm: as the cold one left them. What the process has"
            " loaded already counts for nothing: on the command line each time is a process's own"
        )
        compiling = self.found.sides[side].compiling = Compiling()
        for kind in ("cold", "warm"):
            self.progress(f"Compiling with {side.capitalize()}, {kind}...")
            try:
                setattr(compiling, kind, self._first_call(side, variables))
            except Exception as error:  # the step that compiles in this process says what is wrong
                self.found.sides[side].warnings.append(f"{kind} compile time was not measured: {_told(error)}")
                break

    def _first_call(self, side: str, variables: dict[str, str]) -> float:
        if self.target:
            return startup.in_a_process(self.target, side, self.settings, torch.get_num_threads(), variables)
        self.state.rewind()
        with startup.environment(variables):
            return startup.first_call(
                lambda: Runner(self.settings.compile(side, self.function), self.sets[0], self.state, self.training)
            )

    def compiled(self, side: str) -> None:
        """Compile a side for all sets of inputs, and keep what it gives."""
        self.progress(f"Compiling and running with {side.capitalize()}...")
        record = self.found.sides[side]
        record.compiling = record.compiling or Compiling()
        self.calls[side] = self.settings.compile(side, self.function)
        try:
            with counting(record.compiling), collecting_warnings(record.warnings):
                self.tensors[side] = [self.runner(side, index).tensors() for index, _ in enumerate(self.sets)]
        except PostludeError:
            raise
        except Exception as error:
            record.failed = _told(error)

    def stability(self) -> None:
        """Whether every run gives the same bits."""
        self.progress("Running again, for the same bits...")
        for side in self.running:
            unstable: dict[str, None] = {}
            for index, first in enumerate(self.tensors[side]):
                with self._failing_later(side, index):
                    for _ in range(RUNS - 1):
                        unstable |= dict.fromkeys(_different(first, self.runner(side, index).tensors()))
            self.found.sides[side].unstable = list(unstable)

    def accuracy(self) -> None:
        """Errors of all outputs and gradients against the model in float64."""
        self.progress("Computing the reference in float64...")
        for index, eager in enumerate(self.tensors[EAGER]):
            exact = self._reference(index)
            if self.found.draws:
                continue
            own = {name: distance(tensor, exact[name]) for name, tensor in eager.items() if name in exact}
            largest = max((error.relative for error in own.values() if error.relative != float("inf")), default=0.0)
            for name, error in own.items():
                errors = {EAGER: error}
                for side in self.running:
                    if side != EAGER:
                        given = self.tensors[side][index].get(name)
                        missing = Error(float("inf"), float("inf"), exact[name].numel())
                        errors[side] = distance(given, exact[name]) if given is not None else missing
                allowed = bar(error, eager[name].dtype, largest, eager[name].numel())
                limit = self.found.limits.error
                if limit is not None:
                    allowed = limit
                kept = POSTLUDE not in errors or errors[POSTLUDE].within(allowed, error)
                shared = (
                    not kept
                    and limit is None
                    and INDUCTOR in errors
                    and as_good(errors[POSTLUDE], errors[INDUCTOR], eager[name].dtype, largest, eager[name].numel())
                )
                dtype = str(eager[name].dtype).removeprefix("torch.")
                shape = tuple(eager[name].shape)
                self.found.tensors.append(Tensors(name, index, dtype, shape, errors, allowed, kept or shared, shared))

    def _reference(self, index: int) -> dict[str, Tensor]:
        if self.found.draws:
            self.found.reference = (
                "none: the model draws random numbers, so outputs of two sides can't be compared; Regions are, on the same values"
            )
            return {}
        reasons: list[str] = []
        for dtype in (torch.float64, torch.float32):
            name = str(dtype).removeprefix("torch.")
            inputs = self.sets[index]
            try:
                with widened(self.state, dtype):
                    wide = Inputs(*widen((inputs.args, inputs.kwargs), dtype))
                    found = Runner(self.function, wide, _Still(self.state), self.training).tensors()
                self.found.reference = f"the model in {name}" + "".join(f"; {reason}" for reason in reasons)
                return found
            except Exception as error:
                reasons.append(f"it does not run in {name}: {_told(error)}")
            finally:
                self.state.rewind()
        self.found.reference = "eager itself; " + "; ".join(reasons)
        return self.tensors[EAGER][index]

    def speed(self, seconds: float) -> None:
        """Latencies of all sides, call by call in turn."""
        for index, _ in enumerate(self.sets):
            self.progress(f"Timing set {index + 1} of {len(self.sets)} of the inputs...")
            before = self._first_timed_calls(index)
            latencies = race(
                {side: self.runner(side, index).timed() for side in self.running}, seconds, self.device, before=before
            )
            ours = latencies.get(POSTLUDE)
            others = {name: latency for name, latency in latencies.items() if name != POSTLUDE and ours is not None}
            ratios = {name: speedup(ours, latency) for name, latency in others.items()} if ours else {}
            self.found.speeds.append(Speed(index, latencies, ratios))
            self.state.rewind()

    def _first_timed_calls(self, index: int) -> Callable[[], object] | None:
        """Call each side once as it is timed. Where calls change the model, it must be put back before each: a cache is full."""
        changed = False
        for side in self.running:
            with self._failing_later(side, index):
                self.runner(side, index).timed()()
            changed |= self.state.changed
            self.state.rewind()
        return self.state.rewind if changed else None

    def memory(self) -> None:
        """Peak memory of one call of each side."""
        self.progress("Measuring memory...")
        self.found.memory_how = memory.how(self.device)
        self.tensors.clear()
        for side in self.running:
            for index, _ in enumerate(self.sets):
                self.found.sides[side].memory.append(memory.peak(self.runner(side, index).timed(), self.device))
                self.state.rewind()

    def regions(self) -> None:
        """Each Region by itself, for the first set of inputs."""
        if POSTLUDE not in self.running:
            return
        self.progress("Looking into each Region...")
        try:
            with collecting_warnings(self.found.sides[POSTLUDE].warnings):
                inspection = inspect(self.runner(EAGER, 0), self.settings.options)
                inspection.measure(self.progress)
        except Exception as error:  # the model itself runs: what was found so far is worth more than an error
            self.found.regions_how = f"Regions were not looked into: {_told(error)}"
            return
        self.found.regions, self.found.left = inspection.regions, inspection.left
        if not self.found.regions:
            self.found.regions_how = (
                "No matrix multiplication was fused, so all of this model is Inductor's code: postlude explain says why."
            )
            return
        self.found.regions_how = (
            "each kernel on the values that it gets for the first set of inputs, beside the nodes that it replaced: in float64,"
            " in eager, and compiled by Inductor"
        )
        self.progress("Measuring what the machine can do...")
        self.found.roofs = roofs(self.device, getattr(torch, self.found.regions[0].dtype), self._fastest_region())

    def _fastest_region(self) -> float:
        timed = [region for region in self.found.regions if region.seconds]
        return max((region.flops / min(region.seconds.values()) for region in timed), default=0.0)

    @contextmanager
    def _failing_in_eager(self, index: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise CheckError(
                f"The model fails in eager, before anything is compiled, for set {index} of the inputs: {_told(error)}"
            ) from error

    @contextmanager
    def _failing_later(self, side: str, index: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if side == EAGER:
                raise CheckError(
                    f"The model fails in eager when it is called again, for set {index} of the inputs: {_told(error)}. Weights,"
                    " buffers, attributes and random numbers were put back; what else it changes must not stop the next call."
                ) from error
            self.found.sides[side].failed = f"called again, {_told(error)}"


class _Still:
    """A state that is not rewound: while the model is in another type, there is nothing to copy back."""

    def __init__(self, state: State) -> None:
        self.parameters = state.parameters

    def rewind(self) -> None:
        """Nothing."""


def _different(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Names of the tensors that do not have the same bits."""
    return [name for name in one | other if name not in one or name not in other or not same_bits(one[name], other[name])]


def _device(sets: Sequence[Inputs], state: State) -> torch.device:
    tensors = [leaf for one in sets for leaf in tree_leaves((one.args, one.kwargs)) if isinstance(leaf, Tensor)]
    on = [tensor.device for tensor in (*tensors, *state.tensors.values())]
    return next((device for device in on if device.type != "cpu"), on[0] if on else torch.device("cpu"))


def _described(inputs: Inputs) -> str:
    """``int64[8, 128], attention_mask=int64[8, 128]``."""
    named = [(f"{name}=", value) for name, value in inputs.kwargs.items()]
    return ", ".join(prefix + _kind(value) for prefix, value in [("", value) for value in inputs.args] + named)


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
    return repr(value) if isinstance(value, bool | int | float | str | None) else type(value).__name__


def _told(error: BaseException) -> str:
    """Kind and message of an error on one line; of what Dynamo and Inductor wrap, the inner one."""
    inner = getattr(error, "inner_exception", None) or error
    lines = [line.strip() for line in str(inner).splitlines() if line.strip()]
    return f"{type(inner).__name__}: {lines[0]}" if lines else type(inner).__name__


__all__ = ["check", "input_sets", "wants_gradients"]
