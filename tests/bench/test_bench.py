"""`postlude bench`: cases, peers, the table and the JSON."""

import json
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from postlude import cli
from postlude.bench.cases import DTYPES, EPILOGUES, Case, built, from_csv, parsed
from postlude.bench.peers import PEERS, Peer
from postlude.bench.run import measure
from postlude.errors import CaseError


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["bench", *arguments], env={"COLUMNS": "120"})


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_every_epilogue_runs_and_is_what_it_says(epilogue: str) -> None:
    layer, inputs = built(Case(3, 5, 7, epilogue, "float64"), "cpu")
    result = layer(*inputs)
    assert result.shape == (3, 5)
    product = inputs[0] @ layer.linear.weight.T + (layer.linear.bias if layer.linear.bias is not None else 0)  # type: ignore[union-attr,operator]
    if epilogue in ("none", "bias"):
        torch.testing.assert_close(result, product)
    elif epilogue == "swiglu":
        gate = inputs[0] @ layer.gate.weight.T  # type: ignore[union-attr,operator]
        torch.testing.assert_close(result, gate * gate.sigmoid() * product)
    elif epilogue == "residual":
        torch.testing.assert_close(result, product + inputs[1])
    else:
        assert (result - product).abs().max() > 1e-3


def test_cases_of_a_csv(tmp_path: Path) -> None:
    path = tmp_path / "shapes.csv"
    path.write_text("m, n, k, epilogue, dtype\n1,2,3,gelu,bfloat16\n4, 5, 6,,\n")
    assert from_csv(path, ["relu", "silu"], ["float32"]) == [
        Case(1, 2, 3, "gelu", "bfloat16"),
        Case(4, 5, 6, "relu", "float32"),
        Case(4, 5, 6, "silu", "float32"),
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("m,n\n1,2\n", "has no column k"),
        ("m,n,k\n1,2,x\n", "line 2: '1x2xx' is no size"),
        ("m,n,k,epilogue\n1,2,3,tanh\n", "line 2: 'tanh' is no epilogue"),
        ("m,n,k\n", "no lines below its header"),
        ("", "has no column m, n, k"),
        (f"m,n,k\n1,2,{'9' * 5000}\n", "nine digits at most"),
        ("m,n,k,m\n1,2,3,4\n", "has the column m twice"),
        ('m,n,k\n1,2,"' + "3" * 200_000, "can't be read: field larger"),
    ],
)
def test_lines_that_say_nothing_are_named(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "shapes.csv"
    path.write_text(text)
    with pytest.raises(CaseError) as error:
        from_csv(path, ["gelu"], ["float32"])
    assert reason in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "Nothing to measure"),
        (("12x0x3",), "no size"),
        (("12x3",), "no size"),
        (("99999999x99999999x99999999",), "can't be measured here"),
        (("1x2x3", "--dtype", "int3"), "no element type"),
        (("1x2x3", "--peer", "cublaz"), "no peer"),
        (("1x2x3", "--device", "tpu"), "no device"),
        (("--csv", "gone.csv"), "can't be read"),
    ],
)
def test_wrong_usage_is_told(arguments: tuple[str, ...], reason: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 1
    assert reason in " ".join(result.stderr.split())
    assert "Traceback" not in result.output


def test_the_table_and_the_json_say_the_same(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    peers = ("--peer", "eager", "--peer", "inductor", "--peer", "postlude")
    result = run("5x16x24", "--epilogue", "gelu", "--seconds", "0.02", *peers, "--out", str(out))
    assert result.exit_code == 0, result.output
    (case,) = json.loads(out.read_text())["cases"]
    assert case["case"] == {"m": 5, "n": 16, "k": 24, "epilogue": "gelu", "dtype": "float32"}
    assert set(case["latencies"]) == {"eager", "inductor", "postlude"}
    assert case["best_other"] in ("eager", "inductor")
    assert all(0 < error < 1e-6 for error in case["errors"].values())
    rate = 2 * 5 * 16 * 24 / case["latencies"]["postlude"]["median"]
    assert case["flops_per_second"]["postlude"] == pytest.approx(rate)
    assert "5x16x24 gelu, float32" in result.stdout
    assert "best other" in result.stdout


def test_peers_that_are_missing_or_fail_are_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    by_name = {peer.name: peer for peer in PEERS}

    def fail(*_: object) -> None:
        raise RuntimeError("out of luck")

    peers = [by_name["eager"], by_name["onnxruntime"], Peer("broken", fail), Peer("absent", fail, package="no_such_package")]  # type: ignore[arg-type]
    (found,) = measure([Case(2, 3, 4)], peers, "cpu", 0.02, lambda text: None)
    assert list(found.latencies) == ["eager"]
    assert found.missing["broken"] == "RuntimeError: out of luck"
    assert found.missing["absent"] == "the package no_such_package is not installed"
    assert "onnxruntime" in found.missing


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_other_runtimes_compute_the_same(name: str) -> None:
    pytest.importorskip(name)
    peer = next(peer for peer in PEERS if peer.name == name)
    (found,) = measure([Case(4, 8, 16, "residual")], [peer], "cpu", 0.02, lambda text: None)
    assert not found.missing, found.missing
    assert found.errors[name] < 1e-5
    assert "not in float64" in (peer.refusal(Case(1, 1, 1, dtype="float64"), "cpu") or "")


def test_sizes_times_epilogues_times_types() -> None:
    cases = parsed(["1x2x3", "4X5x6"], ["none", "bias"], DTYPES)
    assert len(cases) == 2 * 2 * len(DTYPES)
    assert str(cases[0]) == "1x2x3 none, float32"
    assert Case(2, 3, 4, "swiglu").flops == 2 * Case(2, 3, 4).flops


@pytest.mark.parametrize("number", ["nan", "inf"])
def test_times_that_never_end_are_refused(number: str) -> None:
    assert run("4x4x4", "--seconds", number).exit_code == 2
