"""How tensors lie, as kernels see it: one stride along an axis, two, or none that would do."""

from math import prod

import pytest
import torch

from postlude.targets.triton.layout import Extension, extensions, reach

M, BM = ("m",), ("b", "m")


def of(tensor: torch.Tensor, axes: str, rows: tuple[str, ...], m: int) -> dict[str, Extension] | None:
    return extensions(axes.split(), tensor.shape, tensor.stride(), rows, m)


@pytest.mark.parametrize(
    ("tensor", "axes", "rows", "m", "expected"),
    [
        (torch.empty(6, 5), "m k", M, 6, {"m": Extension(5), "k": Extension(1)}),
        (torch.empty(5, 6).T, "m k", M, 6, {"m": Extension(1), "k": Extension(6)}),
        (torch.empty(2, 3, 5), "m k", M, 6, {"m": Extension(5), "k": Extension(1)}),
        (torch.empty(3, 2, 5).transpose(0, 1), "m k", M, 6, {"m": Extension(10, 3, 5), "k": Extension(1)}),
        (torch.empty(1, 5).expand(6, 5), "m k", M, 6, {"m": Extension(0), "k": Extension(1)}),
        (torch.empty(2, 1, 5).expand(2, 3, 5), "m k", M, 6, {"m": Extension(0, 3, 5), "k": Extension(1)}),
        (torch.empty(1, 1, 5), "m k", M, 1, {"m": Extension(0), "k": Extension(1)}),
        (torch.empty(7, 5)[:, ::2], "n k", M, 6, {"n": Extension(5), "k": Extension(2)}),
        (torch.empty(9), "n", M, 6, {"n": Extension(1)}),
        (torch.empty(2, 3), "m", M, 6, {"m": Extension(1)}),
        (torch.empty(()), "", M, 6, {}),
        (torch.empty(4, 6, 5), "b m k", BM, 6, {"b": Extension(30), "m": Extension(5), "k": Extension(1)}),
        (torch.empty(4, 2, 3, 5), "b m k", BM, 6, {"b": Extension(30), "m": Extension(5), "k": Extension(1)}),
        (torch.empty(4, 8, 6, 5), "b m k", BM, 6, {"b": Extension(30), "m": Extension(5), "k": Extension(1)}),
        (  # heads, permuted: [batch, rows, heads, width] seen as [batch, heads, rows, width]
            torch.empty(4, 6, 8, 5).transpose(1, 2),
            "b m k",
            BM,
            6,
            {"b": Extension(5, 8, 240), "m": Extension(40), "k": Extension(1)},
        ),
        (torch.empty(4, 7, 5), "b n k", BM, 6, {"b": Extension(35), "n": Extension(5), "k": Extension(1)}),
    ],
)
def test_extensions(tensor: torch.Tensor, axes: str, rows: tuple[str, ...], m: int, expected: dict[str, Extension]) -> None:
    found = of(tensor, axes, rows, m)
    assert found == expected
    assert found is not None
    named = dict(zip(reversed(axes.split()), reversed(tensor.shape), strict=False)) | {"m": m}
    named["b"] = tensor.numel() // prod(size for axis, size in named.items() if axis in found and axis != "b")
    places = [0]
    for axis in axes.split():
        places = [at + place(found[axis], index) for at in places for index in range(named[axis])]
    assert places == torch.arange(2000).as_strided(tensor.shape, tensor.stride()).flatten().tolist()


def place(extension: Extension, index: int) -> int:
    """Where a kernel looks for a position along an axis."""
    if extension.inner:
        return index // extension.inner * extension.outer + index % extension.inner * extension.step
    return index * extension.step


def test_three_strides_are_too_many() -> None:
    tensor = torch.empty(4, 3, 2, 5).permute(2, 1, 0, 3)
    assert of(tensor, "m k", M, 24) is None


def test_rows_that_cut_a_dimension_apart() -> None:
    assert of(torch.empty(4, 5, 3), "b m k", BM, 2) is None


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [((2, 3), (3, 1), 6), ((2, 3), (1, 100), 202), ((0, 3), (3, 1), 0), ((5, 2), (0, 1), 2), ((), (), 1)],
)
def test_reach(shape: tuple[int, ...], strides: tuple[int, ...], expected: int) -> None:
    assert reach(shape, strides) == expected
