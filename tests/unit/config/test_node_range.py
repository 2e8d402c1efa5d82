"""Ranges of numbers of nodes in a config: `cluster.nodes: 2-8` and `cluster.min_nodes`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpcdist.config.loading import load_config, load_run_config
from hpcdist.config.written import to_yaml
from hpcdist.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        ("nodes: 2-8", [], (8, 2)),
        ("nodes: 4", ["cluster.nodes=2-8"], (8, 2)),
        ("nodes: 2-8", ["cluster.nodes=4"], (4, None)),
        ("nodes: 2-8", ["cluster.min_nodes=3"], (8, 3)),
        ("{nodes: 8, min_nodes: 2}", [], (8, 2)),
        ("nodes: 8", [], (8, None)),
    ],
)
def test_range_sets_both_numbers(
    tmp_path: Path, text: str, overrides: list[str], expected: tuple[int, int | None]
) -> None:
    (tmp_path / "config.yaml").write_text(f"trainer: ddp\ncluster: {text if text[0] == '{' else '{' + text + '}'}\n")
    cluster = load_config(tmp_path / "config.yaml", overrides).cluster
    assert (cluster.nodes, cluster.min_nodes) == expected
    assert cluster.outlives_nodes == (expected[1] is not None)


@pytest.mark.parametrize(
    ("stored", "overrides", "expected"),
    [
        ("nodes: 4", ["cluster.nodes=2-8"], (8, 2)),
        ("nodes: 2-8", ["cluster.nodes=4"], (4, None)),
        ("nodes: 2-8", ["cluster.nodes=3-6"], (6, 3)),
        ("nodes: 2-8", ["cluster.nodes=4", "cluster.min_nodes=3"], (4, 3)),
        ("nodes: 2-8", ["cluster.min_nodes=4"], (8, 4)),
        ("nodes: 2-8", ["cluster.time_limit_min=9"], (8, 2)),
    ],
)
def test_override_of_nodes_replaces_the_range_of_a_run_folder(
    tmp_path: Path, stored: str, overrides: list[str], expected: tuple[int, int | None]
) -> None:
    (tmp_path / "config.yaml").write_text(f"trainer: ddp\ncluster: {{{stored}}}\n")
    (tmp_path / "stored.yaml").write_text(to_yaml(load_config(tmp_path / "config.yaml")))
    cluster = load_run_config(tmp_path / "stored.yaml", overrides, {}).cluster
    assert (cluster.nodes, cluster.min_nodes) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes: 8-2", "cluster.min_nodes must be at most nodes=2, got 8"),
        ("nodes: 0-2", "cluster.min_nodes must be >= 1, got 0"),
        ("spare_nodes: -1", "cluster.spare_nodes must be >= 0, got -1"),
        ("nodes: 2 to 8", "cluster.nodes must be int, got '2 to 8'"),
    ],
)
def test_mistakes_in_a_range_name_the_key(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.yaml").write_text(f"trainer: ddp\ncluster: {{{text}}}\n")
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(tmp_path / "config.yaml")
