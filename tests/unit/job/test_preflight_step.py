"""The preflight of a job, with a fake srun and fake checks, and the command line of its step."""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from slurm_recordings import FakeCommands

from hpcdist.checks.preflight import Needs
from hpcdist.config.cluster_schema import ClusterConfig
from hpcdist.config.launch_schema import PreflightConfig
from hpcdist.config.schema import Config
from hpcdist.containers.probe import PROBE_TIMEOUT_S
from hpcdist.containers.spec import ContainerSpec
from hpcdist.errors import HpcdistError, PreflightError
from hpcdist.host.check_result import Check
from hpcdist.host.json_files import read_json
from hpcdist.job import preflight_step
from hpcdist.job.preflight_step import Preflight, newest_checkpoint_bytes
from hpcdist.job.srun import preflight_command
from hpcdist.run import folder as attempts
from hpcdist.run.folder import RunDir
from hpcdist.slurm.client import CurrentJob
from hpcdist.slurm.on_nodes import JobNodes

NODES = ("n1", "n2", "n3")
OK = Check(name="preflight", level="ok", text="3 nodes alike, 0.1 ms and 9 Gbit/s between them")
DISK = Check(name="disk", level="failure", text="0 MB are free in /c", fix="remove old runs", node="n3")


class FakeJob:
    """A job in a partition that can replace the nodes in `spare`."""

    partition = "main"

    def __init__(self, spare: str = "") -> None:
        self.spare = spare

    def replaceable(self, nodes: Sequence[str], *, idle_only: bool) -> bool:
        assert not idle_only, "the job can wait for a node that is busy now"
        if self.spare == "unknown":
            raise HpcdistError("sinfo: timed out")
        return set(nodes) <= set(self.spare.split())


class Scene:
    """A run on three nodes with a fake srun, which prints the files `answers` and `errors`."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.run = RunDir.create(folder / "exp" / "first")
        self.attempt = self.run.new_attempt()
        srun = folder / "srun"
        srun.write_text(f'#!/bin/sh\ncd {folder}\necho "$@" >> calls\ncat errors >&2\nexec cat answers\n')
        srun.chmod(0o755)
        self.set_answers(*NODES)
        self.patch = monkeypatch
        self.needs: list[Needs] = []
        self.set_checks([OK])

    def set_answers(self, *nodes: str, errors: str = "") -> None:
        lines = [f'{task}: hpcdist-node {node} 0/1 {{"node": "{node}"}}\n' for task, node in enumerate(nodes)]
        (self.folder / "answers").write_text("".join(lines))
        (self.folder / "errors").write_text(errors)

    def set_checks(self, checks: list[Check]) -> None:
        def check_nodes(needs: Needs, answers: Any, asked_at: float, answered_at: float) -> list[Check]:
            self.needs.append(needs)
            return checks

        self.patch.setattr(preflight_step, "check_nodes", check_nodes)

    def run_preflight(
        self,
        spare: str = "",
        *,
        nodes: Sequence[str] = NODES,
        box: ContainerSpec | None = None,
        **settings: Any,
    ) -> Preflight:
        self.preflight = Preflight(
            self.run,
            Config(cluster=ClusterConfig(nodes=3, cpus_per_task=4), preflight=PreflightConfig(**settings)),
            cast(CurrentJob, FakeJob(spare)),
            JobNodes(nodes),
            env={"PATH": f"{self.folder}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]"},
            python=sys.executable,
            box=box,
        )
        self.preflight.run(self.attempt)
        return self.preflight

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Scene:
    caplog.set_level(logging.INFO, logger="hpcdist")
    return Scene(tmp_path, monkeypatch)


@pytest.mark.processes
def test_preflight_runs_once_per_job_start_and_logs_one_line(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.run_preflight(nodes=("n1",))
    scene.run_preflight(mode="off")
    assert scene.calls == []
    preflight = scene.run_preflight()
    preflight.run(scene.run.new_attempt())
    assert len(scene.calls) == 1
    (line,) = caplog.messages
    assert line.startswith("preflight: 3 nodes alike, 0.1 ms and 9 Gbit/s between them (")
    assert line.endswith(" s with srun)")
    report = read_json(scene.attempt.preflight) or {}
    assert (report["nodes"], report["answers"]["n2"]) == (list(NODES), {"node": "n2"})
    assert [check["level"] for check in report["checks"]] == ["ok"]
    text = (scene.attempt.path / "preflight.txt").read_text()
    assert text.startswith("preflight of 3 nodes (n1, n2, n3), ")
    assert text.endswith("\nok       preflight: 3 nodes alike, 0.1 ms and 9 Gbit/s between them\n")
    (needs,) = scene.needs
    assert (needs.nodes, needs.checkpoint_bytes, needs.join_s) == (NODES, None, Config().launch.init_timeout_s)
    assert not list(scene.attempt.path.rglob("witness")), "the witness is removed"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("settings", "spare", "failures", "suffix", "avoid"),
    [
        ({}, "n3", [DISK], "", []),
        ({"on_failure": "exclude"}, "n3", [DISK], "", ["n3"]),
        ({"on_failure": "exclude"}, "", [DISK], "; partition main has no node to replace n3", []),
        ({"on_failure": "exclude"}, "unknown", [DISK],
         "; cannot find nodes to replace n3 (sinfo: timed out)", []),
        ({"on_failure": "exclude"}, "n2 n3",
         [DISK, Check(name="disk", level="failure", text="full", node="n2")],
         " (and 1 more in {text}); it concerns no single node, or most of them: none is excluded", []),
    ],
    ids=["stop", "exclude", "no spare node", "no answer", "most nodes"],
)  # fmt: skip
def test_failed_nodes_are_excluded_on_request_if_replaceable(
    scene: Scene, settings: dict[str, Any], spare: str, failures: list[Check], suffix: str, avoid: list[str]
) -> None:
    scene.set_checks(failures)
    with pytest.raises(PreflightError) as caught:
        scene.run_preflight(spare, **settings)
    suffix = suffix.format(text=scene.attempt.path / "preflight.txt")
    assert str(caught.value) == f"preflight: n3: disk: 0 MB are free in /c; remove old runs{suffix}"
    assert (scene.preflight.failed, scene.preflight.avoid) == (True, avoid)


@pytest.mark.processes
def test_first_failure_is_raised_and_the_others_are_logged(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    clock = [Check(name="clock", level=level, text="9 s ahead", node="n2") for level in ("failure", "warning")]
    scene.set_checks([DISK, *clock, OK])
    with pytest.raises(PreflightError):
        scene.run_preflight()
    assert caplog.messages == [f"preflight: {level}: n2: clock: 9 s ahead" for level in ("failure", "warning")]


@pytest.mark.processes
def test_failures_after_a_stop_request_are_ignored(scene: Scene) -> None:
    scene.set_checks([DISK])
    scene.set_answers("n1")
    scene.attempt.send_request(attempts.StopRequest(cause="preemption"))
    scene.run_preflight()
    assert (len(scene.calls), scene.attempt.preflight.exists(), scene.preflight.failed) == (1, False, False)


@pytest.mark.processes
def test_missing_answer_is_requested_twice_and_reported(scene: Scene) -> None:
    scene.set_answers("n1", "n2", errors="srun: error: n3: task 2\n2: No module named hpcdist.slurm.probe\n1: fine\n")
    scene.set_checks([Check(name="answer", level="failure", text="did not answer", node="n3")])
    with pytest.raises(PreflightError, match=r"^preflight: n3: answer: did not answer: No module named hpcdist\.slurm"):
        scene.run_preflight()
    assert len(scene.calls) == 2


@pytest.mark.processes
def test_node_that_did_not_join_is_reported_with_its_probe_error(scene: Scene) -> None:
    scene.set_answers(*NODES, errors="1: terminate called\n0: fine\n")
    scene.set_checks([Check(name="group", level="failure", text="it has not joined", node="n2")])
    with pytest.raises(PreflightError, match=r"^preflight: n2: group: it has not joined: terminate called$"):
        scene.run_preflight()


@pytest.mark.processes
def test_failure_of_the_step_itself_is_a_warning(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.set_answers(errors="srun: error: Unable to create step\n")
    scene.run_preflight()
    assert caplog.messages[0] == (
        "preflight: warning: probe: no node answered in 2 steps: srun: error: Unable to create step;"
        " the ranks start nevertheless"
    )


@pytest.mark.processes
def test_step_is_cancelled_after_its_time_limit(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    (scene.folder / "srun").write_text("#!/bin/sh\nexec sleep 60\n")
    commands = FakeCommands(scene.folder)
    commands.add_script("squeue", "echo 7.0 preflight; echo 7.1 mine")
    commands.add_script("scancel", 'echo "$@" > cancelled')
    monkeypatch.setenv("PATH", f"{scene.folder}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(preflight_step, "STEP_S", 0.1 - Config().launch.init_timeout_s)
    monkeypatch.setattr(preflight_step, "ROUNDS", 1)
    scene.run_preflight()
    assert (scene.folder / "cancelled").read_text() == "--signal=KILL 7.0\n"


@pytest.mark.processes
@pytest.mark.parametrize(("runtime", "more_s"), [("pyxis", PROBE_TIMEOUT_S), ("apptainer", 0)])
def test_nodes_wait_for_others_whose_pyxis_unpacks_the_image(scene: Scene, runtime: str, more_s: float) -> None:
    """`srun` has this time, too: killing a step while `enroot create` runs lets Slurm drain the node."""
    scene.run_preflight(box=ContainerSpec(runtime=runtime, image="/i", workdir=scene.folder))
    (needs,) = scene.needs
    assert needs.join_s == Config().launch.init_timeout_s + more_s


def test_required_disk_space_is_that_of_the_newest_checkpoint(scene: Scene) -> None:
    for name, complete in (("step-00000009", True), ("step-00000010", True), ("step-00000011", False)):
        folder = scene.run.checkpoints / name
        (folder / "shards").mkdir(parents=True)
        (folder / "shards" / "model.pt").write_bytes(bytes(int(name[-2:])))
        if complete:
            (folder / "manifest.json").write_text("{}")
    assert newest_checkpoint_bytes(scene.run) == 10 + 2


# --- the step's command line


def test_step_requests_the_cores_and_gpus_of_all_ranks_on_a_node() -> None:
    config = Config(cluster=ClusterConfig(nodes=3, tasks_per_node=2, cpus_per_task=4, gpus_per_node=2))
    assert preflight_command(config, JobNodes(NODES), ["probe"]) == [
        *("srun", "--job-name=preflight", "--overlap", "--nodes=3", "--ntasks=3", "--ntasks-per-node=1"),
        *("--cpus-per-task=8", "--input=none", "--label", "--gpus-per-node=2"),
        *("sh", "-c", "trap '' USR2; exec \"$@\"", "sh", "probe"),
    ]
