"""How explanations call the GEMMs."""

import pytest

from postlude.capture.names import joined, pattern


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["up"], "up"),
        (["layers.0.query", "layers.0.key"], "layers.0.{query, key}"),
        (["layers.0.query", "head"], "layers.0.query + head"),
        (["mm", "mm_1"], "mm + mm_1"),
    ],
)
def test_what_paths_share_is_written_once(names: list[str], text: str) -> None:
    assert joined(names) == text


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["layers.0.up", "layers.0.up"], "layers.0.up"),
        (["layers.0.up", "layers.1.up", "layers.11.up"], "layers.*.up"),
        (["layers.0.{query, key}", "layers.1.{query, key}"], "layers.*.{query, key}"),
        (["blocks.0.0.up", "blocks.1.3.up"], "blocks.*.*.up"),
        (["layers.0.up", "layers.0.down"], "layers.0.up, ..."),
        (["layers.0.up", "layers.0.up.0"], "layers.0.up, ..."),
        (["addmm", "addmm_4"], "addmm, ..."),
    ],
)
def test_layers_become_a_star(names: list[str], text: str) -> None:
    assert pattern(names) == text
