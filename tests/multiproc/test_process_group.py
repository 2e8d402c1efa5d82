"""The rendezvous of ranks: other programs on the port, missing ranks, and time limits."""

import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import zmq
from attacker import as_other_user
from hpcdist_runs import assert_states_equal, unused_port, wait_for
from launcher_env import OWN, topology_of
from spawn import Rank, rank_env, spawn_ranks
from torch import Tensor
from torch.distributed import DistStoreError, FileStore, HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from hpcdist.checkpoint.state import rng_state
from hpcdist.config.launch_schema import LaunchConfig
from hpcdist.config.schema import Config
from hpcdist.config.topology import Topology
from hpcdist.config.written import to_yaml
from hpcdist.errors import HpcdistError, PreflightError, RendezvousError
from hpcdist.host.files import read_json
from hpcdist.rank import collective_check, process_group
from hpcdist.rank.collective_check import Stopwatch
from hpcdist.rank.process_group import Groups, _AdmittingGloo, guard_gloo, open_store, process_groups, refuse_strangers
from hpcdist.rank.rendezvous_store import SOCKET_NAME, CurveKeys, Meeting, RendezvousStore, _Connection
from hpcdist.rank.rpc_torch import _SignedPickler
from hpcdist.run.folder import Attempt, RunDir

CPU = torch.device("cpu")
KEY = bytes(range(32))


def at_port(port: int, *, rank: int = 0, world_size: int = 2, job_id: str = "ours", num_nodes: int = 1) -> Topology:
    return topology_of(rank, world_size, num_nodes, master_port=port, job_id=job_id)


@pytest.fixture
def silent_listener() -> Iterator[socket.socket]:
    """A listening socket that accepts connections but sends no data."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def test_port_in_use_and_unreachable_master_are_errors_with_their_address(
    silent_listener: socket.socket, tmp_path: Path
) -> None:
    used = port_of(silent_listener)
    with pytest.raises(
        RendezvousError, match=rf"rank 0 cannot listen on 127\.0\.0\.1:{used}: .*Address already in use"
    ):
        open_store(at_port(used, num_nodes=2), KEY, 60, tmp_path)
    port = unused_port()
    with pytest.raises(RendezvousError, match=rf"rank 1 cannot reach the master at 127\.0\.0\.1:{port}: "):
        open_store(at_port(port, rank=1, num_nodes=2), KEY, 1, tmp_path)
    with pytest.raises(RendezvousError, match=rf"rank 1 cannot reach the master at {tmp_path}/store.sock: .*No such"):
        open_store(at_port(port, rank=1), KEY, 1, tmp_path)


def test_ranks_of_other_attempts_and_other_programs_are_refused_as_rank_0(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, silent_listener: socket.socket
) -> None:
    open_store(at_port(port := unused_port(), num_nodes=2, job_id="theirs"), KEY, 5, tmp_path)
    for key, theirs, limit_s, reason in (
        (KEY, port, 60, "it does not know this attempt's key"),
        (KEY[::-1], port, 60, "it does not know this attempt's key"),
        (KEY, port_of(silent_listener), 1, "it did not answer within 1 s"),
    ):
        problem = rf"the program at 127\.0\.0\.1:{theirs} is not rank 0 of this attempt \(hpcdist/ours/1\): {reason}"
        with pytest.raises(RendezvousError, match=problem):
            open_store(at_port(theirs, rank=1, num_nodes=2), key, limit_s, tmp_path)


def test_silent_listener_on_the_port_ends_the_rank_within_its_time_limit(
    tmp_path: Path, silent_listener: socket.socket
) -> None:
    run = RunDir.create(tmp_path / "runs" / "exp" / "first")
    run.config.write_text(to_yaml(Config(runs_dir=str(tmp_path / "runs"), launch=LaunchConfig(init_timeout_s=2.0))))
    attempt, address = run.new_attempt(), f"127.0.0.1:{port_of(silent_listener)}"
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "ATTEMPT": "1"}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port_of(silent_listener))}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "hpcdist.rank.worker", str(run.path)],
        env={**rank_env(), **OWN, **{f"HPCDIST_{name}": value for name, value in place.items()}},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    # The error of the time limit of all, or that of the connection.
    problem = (
        rf"the program at {address} is not rank 0 of this attempt"
        rf"|rank 1 could not connect to the other ranks at {address}"
    )
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
    outcome = attempt.outcomes()[1]
    assert (outcome["outcome"], outcome["peer_lost"]) == ("failed", False)
    for text in (done.stderr, outcome["error"]):
        assert re.search(problem, text)


def grouped(topology: Topology, folder: Path) -> AbstractContextManager[Groups]:
    abort = partial(os.kill, os.getpid(), signal.SIGABRT)
    return process_groups(topology, CPU, "gloo", KEY, folder, init_timeout_s=30, timeout_s=30, on_expiry=abort)


def rendezvous_twice(here: Rank, ports: list[int]) -> list[float]:
    """Create the process groups on one node and on two, as after a restart, and return the sums of all-reduces."""
    dist.destroy_process_group()
    sums = []
    for attempt in (0, 1):
        topology = at_port(ports[attempt], rank=here.rank, world_size=2, job_id=f"job-{attempt}", num_nodes=1 + attempt)
        with grouped(topology, here.folder) as groups:
            assert groups.control is not None
            for group in (None, groups.control):
                value = torch.tensor([float(here.rank + 1)])
                dist.all_reduce(value, group=group)
                sums.append(value.item())
        assert not dist.is_initialized()
    with pytest.raises(ValueError, match="ours"), grouped(at_port(ports[2], rank=here.rank, num_nodes=2), here.folder):
        raise ValueError("ours")
    assert dist.is_initialized(), "groups are not destroyed after an error, because peers may be dead"
    return sums


def test_both_groups_reduce_over_all_ranks() -> None:
    assert spawn_ranks(rendezvous_twice, 2, ports=[unused_port() for _ in range(3)]) == [[3.0] * 4] * 2


def receive_late(here: Rank) -> float:
    """Receive from rank 0, which sends later than a disturbed creation of a group may take."""
    process_group.FIRST_CONNECT_TIMEOUT = timedelta(seconds=0.5)
    store = FileStore(str(here.folder / "late"), here.world_size)
    group = _AdmittingGloo(store, here.rank, here.world_size, timeout=timedelta(seconds=60))
    value = torch.ones(1)
    if here.rank == 0:
        time.sleep(1.5)  # longer than the limit
        group.send([value], 1, 0).wait()
    else:
        group.recv([value.zero_()], 0, 0).wait()
    dist.barrier()
    return value.item()


def test_receiver_waits_longer_than_for_connections() -> None:
    assert spawn_ranks(receive_late, 2) == [1.0, 1.0]


# --- The store, signed RPC messages, and the comparison of gloo's connections; SECURITY.md has the table.


STORE_KEY, OTHER = bytes(32), bytes([1] * 32)
HERE = "127.0.0.1"


def store_at(folder: Path, port: int, *, rank: int, num_nodes: int) -> Store:
    return open_store(at_port(port, rank=rank, num_nodes=num_nodes, job_id="attacked"), STORE_KEY, 30, folder)


def gets_an_answer(endpoint: str, keys: CurveKeys | None = None) -> bool:
    """Return whether a client gets an answer that has no keys, or knows the server but has other `keys`."""
    with zmq.Context() as context, context.socket(zmq.REQ) as sock:
        sock.linger = 0
        sock.sndtimeo = 500  # sending waits for ever once the server has refused the connection
        if keys is not None:
            keys.be_client(sock)
            sock.curve_serverkey = CurveKeys(STORE_KEY, "hpcdist/attacked/1")._server_public
        sock.connect(endpoint)
        with suppress(zmq.Again):
            sock.send_multipart([b"set", b"key", b"changed"])
            return bool(sock.poll(500))
    return False


def test_store_of_one_machine_has_no_port_and_one_user() -> None:
    before = process_group.inodes()
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # its parent folder is open to all users
    ours, theirs = (store_at(folder, 1, rank=rank, num_nodes=1) for rank in range(2))
    ours.set("key", "value" * 100_000)
    assert theirs.get("key") == b"value" * 100_000
    with process_group.tcp_sockets() as found:
        assert not [own for own in found if own.inode not in before]
    path = str(folder / SOCKET_NAME)
    assert as_other_user(lambda: socket.socket(socket.AF_UNIX).connect(path)).startswith("PermissionError")
    shutil.rmtree(folder)


def test_store_between_nodes_answers_only_those_who_know_the_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    port = unused_port()
    ours, theirs = (store_at(tmp_path, port, rank=rank, num_nodes=2) for rank in range(2))
    ours.set("key", "value")
    assert theirs.get("key") == b"value"

    def attack() -> list[Any]:
        answers: list[Any] = []
        for data in (b"GET / HTTP/1.1\r\n\r\n", bytes(64), b"\xff" + bytes(8) + b"\x7f\x03\0NULL" + bytes(48)):
            with socket.create_connection((HERE, port)) as sock, suppress(ConnectionResetError):
                sock.sendall(data)
                while sock.recv(100):  # a greeting, and no more
                    pass
        for keys in (None, CurveKeys(OTHER, "hpcdist/attacked/1")):
            answers.append(gets_an_answer(f"tcp://{HERE}:{port}", keys))
        for wrong, token in ((OTHER, "hpcdist/attacked/1"), (STORE_KEY, "hpcdist/attacked/2")):
            foreign = Meeting(token=token, folder=tmp_path, host=HERE, port=port, keys=CurveKeys(wrong, token))
            try:
                RendezvousStore(foreign, timedelta(seconds=10), serve=False)
            except RendezvousError as error:
                answers.append(str(error))
        return answers

    *answered, problem, other_problem = as_other_user(attack)
    assert answered == [False, False]
    for text in (problem, other_problem):
        assert text.endswith("it does not know this attempt's key")
    assert theirs.get("key") == b"value"
    assert ours.num_keys() == 1  # type: ignore[attr-defined]  # of the C++ classes too
    assert caplog.text.count("without this attempt's key") == 1


def test_program_that_ends_the_connection_before_the_first_request_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeroMQ has no connection then, and sending would wait for ever."""
    with socket.create_server((HERE, 0)) as server, ThreadPoolExecutor(1) as pool:

        def answer() -> None:
            sock, _ = server.accept()
            with sock, suppress(ConnectionError):
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 4)
                while sock.recv(1000):  # until the client has closed the connection
                    pass

        answered, ask = pool.submit(answer), _Connection.ask

        def ask_late(connection: _Connection, *request: Any) -> list[bytes]:
            answered.result()
            wait_for(lambda: not connection._socket.poll(0, zmq.POLLOUT), "ZeroMQ to end the connection")
            return ask(connection, *request)

        monkeypatch.setattr(_Connection, "ask", ask_late)
        with pytest.raises(RendezvousError, match="is not rank 0 of this attempt"):
            store_at(tmp_path, server.getsockname()[1], rank=1, num_nodes=2)


def test_store_does_what_torch_expects(tmp_path: Path) -> None:
    _, client = (store_at(tmp_path, 1, rank=rank, num_nodes=1) for rank in range(2))
    ours: Any = PrefixStore("of", client)  # calls through torch's C++ code
    reference: Any = PrefixStore("of", HashStore())
    for name, *arguments in (
        ("set", "a", "1"),
        ("append", "a", "2"),
        ("append", "new", "3"),
        ("multi_set", ["b", "c"], ["4", "5"]),
        ("multi_get", ["a", "new", "b"]),
        ("add", "count", 2),
        ("add", "count", -3),
        ("get", "count"),
        ("check", ["a", "b"]),
        ("check", ["a", "none"]),
        ("compare_set", "a", "12", "x"),
        ("compare_set", "a", "12", "y"),
        ("compare_set", "fresh", "", "z"),
        ("delete_key", "a"),
        ("delete_key", "a"),
        ("num_keys",),
        ("has_extended_api",),
    ):
        assert getattr(ours, name)(*arguments) == getattr(reference, name)(*arguments), name
    assert ours.clone().get("b") == b"4"
    with pytest.raises(DistStoreError, match=r"no rank has set 'of/never' within the time limit"):
        ours.wait(["b", "never"], timedelta(seconds=0.05))
    ours.append("b", "x")
    with pytest.raises(DistStoreError, match="invalid literal for int"):
        ours.add("b", 1)
    # A thread that waits does not keep others from the store.
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(ours.wait, ["late"], timedelta(days=100)) for _ in range(8)]
        ours.set("late", "")
        assert [one.result() for one in waiting] == [None] * 8


def survive_connections(here: Rank) -> tuple[int, float]:
    """Create gloo groups, and use them while another user connects to all ports that they have opened."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 4096))
    guard_gloo()
    ports: set[int] = set()

    def note_ports(store: Store, rank: int, size: int, before: frozenset[int], number: int) -> tuple[list[int], str]:
        with process_group.tcp_sockets() as found:
            ports.update(own.local[1] for own in found if own.peer is None and own.inode not in before)
        return refuse_strangers(store, rank, size, before, number)

    process_group.refuse_strangers = note_ports
    first, second = (dist.new_group(backend="gloo") for _ in range(2))

    def attack() -> int:
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
        kept = []
        for port in [*ports] * (1 + 1000 // len(ports)):
            with suppress(ConnectionRefusedError):
                kept.append(socket.create_connection((HERE, port)))
        return len(kept)

    num_accepted = as_other_user(attack)
    total = torch.ones(100_000)
    for group in (first, second, dist.new_group(backend="gloo")):
        dist.all_reduce(total, group=group)
    dist.destroy_process_group(first)
    dist.all_reduce(total, group=second)
    assert len(ports) >= 2
    return num_accepted, total[0].item()


def test_gloo_survives_a_thousand_connections_and_accepts_none() -> None:
    assert spawn_ranks(survive_connections, 2) == [(0, 16.0)] * 2


class AttackedStore(Store):
    """A rank's store: when gloo publishes its address, another user connects to its listening sockets and sends data.

    Args:
        attacks: for each creation of a group what is sent, and whether the connections stay open.
    """

    def __init__(self, inner: Store, attacks: list[tuple[list[bytes], bool]]) -> None:
        super().__init__()
        self.inner, self.attacks, self.known = inner, attacks, process_group.inodes()
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            self.control.close()
            send_as_other_user(theirs)
            os._exit(0)
        theirs.close()
        self.num_sent = 0

    def set(self, key: str, value: Any) -> None:
        with process_group.tcp_sockets() as found:
            ports = {own.local[1]: own.inode for own in found if own.peer is None and own.inode not in self.known}
        if ports and self.attacks:
            self.known |= set(ports.values())
            messages, stays = self.attacks.pop(0)
            for data in messages:
                self.control.send(json.dumps([list(ports), data.hex(), stays]).encode())
                self.num_sent += int(self.control.recv(100))
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        return self.inner.get(key)

    def add(self, key: str, amount: int) -> int:
        return self.inner.add(key, amount)

    def wait(self, *arguments: Any) -> None:
        self.inner.wait(*arguments)

    def check(self, keys: list[str]) -> bool:
        return self.inner.check(keys)


def send_as_other_user(requests: socket.socket) -> None:
    """Connect to ports and send data, until the other end of `requests` is closed."""
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    kept = []
    while request := requests.recv(10_000):
        ports, data, stays = json.loads(request)
        for port in ports:
            kept.append(sock := socket.create_connection((HERE, port)))
            sock.sendall(bytes.fromhex(data))
            if not stays:
                sock.close()
        requests.send(str(len(ports) * len(data) // 2).encode())


#: What gloo expects from a peer that connects: the number of a pair, which begins with 0.
NUMBERS = [number.to_bytes(8, "little") for number in range(4)]


def create_attacked_groups(here: Rank) -> tuple[list[float], list[int], list[int], bool]:
    """Create a group that gets foreign data, one whose pairs are taken three times, and one that always loses them."""
    process_group.NUM_TRIALS = 4
    known, sums, num_sent, num_sockets, reasons = process_group.inodes(), [], [], [], []
    shared = FileStore(str(here.folder / "store"), here.world_size)
    longer = [number + b"\xff" * 56 for number in NUMBERS]
    for name, attacks in (
        ("once", [([b"", b"1", b"12345678"], True)]),
        ("three", [(NUMBERS, True), (longer, True), (NUMBERS, False)]),
        ("always", [(NUMBERS, True)] * 5),
    ):
        store = AttackedStore(PrefixStore(name, shared), attacks)
        try:
            group = _AdmittingGloo(store, here.rank, here.world_size, timeout=timedelta(seconds=60))
            group.allreduce(total := torch.ones(1)).wait()
            sums.append(total.item())
        except RendezvousError as error:
            reasons.append(str(error))
        num_sent.append(store.num_sent)
        num_sockets.append(len(process_group.inodes() - known))
        known |= process_group.inodes()
    dist.barrier()  # a rank that ends closes the connections of the others
    has_reason = all(re.search(r"lost the connection .* \(\[.*gloo/.+\]:\d+[^()]*\)$", one) for one in reasons)
    return sums, num_sent, num_sockets[1:], len(reasons) == 1 and has_reason


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_gloo_group_is_created_again_after_another_user_has_taken_the_place_of_a_rank() -> None:
    # Bytes: 0 + 1 + 8; 4 times 8, 4 times 64, 4 times 8; 4 times 8 for each of 4 trials. What is left are the two
    # connections of the second group: groups that were dropped are closed.
    assert spawn_ranks(create_attacked_groups, 3) == [([3.0, 3.0], [9, 32 + 256 + 32, 4 * 32], [2, 0], True)] * 3


def test_rpc_message_without_valid_signature_is_refused() -> None:
    ours, theirs = _SignedPickler(STORE_KEY), _SignedPickler(OTHER)
    content, tensors = ours.serialize(["text", torch.ones(2)])
    found: Any = ours.deserialize(content, tensors)
    assert found[0] == "text"
    assert found[1].tolist() == [1.0, 1.0]
    for pickler, message in ((theirs, content), (ours, content[:-1] + b"!"), (ours, b""), (ours, content[32:])):
        with pytest.raises(HpcdistError, match="an RPC message is not signed with this attempt's key"):
            pickler.deserialize(message, tensors)


# --- The all-reduce check between real ranks: correct sums pass, and a wrong sum is attributed to the faulty rank.


NUM_RANKS = 3
FIX = "; have the node's memory, GPUs and network card tested, and leave it out by cluster.exclude until then"


terms = collective_check.terms


def check_error(rank: int, groups: Groups, attempt: Attempt) -> str:
    """Run the check and return its error message; empty without an error."""
    topology = topology_of(rank, NUM_RANKS, NUM_RANKS, hosts=("n1", "n2", "n3"), master_addr="n1", launcher="slurm")
    before = rng_state(CPU)
    try:
        collective_check.check(topology, CPU, "gloo", groups, attempt, timeout_s=60, on_expiry=pytest.fail)
    except PreflightError as error:
        return str(error)
    assert_states_equal(rng_state(CPU), before)
    return ""


def run_checks(here: Rank) -> dict[str, Any]:
    """Run a check without a fault and two with one; then measure."""
    control = dist.new_group(backend="gloo")
    assert isinstance(control, dist.ProcessGroup)
    groups = Groups(control, dist.HashStore())  # type: ignore[attr-defined]  # torch exports it at run time
    attempt = Attempt(here.folder / "001")
    attempt.path.mkdir(exist_ok=True)

    if here.rank == 1:
        (attempt.path / "nccl.node-00001.log").write_text("n2:91:91 [0] NCCL INFO Using network Socket\n")

    def wrong_contribution(rank: int, *arguments: Any) -> tuple[Tensor, Tensor]:
        """Damage one of the 8192 float16 elements of rank 1."""
        own, expected = terms(rank, *arguments)
        if rank == 1 and own.dtype == torch.float16:
            own[0, 1 + 5 * NUM_RANKS] += 1
        return own, expected

    def damaged_on_arrival(rank: int, *arguments: Any) -> tuple[Tensor, Tensor]:
        """Change the expected sums at rank 2 only, as if the received ones had been damaged."""
        own, expected = terms(rank, *arguments)
        if rank == 2 and own.dtype == torch.float64:
            expected[:, :7] += 1
        return own, expected

    errors = [check_error(here.rank, groups, attempt)]
    for damaged in (wrong_contribution, damaged_on_arrival):
        with patch.object(collective_check, "terms", damaged):
            errors.append(check_error(here.rank, groups, attempt))
    with patch.multiple(collective_check, MESSAGE_BYTES=(2**16, 2**18), _SLOW_S=600.0):
        measured = collective_check.measure_all_reduce(Stopwatch(CPU, "gloo"), CPU, groups)
    return {"errors": errors, "network": read_json(attempt.network), "measured": measured}


def test_check_attributes_wrong_sums_to_the_faulty_rank_and_measures() -> None:
    ranks = spawn_ranks(run_checks, NUM_RANKS)
    measured = ranks[0]["measured"]
    wrong = "an all-reduce of {} over gloo gives wrong sums"
    for found in ranks:
        assert found["errors"] == [
            "",
            f"{wrong.format('float16')}: what rank 1 on n2 adds arrives wrong at 3 of 3 ranks{FIX}",
            f"{wrong.format('float64')} at rank 2 on n3 alone{FIX}",
        ]
        assert found["measured"] == measured
    assert measured["latency_s"] > 0
    assert measured["bytes"] == 2**18
    assert measured["busbw_gb_per_s"] == pytest.approx(2**18 / measured["time_s"] / 1e9 * 4 / 3)  # 2 (n - 1) / n
    network = ranks[0]["network"]
    assert (network["backend"], network["ranks"], network["nodes"]) == ("gloo", 3, 3)
    assert network["warnings"][0].startswith("NCCL uses TCP sockets on n2, although InfiniBand is active there: ")
    assert network["text"].startswith("all-reduce over gloo of 3 ranks on 3 nodes is correct: ")
    assert network["all_reduce"]["bytes"] in collective_check.MESSAGE_BYTES
