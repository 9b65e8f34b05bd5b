"""What a check's numbers mean: the bars that were missed, and one sentence."""

from collections.abc import Sequence

from postlude.checking.clock import Ratio
from postlude.checking.result import EAGER, INDUCTOR, POSTLUDE, Check, RegionFound, Speed, Tensors

_NAMES = {EAGER: "eager", INDUCTOR: "Inductor", POSTLUDE: "Postlude"}


def judge(found: Check) -> None:
    """Fill in `failures` and `verdict`."""
    found.failures = [*_failed_side(found), *_inaccurate(found), *_faulty_regions(found), *_unstable(found), *_slow(found)]
    parts = [part for part in (_speed(found), _accuracy(found), _bits(found)) if part]
    if found.sides[POSTLUDE].failed is not None:
        found.verdict = f"Postlude does not run this model: {found.sides[POSTLUDE].failed}."
    elif found.failures:
        found.verdict = f"Do not ship this: {found.failures[0]}."
    else:
        found.verdict = f"Postlude is {_enumerated(parts)}."


def _failed_side(found: Check) -> list[str]:
    reason = found.sides[POSTLUDE].failed
    return [] if reason is None else [f"Postlude failed: {reason}"]


def _inaccurate(found: Check) -> list[str]:
    missed = [tensors for tensors in found.tensors if not tensors.kept]
    if not missed:
        return []
    worst = max(missed, key=_excess)
    ours, eager = worst.errors[POSTLUDE], worst.errors[EAGER]
    more = _and_others(missed)
    culprit = found.worst_region
    where = f"; worst Region: {culprit.name}" if culprit is not None and culprit.badness > 1 else ""
    bar = f"{worst.bar:.1e} were allowed, eager has {eager.relative:.1e}"
    astray = f", and {ours.astray} elements are NaN or infinite where they should not be" if ours.astray > eager.astray else ""
    return [f"the error of {worst.name}{more} is {ours.relative:.1e}, where {bar}{astray}{where}"]


def _excess(tensors: Tensors) -> float:
    return tensors.errors[POSTLUDE].relative / tensors.bar if tensors.bar else float("inf")


def _faulty_regions(found: Check) -> list[str]:
    faulty = [region for region in found.regions if region.badness > 1]
    worst = found.worst_region
    if not faulty or worst is None:
        return []
    more = _and_others(faulty)
    return [f"the Region {worst.name}{more} is wrong: {_region_error(worst)}"]


def _region_error(region: RegionFound) -> str:
    ours, eager = region.errors[POSTLUDE], region.errors[EAGER]
    whose = {"kernel": "its kernel departs from its program", "capture": "its program departs from the model"}
    blame = f"; {whose[region.blame]}" if region.blame else ""
    return f"its error is {ours.relative:.1e}, eager's on the same values {eager.relative:.1e}{blame}"


def _and_others(found: Sequence[object]) -> str:
    """What follows the name of the first."""
    more = len(found) - 1
    return f" (and {more} other{'s' * (more > 1)})" if more else ""


def _unstable(found: Check) -> list[str]:
    """Other bits from run to run count where eager gives the same ones."""
    names = [name for name in found.sides[POSTLUDE].unstable if name not in found.sides[EAGER].unstable]
    inductor = set(found.sides[INDUCTOR].unstable)
    names = [name for name in names if name not in inductor]
    return [f"{_enumerated(names[:3])} differ from run to run" + (" (and more)" if len(names) > 3 else "")] if names else []


def _slow(found: Check) -> list[str]:
    """Slower than allowed, by more than the spread: even the better quartile of the rounds is."""
    failures = []
    for speed in found.speeds:
        best = speed.best_other
        ratio = speed.speedups.get(best) if best else None
        if ratio is not None and ratio.high * found.limits.slowdown < 1:
            failures.append(
                f"Postlude takes {1 / ratio.median:.2f} times as long as {_NAMES[best or EAGER]} for set {speed.input_set} of the"
                f" inputs, where {found.limits.slowdown:.2f} times are allowed{_overhead(speed)}"
            )
    return failures


#: A model of less than these seconds a call can lose to eager by what a call of compiled code costs.
TINY = 1e-3


def _overhead(speed: Speed) -> str:
    """What is said where eager is faster than both, in a call so short that what surrounds compiled code is the reason."""
    ratio = speed.speedups.get(INDUCTOR)
    if speed.best_other != EAGER or ratio is None or ratio.high < 1 or speed.latencies[EAGER].median > TINY:
        return ""
    inductor, eager = speed.latencies[INDUCTOR].median, speed.latencies[EAGER].median
    return (
        f" (Inductor takes {inductor / eager:.2f} times as long: in a call of {eager * 1e6:.0f} µs, what torch.compile does"
        " around the kernels outweighs them)"
    )


def _speed(found: Check) -> str:
    ratios = [(speed, ratio) for speed in found.speeds if (ratio := _of_best(speed)) is not None]
    if not ratios or found.speedup is None:
        return ""
    names = {_NAMES[speed.best_other or EAGER] for speed, _ in ratios}
    over = f"{names.pop()}, the faster of the others" if len(names) == 1 else "the faster of eager and Inductor"
    if not any(ratio.clear for _, ratio in ratios):
        return f"as fast as {over}, within the spread"
    if found.speedup >= 1:
        return f"{found.speedup:.2f} times as fast as {over}"
    overhead = next((text for speed, _ in ratios if (text := _overhead(speed))), "")
    return f"slower than {over} ({found.speedup:.2f} times its speed), within what is allowed{overhead}"


def _of_best(speed: Speed) -> Ratio | None:
    best = speed.best_other
    return speed.speedups.get(best) if best else None


def _accuracy(found: Check) -> str:
    if found.draws or not found.tensors:
        return "right in every Region on its own (the model draws random numbers, so outputs were not compared)"
    if found.limits.error is not None:
        return f"within the error of {found.limits.error:.1e} that is allowed"
    if shared := [tensors for tensors in found.tensors if tensors.shared]:
        worst = max(shared, key=_excess)
        return f"as accurate as Inductor; torch.compile computes {worst.name}{_and_others(shared)} otherwise than eager, in both"
    return "as accurate as eager"


def _bits(found: Check) -> str:
    return "" if found.sides[POSTLUDE].unstable else "the same bit for bit in every run"


def _enumerated(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}" if parts else "there"
