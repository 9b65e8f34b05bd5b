"""The JSON form: what goes in comes out, and what is anything else is refused with a reason."""

import json
from dataclasses import replace
from typing import Any

import pytest

from postlude.select.choice import UNFUSED
from postlude.select.entry import Entry, EntryError, Measured
from postlude.select.variants import Variant, variant_from
from postlude.targets import cute, triton
from tests.select.entries import entry


def changed(path: str, value: Any) -> str:
    """An entry's line with one field set, or removed by `...`."""
    record = json.loads(entry().to_json())
    *way, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    place: Any = record
    for step in way:
        place = place[step]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return json.dumps(record)


def gpu_entry() -> Entry:
    tile = cute.configuration({"tile_m": 128, "tile_n": 192, "cluster_m": 1, "cluster_n": 2, "pingpong": True})
    skinny = triton.configuration({"form": "gemm", "block_m": 16, "block_n": 64, "block_k": 128, "warps": 4, "stages": 3})
    candidates = (
        Measured(Variant("cute", tile), 1e-5, 0.9e-5, 1.1e-5),
        Measured(Variant("cute"), 2e-5, 1.9e-5, 2.1e-5),
        Measured(Variant("triton", skinny), error="OutOfResources: shared memory"),
        Measured(Variant(UNFUSED), 3e-5, 2.9e-5, 3.1e-5),
    )
    name = candidates[0].variant.name
    return entry(candidates=candidates, winner=name, incumbent="cute", failed={name: "it does not build"})


@pytest.mark.parametrize("made", [entry(), entry(3, versions={"python": "3.11.7"}), gpu_entry()], ids=["cpu", "versions", "gpu"])
def test_what_goes_in_comes_out(made: Entry) -> None:
    assert Entry.from_json(made.to_json()) == made
    assert "\n" not in made.to_json()


def test_an_entry_chooses_its_winner_and_says_why() -> None:
    choice = entry(fused=2e-6, unfused=3e-6).choice("user database")
    assert choice is not None
    assert (choice.winner, choice.origin, choice.reason) == ("cpp", "user database", "measured: 2.0 µs, 3.0 µs in Inductor")
    assert [candidate.name for candidate in choice.candidates] == ["cpp", UNFUSED]
    assert choice.candidates[0].spread == pytest.approx(0.1)
    lost = entry(fused=4e-6, unfused=3e-6).choice("user database")
    assert lost is not None
    assert (lost.winner, lost.reason) == (UNFUSED, "measured: 4.0 µs fused, 3.0 µs in Inductor")


def test_a_winner_that_failed_gives_way_to_the_next() -> None:
    choice = gpu_entry().choice("user database")
    assert choice is not None
    assert choice.winner == "cute"
    assert choice.candidates[0].error == "it does not build"
    without_cute = gpu_entry().choice("user database", lambda variant: variant.target != "cute")
    assert without_cute is not None
    assert without_cute.winner == UNFUSED
    assert replace(entry(), failed={"cpp": "no", UNFUSED: "no"}).choice("user database") is None


BAD = {
    "not JSON": ("{", "not JSON"),
    "half a character": (changed("peer", "\ud800"), "peer of the entry is '\\ud800': expected text"),
    "half a character in a list": (changed("call.layout", ["2 1 @16", "\udfff"]), "expected a list of texts"),
    "half a character in a name": (changed("versions", {"\ud800": "1"}), "expected an object of texts"),
    "a time beyond all floats": (changed("candidates.0.high", 10**400), "expected a positive number"),
    "not an object": ("[1]", "not a line of postlude-tuning"),
    "another file": ('{"a": 1}', "not a line of postlude-tuning"),
    "a newer version": (changed("version", 2), "this Postlude reads version 1"),
    "too long": (" " * (1 << 21), "characters"),
    "too deep": ("[" * 100_000, "not JSON"),
    "a name twice": ('{"format": "postlude-tuning", "format": "x"}', "twice"),
    "not a number": (changed("candidates.0.seconds", float("nan")), "NaN is no number"),
    "unknown field": (changed("source", "import os"), "unknown field 'source'"),
    "unknown field of a candidate": (changed("candidates.0.source", "import os"), "unknown field 'source'"),
    "missing": (changed("winner", ...), "no field 'winner'"),
    "missing size": (changed("call.sizes", ...), "no field 'sizes'"),
    "type": (changed("rounds", "9"), "rounds of the entry"),
    "a truth for a number": (changed("rounds", True), "rounds of the entry"),
    "negative time": (changed("candidates.0.seconds", -1.0), "seconds of candidate 0"),
    "time out of its interval": (changed("candidates.0.seconds", 1.0), "is not in its interval"),
    "no time and no error": (changed("candidates.0", {"target": "cpp"}), "expected seconds, low and high, or an error"),
    "half a time": (changed("candidates.0.low", ...), "expected seconds, low and high"),
    "region": (changed("call.region", "region(m); os.system"), "the region"),
    "layouts": (changed("call.layout", ["2 1 @16"]), "1 layouts for 2 operands"),
    "target": (changed("candidates.0.target", "os"), "there is no target 'os'"),
    "configuration": (changed("candidates.0.configuration", {"tile": 1}), "target cpp has no configurations"),
    "winner": (changed("winner", "cute"), "winner is 'cute', which is no candidate"),
    "incumbent": (changed("incumbent", "cute"), "incumbent is 'cute'"),
    "no unfused": (changed("candidates.1.target", "blas"), "'unfused' among them"),
    "failed": (changed("failed", {"cute": "no"}), "failed names 'cute'"),
    "time of day": (changed("at", "yesterday"), "at: "),
    "instruction set": (changed("call.isa", "quantum"), "instruction set"),
}


@pytest.mark.parametrize(("line", "reason"), BAD.values(), ids=BAD)
def test_what_is_no_entry_is_refused_with_a_reason(line: str, reason: str) -> None:
    with pytest.raises(EntryError) as error:
        Entry.from_json(line)
    assert reason in str(error.value)


GOOD_TILE = {"tile_m": 128, "tile_n": 128, "cluster_m": 1, "cluster_n": 2, "pingpong": True}
GOOD_BLOCKS = {"form": "gemv", "block_m": 1, "block_n": 8, "block_k": 512, "warps": 4, "stages": 3}


@pytest.mark.parametrize(
    ("target", "fields", "reason"),
    [
        ("cute", {**GOOD_TILE, "tile_m": 7}, "no configuration that this version has kernels for"),
        ("cute", {**GOOD_TILE, "tile_m": "128"}, "expected int"),
        ("cute", {**GOOD_TILE, "pingpong": 1}, "expected bool"),
        ("cute", {"tile_m": 128}, "needs the field 'tile_n'"),
        ("cute", {**GOOD_TILE, "code": "x"}, "no field 'code'"),
        ("triton", {**GOOD_BLOCKS, "form": "gem"}, "expected 'gemv' or 'gemm'"),
        ("triton", {**GOOD_BLOCKS, "block_n": 24}, "a power of two"),
        ("triton", {**GOOD_BLOCKS, "block_k": 1 << 20}, "a power of two, 8192 at most"),
        ("triton", {**GOOD_BLOCKS, "stages": 0}, "expected 1 to 16"),
    ],
)
def test_only_configurations_that_kernels_have_are_taken(target: str, fields: dict[str, Any], reason: str) -> None:
    good = GOOD_TILE if target == "cute" else GOOD_BLOCKS
    assert variant_from({"target": target, "configuration": good}).plain()["configuration"].items() >= good.items()
    with pytest.raises(ValueError, match=reason):
        variant_from({"target": target, "configuration": fields})
