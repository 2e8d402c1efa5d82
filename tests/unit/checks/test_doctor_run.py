"""Tests of `hpcdist doctor RUN`: sections about the run folder and the nodes."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from hpcdist.checks import run as checks_run
from hpcdist.checks.run import attempts, node_checks, preflight, run_sections
from hpcdist.config.loading import load_config
from hpcdist.config.schema import Config
from hpcdist.host.files import write_json
from hpcdist.host.machine import Check
from hpcdist.run.folder import RunDir
from hpcdist.slurm import client, on_nodes
from hpcdist.slurm.client import JobSnapshot
from hpcdist.slurm.on_nodes import answer_lines
from hpcdist.slurm.output import JobInfo, parse_node_states
from hpcdist.slurm.preflight.probe import Request


@pytest.fixture
def run(runs_dir: Path) -> RunDir:
    run = RunDir.create(runs_dir / "exp" / "first")
    run.write_state(replace(run.read_state(), status="running", attempt=1))
    return run


@pytest.fixture
def slurm(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that makes the run job 7 and sets the answers of Slurm about the job and its nodes."""

    def set_answers(state: str, nodes: str = "n[1-2]", sinfo: str = "", error: str = "") -> None:
        write_json(run.path / "slurm.json", {"job_id": "7"})
        facts = JobInfo(id="7", state=state, nodes=nodes)
        snapshot = JobSnapshot(error=error) if error else JobSnapshot(info=facts)
        monkeypatch.setattr(client, "take_snapshot", lambda job, history=False: snapshot)
        monkeypatch.setattr(client, "node_states", lambda names: parse_node_states(sinfo))

    return set_answers


def checks_of(run: RunDir, config: Config | None = None) -> dict[str, list[Check]]:
    """Return the results by section."""
    return {section.title: section.run() for section in run_sections(run, config or load_config("ddp_digits"))}


def add_failed_attempt(run: RunDir, host: str, error: str = "was killed by SIGKILL") -> None:
    attempt = run.new_attempt()
    write_json(attempt.failure, {"kind": "killed", "rank": 3, "host": host, "step": 40, "error": error})


# --- status and failed attempts


def test_failed_run_refers_to_explain(run: RunDir) -> None:
    write_json(run.environment, {"host": socket.gethostname()})
    run.write_state(replace(run.read_state(), status="failed", reason="loss is nan"))
    found = checks_of(run)
    assert list(found) == ["Run", "Attempts", "Preflight"], "the command adds the sections about the machine"
    assert found["Run"] == [
        Check(
            name="state", level="warning", text="failed: loss is nan", fix="for the cause run `hpcdist explain first`"
        )
    ]


def test_run_started_on_another_host_has_a_note(run: RunDir) -> None:
    write_json(run.environment, {"host": "n9"})
    run.write_state(replace(run.read_state(), status="stopped", reason="stopped by the user"))
    state, host = checks_of(run)["Run"]
    assert (state.level, host.level) == ("ok", "note")
    assert host.text.startswith("the run was started on n9; the sections below")


def test_lost_run_refers_to_resume(run: RunDir) -> None:
    (state,) = checks_of(run)["Run"]
    assert (state.level, state.text) == ("warning", "lost")
    assert state.fix.startswith("`hpcdist resume first` continues it")


def test_failed_attempts_have_their_node_and_repeated_failures_blame_it(
    run: RunDir, slurm: Callable[..., None]
) -> None:
    slurm("RUNNING")
    run.new_attempt()
    assert [check.text for check in attempts(run)] == ["1 started, none failed"]
    add_failed_attempt(run, "n3.site")
    assert attempts(run) == [
        Check(name="attempt 2", level="note", node="n3.site", text="rank 3 failed after step 40: was killed by SIGKILL")
    ]
    add_failed_attempt(run, "n3.site", "lost\nits GPU")
    *_, last, suspect = attempts(run)
    assert last.text.endswith("lost its GPU")
    assert (suspect.level, suspect.node, suspect.text) == (
        "warning",
        "n3.site",
        "all 2 failures happened on this node",
    )
    assert suspect.fix.startswith("`hpcdist resume first cluster.exclude=n3`")
    for node in ("n1", "n2", "n1", "n4"):
        add_failed_attempt(run, node)
    first, *shown = attempts(run)
    assert (first.text, len(shown)) == ("1 earlier ones failed as well", 5)
    assert "suspect" not in {check.name for check in shown}, "attempts failed on several nodes"


def test_newest_preflight_is_summarized(run: RunDir) -> None:
    assert preflight(run) == []
    attempt = run.new_attempt()
    disk = Check(name="disk", level="failure", text="0 MB are free in /runs", fix="free space", node="n2")
    passed = Check(name="preflight", level="ok", text="2 nodes are alike")
    write_json(attempt.preflight, {"nodes": ["n1", "n2"], "checks": [asdict(disk), asdict(passed)], "answers": {}})
    head, found = preflight(run)
    assert (head.level, head.text, found) == ("note", "1 finding before attempt 1, 0 min ago, on 2 nodes", disk)
    write_json(attempt.preflight, {"nodes": ["n1", "n2"], "checks": [asdict(passed)]})
    (head,) = preflight(run)
    assert (head.level, head.text) == ("ok", "no problems before attempt 1, 0 min ago, on 2 nodes")


# --- node states in Slurm

SINFO = """\
n1|idle|||||Unknown|Unknown|none
n1|idle|||||Unknown|Unknown|none
n2|drained|||||2026-11-20T14:50:01|root|bad DIMM in slot 4 | see ticket
n3|down*|||||2026-11-20T14:50:01|slurm|Not responding
n4|mixed|||||Unknown|Unknown|none
"""


def test_unavailable_nodes_come_first_with_reason_and_fix() -> None:
    two, three, one, four = node_checks(parse_node_states(SINFO), ["n1", "n2", "n3", "n4"])
    assert one == Check(name="n1", level="ok", text="idle", node="n1")
    assert (four.node, four.level, four.text) == ("n4", "ok", "mixed")
    assert two.text == "drained, since 2026-11-20 14:50, 'bad DIMM in slot 4 | see ticket' by root"
    assert two.fix.endswith("`scontrol update nodename=n2 state=resume`")
    assert three.text == "down* (does not answer), since 2026-11-20 14:50, 'Not responding' by slurm"
    assert {two.level, three.level} == {"warning"}
    (unknown,) = node_checks(parse_node_states(SINFO), ["n9"])
    assert (unknown.level, unknown.text) == ("warning", "Slurm has no node of this name any more")
    many = "".join(f"m{number}|idle|||||Unknown|Unknown|none\n" for number in range(40))
    assert node_checks(parse_node_states(many), [f"m{number}" for number in range(40)])[-1].text == "24 idle"


def test_nodes_before_each_requeue_are_included(run: RunDir, slurm: Callable[..., None]) -> None:
    slurm("COMPLETED", nodes="n1,n4", sinfo=SINFO)
    starts = {"0": {"began": 1.0, "nodes": "n[2-3]"}, "1": {"began": 2.0, "nodes": "n[1,4]"}}
    write_json(run.path / "job.json", {"job_id": "7", "starts": starts})
    found = checks_of(run)
    assert [check.name for check in found["Nodes in Slurm"]] == ["n2", "n3", "n1", "n4"]
    assert found["Node preflight"][0].text.startswith("not run: the run has no nodes at present")


def test_unreachable_slurm_is_a_warning(run: RunDir, slurm: Callable[..., None]) -> None:
    slurm("RUNNING", error="scontrol gave no answer in 10 s")
    found = checks_of(run)
    assert [check.level for check in found["Run"]] == ["ok", "warning"]
    assert found["Nodes in Slurm"] == []


# --- preflight of the nodes


class Srun:
    """A replacement for srun that keeps the command and returns the answers of a test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: dict[str, dict[str, Any]] = {}
        self.errors, self.hangs, self.command, self.token = "", False, [""], ""
        monkeypatch.setattr(on_nodes, "run_within", self)
        monkeypatch.setattr(checks_run.shutil, "which", lambda name: name)

    def __call__(
        self, command: list[str], limit_s: float, *, env: dict[str, str], is_enough: None
    ) -> subprocess.CompletedProcess[str]:
        self.command = command
        self.token = env["HPCDIST_PREFLIGHT_TOKEN"]
        assert Path(self.request.witness).read_text() == self.token
        lines = [line for node, answer in self.answers.items() for line in answer_lines(node, answer)]
        return subprocess.CompletedProcess(command, -1 if self.hangs else 0, "\n".join(lines), self.errors)

    @property
    def request(self) -> Request:
        return Request.from_json(self.command[-1], self.token)


def test_preflight_step_runs_beside_the_ranks(
    run: RunDir, slurm: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm("RUNNING", sinfo=SINFO)
    srun = Srun(monkeypatch)
    in_use = {"index": 0, "used_mb": 90_000, "total_mb": 100_000, "pids": [1]}
    srun.answers = {"n1": {"gpus": [in_use]}, "n2": {}}
    checked: dict[str, Any] = {}

    def check_nodes(request: Request, answers: dict[str, Any]) -> list[Check]:
        checked.update(answers)
        return [Check(name="network", level="warning", text="n1 → n2 is slow")]

    monkeypatch.setattr(checks_run, "check_nodes", check_nodes)
    config = load_config("ddp_digits", ["cluster.nodes=2", "cluster.gpus_per_node=4"])
    slow, beside = checks_of(run, config)["Node preflight"]
    assert (slow.level, beside.level) == ("warning", "note")
    assert {"--jobid=7", "--job-name=doctor", "--overlap", "--time=2", "--mem=0", "--nodes=2", "--gpus-per-node=4"} < {
        *srun.command
    }
    assert (srun.request.nodes, srun.request.run_folder) == (("n1", "n2"), str(run.path))
    assert checked["n1"]["gpus"][0]["used_mb"] is None, "the ranks use the GPUs"
    assert not list(run.path.glob(".doctor-*")), "the temporary folder is removed"


def test_step_without_answers_is_a_warning(
    run: RunDir, slurm: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm("RUNNING", sinfo=SINFO)
    srun = Srun(monkeypatch)
    srun.errors = "srun: error: Unable to create step for job 7: Invalid job id specified\n"
    (check,) = checks_of(run)["Node preflight"]
    assert (check.level, "Unable to create step" in check.text) == ("warning", True)
    srun.hangs = True
    (check,) = checks_of(run)["Node preflight"]
    assert (check.level, "did not finish within 60 s" in check.text) == ("warning", True)
    assert not list(run.path.glob(".doctor-*"))
