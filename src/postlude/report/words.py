"""How numbers and names are written, in every report."""

from postlude.checking.accuracy import Error
from postlude.checking.clock import Latency, Ratio

#: Sides as a person writes them.
NAMES = {"eager": "eager", "inductor": "Inductor", "postlude": "Postlude"}

#: What is said of timings where something else ran too.
NOISY = "The timings vary a lot: something else runs on this machine, so take them as rough."


def seconds(value: float | None) -> str:
    """``1.52 ms``: three digits, in the unit that needs no zeros."""
    if value is None:
        return "–"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= size or unit == "µs":
            return f"{_digits(value / size)} {unit}"
    raise AssertionError


def size(value: float | None) -> str:
    """``1.5 MB``: decimal units, as memory bandwidth is given."""
    if value is None:
        return "–"
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{_digits(value)} {unit}"
        value /= 1000
    raise AssertionError


def rate(value: float, unit: str) -> str:
    """``120 GFLOP/s``."""
    for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= factor or prefix == "M":
            return f"{_digits(value / factor)} {prefix}{unit}"
    raise AssertionError


def error(value: Error | None) -> str:
    """``6.8e-07``, and what is astray."""
    if value is None:
        return "–"
    return f"{value.relative:.1e}" + (f", {value.astray} astray" if value.astray else "")


def ratio(value: Ratio | None) -> str:
    """``1.99x (1.95 to 2.03)``: of the medians, and the quartiles of the rounds."""
    return "–" if value is None else f"{value.median:.2f}x ({value.low:.2f} to {value.high:.2f})"


def spread(latency: Latency) -> str:
    """``±3%``."""
    return f"±{latency.spread:.0%}"


def plural(count: int, word: str) -> str:
    """``1 GEMM``, ``3 GEMMs``."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def _digits(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
