"""What a check says of its numbers."""

from postlude.checking.clock import Latency, Ratio, speedup
from postlude.checking.result import Speed
from postlude.checking.verdict import judge
from tests.report.test_page import example


def latency(*rounds: float) -> Latency:
    return Latency(sorted(rounds)[len(rounds) // 2], max(rounds), max(rounds), rounds, 100)


def test_a_ratio_is_that_of_the_medians_that_are_shown() -> None:
    ours, theirs = latency(1.0, 2.0, 3.0), latency(4.0, 2.0, 3.0)
    ratio = speedup(ours, theirs)
    assert ratio.median == theirs.median / ours.median == 1.5
    assert ratio.low <= ratio.median <= ratio.high


def test_of_a_tiny_model_it_is_said_whose_the_time_is() -> None:
    check = example()

    def timed(eager: float, inductor: float, ours: float) -> str:
        latencies = {"eager": latency(eager), "inductor": latency(inductor), "postlude": latency(ours)}
        ratios = {name: Ratio(one.median / ours, one.median / ours, one.median / ours) for name, one in latencies.items()}
        check.speeds = [Speed(0, latencies, {name: ratios[name] for name in ("eager", "inductor")})]
        judge(check)
        return check.verdict

    said = "what torch.compile does around the kernels outweighs them"
    assert said in timed(10e-6, 30e-6, 28e-6)
    assert "Inductor takes 3.00 times as long: in a call of 10 µs" in check.verdict
    assert not check.passed  # eager is faster, and that was asked for
    assert said not in timed(10e-6, 15e-6, 30e-6)  # Inductor is faster than Postlude: not torch.compile's
    assert said not in timed(10e-3, 30e-3, 28e-3)  # no tiny model
    assert said not in timed(10e-6, 8e-6, 7e-6)
    check.limits = type(check.limits)(slowdown=5.0)
    assert said in timed(10e-6, 30e-6, 28e-6)
    assert check.passed
