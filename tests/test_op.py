"""The op `postlude::region` as PyTorch sees it."""

import pytest
import torch
from torch.library import opcheck

from postlude.ir import parse, to_text
from postlude.op import overload, result_strides

LINEAR = to_text(
    parse(
        "region(m, n, k); %x = operand [m, k] f32; %w = operand [n, k] f32; %row = operand [n] f32;"
        " %acc = contract %x, %w : f32; %0 = add %acc, %row; %1 = relu %0; %2 = reduce sum n %1;"
        " yield [m, n] f32 %1; yield [m] f32 %2; yield [m, n] bf16 %0"
    )
)
BATCHED = (
    "region(b, m, n, k); %x = operand [b, m, k] f32; %w = operand [b, k, n] f32; %acc = contract %x, %w : f32;"
    " yield [b, m, n] f32 %acc order 0 2 1 3"
)


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_opcheck_with_several_results(rows: int) -> None:
    opcheck(overload(3), (LINEAR, [torch.randn(rows, 7), torch.randn(6, 7), torch.randn(6)]))


def test_opcheck_with_a_batch_and_an_order() -> None:
    opcheck(overload(1), (BATCHED, [torch.randn(2, 3, 4, 5), torch.randn(2, 3, 5, 6)]))


def test_results_lie_in_memory_as_ordered() -> None:
    x, w = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 5, 6)
    result = overload(1)(BATCHED, [x, w])
    torch.testing.assert_close(result, x @ w)
    assert result.stride() == (4 * 3 * 6, 6, 3 * 6, 1)


def test_strides_of_empty_results_are_pytorchs() -> None:
    assert result_strides((0, 3, 0), ()) == torch.empty(0, 3, 0).stride()


def test_leading_dimensions_are_rows() -> None:
    x, w, row = torch.randn(2, 5, 7), torch.randn(6, 7), torch.randn(6)
    tile, sums, low = overload(3)(LINEAR, [x, w, row])
    expected = torch.relu(x @ w.t() + row).reshape(10, 6)
    torch.testing.assert_close(tile, expected)
    torch.testing.assert_close(sums, expected.sum(1))
    assert low.dtype == torch.bfloat16


def test_a_program_that_is_none_is_named() -> None:
    with pytest.raises(ValueError, match="a Region starts with"):
        overload(1)("matmul", [torch.randn(2, 2), torch.randn(2, 2)])


def test_the_op_survives_export_and_saving(tmp_path) -> None:  # type: ignore[no-untyped-def]
    class Block(torch.nn.Module):
        def forward(self, x: torch.Tensor, w: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
            tile, sums, _ = overload(3)(LINEAR, [x, w, row])
            return tile / (1 + sums[:, None])

    inputs = torch.randn(5, 7), torch.randn(6, 7), torch.randn(6)
    rows = torch.export.Dim("rows", min=1, max=64)
    program = torch.export.export(Block(), inputs, dynamic_shapes=({0: rows}, None, None))
    torch.export.save(program, tmp_path / "block.pt2")
    loaded = torch.export.load(tmp_path / "block.pt2").module()
    more = torch.randn(9, 7), *inputs[1:]
    torch.testing.assert_close(loaded(*more), Block()(*more))
