"""Nodes that are lost, replaced and used again, with a fake srun that answers for the nodes that live."""

import errno
import re
import socket
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hpcdist_runs import unused_port, wait_for

from hpcdist.config.cluster_schema import ClusterConfig
from hpcdist.config.schema import Config
from hpcdist.config.training_schema import DataConfig
from hpcdist.errors import HpcdistError
from hpcdist.host.json_files import write_json
from hpcdist.job import elastic_nodes
from hpcdist.job.elastic_nodes import ElasticNodes, HostProbe, NodePool, failing_node
from hpcdist.job.node_steps import has_lost_batch_host
from hpcdist.run.folder import RunDir
from hpcdist.slurm import client, on_nodes
from hpcdist.slurm.client import CurrentJob
from hpcdist.supervisor.restart_policy import Failure

#: All tests of this file may start processes.
pytestmark = pytest.mark.processes

NODES = ("n1", "n2", "n3", "n4")


class Slurm:
    """Fake commands. `alive` are the nodes that answer; srun waits for others. `surviving` ranks are not killed.

    All nodes answer at once: on a busy machine one answer may come seconds after another, which PATIENCE_S forbids.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
        self.alive(*NODES)
        self.allocated("n[1-4]")
        self._script(
            "srun",
            """for word; do case $word in --nodelist=*) asked=${word#*=};; esac; done
            echo $asked >> asked
            for node in $(echo $asked | tr , ' '); do
              if ! grep -qx $node alive; then wait=1; continue; fi
              echo "hpcdist-node $node"
              echo "hpcdist-node $node 0/1 {\\"ranks\\": [$(cat surviving)]}"
            done > answers.$$
            cat answers.$$
            [ -z "$wait" ] || exec sleep 100""",
        )
        self._script("scontrol", "cat job")
        (folder / "surviving").write_text("")

    def _script(self, name: str, text: str) -> None:
        (self.folder / name).write_text(f"#!/bin/sh\ncd {self.folder}\n{text}\n")
        (self.folder / name).chmod(0o755)

    def alive(self, *nodes: str) -> None:
        (self.folder / "alive").write_text("".join(f"{node}\n" for node in nodes))

    def allocated(self, nodes: str) -> None:
        (self.folder / "job").write_text(f"JobId=7 JobState=RUNNING NodeList={nodes}\n")

    @property
    def asked(self) -> list[str]:
        return (self.folder / "asked").read_text().split()


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    fake = Slurm(tmp_path)
    monkeypatch.setenv("PATH", fake.env["PATH"])
    monkeypatch.setattr(on_nodes, "PATIENCE_S", 0.2)
    monkeypatch.setattr(on_nodes, "FIRST_ANSWER_S", 30.0)
    monkeypatch.setattr(elastic_nodes, "CHECK_EVERY_S", 0.0)
    monkeypatch.setattr(elastic_nodes, "addresses_of", lambda nodes: {})
    monkeypatch.setattr(client, "JOB_RETRY_S", 0.0)
    return fake


def of(slurm: Slurm, runs_dir: Path, **cluster: int) -> ElasticNodes:
    run = RunDir.create(runs_dir / "exp" / "first")
    settings: dict[str, Any] = {"nodes": 4, "tasks_per_node": 2, **cluster}
    config = Config(cluster=ClusterConfig(**settings), data=DataConfig(global_batch_size=64))
    job = CurrentJob(id="7", restart_count=0, end_time=None)
    return ElasticNodes(run, config, job, NODES, slurm.env)


def save(nodes: ElasticNodes, step: int) -> None:
    folder = nodes._run.checkpoints / f"step-{step:08d}"
    folder.mkdir(parents=True)
    write_json(folder / "manifest.json", {"step": step})


def test_run_continues_without_nodes_that_do_not_answer(
    slurm: Slurm, runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = of(slurm, runs_dir, min_nodes=2)
    nodes.begin()
    assert not nodes.end_ranks("ranks-001")
    assert (nodes.abandoned, nodes.replace_lost()) == (set(), ""), "all nodes answer: they do not explain a failure"
    slurm.alive()
    with monkeypatch.context() as patch:
        patch.setattr(on_nodes, "FIRST_ANSWER_S", 2.0)
        assert not nodes.end_ranks("ranks-001")
    assert nodes.replace_lost() == "", "the controller does not answer"
    slurm.alive("n1", "n2", "n4")
    (slurm.folder / "surviving").write_text("1")
    assert nodes.end_ranks("ranks-002")
    assert nodes.abandoned == set(), "a rank has survived"
    nodes.begin()
    (slurm.folder / "surviving").write_text("")
    assert nodes.end_ranks("ranks-002")
    assert nodes.abandoned == {"ranks-002", "hpcdist-nodes", "hpcdist-containers"}
    assert nodes.answering == ("n1", "n2", "n4"), "containers are removed on these"
    assert nodes.replace_lost() == "no answer from n3: continuing on 3 of 4 nodes"
    assert nodes.pool.used == ("n1", "n2", "n4")
    assert nodes.replace_lost() == "", "the nodes do not explain another failure"
    slurm.alive("n1")
    nodes.begin()
    assert nodes.end_ranks("ranks-002")
    assert slurm.asked == ["n1,n2,n3,n4"] * 4 + ["n1,n2,n4"]
    assert nodes.replace_lost() == "", "too few nodes are left"


def test_nodes_that_slurm_has_taken_out_of_the_job_are_lost(slurm: Slurm, runs_dir: Path) -> None:
    """A step with such a node in its list starts on no node."""
    nodes = of(slurm, runs_dir, nodes=3, min_nodes=2, spare_nodes=1)
    slurm.allocated("n[1-2]")
    assert nodes.end_ranks("ranks-001")
    assert slurm.asked == ["n1,n2"]
    assert nodes.replace_lost() == "no answer from n3: continuing on 2 of 3 nodes"
    assert (nodes.pool.present, nodes.pool.missing) == (("n1", "n2"), ())


def test_silent_node_of_a_failed_preflight_is_lost(slurm: Slurm, runs_dir: Path) -> None:
    nodes = of(slurm, runs_dir, min_nodes=2)
    slurm.alive("n1", "n2", "n4")
    assert nodes.drop_rejected(["n3", "n4"])
    assert (nodes.pool.used, nodes.pool.present) == (("n1", "n2"), ("n1", "n2", "n4"))
    assert nodes.abandoned == {"preflight", "hpcdist-nodes", "hpcdist-containers"}
    assert not nodes.drop_rejected(["n2"])


def test_node_on_which_ranks_fail_twice_is_left_out(slurm: Slurm, runs_dir: Path) -> None:
    nodes = of(slurm, runs_dir, min_nodes=2)
    failure = Failure(kind="killed", rank=2, host="n2.site", step=5, error="was killed by SIGKILL")
    for step in (5, 6):
        write_json(nodes._run.new_attempt().failure, asdict(failure) | {"step": step})
    assert nodes.replace_lost() == "ranks have failed twice in a row on n2: continuing on 3 of 4 nodes"
    assert nodes.pool.missing == ()


def grown(nodes: ElasticNodes) -> str:
    return wait_for(nodes.detect_returned, "lost nodes to answer")


def test_lost_node_that_answers_is_used_after_a_checkpoint(slurm: Slurm, runs_dir: Path) -> None:
    nodes = of(slurm, runs_dir, min_nodes=2)
    assert nodes.detect_returned() == "", "no node is missing"
    slurm.alive("n1", "n2", "n4")
    nodes.end_ranks("ranks-001")
    nodes.replace_lost()
    save(nodes, 5)
    nodes.begin()
    num_asked = len(slurm.asked)
    assert [nodes.detect_returned() for _ in range(3)] == [""] * 3
    assert len(slurm.asked) == num_asked, "no checkpoint is newer than the start of the attempt"
    save(nodes, 10)
    slurm.alive(*NODES)
    assert grown(nodes) == "n3"
    assert list(nodes.pool.used) == ["n1", "n2", "n4"], "the running attempt keeps its nodes"
    nodes.use_returned()
    assert nodes.pool.used == NODES, "before the resources of the next attempt are recorded"
    nodes.begin()
    assert slurm.asked[-1] == "n3", "ranks that have survived there are killed"
    nodes.close()


def test_node_removed_from_the_job_by_slurm_does_not_return(slurm: Slurm, runs_dir: Path) -> None:
    nodes = of(slurm, runs_dir, min_nodes=2)
    nodes.pool.drop_silent(["n3"])
    nodes.begin()
    save(nodes, 5)
    slurm.allocated("n[1-2,4]")
    wait_for(lambda: nodes.detect_returned() == "" and not nodes.pool.missing, "the check of the node")
    assert not (slurm.folder / "asked").exists()
    nodes.close()


def test_silent_nodes_are_not_checked_for_growth(slurm: Slurm, runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_nodes, "FIRST_ANSWER_S", 2.0)  # as no node answers at last
    nodes = of(slurm, runs_dir, min_nodes=2)
    nodes.pool.drop_silent(["n2", "n3"])
    nodes.begin()
    save(nodes, 5)
    monkeypatch.setattr(nodes._probe, "silent", lambda for_s=0.0: ["n2"])
    slurm.alive("n1", "n4")
    wait_for(lambda: nodes.detect_returned() == "" and nodes.abandoned == {"hpcdist-nodes"}, "the check of n3")
    assert set(slurm.asked) == {"n3"}
    nodes.close()


def test_storage_error_in_a_growth_check_does_not_end_the_run(
    slurm: Slurm, runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = of(slurm, runs_dir, min_nodes=2)
    nodes.pool.drop_silent(["n3"])
    nodes.begin()
    tries: list[RunDir] = []

    def newest_step(run: RunDir) -> int:
        tries.append(run)
        raise OSError("stale file handle")

    monkeypatch.setattr(elastic_nodes, "newest_step", newest_step)
    wait_for(lambda: nodes.detect_returned() == "" and len(tries) > 1, "a second try")
    nodes.close()


def test_silent_node_is_reported_with_its_first_rank(
    slurm: Slurm, runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = of(slurm, runs_dir, nodes=3, min_nodes=2, spare_nodes=1)
    silent: list[str] = []
    monkeypatch.setattr(nodes._probe, "silent", lambda for_s=0.0: silent if for_s == 0 else [])
    assert nodes.detect_lost() is None
    silent[:] = ["n4"]
    assert nodes.detect_lost() is None, "the spare node"
    assert "n4" not in nodes.pool.present
    silent[:] = []
    assert nodes.detect_lost() is None
    assert nodes.pool.idle == ("n4",), "it answers again"
    silent[:] = ["n4"]
    nodes.detect_lost()
    silent[:] = []
    nodes.detect_lost()
    assert list(nodes.pool.idle) == [], "it was lost twice"
    silent[:] = ["n2", "n4"]
    assert nodes.detect_lost() == (2, "n2")
    assert nodes.end_ranks("ranks-001")
    assert slurm.asked == ["n1,n3"], "no time is lost with the silent node"
    assert nodes.replace_lost() == "no answer from n2: continuing on 2 of 3 nodes"
    silent[:] = ["n2", "n3", "n4"]
    assert nodes.detect_lost() is None, "too few nodes would be left: more patience"
    monkeypatch.setattr(nodes._probe, "silent", lambda for_s=0.0: silent if for_s == 0 else ["n2", "n4"])
    assert nodes.detect_lost() is None, "the others were lost before"


def test_job_with_too_few_nodes_is_an_error(slurm: Slurm, runs_dir: Path) -> None:
    with pytest.raises(HpcdistError, match=re.escape("job 7 has 4 nodes, but cluster.min_nodes=5")):
        of(slurm, runs_dir, nodes=8, min_nodes=5)


# --- Detection of nodes that do not answer: refused connections are answers, silence after an answer is a loss.


#: Addresses of this machine, where connections are refused.
HOSTS = {"n1": "127.0.0.1", "n2": "127.0.0.2"}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of the probe in a list with one element."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_refused_and_accepted_connections_are_answers(clock: list[float]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        probe = HostProbe(HOSTS, listener.getsockname()[1])
        for _ in range(40):
            assert probe.silent() == []
            clock[0] += 0.5
        assert all(node.answered is not None for node in probe._nodes.values())
        probe.close()


def test_only_a_node_that_has_answered_can_be_silent(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    probe = HostProbe({**HOSTS, "n3": "127.0.0.3"}, unused_port())
    real = socket.socket.connect_ex

    def connect_ex(connection: socket.socket, address: tuple[str, int]) -> int:
        return errno.EHOSTUNREACH if address[0] in lost else real(connection, address)

    lost = {"127.0.0.3"}
    monkeypatch.setattr(socket, "socket", type("Socket", (socket.socket,), {"connect_ex": connect_ex}))
    for _ in range(20):
        assert probe.silent() == []
        clock[0] += 0.5
    lost.add(HOSTS["n2"])
    began = clock[0]
    while probe.silent() == []:
        clock[0] += 0.5
        assert clock[0] < began + 10
    assert probe.silent() == ["n2"]
    assert elastic_nodes.SILENT_S <= clock[0] - began <= elastic_nodes.SILENT_S + 2 * elastic_nodes.PROBE_EVERY_S
    assert probe.silent(30.0) == []
    lost.discard(HOSTS["n2"])
    clock[0] += elastic_nodes.PROBE_EVERY_S
    probe.silent()
    assert probe.silent() == [], "it answers again"
    # After a pause of this process nothing is known about the nodes.
    clock[0] += 100
    assert probe.silent() == []
    lost.add(HOSTS["n2"])
    for _ in range(10):  # calls that are far apart detect it as well, only later
        clock[0] += 2 * elastic_nodes.PAUSE_S
        silent = probe.silent()
    assert silent == ["n2"]
    probe.close()


# --- The choice of nodes for each attempt: losses, spare nodes, returns, and nodes that are not fit.


def test_spare_node_stays_idle_in_a_smaller_allocation() -> None:
    pool = NodePool(NODES, most=8, least=2, spare=1)
    assert (pool.used, pool.idle) == (("n1", "n2", "n3"), ("n4",))
    assert pool.drop_silent(["n4"])
    assert list(pool.used) == ["n1", "n2", "n3"]
    assert list(pool.missing) == [], "the run has its size"
    assert pool.drop_silent(["n3"])
    assert pool.used == ("n1", "n2")
    assert pool.missing == ("n3", "n4")
    pool = NodePool(NODES, most=3, least=3, spare=1)
    assert pool.drop_silent(["n2"])
    assert pool.used == ("n1", "n3", "n4")
    assert not pool.drop_silent(["n1"]), "too few nodes are left"


# --- jobs that run on without their batch host


def test_job_has_lost_its_batch_host_if_it_runs_on_other_nodes() -> None:
    lost = {"JobState": "RUNNING", "BatchHost": "n1", "NodeList": "n[2-4]"}
    assert has_lost_batch_host(lost)
    for change in ({"NodeList": "n[1,3-4]"}, {"JobState": "PENDING"}, {"NodeList": "(null)"}):
        assert not has_lost_batch_host(lost | change)
    assert not has_lost_batch_host({})


def test_failures_of_other_versions_and_damaged_ones_are_read(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "e" / "r")
    known = {"kind": "error", "rank": 1, "host": "n1", "step": 3, "error": "x", "traceback": ["a", "b"]}
    for record in (known, known | {"key_of_a_later_version": 1}, {"kind": "error"}, known | {"traceback": 3}):
        write_json(run.new_attempt().failure, record)
        assert failing_node(run, ["n1", "n2"]) in ("", "n1")
    for _ in range(3):
        write_json(run.new_attempt().failure, known | {"key_of_a_later_version": 1})
    assert failing_node(run, ["n1", "n2"]) == "n1"
