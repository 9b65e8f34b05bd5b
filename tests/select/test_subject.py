"""Keys: what is one call, and what are two."""

import pytest
import torch
from torch import Tensor

from postlude.ir import parse
from postlude.select import subject
from postlude.select.subject import applies, bucket, call_of, environment, layout

LINEAR = parse(
    "region(m, n, k); %x = operand [m, k] f32; %w = operand [n, k] f32; %acc = contract %x, %w : f32; yield [m, n] f32 %acc"
)
BATCHED = parse(
    "region(b, m, n, k); %x = operand [b, m, k] bf16; %w = operand [b, k, n] bf16; %acc = contract %x, %w : f32;"
    " yield [b, m, n] bf16 %acc"
)
CPU = torch.device("cpu")


def key(*operands: Tensor) -> str:
    return call_of(LINEAR, operands, device=CPU).digest()


def test_buckets_are_powers_of_two_and_half_way_tiles() -> None:
    assert [bucket(size) for size in (0, 1, 2, 3, 5, 33, 64, 65, 96, 97, 129, 200, 4096, 5000)] == [
        0, 1, 2, 4, 8, 64, 64, 96, 96, 128, 192, 256, 4096, 6144,
    ]  # fmt: skip
    edges = sorted({bucket(size) for size in range(3000)})
    assert all(bucket(edge) == edge for edge in edges)


@pytest.mark.parametrize(
    ("axes", "tensor", "text"),
    [
        ("mk", torch.empty(6, 8), "2 1 @16"),
        ("mk", torch.empty(2, 3, 8), "2 1 @16"),  # leading dimensions that one stride describes are one
        ("mk", torch.empty(3, 2, 8).transpose(0, 1), "2 3 1 @16"),
        ("mk", torch.empty(1, 6, 8), "2 1 @16"),
        ("nk", torch.empty(8, 6).t(), "1 2 @8"),
        ("mk", torch.empty(6, 12)[:, :8], "2+ 1 @16"),
        ("mk", torch.empty(6, 7), "2 1 @4"),
        ("mk", torch.empty(1, 8), "- 1 @16"),
        ("mk", torch.empty(8).expand(6, 8), "0 1 @16"),
        ("n", torch.empty(5), "1 @16"),
        ("", torch.empty(()), "@16"),
    ],
)
def test_layouts(axes: str, tensor: Tensor, text: str) -> None:
    assert layout(axes, tensor.shape, tensor.stride(), 4) == text


def test_an_address_that_is_not_aligned_is_seen() -> None:
    assert layout("n", (5,), (1,), 4, pointer=1 << 20 | 4) == "1 @4"


def test_one_entry_serves_a_bucket_of_rows() -> None:
    w = torch.empty(24, 16)
    assert key(torch.empty(65, 16), w) == key(torch.empty(96, 16), w) == key(torch.empty(5, 15, 16), w)
    assert key(torch.empty(65, 16), w) != key(torch.empty(64, 16), w)
    assert key(torch.empty(65, 16), w) != key(torch.empty(65, 16), torch.empty(25, 16))
    assert key(torch.empty(65, 16), w) != key(torch.empty(65, 16), torch.empty(16, 24).t())


def test_lengths_of_a_batched_region_come_in_buckets() -> None:
    sizes = [
        dict(call_of(BATCHED, [torch.empty(2, 3, m, 16), torch.empty(2, 3, 16, n)], device=CPU).sizes)
        for m, n in ((70, 80), (80, 90))
    ]
    assert sizes[0] == sizes[1] == {"b": 8, "m": 96, "n": 96, "k": 16}


def test_threads_and_the_precision_of_float32_are_part_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    operands = torch.empty(4, 16), torch.empty(24, 16)
    before = key(*operands)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert key(*operands) != before
    monkeypatch.undo()
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert key(*operands) != before


def test_fake_and_real_tensors_have_one_key() -> None:
    real = [torch.empty(4, 16), torch.empty(24, 16)]
    fake = [tensor.to("meta") for tensor in real]
    assert call_of(LINEAR, fake, device=CPU, real=False) == call_of(LINEAR, real, device=CPU)


def test_an_environment_changes_with_what_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    from postlude.targets import cpp

    before = environment("cpu", LINEAR)
    assert before["torch"] == torch.__version__.split("+")[0]
    call = call_of(LINEAR, [torch.empty(4, 16), torch.empty(24, 16)], device=CPU)
    assert applies(call, before)
    monkeypatch.setattr(cpp, "fingerprint", lambda region: "another")
    after = environment("cpu", LINEAR)
    assert {name for name in before if before[name] != after[name]} == {"generator"}
    assert not applies(call, before)


def test_on_another_gpu_nothing_applies(monkeypatch: pytest.MonkeyPatch) -> None:
    call = subject.Call("", (), (), "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert not applies(call, {})


def test_a_device_is_part_of_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same call on a CPU and on two kinds of GPU are three; on two GPUs of a kind it is one."""
    names = ["NVIDIA H200", "NVIDIA B200", "NVIDIA H200"]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[device.index])
    operands = torch.empty(4, 16), torch.empty(24, 16)
    digests = [call_of(LINEAR, operands, device=torch.device(where)).digest() for where in ("cpu", "cuda:0", "cuda:1", "cuda:2")]
    assert len(set(digests)) == 3
    assert digests[1] == digests[3]
