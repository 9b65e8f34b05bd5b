"""Element types without any arithmetic of `postlude.quant`: values as fractions from bits, codes by search between midpoints."""

from fractions import Fraction
from itertools import pairwise

import numpy as np

#: name: (exponent bits, mantissa bits, bias, how many codes below the top are NaN or infinity, whether there is an infinity)
FLOATS = {"e4m3": (4, 3, 7, 1, False), "e5m2": (5, 2, 15, 4, True), "e2m1": (2, 1, 1, 0, False)}


def magnitudes(name: str) -> list[Fraction]:
    """The finite values that are not negative, by their code."""
    exponent_bits, mantissa_bits, bias, special, _ = FLOATS[name]
    values = []
    for code in range((1 << (exponent_bits + mantissa_bits)) - special):
        exponent, mantissa = divmod(code, 1 << mantissa_bits)
        if exponent == 0:
            values.append(Fraction(mantissa, 1 << mantissa_bits) * Fraction(2) ** (1 - bias))
        else:
            values.append((1 + Fraction(mantissa, 1 << mantissa_bits)) * Fraction(2) ** (exponent - bias))
    return values


def encode(values: np.ndarray, name: str) -> np.ndarray:
    """Codes of float32 values: the midpoint of two neighbours decides, and on it the even code. NaN gives the last code."""
    exponent_bits, mantissa_bits, _, _, infinite = FLOATS[name]
    exact = magnitudes(name)
    # One step further there would be another value: half way to it, infinity begins.
    beyond = [exact[-1] + (exact[-1] - exact[-2])] if infinite else []
    midpoints = [(a + b) / 2 for a, b in zip((*exact, *beyond), (*exact[1:], *beyond), strict=False)]
    boundaries = np.array([float(m) for m in midpoints])
    assert all(Fraction(b) == m for b, m in zip(boundaries.tolist(), midpoints, strict=True))
    with np.errstate(invalid="ignore"):  # of signalling NaNs
        size = np.abs(values.astype(np.float64))
    codes = np.searchsorted(boundaries, size, side="left").astype(np.int64)
    on_midpoint = np.isin(size, boundaries)
    codes += on_midpoint & (codes % 2 == 1)  # halves to even
    codes[np.isnan(values)] = (1 << (exponent_bits + mantissa_bits)) - 1
    sign = np.signbit(values).astype(np.int64) << (exponent_bits + mantissa_bits)
    return (codes | sign).astype(np.uint8)


def floats(count: int, seed: int) -> np.ndarray:
    """float32 numbers of any bits, half of them of the size of narrow types' values, and all that is special."""
    random = np.random.default_rng(seed)
    anything = random.integers(0, 1 << 32, count // 2, dtype=np.uint32).view(np.float32)
    near = (random.standard_normal(count - count // 2) * np.exp2(random.integers(-20, 20, count - count // 2))).astype(np.float32)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 2.0**-149, 2.0**-126, 2.0**-127, np.finfo(np.float32).max]
    for name in FLOATS:
        exact = magnitudes(name)
        for a, b in pairwise(exact):
            middle = np.float32(float((a + b) / 2))
            special += [float(a), middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))]
    special += [464.0, 480.0, 57344.0, 61439.0, 61440.0, 65536.0, 5.0, 7.0, 1e9]
    both = np.array(special, np.float32)
    return np.concatenate((anything, near, both, -both))
