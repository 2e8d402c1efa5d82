"""The preflight of a job, with a fake srun and fake checks."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from hpcdist.config.launch_schema import ClusterConfig, PreflightConfig, RoleRequest
from hpcdist.config.schema import Config, DataConfig
from hpcdist.containers.spec import ContainerSpec
from hpcdist.containers.steps import PROBE_TIMEOUT_S
from hpcdist.errors import HpcdistError, PreflightError
from hpcdist.host.files import read_json
from hpcdist.host.machine import Check
from hpcdist.run import folder as attempts
from hpcdist.run.folder import RunDir
from hpcdist.slurm.current_job import CurrentJob
from hpcdist.slurm.job import preflight_step
from hpcdist.slurm.job.preflight_step import Preflight, loaders, newest_checkpoint_bytes
from hpcdist.slurm.job.srun import preflight_command
from hpcdist.slurm.on_nodes import JobNodes
from hpcdist.slurm.preflight_probe import ProbeRequest

#: All tests of this file may start processes.
pytestmark = pytest.mark.processes

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
        return set(nodes) <= set(self.spare.split())


class Scene:
    """A run on three nodes with a fake srun, which prints the files `answers` and `errors`."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.run = RunDir.create(folder / "exp" / "first")
        self.attempt = self.run.new_attempt()
        srun = folder / "srun"
        srun.write_text(
            f'#!/bin/sh\ncd {folder}\necho "$@" >> calls\necho "$HPCDIST_PREFLIGHT_TOKEN" >> tokens\n'
            "cat errors >&2\nexec cat answers\n"
        )
        srun.chmod(0o755)
        self.set_answers(*NODES)
        self.patch = monkeypatch
        self.requests: list[ProbeRequest] = []
        self.set_checks([OK])

    def set_answers(self, *nodes: str, errors: str = "") -> None:
        lines = [f'{task}: hpcdist-node {node} 0/1 {{"node": "{node}"}}\n' for task, node in enumerate(nodes)]
        (self.folder / "answers").write_text("".join(lines))
        (self.folder / "errors").write_text(errors)

    def set_checks(self, checks: list[Check]) -> None:
        def check_nodes(request: ProbeRequest, answers: Any) -> list[Check]:
            self.requests.append(request)
            return checks

        self.patch.setattr(preflight_step, "check_nodes", check_nodes)

    def run_preflight(
        self,
        spare: str = "",
        *,
        het: bool = False,
        nodes: Sequence[str] = NODES,
        box: ContainerSpec | None = None,
        **settings: Any,
    ) -> Preflight:
        self.preflight = Preflight(
            self.run,
            Config(cluster=ClusterConfig(nodes=3, cpus_per_task=4), preflight=PreflightConfig(**settings)),
            cast(CurrentJob, FakeJob(spare)),
            JobNodes([nodes], het=het),
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


def test_preflight_runs_once_per_job_start_and_logs_one_line(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    preflight = scene.run_preflight()
    preflight.run(scene.run.new_attempt())
    assert len(scene.calls) == 1
    (line,) = caplog.messages
    assert line.startswith("preflight: 3 nodes alike, 0.1 ms and 9 Gbit/s between them (")
    assert line.endswith(" s with srun)")
    report = read_json(scene.attempt.preflight) or {}
    assert (report["mode"], report["nodes"], report["answers"]["n2"]) == ("quick", list(NODES), {"node": "n2"})
    assert [check["level"] for check in report["checks"]] == ["ok"]
    text = (scene.attempt.path / "preflight.txt").read_text()
    assert text.startswith("preflight of 3 nodes (n1, n2, n3), ")
    assert text.endswith("\nok       preflight: 3 nodes alike, 0.1 ms and 9 Gbit/s between them\n")
    (request,) = scene.requests
    assert (request.nodes, request.tasks_per_node, request.checkpoint_bytes) == (NODES, 1, None)
    assert not Path(request.witness).parent.exists(), "the witness is removed"


def test_preflight_is_skipped_on_one_node_and_with_mode_off(scene: Scene) -> None:
    scene.run_preflight(nodes=("n1",))
    scene.run_preflight(mode="off")
    assert scene.calls == []


def test_warnings_are_logged(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.set_checks([Check(name="clock", level="warning", text="2 s ahead", fix="start chronyd", node="n2"), OK])
    scene.run_preflight()
    assert caplog.messages[0] == "preflight: warning: n2: clock: 2 s ahead; start chronyd"
    assert caplog.messages[1].startswith("preflight: 3 nodes alike")


@pytest.mark.parametrize(
    ("settings", "spare", "het", "failures", "suffix", "avoid"),
    [
        ({}, "n3", False, [DISK], "", []),
        ({"on_failure": "exclude"}, "n3", False, [DISK], "", ["n3"]),
        ({"on_failure": "exclude"}, "", False, [DISK], "; partition main has no node to replace n3", []),
        ({"on_failure": "exclude"}, "n3", True, [DISK],
         "; a heterogeneous job cannot be requeued without n3", []),
        ({"on_failure": "exclude"}, "n2 n3", False,
         [DISK, Check(name="disk", level="failure", text="full", node="n2")],
         " (and 1 more in {text}); it concerns most nodes: none is excluded", []),
    ],
    ids=["stop", "exclude", "no spare node", "heterogeneous", "most nodes"],
)  # fmt: skip
def test_failed_nodes_are_excluded_on_request_if_replaceable(
    scene: Scene, settings: dict[str, Any], spare: str, het: bool, failures: list[Check], suffix: str, avoid: list[str]
) -> None:
    scene.set_checks(failures)
    with pytest.raises(PreflightError) as caught:
        scene.run_preflight(spare, het=het, **settings)
    suffix = suffix.format(text=scene.attempt.path / "preflight.txt")
    assert str(caught.value) == f"preflight: n3: disk: 0 MB are free in /c; remove old runs{suffix}"
    assert (scene.preflight.failed, scene.preflight.avoid) == (True, avoid)


def test_first_failure_is_raised_and_the_others_are_logged(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.set_checks([DISK, Check(name="clock", level="failure", text="400 s ahead", node="n2"), OK])
    with pytest.raises(PreflightError):
        scene.run_preflight()
    assert caplog.messages == ["preflight: failure: n2: clock: 400 s ahead"]


def test_no_node_is_excluded_while_slurm_does_not_answer(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def time_out(*_: object, **__: object) -> bool:
        raise HpcdistError("sinfo: timed out")

    monkeypatch.setattr(FakeJob, "replaceable", time_out)
    scene.set_checks([DISK])
    error = r"; cannot find nodes to replace n3 \(sinfo: timed out\)$"
    with pytest.raises(PreflightError, match=error):
        scene.run_preflight(on_failure="exclude")
    assert (scene.preflight.failed, scene.preflight.avoid) == (True, [])


def test_failure_without_a_node_excludes_none(scene: Scene) -> None:
    scene.set_checks([Check(name="disk", level="failure", text="0 MB are free in /c", fix="remove old runs")])
    with pytest.raises(PreflightError, match=r"^preflight: disk: 0 MB .*; it concerns most nodes: none is"):
        scene.run_preflight("n1 n2 n3", on_failure="exclude")
    assert scene.preflight.avoid == []


def test_failures_after_a_stop_request_are_ignored(scene: Scene) -> None:
    scene.set_checks([DISK])
    scene.set_answers("n1")
    scene.attempt.send_request(attempts.StopRequest(cause="preemption"))
    scene.run_preflight()
    assert (len(scene.calls), scene.attempt.preflight.exists(), scene.preflight.failed) == (1, False, False)


def test_missing_answer_is_requested_twice_and_reported_with_the_error(scene: Scene) -> None:
    scene.set_answers("n1", "n2", errors="srun: error: n3: task 2\n2: No module named hpcdist.slurm.probe\n1: fine\n")
    scene.set_checks([Check(name="answer", level="failure", text="did not answer", node="n3")])
    error = r"^preflight: n3: answer: did not answer: No module named hpcdist\.slurm\.probe$"
    with pytest.raises(PreflightError, match=error):
        scene.run_preflight()
    assert len(scene.calls) == 2
    tokens = set((scene.folder / "tokens").read_text().split())
    assert len(tokens) == 2, "each step has its own token"
    assert not any(token in line for token in tokens for line in scene.calls), "other users can read command lines"


def test_failure_of_the_step_itself_is_a_warning(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.set_answers(errors="srun: error: Unable to create step\n")
    scene.run_preflight()
    assert caplog.messages[0] == (
        "preflight: warning: probe: no node answered in 2 steps: srun: error: Unable to create step;"
        " the ranks start nevertheless"
    )


def test_step_is_cancelled_after_its_time_limit(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    (scene.folder / "srun").write_text("#!/bin/sh\nexec sleep 60\n")
    for name, script in {"squeue": "echo 7.0 preflight; echo 7.1 mine", "scancel": 'echo "$@" > cancelled'}.items():
        (scene.folder / name).write_text(f"#!/bin/sh\ncd {scene.folder}\n{script}\n")
        (scene.folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{scene.folder}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(preflight_step, "STEP_S", {"quick": 0.1 - ProbeRequest.deadline_s})
    monkeypatch.setattr(preflight_step, "ROUNDS", 1)
    scene.run_preflight()
    assert (scene.folder / "cancelled").read_text() == "--signal=KILL 7.0\n"


@pytest.mark.parametrize(("runtime", "more_s"), [("pyxis", PROBE_TIMEOUT_S), ("apptainer", 0)])
def test_nodes_wait_for_others_whose_pyxis_unpacks_the_image(scene: Scene, runtime: str, more_s: float) -> None:
    """`srun` has this time, too: killing a step while `enroot create` runs lets Slurm drain the node."""
    limits = []
    ask = preflight_step.ask
    scene.patch.setattr(
        preflight_step,
        "ask",
        lambda step, nodes, limit_s, env: limits.append(limit_s) or ask(step, nodes, limit_s, env=env),
    )
    scene.run_preflight(box=ContainerSpec(runtime=runtime, image="/i", run=scene.run.path, workdir=scene.folder))
    (request,) = scene.requests
    assert request.deadline_s == ProbeRequest.deadline_s + more_s
    assert limits == [request.deadline_s + preflight_step.STEP_S["quick"]]


def test_required_disk_space_is_the_size_of_the_newest_complete_checkpoint(scene: Scene) -> None:
    for name, complete in (("step-00000009", True), ("step-00000010", True), ("step-00000011", False)):
        folder = scene.run.checkpoints / name
        (folder / "shards").mkdir(parents=True)
        (folder / "shards" / "model.pt").write_bytes(bytes(int(name[-2:])))
        if complete:
            (folder / "manifest.json").write_text("{}")
    assert newest_checkpoint_bytes(scene.run) == 10 + 2


def test_number_of_loader_processes() -> None:
    assert loaders(DataConfig(name="mnist", num_workers=3)) == 0
    assert loaders(DataConfig(name="image_folder", num_workers=3)) == 3
    assert loaders(DataConfig(name="image_folder", num_workers=3, preload="always")) == 0
    assert loaders(DataConfig(name="cifar10", num_workers=3, preload="never")) == 3


# --- the step's command line


def test_step_requests_the_cores_and_gpus_of_all_ranks_on_a_node() -> None:
    config = Config(cluster=ClusterConfig(nodes=3, tasks_per_node=2, cpus_per_task=4, gpus_per_node=2))
    assert preflight_command(config, JobNodes([NODES]), ["probe"]) == [
        *("srun", "--job-name=preflight", "--overlap", "--nodes=3", "--ntasks=3", "--ntasks-per-node=1"),
        *("--cpus-per-task=8", "--input=none", "--label", "--gpus-per-node=2"),
        *("sh", "-c", "trap '' USR2; exec \"$@\"", "sh", "probe"),
    ]


def test_step_of_a_heterogeneous_job_has_one_container_command_per_component() -> None:
    config = Config(
        roles={"server": 1, "worker": 2}, cluster=ClusterConfig(roles={"worker": RoleRequest(gpus_per_node=1, nodes=2)})
    )
    box = ContainerSpec(runtime="apptainer", image="/i.sif", run=Path("/r"), mounts=(), workdir=Path("/r"), gpus="all")
    words = preflight_command(config, JobNodes([("n1",), ("n2", "n3")], het=True), ["probe"], box)
    first, second = words[1 : words.index(":")], words[words.index(":") + 1 :]
    assert first[0] == "--het-group=0"
    assert second[0] == "--het-group=1"
    assert ("--nodes=1" in first, "--nv" in first) == (True, False)
    assert ("--nodes=2" in second, "--gpus-per-node=1" in second, "--nv" in second) == (True, True, True)
    assert first[-1] == second[-1] == "probe"
