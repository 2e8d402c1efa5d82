"""doctor's page, and its sections about a cluster."""

import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from slurm_recordings import recorded

from hpcdist.checks import doctor_report
from hpcdist.checks.doctor_page import document, section_lines, summary_lines, would_fail
from hpcdist.checks.doctor_report import Section, execute, node_checks, run_sections
from hpcdist.checks.node_probe import ProbeRequest
from hpcdist.checks.preflight import Needs
from hpcdist.checks.slurm_checks import NEEDED, SlurmFacts, client_checks, job_end_checks, partition_checks, read_slurm
from hpcdist.config.loading import load_config
from hpcdist.config.schema import Config
from hpcdist.host.check_result import Check
from hpcdist.host.json_files import write_json
from hpcdist.run.folder import RunDir
from hpcdist.slurm import client, on_nodes
from hpcdist.slurm.client import JobSnapshot
from hpcdist.slurm.on_nodes import answer_lines
from hpcdist.slurm.output import JobInfo, SlurmError, parse_node_states, parse_partitions, parse_settings

OK = Check(name="cores", level="ok", text="16")
FAILURE = Check(name="space", level="failure", text="0.0 GiB free of 100.0: a run would fail", fix="remove old runs")
WARNING = Check(name="names", level="warning", text="the lookup of its own name took 5.0 s", node="n3")


def test_sections_run_concurrently_and_a_failed_one_is_a_warning() -> None:
    released, last_done = threading.Event(), threading.Event()

    def hang() -> list[Check]:
        released.wait()
        return []

    def fail() -> list[Check]:
        raise OSError(5, "Input/output error")

    def wait() -> list[Check]:
        assert last_done.wait(30), "the last section waits for this one"
        return [OK]

    def end() -> list[Check]:
        last_done.set()
        return [FAILURE]

    pending: list[Sequence[str]] = []
    sections = [
        Section(title="Folder", run=hang, timeout_s=0.05, timeout_fix="check the server"),
        Section(title="MLflow", run=fail),
        Section(title="Cores", run=wait, timeout_s=30),
        Section(title="Disk", run=end, timeout_s=30),
    ]
    hung, failed, *others = execute(sections, pending.append)
    released.set()
    text = "no answer within 0.05 s"
    assert hung == ("Folder", [Check(name="Folder", level="warning", text=text, fix="check the server")])
    text = "this section failed: OSError: [Errno 5] Input/output error"
    assert failed == ("MLflow", [Check(name="MLflow", level="warning", text=text)])
    assert others == [("Cores", [OK]), ("Disk", [FAILURE])]
    assert pending[0][0] == "Folder"


def test_page_has_a_line_for_each_result_and_a_summary() -> None:
    def lines(title: str, *checks: Check) -> str:
        return "\n".join(line for _, line in section_lines(title, checks, 80))

    def summary(*checks: Check) -> str:
        return "\n".join(line for _, line in summary_lines([("Section", checks)], 80))

    assert lines("Folder of runs", OK, FAILURE, WARNING) == (
        "Folder of runs\n"
        "  ok       cores          16\n"
        "  FAILURE  space          0.0 GiB free of 100.0: a run would fail\n"
        "                          → remove old runs\n"
        "  warning  n3 names       the lookup of its own name took 5.0 s"
    )
    assert lines("Empty") == ""
    assert [kind for kind, _ in section_lines("x", [OK, FAILURE], 80)] == ["title", "ok", "failure", ""]
    path = "/very/long/" + "folder/" * 12
    long = Check(name="a name that is long", level="note", text=f"{path} " + "word " * 40, fix=f"`ls -ld {path}` " * 2)
    text = lines("Folder", long)
    assert f" {path}\n" in text, "words are not broken"
    assert all(len(line) <= 80 or path in line for line in text.splitlines()), text
    assert summary(OK, WARNING) == "No problem found that would make a run fail; 1 warning above."
    assert summary(FAILURE, WARNING, WARNING) == (
        "1 problem would make a run fail (2 warnings above):\n"
        "  - Section, space: 0.0 GiB free of 100.0: a run would fail"
    )
    found = document([("One", [OK]), ("Two", [FAILURE])], {"host": "n1"})
    assert (found["host"], found["would_fail"], would_fail([("One", [OK])])) == ("n1", True, False)
    assert found["checks"][1] == {"section": "Two", **asdict(FAILURE)}


RECORDED = parse_settings(recorded("config"))

PARTITIONS = """\
PartitionName=main AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL Default=YES GraceTime=0 MaxNodes=UNLIMITED \
MaxTime=1-00:00:00 MinNodes=0 Nodes=n[1-4] PreemptMode=REQUEUE State=UP
PartitionName=high AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL Default=NO GraceTime=0 MaxNodes=UNLIMITED \
MaxTime=1-00:00:00 MinNodes=0 Nodes=n[1-4] PreemptMode=OFF State=UP
"""

NODES = "main|4|8|32768|gpu:2|idle|n[1-4]\nhigh|4|8|32768|gpu:2|idle|n[1-4]\n"


def slurm_facts(*, partitions: str = PARTITIONS, nodes: str = NODES, **settings: str) -> SlurmFacts:
    return SlurmFacts(settings=RECORDED | settings, seconds=0.01, partitions=parse_partitions(partitions, nodes))


def by_name(checks: list[Check]) -> dict[str, Check]:
    assert len({check.name for check in checks}) == len(checks), checks
    return {check.name: check for check in checks}


def test_missing_slurm_is_a_note_but_a_dead_controller_a_failure() -> None:
    (missing,) = client_checks(SlurmFacts(missing=NEEDED), "ada")
    assert (missing.level, "devcluster up" in missing.fix) == ("note", True)
    (inside,) = client_checks(SlurmFacts(missing=NEEDED), "ada", in_container=True)
    assert (inside.level, inside.fix) == ("ok", "")
    (unreachable,) = client_checks(SlurmFacts(away="scontrol gave no answer in 10 s"), "ada")
    text = "scontrol gave no answer in 10 s: `hpcdist submit` would fail"
    assert (unreachable.level, unreachable.text) == ("failure", text)
    (incomplete,) = client_checks(SlurmFacts(missing=("sbatch", "scontrol")), "ada")
    assert incomplete.level == "failure"
    assert incomplete.text.startswith("sbatch, scontrol not found, other Slurm commands are")


@pytest.mark.processes
def test_slurm_without_configuration_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    error = "scontrol: fatal: Could not establish a configuration source"
    for name in NEEDED:
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{error}' >&2; exit 1\n")
        (tmp_path / name).chmod(0o755)
    (unconfigured,) = client_checks(read_slurm(), "ada")
    assert (unconfigured.level, "SLURM_CONF" in unconfigured.fix) == ("warning", True)


def test_accounting_problems_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def level(**settings: str) -> str:
        return client_checks(slurm_facts(**settings), "ada")[-1].level

    def refuse(*_: str, **__: object) -> str:
        raise SlurmError("sacctmgr: slurm_persist_conn_open: Connection refused", installed=True)

    monkeypatch.setattr(client, "run", refuse)
    assert level(AccountingStorageType="accounting_storage/none") == "note"
    check = client_checks(slurm_facts(), "ada")[-1]
    assert (check.level, "sacctmgr: slurm_persist" in check.text, "slurmdbd" in check.fix) == ("warning", True, True)
    monkeypatch.setattr(client, "run", lambda *_, **__: "")
    assert level(AccountingStorageEnforce="associations,limits") == "failure"
    assert level(AccountingStorageEnforce="none") == "ok"


@pytest.mark.processes
def test_facts_include_missing_commands_and_controller_errors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_slurm() == SlurmFacts(missing=NEEDED)
    for name in NEEDED:
        (tmp_path / name).write_text("#!/bin/sh\necho 'slurm_load_ctl_conf error: Unable to contact' >&2; exit 1\n")
        (tmp_path / name).chmod(0o755)
    found = read_slurm()
    assert (found.missing, found.reached) == ((), False)
    assert found.away == "scontrol: slurm_load_ctl_conf error: Unable to contact"


def test_working_cluster_is_ok_and_shows_its_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "run", lambda *_, **__: "devcluster\nroot\nroot\n")
    assert client_checks(slurm_facts(), "root") == [
        Check(name="controller", level="ok", text="hpcdist, Slurm 22.05.8, answers in 0.01 s"),
        Check(name="accounting", level="ok", text="root may use devcluster, root (cluster.account)"),
    ]
    text = "4 nodes; 8 cores, 32 GiB, 2 GPUs each; at most 1-00:00:00"
    assert partition_checks(slurm_facts()) == [
        Check(name="main", level="ok", text=f"{text} (default)"),
        Check(name="high", level="ok", text=text),
        Check(name="topology", level="ok", text="topology/none"),
    ]
    blocks = by_name(partition_checks(slurm_facts(TopologyPlugin="topology/block")))["topology"].text
    assert blocks == "topology/block: cluster.sbatch.segment=N keeps groups of N nodes in one block each"


def test_unusable_restricted_and_missing_partitions_are_reported() -> None:
    many = "".join(f"PartitionName=p{number} State=UP MaxTime=UNLIMITED\n" for number in range(14))
    listed = (
        "PartitionName=down State=DOWN MaxTime=60 MaxNodes=2 AllowAccounts=ada,bob\n"
        "PartitionName=drained State=UP MaxTime=INFINITE\n" + many
    )
    nodes = "drained|2|16|64000|(null)|drained|n[1-2]\n" + "".join(
        f"p{n}|1|4|1024|(null)|idle|m{n}\n" for n in range(14)
    )
    found = by_name(partition_checks(slurm_facts(partitions=listed, nodes=nodes)))
    assert found["down"].level == "note"
    assert found["down"].text == "DOWN; 0 nodes; at most 60, 2 nodes a job, accounts ada, bob only"
    assert found["drained"].level == "warning"
    assert found["drained"].text == "no node accepts jobs; 0 of 2 nodes up; 16 cores, 62 GiB each; no time limit"
    assert found["more"].text == "4 partitions: p10, p11, p12, p13"
    assert found["default"].text == "no partition is the default: set cluster.partition"
    assert partition_checks(SlurmFacts()) == job_end_checks(SlurmFacts()) == []
    assert partition_checks(SlurmFacts(settings=RECORDED))[0].level == "warning"
    assert partition_checks(SlurmFacts(settings=RECORDED, partitions=[]))[0].level == "failure"


def test_ends_of_jobs_and_preemption_are_explained() -> None:
    sentences = [check.sentence() for check in job_end_checks(slurm_facts(KillWait="30 sec"))]
    assert sentences == [
        "job ends: `scancel` sends SIGTERM, and SIGKILL 30 s later (KillWait); a run saves a checkpoint before its time"
        " limit (cluster.signal_lead_s)",
        "preemption: preempted in main: SIGTERM, and SIGKILL 30 s later (GraceTime 0 + KillWait 30); Slurm requeues the"
        " run",
        "preemption: jobs in high are never preempted",
    ]
    for old, new, level, text, fix in (
        ("GraceTime=0", "GraceTime=10", "note", "SIGKILL 15 s later (GraceTime 10 + KillWait 5)", "fit into 15 s"),
        ("GraceTime=0", "GraceTime=60", "ok", "SIGKILL 65 s later", ""),
        ("=REQUEUE", "=CANCEL", "note", "does not requeue the run", "`hpcdist resume RUN`"),
        ("=REQUEUE", "=GANG,SUSPEND", "note", "suspends the processes", "launch.hang_timeout_s"),
    ):
        check = job_end_checks(slurm_facts(partitions=PARTITIONS.replace(old, new, 1)))[1]
        assert (check.level, text in check.text, fix in check.fix) == (level, True, True), check
    assert len(job_end_checks(slurm_facts(PreemptType="preempt/none"))) == 1


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


def test_state_of_the_run_has_the_next_command(run: RunDir) -> None:
    (lost,) = checks_of(run)["Run"]
    assert (lost.level, lost.text) == ("warning", "lost")
    assert lost.fix.startswith("`hpcdist resume first` continues it")
    write_json(run.environment, {"host": socket.gethostname()})
    run.write_state(replace(run.read_state(), status="failed", reason="loss is nan"))
    found = checks_of(run)
    assert list(found) == ["Run"], "the command adds the sections about the machine"
    fix = "for the cause run `hpcdist explain first`"
    assert found["Run"] == [Check(name="state", level="warning", text="failed: loss is nan", fix=fix)]
    write_json(run.environment, {"host": "n9"})
    run.write_state(replace(run.read_state(), status="stopped", reason="stopped by the user"))
    state, host = checks_of(run)["Run"]
    assert (state.level, host.level) == ("ok", "note")
    assert host.text.startswith("the run was started on n9; the sections below")


SINFO = """\
n1|idle|||||Unknown|Unknown|none
n1|idle|||||Unknown|Unknown|none
n2|drained|||||2026-11-20T14:50:01|root|bad DIMM in slot 4 | see ticket
n3|down*|||||2026-11-20T14:50:01|slurm|Not responding
n4|mixed|||||Unknown|Unknown|none
"""


def test_unavailable_nodes_come_first_with_reason_and_fix() -> None:
    two, three, others = node_checks(parse_node_states(SINFO), ["n1", "n2", "n3", "n4"])
    assert others == Check(name="others", level="ok", text="1 idle, 1 mixed")
    assert two.text == "drained, since 2026-11-20 14:50, 'bad DIMM in slot 4 | see ticket' by root"
    assert two.fix.endswith("`scontrol update nodename=n2 state=resume`")
    assert three.text == "down* (does not answer), since 2026-11-20 14:50, 'Not responding' by slurm"
    assert {two.level, three.level} == {"warning"}
    (unknown,) = node_checks(parse_node_states(SINFO), ["n9"])
    assert (unknown.level, unknown.text) == ("warning", "Slurm has no node of this name any more")


def test_nodes_before_each_requeue_are_included(run: RunDir, slurm: Callable[..., None]) -> None:
    slurm("COMPLETED", nodes="n1,n4", sinfo=SINFO)
    starts = {"0": {"began": 1.0, "nodes": "n[2-3]"}, "1": {"began": 2.0, "nodes": "n[1,4]"}}
    write_json(run.path / "job.json", {"job_id": "7", "starts": starts})
    found = checks_of(run)
    assert [check.name for check in found["Nodes in Slurm"]] == ["n2", "n3", "others"]
    assert found["Node preflight"][0].text.startswith("not run: the run has no nodes at present")
    slurm("RUNNING", error="scontrol gave no answer in 10 s")
    assert [check.level for check in checks_of(run)["Run"]] == ["ok", "warning"]


class Srun:
    """A replacement for srun that keeps the command and returns the answers of a test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: dict[str, dict[str, Any]] = {}
        self.errors, self.hangs, self.command = "", False, [""]
        monkeypatch.setattr(on_nodes, "run_within", self)
        monkeypatch.setattr(shutil, "which", lambda name: name)

    def __call__(
        self, command: list[str], limit_s: float, *, env: dict[str, str], is_enough: None = None
    ) -> subprocess.CompletedProcess[str]:
        self.command = command
        assert Path(self.request.witness).read_text() == self.request.token
        lines = [line for node, answer in self.answers.items() for line in answer_lines(node, answer)]
        return subprocess.CompletedProcess(command, -1 if self.hangs else 0, "\n".join(lines), self.errors)

    @property
    def request(self) -> ProbeRequest:
        return ProbeRequest.from_json(self.command[-1])


def test_preflight_step_runs_beside_the_ranks(
    run: RunDir, slurm: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm("RUNNING", sinfo=SINFO)
    srun = Srun(monkeypatch)
    in_use = {"index": 0, "used_mb": 90_000, "total_mb": 100_000, "pids": [1]}
    srun.answers = {"n1": {"gpus": [in_use]}, "n2": {}}
    checked: dict[str, Any] = {}

    def check_nodes(needs: Needs, answers: dict[str, Any], asked_at: float, answered_at: float) -> list[Check]:
        assert (needs.nodes, needs.gpus_per_node, needs.gpu_type, needs.join_s) == (("n1", "n2"), 4, "xpu", 0.0)
        checked.update(answers)
        return [Check(name="network", level="warning", text="n1 → n2 is slow")]

    monkeypatch.setattr(doctor_report, "check_nodes", check_nodes)
    config = load_config("ddp_digits", ["cluster.nodes=2", "cluster.gpus_per_node=4", "launch.device=xpu"])
    (slow,) = checks_of(run, config)["Node preflight"]
    assert slow.level == "warning"
    flags = {"--jobid=7", "--job-name=doctor", "--overlap", "--time=2", "--mem=0", "--nodes=2", "--gpus-per-node=4"}
    assert flags < {*srun.command}
    assert (srun.request.first_node, srun.request.run_folder) == ("n1", str(run.path))
    assert srun.request.attempt is None, "a group would take time from the ranks"
    assert checked["n1"]["gpus"][0]["used_mb"] is None, "the ranks use the GPUs"
    srun.answers, srun.errors = {}, "srun: error: Unable to create step for job 7: Invalid job id specified\n"
    (check,) = checks_of(run)["Node preflight"]
    assert (check.level, "Unable to create step" in check.text) == ("warning", True)
    srun.hangs = True
    (check,) = checks_of(run)["Node preflight"]
    assert (check.level, "did not finish within 60 s" in check.text) == ("warning", True)
    assert not list(run.path.glob(".doctor-*")), "the temporary folder is removed"


def test_step_on_the_nodes_of_a_cell_has_the_number_of_its_job(
    run: RunDir, slurm: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """srun refuses the id of an array task."""
    slurm("RUNNING", sinfo=SINFO)
    write_json(run.slurm, {"job_id": "69_0"})
    srun = Srun(monkeypatch)
    asked: list[tuple[str, ...]] = []

    def numbers(*command: str) -> str:
        asked.append(command)
        return "71\n"

    monkeypatch.setattr(client, "run", numbers)
    (check,) = checks_of(run)["Node preflight"]
    assert asked == [("squeue", "--noheader", "--format=%A", "--jobs=69_0")]
    assert "--jobid=71" in srun.command
    assert check.fix == "`srun --jobid=71 --overlap hostname`"
    monkeypatch.setattr(client, "run", lambda *command: "")
    (check,) = checks_of(run)["Node preflight"]
    assert check.text == "not asked, since Slurm does not answer: squeue reports no number of job 69_0: ''"
