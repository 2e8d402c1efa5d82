"""RPC between real ranks: values, names, commands, remote errors, stop requests, and the death of a rank."""

import importlib
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from context_scene import SINGLE_RANK, new_run, open_context
from hpcdist_runs import listening
from spawn import Rank, spawn_ranks

from hpcdist.checkpoint.state import load_weights
from hpcdist.checkpoint.store import CheckpointStore
from hpcdist.config.launch_schema import CheckpointConfig, LaunchConfig
from hpcdist.config.schema import Config, DataConfig, ModelConfig, OptimConfig, StopConfig
from hpcdist.errors import ConfigError, HpcdistError, PeerLost, RemoteError
from hpcdist.rank.context import Context
from hpcdist.rank.process_group import guard_gloo
from hpcdist.rank.rpc import RpcGroup, rpc_group
from hpcdist.run.folder import RunDir
from hpcdist.trainers.hybrid import HybridConfig
from hpcdist.trainers.pipeline import PipelineConfig
from hpcdist.trainers.rl import RlConfig
from hpcdist.trainers.rnn import RnnConfig

NAMES = ["agent:0", "observer:0", "observer:1"]
CONFIG = Config(roles={"agent": 1, "observer": 2})
TORCH = Config(roles=CONFIG.roles, launch=LaunchConfig(rpc="torch", rpc_trusted_nodes=True))


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

    return {
        "double": lambda tensor: 2 * tensor,
        "echo": lambda *values: values,
        "fail": fail,
        "fail_at": lambda name: group[0].call(name, "fail", 0).result(),
        "later": later,
        "sleep": time.sleep,
    }


def commands_and_errors(here: Rank, path: Path, config: Config) -> dict[str, Any]:
    guard_gloo()  # torch's RPC creates a group of its own
    done: list[tuple[str, int]] = []
    with (
        warnings.catch_warnings(record=True) as warned,
        open_context(here, RunDir(path), config) as ctx,
        rpc_group(ctx, served(opened := [])) as group,
    ):
        opened.append(group)
        warnings.simplefilter("always")
        found: dict[str, Any] = {"name": group.name, "observers": group.of_role("observer"), "peers": group.peers}
        if not ctx.is_main:
            group.serve({"save": lambda step: done.append(("save", step)), "sum": lambda: sums(ctx, done)})
        else:
            found["doubled"] = group.call("observer:1", "double", torch.ones(2)).result().tolist()
            found["later"] = group.call(2, "later", {"one": (1, [None, "two"])}).result()
            found |= exchanged_values(group)
            calls = {"fail": (1, "fail", 0), "fail_at": (1, "fail_at", "observer:1"), "unknown": (1, "unknown")}
            for name, arguments in calls.items():
                with pytest.raises(RemoteError) as failed:
                    group.call(*arguments).result()
                found[name] = str(failed.value)
            with pytest.raises(PeerLost, match=r"observer:0 \(rank 1\) does not answer: no answer in 0.2 s"):
                group.call(1, "sleep", 1.0, timeout_s=0.2).result()
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
    plain = (None, True, -(2**70), float("inf"), "\udc80 ä", [1, (2.5, {"a": []})], {}, ())
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
    done.append(("sum", int(ctx.sum_over_ranks([ctx.rank])[0])))


@pytest.mark.parametrize("config", [CONFIG, TORCH], ids=["zmq", "torch"])
def test_ranks_call_each_other_by_role_and_execute_commands_of_rank_0(tmp_path: Path, config: Config) -> None:
    run = new_run(tmp_path / ("deep" * 30))  # a longer path than a Unix socket may have
    agent, first, second = spawn_ranks(commands_and_errors, 3, path=run.path, config=config)
    assert not [path for path in run.path.rglob("*") if path.is_socket()]
    assert agent["later"] == {"one": (1, [None, "two"])}
    assert (agent["plain"], all(agent["tensors"])) == (True, True)
    assert agent["unknown"].startswith("observer:0 (rank 1 on ")
    assert "no function 'unknown' for other ranks; there are: double, echo, fail, fail_at" in agent["unknown"]
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
        ctx.agree_among([0])
        if not ctx.is_main:
            if ctx.rank == 2:
                ctx.request_stop()  # as the signal handler does
            group.serve({})
            return -1
        step = 0
        until = time.monotonic() + 30
        while not ctx.should_stop(step) and time.monotonic() < until:
            step += 1
        assert ctx.stop_agreed
    return step


def test_stop_request_on_any_rank_stops_rank_0(tmp_path: Path) -> None:
    steps, *others = spawn_ranks(step_until_stop, 3, path=new_run(tmp_path).path)
    assert steps > 0
    assert others == [-1, -1]


def lose_rank(here: Rank, path: Path, victim: int, config: Config) -> str:
    """Return the error with which this rank leaves `rpc_group`."""
    try:
        with open_context(here, RunDir(path), config) as ctx, rpc_group(ctx, served([])) as group:
            ctx.barrier()
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


@pytest.mark.parametrize("config", [CONFIG, TORCH], ids=["zmq", "torch"])
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_death_of_a_rank_ends_the_others_soon(tmp_path: Path, victim: int, config: Config) -> None:
    outcomes = spawn_ranks(lose_rank, 3, killed=[victim], path=new_run(tmp_path).path, victim=victim, config=config)
    # Rank 0 calls the others. The others serve, and notice only the death of rank 0 or its end after an error.
    for rank in {0, 1, 2} - {victim}:
        lost = "agent:0 (rank 0)" if rank else "observer:0 (rank 1)"
        assert outcomes[rank].startswith(f"PeerLost: {lost} does not answer: ")
        assert "no answer in" not in outcomes[rank], "noticed by the connection's end"


def exchange_on_gpus(here: Rank, path: Path, config: Config) -> list[Any]:
    """Change a tensor of rank 1 by calls that are answered before the GPU has executed them, and read it.

    Rank 2 uses the CPU.
    """
    guard_gloo()
    device = torch.device("cpu")
    if here.rank < 2:
        device = torch.device("cuda", here.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    weight, found = torch.zeros(1 << 16, device=device), []

    def add(gradient: torch.Tensor) -> None:
        torch.cuda._sleep(200_000_000)
        weight.add_(gradient)

    checks = threading.Semaphore(0)

    def check() -> None:
        found.append(weight.mean().item())
        checks.release()

    functions = {"add": add, "read": weight.clone, "drop": lambda tensor: None, "await_check": checks.acquire}
    with open_context(here, RunDir(path), config, device=device) as ctx, rpc_group(ctx, functions) as group:
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


@pytest.mark.parametrize("config", [CONFIG, TORCH], ids=["zmq", "torch"])
def test_calls_with_tensors_on_gpus_and_the_main_thread_are_ordered(tmp_path: Path, config: Config) -> None:
    if not torch.cuda.is_available():  # not in a decorator: ranks cannot use CUDA if their parent has asked for it
        pytest.skip("needs a CUDA device")
    leader, worker, on_cpu = spawn_ranks(exchange_on_gpus, 3, path=new_run(tmp_path).path, config=config)
    assert leader == ["cpu", 1.0, 3.0]
    assert worker == [1.0, 3.0]
    assert on_cpu == [0.0, 0.0, False], "the rank on the CPU occupies no memory of a GPU"


# --- RPC against others: a second user finds no door, malformed messages are ignored, and torch's RPC is not needed.


NOBODY = 65534


def start_groups(here: Rank, path: Path, num_starts: int) -> dict[str, Any]:
    """Start RPC again and again; return the TCP ports of this rank and the answers."""
    ports, answers = set(), []
    with open_context(here, RunDir(path), Config()) as ctx:
        before = listening(os.getpid())
        for number in range(num_starts):
            with rpc_group(ctx, {"double": lambda value: 2 * value}) as group:
                ports |= listening(os.getpid()) - before
                answers.append(group.call(1 - ctx.rank, "double", number).result())
                ctx.barrier()
    return {"ports": ports, "answers": answers}


def besiege(path: Path, done: threading.Event, found: list[str]) -> None:
    """As another user, connect to every Unix socket that appears in the system, until `done`."""
    code = f"""if True:
        import os, socket, time
        os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
        seen = set()
        print("ready", flush=True)
        while not time.sleep(0.0005):
            for line in open("/proc/net/unix").read().splitlines()[1:]:
                name = line.split()[7:]
                if name and ("rpc-" in name[0]) and name[0] not in seen:
                    base = os.path.basename(name[0])
                    seen.add(name[0])
                    for target in (name[0], os.path.join({str(path)!r}, base)):
                        try:
                            socket.socket(socket.AF_UNIX).connect(target)
                            print("connected", target, flush=True)
                        except OSError as error:
                            print("refused", type(error).__name__, flush=True)
        """
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    found.append(process.stdout.readline())
    reader = threading.Thread(target=lambda: found.extend(process.stdout or ()))
    reader.start()
    done.wait()
    process.kill()
    process.wait()
    reader.join()
    process.stdout.close()


@pytest.mark.parametrize("num_starts", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_another_user_can_connect_to_nothing_while_rpc_starts(tmp_path: Path, num_starts: int) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    run = new_run(tmp_path)
    done, found = threading.Event(), []
    attacker = threading.Thread(target=besiege, args=(run.path / "attempts" / "001", done, found))
    attacker.start()
    try:
        while not found:
            attacker.join(0.01)
        first, second = spawn_ranks(start_groups, 2, path=run.path, num_starts=num_starts)
    finally:
        done.set()
        attacker.join()
    assert first == second == {"ports": set(), "answers": [2 * number for number in range(num_starts)]}
    assert [line for line in found if line.startswith("connected")] == []
    assert [line for line in found if line.startswith("refused")], "the attacker has seen the sockets"


def test_malformed_messages_are_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    random.seed(0)
    valid = [0, 10**6, 0, "echo", {"tuple": [{"tensor": 0}]}, [["float32", [2], [0], False]]]
    with (
        caplog.at_level(logging.WARNING),
        open_context(SINGLE_RANK, new_run(tmp_path), Config()) as ctx,
        rpc_group(ctx, {"echo": lambda *values: values}) as group,
    ):
        peer = group.transport._peers[0]  # type: ignore[attr-defined]
        bad: list[Any] = [None, {}, [], [0] * 6, "x", [0, [], 0, "echo", [], []], [1, {}, 0, "", 0, []]]
        for index in range(6):
            bad += [[*valid[:index], value, *valid[index + 1 :]] for value in (None, -1, 99, "?", [], {}, [[]], 1e999)]
        for shape in ([3], [-2], [2**62, 8], ["2"], [1.0, 2.0]):
            bad.append([*valid[:5], [["float32", shape, list(range(len(shape))), False]]])
        text = json.dumps(valid).encode()
        raw = [json.dumps(content).encode() for content in bad] + [b"[" * 100_000, b"\xff\x00"]
        for _ in range(300):
            broken = bytearray(text)
            broken[random.randrange(len(text))] = random.randrange(256)
            raw.append(bytes(broken))
        for header in raw:
            for frames in ([], [b"12345678"], [b"1", b"2"]):
                with peer.lock:
                    peer.sock.send_multipart([header, *frames])
        assert group.call(0, "echo", torch.ones(2)).result()[0].tolist() == [1.0, 1.0]
        assert group.transport._num_malformed > 300  # type: ignore[attr-defined]
    assert caplog.text.count("RPC: ignored") == 1


def test_torch_rpc_is_refused_where_its_sockets_can_be_reached(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"launch.rpc=torch: every user and program .* launch.rpc_trusted_nodes"):
        spawn_ranks(open_torch_rpc, 2, path=new_run(tmp_path).path)
    assert ConfigError.exit_code == 2


def open_torch_rpc(here: Rank, path: Path) -> None:
    with open_context(here, RunDir(path), Config(launch=LaunchConfig(rpc="torch"))) as ctx, rpc_group(ctx):
        pass


def load_unsigned(here: Rank, path: Path) -> str:
    """Start torch's RPC with a pickler that checks nothing, as after a change in torch; return the error."""
    from hpcdist.rank import rpc_torch

    rpc_torch._SignedPickler = lambda _: rpc_torch.internal._InternalRPCPickler()  # type: ignore[assignment,misc]
    with open_context(here, RunDir(path), Config(launch=LaunchConfig(rpc="torch"))) as ctx:
        with pytest.raises(HpcdistError) as failed, rpc_group(ctx):
            pass
        return str(failed.value)


def test_signatures_that_are_not_checked_fail_the_start_of_torch_rpc(tmp_path: Path) -> None:
    (error,) = spawn_ranks(load_unsigned, 1, path=new_run(tmp_path).path)
    assert "loads pickles without hpcdist's signature" in error


# --- Trainers with roles learn the same weights over both transports of RPC; over ZeroMQ without torch.distributed.rpc.


SHORT = StopConfig(max_steps=4, max_epochs=99)
RNN = RnnConfig(tokenizer="byte", max_corpus_mb=0.01, embedding_size=12, hidden_size=12, batch_size=4, bptt=5)
CONFIGS = {
    "rl": Config(
        roles={"agent": 1, "observer": 2},
        sections={"rl": RlConfig(num_envs=4, num_rollout_steps=32, num_eval_episodes=3)},
        checkpoint=CheckpointConfig(monitor="eval/return"),
        stop=SHORT,
    ),
    "hybrid": Config(
        roles={"trainer": 2, "parameter_server": 2},
        sections={"hybrid": HybridConfig(tables={"user": 50, "tag": 3}, num_samples=400, batch_size=16)},
        checkpoint=CheckpointConfig(monitor="eval/auc"),
        stop=SHORT,
    ),
    "rnn": Config(
        roles={"trainer": 2, "parameter_server": 2},
        sections={"rnn": RNN},
        optim=OptimConfig(max_grad_norm=0.05),
        checkpoint=CheckpointConfig(monitor="eval/loss"),
        stop=SHORT,
    ),
    "pipeline": Config(
        roles={"stage": 2},
        sections={"pipeline": PipelineConfig()},
        model=ModelConfig(name="resnet18", channels_last=True),
        data=DataConfig(name="synthetic", image_size=16, num_samples=64, batch_size=16),
        checkpoint=CheckpointConfig(monitor="eval/loss"),
        stop=SHORT,
    ),
}


def remove_torch_rpc() -> None:
    """Make torch.distributed.rpc unimportable in this process, as if torch had no RPC any more."""
    for name in ["torch.distributed.rpc", *(name for name in sys.modules if name.startswith("torch.distributed.rpc."))]:
        sys.modules[name] = None  # type: ignore[assignment]
    vars(torch.distributed).pop("rpc", None)


def train(here: Rank, path: Path, trainer: str, cfg: Config) -> None:
    if cfg.launch.rpc == "zmq":
        remove_torch_rpc()
    with open_context(here, RunDir(path), cfg) as ctx:
        ctx.export_model = lambda *_: None  # type: ignore[method-assign]  # MLflow takes seconds
        importlib.import_module(f"hpcdist.trainers.{trainer}.train").train(ctx, cfg)
        ctx.close()


def final_weights(folder: Path, trainer: str, launch: LaunchConfig) -> dict[str, torch.Tensor]:
    run, cfg = new_run(folder), replace(CONFIGS[trainer], launch=launch)
    spawn_ranks(train, sum(cfg.roles.values()), path=run.path, trainer=trainer, cfg=cfg)
    newest = CheckpointStore(run.checkpoints).latest()
    assert newest is not None
    return load_weights(newest.path)


@pytest.mark.parametrize(
    "trainer", ["rl", *(pytest.param(name, marks=pytest.mark.slow) for name in ("hybrid", "rnn", "pipeline"))]
)
def test_both_transports_train_the_same_weights(tmp_path: Path, trainer: str) -> None:
    default = final_weights(tmp_path / "zmq", trainer, LaunchConfig())
    other = final_weights(tmp_path / "torch", trainer, TORCH.launch)
    assert default.keys() == other.keys()
    assert [name for name, value in default.items() if not torch.equal(value, other[name])] == []
