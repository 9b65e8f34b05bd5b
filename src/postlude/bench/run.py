"""Measures cases: all peers in turn in one process, errors against float64, and nothing hidden that failed."""

import copy
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from postlude.bench.cases import Case, built
from postlude.bench.peers import PEERS, NotTaken, Peer
from postlude.checking.accuracy import distance
from postlude.checking.clock import Latency, Ratio, race, speedup
from postlude.checking.result import finite
from postlude.doctor import environment, first_line
from postlude.errors import CaseError

SCHEMA = 1


@dataclass
class Measured:
    """One case.

    Attributes:
        case: what was measured.
        latencies: seconds of single calls, by peer.
        errors: relative error against float64, by peer.
        speedups: of each of Postlude's ways over the fastest other peer.
        missing: peers that did not run it, and why.
    """

    case: Case
    latencies: dict[str, Latency] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    speedups: dict[str, Ratio] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def best_other(self) -> str | None:
        """The fastest of the peers that are not Postlude."""
        others = {p.name: self.latencies[p.name].median for p in PEERS if not p.ours and p.name in self.latencies}
        return min(others, key=others.__getitem__) if others else None

    def rate(self, name: str) -> float:
        """Floating-point operations per second of a peer."""
        return self.case.flops / self.latencies[name].median


def measure(
    cases: Sequence[Case], peers: Iterable[Peer], device: str, seconds: float, progress: Callable[[str], object]
) -> list[Measured]:
    """Measure every case with every peer that takes it. `progress` is told what is going on."""
    chosen = list(peers)
    found = []
    for number, case in enumerate(cases, start=1):
        found.append(_measured(case, chosen, device, seconds, lambda text, n=number: progress(f"{n} of {len(cases)}: {text}")))  # type: ignore[misc]
    return found


def _measured(case: Case, peers: Sequence[Peer], device: str, seconds: float, progress: Callable[[str], object]) -> Measured:
    found = Measured(case)
    try:
        module, inputs = built(case, device)
        exact = _exact(module, inputs)
    except (RuntimeError, MemoryError) as error:
        raise CaseError(f"{case} can't be measured here: {first_line(error)}. Name a smaller size.") from error
    calls: dict[str, Callable[[], Tensor]] = {}
    torch._dynamo.reset()  # the cases share code: none should walk the guards of those before it
    for peer in peers:
        if (reason := peer.refusal(case, device)) is not None:
            found.missing[peer.name] = reason
            continue
        progress(f"{case}: {peer.name}...")
        try:
            call = peer.make(copy.deepcopy(module), tuple(value.clone() for value in inputs), case)
            found.errors[peer.name] = distance(call().to(exact.device), exact).relative
            calls[peer.name] = call
        except NotTaken as reason:
            found.missing[peer.name] = str(reason)
        except Exception as error:  # a peer that fails is a row of the table, not its end
            found.missing[peer.name] = f"{type(error).__name__}: {first_line(error)}"
    progress(f"{case}: timing...")
    if calls:
        found.latencies = race(calls, seconds, torch.device(device))
    if best := found.best_other:
        ours = [peer.name for peer in peers if peer.ours and peer.name in found.latencies]
        found.speedups = {name: speedup(found.latencies[name], found.latencies[best]) for name in ours}
    return found


def _exact(module: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    with torch.no_grad():
        exact: Tensor = copy.deepcopy(module).double()(*(value.double() for value in inputs))
    return exact


def record(found: Sequence[Measured], device: str) -> dict[str, Any]:
    """Plain data for JSON: seconds of calls, with what the numbers can be judged by."""
    cases = [
        {
            **asdict(one),
            "best_other": one.best_other,
            "flops_per_second": {name: one.rate(name) for name in one.latencies},
            "spreads": {name: latency.spread for name, latency in one.latencies.items()},
        }
        for one in found
    ]
    plain = {"device": device, "environment": environment(), "cases": cases, "mean_speedup": mean_speedup(found)}
    return {"schema": SCHEMA, **finite(plain)}


def mean_speedup(found: Sequence[Measured]) -> dict[str, float]:
    """Geometric mean over the cases of each of Postlude's ways over the fastest other peer."""
    ratios: dict[str, list[float]] = {}
    for one in found:
        for name, ratio in one.speedups.items():
            ratios.setdefault(name, []).append(ratio.median)
    return {name: statistics.geometric_mean(values) for name, values in ratios.items()}
