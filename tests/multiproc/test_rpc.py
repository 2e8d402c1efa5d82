"""RPC between real ranks: values, names, commands, remote errors, stop requests, and the death of a rank."""

import json
import logging
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import zmq
from context_scene import SINGLE_RANK, new_run, open_context
from hpcdist_runs import listening, wait_for
from raw_zmtp import hold_connections, sent_and_kept_mb
from spawn import Rank, spawn_ranks
from zmq.utils.monitor import recv_monitor_message

from hpcdist.config.schema import Config
from hpcdist.errors import PeerLost, RemoteError
from hpcdist.rank import admission, rpc, rpc_transport
from hpcdist.rank.admission import CurveKeys
from hpcdist.rank.context import Context
from hpcdist.rank.frame_parts import PART_BYTES
from hpcdist.rank.rpc import RpcGroup, rpc_group
from hpcdist.run.folder import RunDir

NAMES = ["agent:0", "observer:0", "observer:1"]
CONFIG = Config(roles={"agent": 1, "observer": 2})


class CodeError(Exception):
    """An exception that cannot be created from a single string."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code, reason)


def served(group: list[RpcGroup]) -> dict[str, Callable[..., Any]]:
    def fail(_: int) -> None:
        raise CodeError(7, "no such environment")

    def later(value: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        threading.Timer(0.05, answer.set_result, [value]).start()
        return answer

    is_released = threading.Event()
    return {
        "double": lambda tensor: 2 * tensor,
        "echo": lambda *values: values,
        "fail": fail,
        "fail_at": lambda name: group[0].call(name, "fail", 0).result(),
        "later": later,
        "hold": is_released.wait,
        "release": is_released.set,
    }


def commands_and_errors(here: Rank, path: Path) -> dict[str, Any]:
    done: list[tuple[str, int]] = []
    with (
        warnings.catch_warnings(record=True) as warned,
        open_context(here, RunDir(path), CONFIG) as ctx,
        rpc_group(ctx, served(opened := [])) as group,
    ):
        opened.append(group)
        warnings.simplefilter("always")
        found: dict[str, Any] = {"name": group.name, "observers": group.of_role("observer"), "peers": group.peers}
        if not ctx.is_main:
            group.serve({"save": lambda step: done.append(("save", step)), "sum": lambda: sums(ctx, done)})
        else:
            found["doubled"] = group.call("observer:1", "double", torch.ones(2)).result().tolist()
            found["numpy"] = group.call(2, "echo", np.float32(0.5), [np.int64(3), np.bool_(True)]).result()
            found["later"] = group.call(2, "later", {"one": (1, [None, "two"])}).result()
            found |= exchanged_values(group)
            calls: dict[str, tuple[Any, ...]] = {
                "fail": (1, "fail", 0),
                "fail_at": (1, "fail_at", "observer:1"),
                "unknown": (1, "unknown"),
            }
            for name, arguments in calls.items():
                with pytest.raises(RemoteError) as failed:
                    group.call(*arguments).result()
                found[name] = str(failed.value)
            with pytest.raises(PeerLost, match=r"observer:0 \(rank 1\) does not answer: no answer in 0.2 s"):
                group.call(1, "hold", timeout_s=0.2).result()
            group.call(1, "release").result()
            with pytest.raises(TypeError, match="RPC cannot send PosixPath"):
                group.call(1, "double", Path())
            group.send_command("save", 3)
            group.send_command("sum")
            sums(ctx, done)
            group.send_command("save", 4)
            group.send_command("save", 5, to=["observer:1"])
    return {**found, "done": done, "warned": [str(warning.message) for warning in warned]}


def exchanged_values(group: RpcGroup) -> dict[str, Any]:
    """Return whether values of each kind come back equal; tensors with their strides, and writable."""
    plain: tuple[Any, ...] = (None, True, -(2**70), float("inf"), "\udc80 ä", [1, (2.5, {"a": []})], {}, ())
    base = torch.arange(48, dtype=torch.float32).view(2, 2, 3, 4)
    tensors = [
        *(base.to(kind) for kind in (torch.bfloat16, torch.bool, torch.complex64, torch.int64, torch.uint8)),
        *(base.contiguous(memory_format=torch.channels_last), base[:, :1, ::2], torch.tensor(3.0), torch.ones(0, 3)),
        torch.rand(3_000_001, requires_grad=True),
    ]
    answers = group.call(1, "echo", tensors).result()[0]
    same = [
        torch.equal(one, other) and one.dtype == other.dtype
        and (one.stride() == other.stride() or not one.is_contiguous(memory_format=torch.channels_last))
        for one, other in zip(tensors, answers, strict=True)
    ]  # fmt: skip
    for answer in answers:
        answer.zero_()
    return {"plain": group.call(1, "echo", *plain).result() == plain, "tensors": same}


def sums(ctx: Context, done: list[tuple[str, int]]) -> None:
    done.append(("sum", int(ctx.groups.sum([ctx.rank])[0])))


def test_ranks_call_each_other_by_role_and_obey_rank_0(tmp_path: Path) -> None:
    run = new_run(tmp_path / ("deep" * 30))  # a longer path than a Unix socket may have
    agent, first, second = spawn_ranks(commands_and_errors, 3, path=run.path)
    assert not [path for path in run.path.rglob("*") if path.is_socket()]
    assert agent["numpy"] == (0.5, [3, True])
    assert [type(part) for part in (agent["numpy"][0], *agent["numpy"][1])] == [float, int, bool]
    assert agent["later"] == {"one": (1, [None, "two"])}
    assert (agent["plain"], all(agent["tensors"])) == (True, True)
    assert agent["unknown"].startswith("observer:0 (rank 1 on ")
    assert "no function 'unknown' for other ranks; there are: double, echo, fail, fail_at, hold" in agent["unknown"]
    assert (agent["name"], first["name"], second["name"]) == tuple(NAMES)
    assert agent["observers"] == ["observer:0", "observer:1"]
    assert first["peers"] == ["agent:0", "observer:1"]
    assert agent["doubled"] == [2.0, 2.0]
    # In order, in the main thread: the sum is a collective of all three.
    assert first["done"] == [("save", 3), ("sum", 3), ("save", 4)]
    assert second["done"] == [*first["done"], ("save", 5)], "the last command was sent only to this rank"
    assert [rank["warned"] for rank in (agent, first, second)] == [[], [], []]
    # The error has the rank and the remote traceback once, also after two hops.
    assert agent["fail"].startswith("observer:0 (rank 1 on ")
    assert agent["fail_at"].startswith("observer:1 (rank 2 on ")
    for text in (agent["fail"], agent["fail_at"]):
        assert text.count("Traceback (most recent call last)") == 1
        assert text.count("raise CodeError(7") == 1
        assert "CodeError: (7, 'no such environment')" in text.splitlines()[0]


def step_until_stop(here: Rank, path: Path) -> int:
    with open_context(here, RunDir(path), CONFIG) as ctx, rpc_group(ctx) as group:
        ctx.roles.agree_among([0])
        if not ctx.is_main:
            if ctx.rank == 2:
                ctx.roles.request_stop()  # as the signal handler does
            group.serve({})
            return -1
        step = 0
        until = time.monotonic() + 120
        while not ctx.should_stop(step) and time.monotonic() < until:
            step += 1
        assert ctx._stop.agreed
    return step


def test_stop_request_on_any_rank_stops_rank_0(tmp_path: Path) -> None:
    steps, *others = spawn_ranks(step_until_stop, 3, path=new_run(tmp_path).path)
    assert steps > 0
    assert others == [-1, -1]


def come_late(here: Rank, path: Path) -> bool:
    """Come to the start on rank 0 only once the others wait there, with heartbeats."""
    with open_context(here, RunDir(path), CONFIG) as ctx:
        waiting = [here.folder / f"waiting-{rank}" for rank in range(here.world_size)]
        if ctx.is_main:
            wait_for(lambda: all(path.exists() for path in waiting[1:]), "heartbeats of the other ranks", timeout_s=60)
            assert not ctx.groups.store.check(["rpc-0/address/1"]), (
                "the address of rank 0 would be awaited with a limit"
            )
        ctx.timer.alive = waiting[ctx.rank].touch  # type: ignore[method-assign]
        with rpc_group(ctx) as group:
            if not ctx.is_main:
                group.serve({})
        return True


def test_start_waits_for_a_rank_that_loads_for_long(tmp_path: Path) -> None:
    assert spawn_ranks(come_late, 3, path=new_run(tmp_path).path) == [True] * 3


def lose_rank(here: Rank, path: Path, victim: int) -> str:
    """Return the error with which this rank leaves `rpc_group`."""
    try:
        with open_context(here, RunDir(path), CONFIG) as ctx, rpc_group(ctx, served([])) as group:
            ctx.groups.barrier()
            if ctx.rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            if not ctx.is_main:
                group.serve({})
            while ctx.is_main:
                for name in group.peers:
                    group.call(name, "double", torch.ones(1)).result()
    except PeerLost as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_death_of_a_rank_ends_the_others_soon(tmp_path: Path, victim: int) -> None:
    outcomes = spawn_ranks(lose_rank, 3, killed=[victim], path=new_run(tmp_path).path, victim=victim)
    # Rank 0 calls the others. The others serve, and notice only the death of rank 0 or its end after an error.
    for rank in {0, 1, 2} - {victim}:
        lost = "agent:0 (rank 0)" if rank else "observer:0 (rank 1)"
        assert outcomes[rank].startswith(f"PeerLost: {lost} does not answer: ")
        assert "no answer in" not in outcomes[rank], "noticed by the connection's end"


def exchange_on_gpus(here: Rank, path: Path) -> list[Any]:
    """Change a tensor of rank 1 by calls that are answered before the GPU has executed them, and read it.

    Rank 2 uses the CPU.
    """
    device = torch.device("cpu")
    if here.rank < 2:
        device = torch.device("cuda", here.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    weight = torch.zeros(1 << 16, device=device)
    found: list[Any] = []

    def add(gradient: torch.Tensor) -> None:
        torch.cuda._sleep(200_000_000)
        weight.add_(gradient)

    checks = threading.Semaphore(0)

    def check() -> None:
        found.append(weight.mean().item())
        checks.release()

    functions: dict[str, Callable[..., Any]] = {
        "add": add,
        "read": weight.clone,
        "drop": lambda tensor: None,
        "await_check": checks.acquire,
    }
    with open_context(here, RunDir(path), CONFIG, device=device) as ctx, rpc_group(ctx, functions) as group:
        if not ctx.is_main:
            group.serve({"check": check})
            if device.type == "cpu":
                found.append(torch._C._cuda_hasPrimaryContext(0))
        else:
            group.call(2, "drop", weight).result()
            found.append(str(group.call(2, "read").result().device))
            for number in (1.0, 2.0):
                group.call(1, "add", torch.full_like(weight, number)).result()
                # These tensors must not get the memory of the gradient, which the GPU still reads.
                others = [group.call(1, "drop", torch.full_like(weight, 9.0)) for _ in range(40)]
                found.append(group.call(1, "read").result().mean().item())
                group.send_command("check")
                group.call(1, "await_check").result()  # its main thread may obey after the next `add`
                for other in others:
                    other.result()
    return found


def test_calls_with_gpu_tensors_are_ordered_with_the_main_thread(tmp_path: Path) -> None:
    if not torch.cuda.is_available():  # not in a decorator: ranks cannot use CUDA if their parent has asked for it
        pytest.skip("needs a CUDA device")
    leader, worker, on_cpu = spawn_ranks(exchange_on_gpus, 3, path=new_run(tmp_path).path)
    assert leader == ["cpu", 1.0, 3.0]
    assert worker == [1.0, 3.0]
    assert on_cpu == [0.0, 0.0, False], "the rank on the CPU occupies no memory of a GPU"


# --- RPC against others.

#: Bytes of values: about a part, and more than one.
LARGE_SIZES = (PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES, 10 * PART_BYTES + 5)


def call_peer(here: Rank, path: Path, num_nodes: int) -> dict[str, Any]:
    """Let the two ranks call each other; return the ports that RPC has opened, and what clients of them experience."""
    received: list[str] = []
    functions: dict[str, Callable[..., Any]] = {"note": received.append, "echo": lambda *values: values}
    with open_context(here, RunDir(path), Config(), num_nodes=num_nodes) as ctx:
        before = listening(os.getpid())
        with rpc_group(ctx, functions) as group:
            ports = [port for _, port in listening(os.getpid()) - before]
            group.call(1 - ctx.rank, "note", f"rank {ctx.rank}").result()
            purpose, server = f"rpc/{ctx.topology.token}", group.transport._keys._server_public
            clients = {"no key": None, "other key": CurveKeys(bytes(32), purpose), "its key": group.transport._keys}
            admitted = [name for name, keys in clients.items() for port in ports if is_admitted(port, keys, server)]
            attacks = [sent_and_kept_mb(port, 2**28) for port in ports for _ in range(2)]
            large = [(sent, kept) for sent, kept in attacks if sent > 64 or kept > 64]
            with patch.object(admission, "MAX_UNPROVED", 8):
                held = [sock for port in ports for sock in hold_connections(port, 1000)]
            for sock in held:
                sock.close()
            damaged = [num_bytes for num_bytes in LARGE_SIZES if not is_echoed(group, 1 - ctx.rank, num_bytes)]
            ctx.groups.barrier()
    return {
        "num_ports": len(ports),
        "admitted": admitted,
        "received": received,
        "large": large,
        "damaged": damaged,
        "is_full": 0 < len(held) < 1000,
    }


def is_echoed(group: RpcGroup, rank: int, num_bytes: int) -> bool:
    """Return whether tensors and a text of this size come back equal."""
    tensor = torch.randint(256, (num_bytes,), dtype=torch.uint8)
    tensors = [tensor, tensor[:0], tensor[:7]]
    text = "t" * num_bytes
    *answers, same_text = group.call(rank, "echo", *tensors, text).result()
    return same_text == text and all(map(torch.equal, answers, tensors))


def is_admitted(port: int, keys: CurveKeys | None, server: bytes) -> bool:
    """Return whether a client that knows the server's public key can connect with its own keys and send a message."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as sock:
        sock.linger = 0
        if keys is not None:
            keys.be_client(sock)
            sock.curve_serverkey = server
        with sock.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED) as monitor:
            sock.connect(f"tcp://127.0.0.1:{port}")
            is_connected = recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            sock.disable_monitor()
        return is_connected


def test_ranks_of_one_node_open_no_port(tmp_path: Path) -> None:
    first, second = spawn_ranks(call_peer, 2, path=new_run(tmp_path).path, num_nodes=1)
    found = {"num_ports": 0, "admitted": [], "large": [], "damaged": [], "is_full": False}
    assert first == {**found, "received": ["rank 1"]}
    assert second == {**found, "received": ["rank 0"]}


def test_ranks_of_two_nodes_admit_only_clients_with_the_key(tmp_path: Path) -> None:
    first, second = spawn_ranks(call_peer, 2, path=new_run(tmp_path).path, num_nodes=2)
    # Before a client has proved its key, no large frame of it is read; RPC itself sends large values in parts.
    found = {"num_ports": 1, "admitted": ["its key"], "large": [], "damaged": [], "is_full": True}
    assert first == {**found, "received": ["rank 1"]}
    assert second == {**found, "received": ["rank 0"]}


def test_malformed_messages_are_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    random.seed(0)
    valid = [0, 10**6, 0, "echo", {"tuple": [{"tensor": 0}]}, [["float32", [2], [0], False]]]
    with (
        caplog.at_level(logging.WARNING),
        open_context(SINGLE_RANK, new_run(tmp_path), Config()) as ctx,
        rpc_group(ctx, {"echo": lambda *values: values}) as group,
    ):
        peer = group.transport._peers[0]
        bad: list[Any] = [None, {}, [], [0] * 6, "x", [0, [], 0, "echo", [], []], [1, {}, 0, "", 0, []]]
        values: list[Any] = [None, True, 0.0, -1, 99, "?", [], {}, [[]], 1e999]
        for index in range(6):
            bad += [[*valid[:index], value, *valid[index + 1 :]] for value in values]
        for shape in ([3], [-2], [2**62, 8], ["2"], [1.0, 2.0]):
            bad.append([*valid[:5], [["float32", shape, list(range(len(shape))), False]]])
        text = json.dumps(valid).encode()
        raw = [json.dumps(content).encode() for content in bad] + [b"[" * 100_000, b"\xff\x00"]
        for _ in range(300):
            broken = bytearray(text)
            broken[random.randrange(len(text))] = random.randrange(256)
            raw.append(bytes(broken))
        for header in raw:
            for frames in ([], [b"12345678"], [b"1", b"2"], [b"1234", b"5678"], [b"12345678", b""]):
                with peer.lock:
                    peer.sock.send_multipart([header, *frames])
        for command in ((["save"], (1,)), ("save", 1), ("save",)):
            with pytest.raises(RemoteError):
                group.call(0, "_command", *command).result()
        assert all(thread.is_alive() for thread in group.transport._threads)
        assert group.call(0, "echo", torch.ones(2)).result()[0].tolist() == [1.0, 1.0]
        assert group.transport._num_malformed > 300
    assert caplog.text.count("RPC: ignored") == 1


OF_CUBLAS = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")


def fill_memory(here: Rank, path: Path, lack: Exception, is_early: bool) -> str:
    """Return the error of each rank when the call of an observer finds no GPU memory.

    Args:
        lack: the error of the call.
        is_early: whether the call comes before the observer serves.
    """
    is_called = threading.Event()

    def fill() -> None:
        is_called.set()
        raise lack

    rpc.SERVES_WITHIN_S = 60.0
    with open_context(here, RunDir(path), CONFIG) as ctx:
        try:
            with rpc_group(ctx, {"fill": fill}) as group:
                if ctx.is_main:
                    group.call(2, "fill").result()
                if here.rank == 2 and is_early:
                    assert is_called.wait(timeout=60)
                group.serve({})
        except (type(lack), PeerLost) as error:
            if here.rank == 2:
                os.kill(os.getpid(), signal.SIGKILL if type(error) is type(lack) else signal.SIGTERM)
            return f"{type(error).__name__}: {error}"
    return "finished"


@pytest.mark.parametrize(
    ("lack", "is_early"),
    [(OF_CUBLAS, False), (torch.OutOfMemoryError("CUDA out of memory"), True)],
    ids=["serving", "before-it-serves"],
)
def test_rank_without_gpu_memory_for_a_call_ends(tmp_path: Path, lack: Exception, is_early: bool) -> None:
    """It raises the error itself, in `serve`, and the other ranks lose it."""
    agent, *_ = spawn_ranks(fill_memory, 3, killed=[2], path=new_run(tmp_path).path, lack=lack, is_early=is_early)
    assert agent == "PeerLost: observer:1 (rank 2) does not answer: its connection has ended"


def fill_memory_of_training_rank(here: Rank, path: Path) -> str:
    """Return the error of a call for which a rank finds no GPU memory that serves only after the answer."""
    rpc.SERVES_WITHIN_S = 0.1
    text = ""
    answered = here.folder / "answered"
    with open_context(here, RunDir(path), CONFIG) as ctx, rpc_group(ctx, {"fill": no_memory}) as group:
        if ctx.is_main:
            with pytest.raises(RemoteError) as failed:
                group.call(2, "fill").result()
            text = str(failed.value)
            answered.touch()
        else:
            wait_for(answered.exists, "the answer to rank 0")
            group.serve({})
    return text


def test_rank_that_trains_before_it_serves_answers_an_error(tmp_path: Path) -> None:
    agent, *_ = spawn_ranks(fill_memory_of_training_rank, 3, path=new_run(tmp_path).path)
    assert agent.endswith("OutOfMemoryError: CUDA out of memory"), agent


def no_memory(*_: Any) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_call_whose_arguments_cannot_be_read_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as tensors for which the receiver's GPU has no memory: the caller does not wait for its time limit."""
    with (
        open_context(SINGLE_RANK, new_run(tmp_path), Config()) as ctx,
        rpc_group(ctx, {"echo": lambda *values: values, "new": lambda: torch.ones(2)}) as group,
    ):
        monkeypatch.setattr(rpc_transport, "from_parts", no_memory)
        with pytest.raises(RemoteError, match=r"trainer:0 \(rank 0 on .*CUDA out of memory"):
            group.call(0, "echo", torch.ones(2)).result()
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            group.call(0, "new").result()  # the answer, which this rank itself has no memory for
        monkeypatch.undo()
        assert group.call(0, "echo", torch.ones(2)).result()[0].tolist() == [1.0, 1.0]
