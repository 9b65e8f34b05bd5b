"""What a check found, as plain data. Sides are ``"eager"``, ``"inductor"`` and ``"postlude"``; times are seconds, sizes bytes."""

import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from postlude.checking.accuracy import Error
from postlude.checking.clock import Latency, Ratio
from postlude.checking.machine import Roofs
from postlude.select.choice import Choice

EAGER, INDUCTOR, POSTLUDE = "eager", "inductor", "postlude"
SIDES = (EAGER, INDUCTOR, POSTLUDE)

#: Version of the JSON form; it changes where a reader of an older one would misread a field.
SCHEMA = 1


@dataclass(frozen=True)
class Limits:
    """What a check demands.

    Attributes:
        slowdown: most times of the best other side's latency that Postlude may take, beyond the spread of the measurement.
        error: largest relative error of an output or gradient against the reference; None demands no more than what eager has.
    """

    slowdown: float = 1.05
    error: float | None = None


@dataclass(frozen=True)
class Tensors:
    """One output or gradient of one set of inputs, on all sides.

    Attributes:
        name: its path, such as ``logits`` or ``gradient of layers.0.weight``.
        input_set: index of the set of inputs.
        dtype: its type in eager.
        shape: its shape in eager.
        errors: by side, against the reference.
        bar: the relative error that Postlude's may have.
        kept: whether it keeps to the bar, or is `shared`.
        shared: whether it does not, and Inductor's error is as large: that is how torch.compile computes the model.
    """

    name: str
    input_set: int
    dtype: str
    shape: tuple[int, ...]
    errors: dict[str, Error]
    bar: float
    kept: bool
    shared: bool = False


@dataclass(frozen=True)
class Speed:
    """Latencies for one set of inputs, measured in turn in one process.

    Attributes:
        input_set: index of the set of inputs.
        latencies: by side.
        speedups: Postlude over each other side.
    """

    input_set: int
    latencies: dict[str, Latency]
    speedups: dict[str, Ratio]

    @property
    def best_other(self) -> str | None:
        """The faster of the other sides."""
        others = {name: latency.median for name, latency in self.latencies.items() if name != POSTLUDE}
        return min(others, key=others.__getitem__) if others else None


@dataclass
class Compiling:
    """What it took one side to compile.

    Attributes:
        cold: seconds of the first call with all caches empty; None where it was not measured.
        warm: the same with the caches that an earlier process left.
        compiles: how often Dynamo compiled while all sets of inputs were run.
        graphs: graphs that were compiled; more than one for each compile says that a graph broke.
        breaks: why graphs broke.
    """

    cold: float | None = None
    warm: float | None = None
    compiles: int = 0
    graphs: int = 0
    breaks: list[str] = field(default_factory=list)


@dataclass
class Side:
    """What was found of one side alone.

    Attributes:
        failed: why it could not be run, or None.
        unstable: outputs and gradients that were not the same bits in every run.
        memory: peak bytes of one call beyond what was there before it, for each set of inputs.
        compiling: what it took to compile; None for eager.
        warnings: what it warned of.
    """

    failed: str | None = None
    unstable: list[str] = field(default_factory=list)
    memory: list[int | None] = field(default_factory=list)
    compiling: Compiling | None = None
    warnings: list[str] = field(default_factory=list)


@dataclass
class RegionFound:
    """One Region of the model, on the values of the first set of inputs.

    Attributes:
        name: the modules that its GEMMs come from.
        backward: whether it stands in a backward graph.
        description: what it computes in a few words.
        program: its text, one statement a line.
        source: the generated source.
        target: the target that compiled it.
        absorbed: what was fused with the GEMMs.
        stopped_by: what ended its growth.
        shapes: of its operands and results, as text.
        dtype: of its first result.
        flops: floating-point operations of its contractions.
        traffic: bytes that it reads and writes.
        saved: bytes that the nodes it replaced move beyond that.
        errors: by side, of its worst result against float64 on the same values.
        bar: the relative error that it may have.
        against: ``"nodes"`` where the reference is the nodes that it replaced; ``"program"`` where they can't be run in float64
            and its own program is.
        blame: ``""``, or what a missed bar points to: ``"kernel"``, ``"capture"``, or ``"torch.compile"`` where Inductor's code
            for the same nodes misses it as well, which is then no fault of the Region.
        seconds: by side, medians on these values; empty where they were not measured.
        spreads: half the distance between the quartiles of those, relative.
        choice: what was chosen from, where selection tells.
    """

    name: str
    backward: bool
    description: str
    program: str
    source: str
    target: str
    absorbed: list[str]
    stopped_by: list[str]
    shapes: str
    dtype: str
    flops: float
    traffic: int
    saved: int
    errors: dict[str, Error]
    bar: float
    against: Literal["nodes", "program"]
    blame: Literal["", "kernel", "capture", "torch.compile"] = ""
    seconds: dict[str, float] = field(default_factory=dict)
    spreads: dict[str, float] = field(default_factory=dict)
    choice: Choice | None = None

    @property
    def badness(self) -> float:
        """Its error in units of the bar; beyond 1 it is a fault."""
        if self.blame == "torch.compile":
            return 1.0
        error = self.errors[POSTLUDE]
        if error.astray > self.errors[EAGER].astray:
            return math.inf
        return error.relative / self.bar if self.bar else (math.inf if error.relative else 0.0)

    @property
    def kind(self) -> tuple[object, ...]:
        """What it shares with the Regions that are the same but for the layer."""
        return self.program, self.shapes, self.backward


@dataclass(frozen=True)
class LeftAlone:
    """A GEMM that was left to Inductor, and why."""

    name: str
    reason: str


@dataclass
class Check:
    """The result of `postlude.check`.

    Attributes:
        target: what was checked.
        device: where it runs.
        training: whether gradients were checked and timed.
        draws: whether the model draws random numbers, so that outputs of two sides can't be compared.
        input_sets: shapes and types of each set of inputs, as text.
        limits: what was demanded.
        reference: what errors are against, in words.
        environment: machine and versions.
        sides: by name.
        tensors: accuracy of each output and gradient.
        speeds: one for each set of inputs.
        regions: in the order in which they were called.
        left: GEMMs that are not in Regions.
        roofs: what the machine can do at most; None where there is no Region.
        compiled_how: how compile times were measured, in words.
        memory_how: how memory was measured, in words.
        seconds: how long the check took.
        failures: each bar that was missed, as a sentence.
        verdict: the result in one sentence.
    """

    target: str
    device: str
    training: bool
    draws: bool
    input_sets: list[str]
    limits: Limits
    reference: str
    environment: dict[str, Any]
    sides: dict[str, Side]
    tensors: list[Tensors] = field(default_factory=list)
    speeds: list[Speed] = field(default_factory=list)
    regions: list[RegionFound] = field(default_factory=list)
    left: list[LeftAlone] = field(default_factory=list)
    regions_how: str = ""
    roofs: Roofs | None = None
    compiled_how: str = ""
    memory_how: str = ""
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
    verdict: str = ""

    @property
    def passed(self) -> bool:
        """Whether every bar was kept."""
        return not self.failures

    @property
    def noisy(self) -> bool:
        """Whether the timings vary so much that something else must have run on the machine."""
        return any(latency.noisy for speed in self.speeds for latency in speed.latencies.values())

    @property
    def worst_region(self) -> RegionFound | None:
        """The Region whose error is largest beside what it may be."""
        return max(self.regions, key=lambda region: region.badness, default=None)

    @property
    def speedup(self) -> float | None:
        """Geometric mean over the sets of inputs of the speed-up over the best other side."""
        ratios = [speed.speedups[best].median for speed in self.speeds if (best := speed.best_other) in speed.speedups]
        return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None

    def kinds(self) -> list[list[RegionFound]]:
        """Regions that are the same but for the layer, together, in the order of the first of each."""
        counts = Counter(region.kind for region in self.regions)
        return [[region for region in self.regions if region.kind == kind] for kind in counts]

    def record(self) -> dict[str, Any]:
        """Plain data for JSON, `schema` first. Numbers that JSON has not are strings (``"inf"``, ``"nan"``)."""
        plain = finite({**asdict(self), "passed": self.passed, "speedup": self.speedup, "noisy": self.noisy})
        worst = self.worst_region
        return {"schema": SCHEMA, **plain, "worst_region": worst.name if worst else None}

    def to_json(self) -> str:
        """`record` as text."""
        return json.dumps(self.record(), indent=1, allow_nan=False)

    def to_html(self) -> str:
        """The report as one page that needs nothing else."""
        from postlude.report.page import page

        return page(self)

    def __rich_console__(self, console: Any, options: Any) -> Iterable[Any]:
        """The report that `print` shows too."""
        from postlude.report.terminal import shown

        yield from shown(self)

    def __str__(self) -> str:
        from postlude.report.terminal import as_text

        return as_text(self)


def finite(value: Any) -> Any:
    """Plain data with numbers that JSON has not as strings (``"inf"``, ``"nan"``)."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    return [finite(part) for part in value] if isinstance(value, list | tuple) else value
