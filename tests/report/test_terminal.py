"""A check in a terminal."""

import pytest

from postlude.checking.accuracy import Error
from postlude.checking.clock import BUSY, Latency
from postlude.report import words
from postlude.report.terminal import as_text
from tests.report.test_page import example


@pytest.mark.parametrize("width", [80, 150])
def test_everything_is_said_at_any_width(width: int) -> None:
    text = as_text(example(), width)
    flat = " ".join(text.replace("│", " ").split())
    assert max(map(len, text.splitlines())) <= width
    assert "Postlude is 2.00 times as fast as Inductor, the faster of the others" in flat
    for part in ("float32[64, 16]", "2 x layers.*.up", "GEMM + bias, GELU, cpp", "9.00 s", "1.60 kB", "too small", "a warning"):
        assert part in flat
    assert "graph break: print in the model" in flat
    assert "2.00x (2.00 to 2.00)" in flat


def test_a_fault_is_told_first() -> None:
    text = as_text(example(faulty=True))
    assert "Do not ship this" in text.splitlines()[1]
    assert "worst Region: layers.1.up" in " ".join(text.replace("│", " ").split())
    assert "fault in kernel" in text


def test_noise_is_told_by_the_terminal_the_page_and_the_json() -> None:
    check = example()
    assert not check.noisy
    assert words.NOISY not in " ".join(as_text(check).split())
    assert words.NOISY not in check.to_html()
    check.speeds[0].latencies["eager"] = Latency(0.020, 33e-3, 35e-3, (0.020, 0.031, 0.014, 0.020, 0.033), 500)
    assert check.speeds[0].latencies["eager"].spread > BUSY
    assert check.record()["noisy"]
    assert words.NOISY in " ".join(as_text(check).split())
    assert words.NOISY in check.to_html()


def test_the_others_are_counted() -> None:
    assert "(and 1 other)" in example(faulty=True).verdict


def test_numbers_in_words() -> None:
    assert words.seconds(0.01234) == "12.3 ms"
    assert words.seconds(2.0) == "2.00 s"
    assert words.seconds(3e-7) == "0.30 µs"
    assert words.size(1_500_000) == "1.50 MB"
    assert words.rate(2.5e9, "FLOP/s") == "2.50 GFLOP/s"
    assert words.error(Error(1e-7, 1e-6, 2)) == "1.0e-07, 2 astray"
    assert words.plural(1, "GEMM") == "1 GEMM"
