"""The vector functions of include/postlude/math.h, against the same functions in more precision.

Float arguments are all of one in some thousand floats, from the whole range, and all special values; double ones are random.
"""

import ctypes
from collections.abc import Callable
from functools import cache

import mpmath
import numpy as np
import pytest
import torch

from postlude.targets.cpp import build, toolchain

STEP = 1013


def _torch(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: function(torch.from_numpy(x)).numpy()


#: For each function: what it is in float64, and the error allowed in float32, in units in the last place.
FUNCTIONS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], float]] = {
    "neg": (np.negative, 0),
    "abs": (np.abs, 0),
    "sign": (lambda x: np.where(np.isnan(x), 0.0, np.sign(x)), 0),
    "relu": (lambda x: np.where(x < 0, 0.0, x), 0),
    "exp": (np.exp, 1.2),
    "exp2": (np.exp2, 1.2),
    "expm1": (np.expm1, 1.5),
    "log": (np.log, 1.0),
    "log1p": (np.log1p, 1.0),
    "log2": (np.log2, 1.6),
    "log10": (np.log10, 1.8),
    "sqrt": (np.sqrt, 0.5),
    "rsqrt": (lambda x: 1 / np.sqrt(x), 1.5),
    "reciprocal": (lambda x: 1 / x, 0.5),
    "erf": (_torch(torch.erf), 1.8),
    "erfc": (_torch(torch.erfc), 5.0),  # the C library's
    "tanh": (np.tanh, 1.5),
    "sigmoid": (_torch(torch.sigmoid), 2.5),
    "sin": (np.sin, 1.7),
    "cos": (np.cos, 1.7),
    "tan": (np.tan, 2.0),
    "asin": (np.arcsin, 1.0),
    "acos": (np.arccos, 1.0),
    "atan": (np.arctan, 1.0),
    "sinh": (np.sinh, 2.0),
    "cosh": (np.cosh, 2.0),
    "floor": (np.floor, 0),
    "ceil": (np.ceil, 0),
    "trunc": (np.trunc, 0),
    "round": (np.rint, 0),
}

BINARY: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "maximum": np.maximum,
    "minimum": np.minimum,
    "copysign": np.copysign,
    "fmod": np.fmod,
    "remainder": np.remainder,
    "atan2": np.arctan2,
    "pow": np.power,
}

SOURCE = """
#include <postlude/math.h>
using namespace postlude;
#define UNARY(name, T)                                                                                      \\
  extern "C" void name##_##T(const T *x, T *y, int64_t n) {                                                 \\
    columns<Vec<T>>(n, [&](int64_t c, auto which) { store<Vec<T>>(y + c, name(load<Vec<T>>(x + c, which)), which); }); \\
  }
#define BINARY(name, T)                                                                                     \\
  extern "C" void name##_##T(const T *x, const T *z, T *y, int64_t n) {                                     \\
    columns<Vec<T>>(n, [&](int64_t c, auto which) {                                                         \\
      store<Vec<T>>(y + c, name(load<Vec<T>>(x + c, which), load<Vec<T>>(z + c, which)), which);            \\
    });                                                                                                     \\
  }
"""

ISAS = [isa for isa in toolchain.ISAS if isa.needs <= toolchain.cpu_features()]


@cache
def library(isa: toolchain.Isa) -> ctypes.CDLL:
    lines = [SOURCE]
    lines += [f"UNARY({name}, {T})" for name in FUNCTIONS for T in ("float", "double")]
    lines += [f"BINARY({name}, {T})" for name in BINARY for T in ("float", "double")]
    return ctypes.CDLL(str(build.build("\n".join(lines) + "\n", isa=isa)))


def call(isa: toolchain.Isa, name: str, *arguments: np.ndarray) -> np.ndarray:
    """Apply the vector function; the last few elements are a tail."""
    result = np.full_like(arguments[0], 7)
    suffix = {"float32": "float", "float64": "double"}[str(result.dtype)]
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (*arguments, result)]
    library(isa)[f"{name}_{suffix}"](*pointers, ctypes.c_int64(result.size))
    return result


@cache
def floats() -> np.ndarray:
    every = np.arange(0, 2**32, STEP, dtype=np.uint64).astype(np.uint32).view(np.float32)
    special_values = [
        0.0,
        1.0,
        0.5,
        1.5,
        2.5,
        88.7,
        104.0,
        np.inf,
        np.nan,
        2.0**-126,
        2.0**-149,
        2.0**-130,
        2.0**23 + 1,
        2.0**24,
        3.4e38,
    ]
    both_signs = np.array([sign * value for value in special_values for sign in (1, -1)], np.float32)
    return np.ascontiguousarray(np.concatenate([every, both_signs]))


def error(got: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Distance in units in the last place of the exact value's float; infinite where one is not finite and they differ."""
    rounded = exact.astype(np.float32)
    same = (got == rounded) | (np.isnan(got) & np.isnan(rounded))
    # The step at the exact value; beyond the largest float as large as just below it.
    size = np.spacing(np.minimum(np.abs(exact), 2.0**127).astype(np.float32)).astype(np.float64)
    bounded = np.clip(got.astype(np.float64), -(2.0**128), 2.0**128)
    distance = np.abs(bounded - np.clip(exact, -(2.0**128), 2.0**128)) / np.abs(size)
    return np.where(same, np.where(np.isfinite(rounded), np.minimum(distance, 0.5), 0), distance)


@pytest.mark.parametrize("isa", ISAS, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_float_functions(name: str, isa: toolchain.Isa) -> None:
    function, bound = FUNCTIONS[name]
    x = floats()
    with np.errstate(all="ignore"):
        exact = function(x.astype(np.float64))
    if name == "sigmoid":  # where exp(-x) overflows the result is 0, as ATen's
        exact = np.where(x < -88.72, 0.0, exact)
    got = call(isa, name, x)
    with np.errstate(all="ignore"):
        errors = error(got, exact)
    errors = np.nan_to_num(errors, nan=np.inf)
    worst = int(errors.argmax())
    assert errors[worst] <= max(bound, 0.5), f"{name}({x[worst]!r}) = {got[worst]!r}, exactly {exact[worst]!r}"
    zero = (exact == 0) & (x == 0)
    assert (np.signbit(got[zero]) == np.signbit(exact[zero])).all(), f"the sign of zero gets lost in {name}"


@pytest.mark.parametrize("isa", ISAS, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_double_functions(name: str, isa: toolchain.Isa) -> None:
    generator = np.random.default_rng(0)
    x = np.concatenate(
        [generator.normal(size=500) * scale for scale in (1e-5, 1, 100)]
        + [[0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 0.5, 2.5]]
    )
    with np.errstate(all="ignore"):
        exact = FUNCTIONS[name][0](x)
        np.testing.assert_allclose(call(isa, name, x), exact, rtol=4e-15, atol=0)


@pytest.mark.parametrize("isa", ISAS, ids=str)
@pytest.mark.parametrize("name", BINARY)
def test_binary_functions(name: str, isa: toolchain.Isa) -> None:
    values = np.array([0.0, -0.0, 1.0, -1.0, 0.3, -2.5, 3.0, 7.25, -1e-3, 1e10, np.inf, -np.inf, np.nan], np.float32)
    x, y = (np.ascontiguousarray(side.ravel()) for side in np.meshgrid(values, values))
    for dtype, tolerance in ((np.float32, 3e-7), (np.float64, 1e-15)):
        with np.errstate(all="ignore"):
            exact = BINARY[name](x.astype(np.float64), y.astype(np.float64)).astype(dtype)
            np.testing.assert_allclose(call(isa, name, x.astype(dtype), y.astype(dtype)), exact, rtol=tolerance, atol=0)


@pytest.mark.parametrize("isa", ISAS, ids=str)
def test_powers_of_all_sizes(isa: toolchain.Isa) -> None:
    """Results over the whole range of floats, subnormal ones included."""
    generator = np.random.default_rng(0)
    x = np.exp(generator.uniform(-100, 88, 200_000)).astype(np.float32)
    y = (generator.uniform(-150, 128, x.size) * np.log(2) / np.log(x.astype(np.float64))).astype(np.float32)
    x[::2] *= np.where(np.abs(y[::2]) < 30, -1, 1).astype(np.float32)
    y[::2] = np.rint(y[::2])
    with np.errstate(all="ignore"):
        exact = np.power(x.astype(np.float64), y.astype(np.float64))
        errors = error(call(isa, "pow", x, y), exact)
    worst = int(errors.argmax())
    assert errors[worst] <= 1.1, f"pow({x[worst]!r}, {y[worst]!r}), exactly {exact[worst]!r}"


@pytest.mark.parametrize("name", ["exp", "log", "erf", "tanh", "log1p", "expm1"])
def test_the_reference_is_right(name: str) -> None:
    """NumPy's and torch's float64 functions, against 40 digits: the tests above stand on them."""
    mpmath.mp.dps = 40
    x = np.abs(np.random.default_rng(1).normal(size=200)) * 3
    exact = np.array([float(getattr(mpmath, name)(mpmath.mpf(float(value)))) for value in x])
    np.testing.assert_allclose(FUNCTIONS[name][0](x), exact, rtol=1e-14)
