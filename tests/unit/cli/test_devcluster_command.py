"""`hpcdist devcluster down` asks before it removes the work of others."""

import io
import os
import sys
from pathlib import Path

import pytest
from command_line import Cli, one_line

from hpcdist.devcluster import cluster, cluster_commands, cluster_status
from hpcdist.devcluster.settings import Layout


@pytest.fixture
def removed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the removed clusters; there is a question to `second`, and none to others."""
    names: list[str] = []

    def down(layout: Layout) -> int:
        names.append(layout.name)
        return 3

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("SUDO_USER", "bob")
    monkeypatch.setattr(cluster, "down", down)
    monkeypatch.setattr(cluster_status, "summary", lambda layout: f"dev cluster {layout.name} of ada, created 3 h ago")
    monkeypatch.setattr(
        cluster, "reasons_to_ask", lambda layout, user: [f"not of {user}", "2 jobs"] * (layout.name == "second")
    )
    return names


def test_down_without_a_terminal_needs_yes(hpcdist: Cli, removed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "isatty", lambda descriptor: descriptor == 0)
    assert one_line(hpcdist("devcluster", "down", "--name", "second")) == (
        "dev cluster second of ada, created 3 h ago: not of bob; 2 jobs."
        " `hpcdist devcluster down --yes --name second` removes it"
    )
    assert removed == []
    ended = "dev cluster second is removed: 3 processes ended\n"
    assert hpcdist("devcluster", "down", "--name", "second", "--yes") == (0, ended, "")
    assert hpcdist("devcluster", "down").code == 0
    assert removed == ["second", "hpcdist"]


def test_down_asks_on_a_terminal(hpcdist: Cli, removed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "isatty", lambda descriptor: True)
    question = "dev cluster second of ada, created 3 h ago: not of bob; 2 jobs. Remove it? [y/N] "
    for answer in ("n\n", "\n", ""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
        assert hpcdist("devcluster", "down", "--name", "second") == (1, f"{question}nothing is removed\n", "")
    assert removed == []
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    ended = "dev cluster second is removed: 3 processes ended\n"
    assert hpcdist("devcluster", "down", "--name", "second") == (0, question + ended, "")
    monkeypatch.setattr(sys, "stdin", None)
    assert hpcdist("devcluster", "down").code == 0, "without a question"
    assert removed == ["second", "hpcdist"]


def test_every_command_takes_the_name_of_a_cluster(
    hpcdist: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(cluster_commands, "LOCK", tmp_path / "lock")
    for words in (("up",), ("down",), *(("node", verb, "second-n1") for verb in ("kill", "start", "slow"))):
        error = one_line(hpcdist("devcluster", *words, "--name", "second"))
        assert error.endswith(f": sudo $(which hpcdist) devcluster {' '.join(words)} --name second")
    found = hpcdist("devcluster", "status", "--name", "no")
    assert (found.code, found.out.splitlines()[0].partition(":")[0]) == (
        1,
        "no dev cluster in /var/lib/hpcdist-devcluster-no",
    )
    assert one_line(hpcdist("devcluster", "status", "--name", "a b")).startswith("--name 'a b': the name of a dev")
