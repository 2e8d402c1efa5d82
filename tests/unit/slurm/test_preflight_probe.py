"""Probes as real processes on different loopback addresses; the preflight's step, with a fake srun and fake checks."""

import asyncio
import logging
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from hpcdist_runs import wait_for
from slurm_recordings import FakeCommands

from hpcdist.config.launch_schema import ClusterConfig, PreflightConfig
from hpcdist.config.schema import Config
from hpcdist.containers.spec import ContainerSpec
from hpcdist.containers.steps import PROBE_TIMEOUT_S
from hpcdist.errors import HpcdistError, PreflightError
from hpcdist.host.files import read_json
from hpcdist.host.machine import Check
from hpcdist.run import folder as attempts
from hpcdist.run.folder import RunDir
from hpcdist.slurm import preflight_probe as mesh
from hpcdist.slurm.client import CurrentJob
from hpcdist.slurm.job import preflight_step
from hpcdist.slurm.job.preflight_step import Preflight, newest_checkpoint_bytes
from hpcdist.slurm.job.srun import preflight_command
from hpcdist.slurm.on_nodes import JobNodes, read_answers
from hpcdist.slurm.preflight_checks import check_nodes
from hpcdist.slurm.preflight_probe import ALL_PAIRS, Mesh, ProbeRequest, connected, probe_command, probe_env

#: Far longer than a probe takes.
LIMIT_S = 60
#: A hello without the token, and too deep for a JSON parser.
FORGED = b"hpf3" + bytes(16) + struct.pack(">H32s", 1000, bytes(32)) + b"[" * 1000


def request_for(folder: Path, num_nodes: int) -> ProbeRequest:
    nodes = tuple(f"n{number}" for number in range(1, num_nodes + 1))
    witness = folder / "preflight" / "witness"
    witness.parent.mkdir()
    witness.write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return ProbeRequest(
        nodes=nodes,
        port=port,
        token="secret",
        run_folder=str(folder),
        checkpoint_folder=str(folder / "checkpoints"),
        witness=str(witness),
        addresses={node: f"127.0.0.{number}" for number, node in enumerate(nodes, 2)},
    )


@pytest.mark.processes
def test_nodes_measure_each_other_among_connections_of_other_programs(tmp_path: Path) -> None:
    """n2 starts first and gets idle connections, garbage, deep JSON, a hello without the token and a reflected one."""
    request = request_for(tmp_path, 4)
    address = request.addresses["n2"], request.port
    greetings = [
        b"",
        b"hpf1" + struct.pack(">H", 65535) + b"[" * 65535,
        b"GET / HTTP/1.1\r\n\r\n" * 50,
        FORGED,
        b"hpf3",
    ]
    running: dict[str, subprocess.Popen[str]] = {}

    def listens() -> bool:
        with suppress(ConnectionRefusedError), socket.create_connection(address):
            return True
        return False

    with ExitStack() as opened:
        for node in ("n2", "n1", "n3", "n4"):
            process = subprocess.Popen(
                probe_command(request),
                env={**os.environ, "SLURMD_NODENAME": node, **probe_env(request)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            running[node] = opened.enter_context(process)
            opened.callback(process.kill)
            if node == "n2":
                wait_for(listens, "the probe to listen")
                reflected = opened.enter_context(socket.create_connection(address))
                reflected.sendall(reflected.recv(20))
                reflected.sendall(reflected.recv(65536))
                for number in range(400):
                    sock = opened.enter_context(socket.create_connection(address))
                    with suppress(ConnectionError):
                        sock.sendall(greetings[number % len(greetings)])
        printed = {node: process.communicate(timeout=LIMIT_S) for node, process in running.items()}
    assert {(node, errors) for node, (_, errors) in printed.items()} == {(node, "") for node in request.nodes}
    answers: Any = read_answers("".join(output for output, _ in printed.values()))
    assert set(answers) == set(request.nodes)
    peers = [peer for answer in answers.values() for peer in answer["network"]["peers"].values()]
    assert (len(peers), {peer["status"] for peer in peers}) == (12, {"ok"})
    assert all(abs(peer["offset_s"]) < 1 for peer in peers), "all have the same clock"
    assert all(0 < peer["exchange_s"] < 8 for peer in peers)
    assert all(answer["witness"] and "write_error" not in answer["checkpoints"] for answer in answers.values())
    assert [check for check in check_nodes(request, answers) if check.level == "failure"] == []
    assert [path.name for path in tmp_path.rglob("*")] == ["preflight", "witness"], "the write test leaves no file"


@asynccontextmanager
async def greeting_server(address: str, port: int, greeting: bytes, *, once: bool = False) -> AsyncIterator[None]:
    """Run a server that greets each client, as mail and SSH servers do."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(4096)  # closing a socket with unread bytes discards the greeting
        writer.write(greeting)
        writer.close()
        if once:
            server.close()

    server = await asyncio.start_server(greet, address, port)
    async with server:
        yield


def test_status_shows_why_a_node_cannot_be_reached(tmp_path: Path) -> None:
    """n3 does not start; n4's port is in use; n5 runs a probe of another job; n6 resolves to n1."""
    request = request_for(tmp_path, 7)
    addresses = {node: address for node, address in request.addresses.items() if node != "n7"}
    addresses["n6"] = addresses["n1"]
    nodes = (*request.nodes[:6], "n7.invalid")
    request = replace(request, nodes=nodes, addresses=addresses, deadline_s=2.0)
    probes = {node: Mesh(request, node) for node in ("n1", "n2", "n4")}

    async def meet() -> None:
        async with (
            greeting_server(addresses["n4"], request.port, b"220 ready when you are\r\n"),
            greeting_server(addresses["n5"], request.port, FORGED),
        ):
            await asyncio.gather(*(probe.run() for probe in probes.values()))

    asyncio.run(meet())
    for node, probe in probes.items():
        peers = {name: peer.as_answer() for name, peer in probe.peers.items()}
        assert peers["n3"] == {"status": "absent"}
        assert peers["n5"] == {"status": "stranger", "detail": "a probe of another job"}
        assert peers["n6"] == {"status": "stranger", "detail": "n1, to which the name n6 resolves"}
        assert peers["n7.invalid"]["status"] == "unresolved"
        if node != "n4":
            assert peers["n4"] == {"status": "stranger", "detail": "another program"}
    assert probes["n1"].peers["n2"].exchange_s, "reachable pairs are measured"
    assert probes["n4"].port_problem == "Address already in use"


def test_other_program_that_ends_before_the_deadline_is_still_reported(tmp_path: Path) -> None:
    """A probe that starts last finds the wrong node, and then nobody: the others have left."""
    request = replace(request_for(tmp_path, 2), deadline_s=1.0)
    late = Mesh(request, "n1")

    async def meet() -> None:
        async with greeting_server(request.addresses["n2"], request.port, b"220 ready when you are\r\n", once=True):
            await late.run()

    asyncio.run(meet())
    assert late.peers["n2"].as_answer() == {"status": "stranger", "detail": "another program"}


@pytest.mark.parametrize(("proof_s", "num_kept"), [(2.0 * LIMIT_S, mesh.MAX_UNKNOWN), (0.05, 0)])
def test_connections_without_a_proof_are_limited_in_number_and_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proof_s: float, num_kept: int
) -> None:
    monkeypatch.setattr(mesh, "HELLO_S", proof_s)
    leave = Future[None]()

    class Waiting(Mesh):
        async def address_of(self, name: str) -> str:
            await asyncio.wrap_future(leave)
            raise OSError(name)

    request = replace(request_for(tmp_path, 2), deadline_s=0.0)
    address = request.addresses["n1"], request.port
    tested = Waiting(request, "n1")
    running = threading.Thread(target=lambda: asyncio.run(tested.run()))
    running.start()
    with ExitStack() as opened:
        opened.callback(running.join)
        opened.callback(leave.set_result, None)
        wait_for(lambda: "ephemeral" in tested._hello, "the probe to listen")
        idle = [opened.enter_context(socket.create_connection(address, LIMIT_S)) for _ in range(mesh.MAX_UNKNOWN + 9)]
        for sock in idle[: len(idle) - num_kept]:
            with suppress(ConnectionError):
                while sock.recv(64):  # until the probe closes the connection
                    pass
        for sock in idle[len(idle) - num_kept :]:
            assert len(sock.recv(64)) == 20, "it waits for the answer to its nonce"


def test_dropped_packets_are_a_timeout_and_not_a_refusal() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:  # the kernel makes the connection within no time
        asyncio.run(connected("127.0.0.1", server.getsockname()[1], limit_s=0.0)).close()
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        address, port = full.getsockname()
        waiting = [socket.create_connection((address, port))]  # fills the queue, which has room for one
        with pytest.raises(TimeoutError):
            asyncio.run(connected(address, port, limit_s=0.2))
        waiting[0].close()
    with pytest.raises(ConnectionRefusedError):
        asyncio.run(connected(address, port, limit_s=5.0))


def test_data_that_does_not_arrive_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer answers empty requests, as if the network lost or delayed larger ones."""

    async def serve(link: mesh.Link, finished: asyncio.Event) -> None:
        while True:
            _, num_bytes = mesh._REQUEST.unpack(await link._reader.readexactly(mesh._REQUEST.size))
            await link._reader.readexactly(num_bytes)
            if num_bytes == 0:
                link._writer.write(mesh._ANSWER.pack(time.time()))

    async def meet() -> list[Mesh]:
        found = [Mesh(request, node) for node in request.nodes]
        await asyncio.gather(*(one.run() for one in found))
        return found

    monkeypatch.setattr(mesh, "STALL_S", 0.2)
    monkeypatch.setattr(mesh.Link, "serve", serve)
    request = request_for(tmp_path, 2)
    for one in asyncio.run(meet()):
        (peer,) = one.peers.values()
        assert (peer.status, peer.exchange_s) == ("ok", mesh.STALL_S)


def test_nodes_of_large_runs_connect_to_an_even_selection_in_both_directions(tmp_path: Path) -> None:
    request = request_for(tmp_path, 151)
    peers = {node: set(Mesh(request, node).peers) for node in request.nodes}
    assert all(node in peers[other] for node in request.nodes for other in peers[node])
    assert all(ALL_PAIRS - 3 < len(others) < ALL_PAIRS for others in peers.values())
    near = [sum(abs(int(node[1:]) - int(other[1:])) % 151 < 30 for other in peers[node]) for node in request.nodes]
    assert max(near) < ALL_PAIRS / 2, "not only neighbours, which may share a switch"


# --- The preflight of a job, with a fake srun and fake checks.

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
    (request,) = scene.requests
    assert (request.nodes, request.checkpoint_bytes) == (NODES, None)
    assert not Path(request.witness).parent.exists(), "the witness is removed"


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
def test_missing_answer_is_requested_twice_and_reported_with_the_error(scene: Scene) -> None:
    scene.set_answers("n1", "n2", errors="srun: error: n3: task 2\n2: No module named hpcdist.slurm.probe\n1: fine\n")
    scene.set_checks([Check(name="answer", level="failure", text="did not answer", node="n3")])
    with pytest.raises(PreflightError, match=r"^preflight: n3: answer: did not answer: No module named hpcdist\.slurm"):
        scene.run_preflight()
    assert len(scene.calls) == 2
    tokens = set((scene.folder / "tokens").read_text().split())
    assert len(tokens) == 2, "each step has its own token"
    assert not any(token in line for token in tokens for line in scene.calls), "other users can read command lines"


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
    monkeypatch.setattr(preflight_step, "STEP_S", 0.1 - ProbeRequest.deadline_s)
    monkeypatch.setattr(preflight_step, "ROUNDS", 1)
    scene.run_preflight()
    assert (scene.folder / "cancelled").read_text() == "--signal=KILL 7.0\n"


@pytest.mark.processes
@pytest.mark.parametrize(("runtime", "more_s"), [("pyxis", PROBE_TIMEOUT_S), ("apptainer", 0)])
def test_nodes_wait_for_others_whose_pyxis_unpacks_the_image(scene: Scene, runtime: str, more_s: float) -> None:
    """`srun` has this time, too: killing a step while `enroot create` runs lets Slurm drain the node."""
    scene.run_preflight(box=ContainerSpec(runtime=runtime, image="/i", run=scene.run.path, workdir=scene.folder))
    (request,) = scene.requests
    assert request.deadline_s == ProbeRequest.deadline_s + more_s


def test_required_disk_space_is_the_size_of_the_newest_complete_checkpoint(scene: Scene) -> None:
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
