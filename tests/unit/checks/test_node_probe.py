"""The probe of a node as a process, and the facts that it prints."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hpcdist
from hpcdist.checks.node_probe import ProbeRequest, probe_command, witness_in
from hpcdist.checks.preflight import Needs, check_nodes
from hpcdist.slurm.on_nodes import answer_lines, read_answers

#: Far longer than a probe takes.
LIMIT_S = 300


def ask(request: ProbeRequest, node: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("SLURMD_NODENAME", node)
    done = subprocess.run(probe_command(request), capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    answer = read_answers(done.stdout)[node]
    assert answer is not None
    return answer


@pytest.mark.processes
def test_probe_prints_the_facts_of_its_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with witness_in(tmp_path / "preflight") as (witness, token):
        request = ProbeRequest(
            first_node="localhost",
            run_folder=str(tmp_path),
            checkpoint_folder=str(tmp_path / "checkpoints"),
            witness=str(witness),
            token=token,
        )
        found = ask(request, "localhost", monkeypatch)
        other = ask(replace(request, token="another", attempt=1), "localhost", monkeypatch)
    assert found["witness"]
    assert found["versions"]["hpcdist"] == hpcdist.__version__
    assert found["versions"]["python"] == sys.version.split()[0]
    assert found["lookups"]["localhost"]["address"].startswith("127.")
    assert "write_error" not in found["checkpoints"]
    assert list(tmp_path.rglob("*")) == [], "neither the write test nor the witness leaves a file"
    needs = Needs(nodes=("localhost",), run_folder=str(tmp_path))
    assert [
        check
        for check in check_nodes(needs, {"localhost": found}, found["time"], found["time"])
        if check.level == "failure"
    ] == []
    assert not other["witness"], "another folder at the same path"
    assert "group" not in other, "without the run folder there is no key"


def test_first_answer_counts_until_the_second_is_complete() -> None:
    first, second = answer_lines("n1", {"node": "n1"}), answer_lines("n1", {"node": "n1", "group": {"a": "b" * 2000}})
    assert read_answers("\n".join(first + second[:-1])) == {"n1": {"node": "n1"}}
    assert (read_answers("\n".join(first + second))["n1"] or {}).keys() == {"node", "group"}
