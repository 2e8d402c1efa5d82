"""Checkpoints of models that are sharded over ranks (DTensor): any mesh reads what another has saved."""

import errno
import hashlib
import logging
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from context_scene import new_run, open_context, stop_at
from hpcdist_runs import assert_states_equal
from spawn import Rank, spawn_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor import Shard as TensorShard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hpcdist.checkpoint import shard_exchange, store
from hpcdist.checkpoint.state import Shard, load_weights
from hpcdist.checkpoint.store import CheckpointStore
from hpcdist.config.record_schema import CheckpointConfig
from hpcdist.config.schema import Config
from hpcdist.config.training_schema import ModelConfig
from hpcdist.errors import CheckpointError
from hpcdist.rank.context import Context, close
from hpcdist.run.folder import RunDir
from hpcdist.tracking.weight_source import checkpoint_weights

CONFIG = Config(checkpoint=CheckpointConfig(every_steps=4))


class Net(nn.Module):
    """Has sizes that the ranks do not divide, and a buffer, which is not sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 5)
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(1))

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.scale * self.down(self.up(self.norm(self.embedding(ids))).relu())
        return y


def sharded(ctx: Context, sizes: dict[str, int], seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model on a mesh, and its optimizer; without sizes a plain model."""
    torch.manual_seed(seed)
    net: nn.Module = Net()
    if sizes:
        mesh = ctx.mesh(**{"replicate": 1, "shard": 1, "tensor": 1, **sizes})
        if sizes.get("tensor", 1) > 1:
            parallelize_module(net, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        for layer in (net.embedding, net.up, net.down):
            fully_shard(layer, mesh=mesh["replicate", "shard"])  # type: ignore[arg-type]
        fully_shard(net, mesh=mesh["replicate", "shard"])
    return net, torch.optim.AdamW(net.parameters(), lr=0.1)


def train_step(net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    ids = torch.randint(7, (8,), generator=torch.Generator().manual_seed(step))  # the same on all ranks
    loss = net(ids).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss)


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def hashes(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return a hash of each whole tensor of a model and its optimizer. Call it on every rank."""
    tensors = {name: whole(value) for name, value in net.state_dict().items()}
    for index, values in optimizer.state_dict()["state"].items():
        tensors |= {f"{index}.{key}": whole(value) for key, value in values.items()}
    return {name: hash_of(value) for name, value in tensors.items()}


def hash_of(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


MESHES = {
    4: {
        "fsdp": {"shard": 4},
        "hsdp": {"replicate": 2, "shard": 2},
        "fsdp and tp": {"shard": 2, "tensor": 2},
        "hsdp and tp": {"replicate": 2, "tensor": 2},
        "ddp": {},
    },
    3: {"fsdp": {"shard": 3}},
    2: {"fsdp": {"shard": 2}, "tp": {"tensor": 2}, "replicas": {"replicate": 2}, "ddp": {}},
    1: {"fsdp": {"shard": 1}, "plain": {}},
}
QUICK = ("fsdp", "tp")  #: of two ranks


def save_on_meshes(here: Rank, path: Path) -> dict[str, dict[str, str]]:
    """Save a trained model on each mesh in a run of its own; return the hashes of its tensors."""
    found = {}
    for name, sizes in MESHES[here.world_size].items():
        with open_context(here, RunDir(path / f"{here.world_size} {name}"), CONFIG) as ctx:
            ctx.restore()
            net, optimizer = sharded(ctx, sizes, seed=1)
            for step in range(2):
                train_step(net, optimizer, step)
            ctx.save(2, model=net, optimizer=optimizer, trainer={"position": 7})
            found[name] = hashes(net, optimizer)
            for step in range(2):  # later changes are not in the checkpoint
                train_step(net, optimizer, step)
            close(ctx)
    return found


def restore_on_meshes(here: Rank, path: Path) -> dict[tuple[str, str], dict[str, str]]:
    """Restore the checkpoint of each run on each mesh; return the hashes."""
    found = {}
    for folder in sorted(path.iterdir()):
        for name, sizes in MESHES[here.world_size].items():
            with open_context(here, RunDir(folder), CONFIG) as ctx:
                net, optimizer = sharded(ctx, sizes, seed=2)
                saved = ctx.restore(model=net, optimizer=optimizer)
                assert saved is not None
                assert (saved.step, saved.trainer["position"]) == (2, 7)
                found[folder.name, name] = hashes(net, optimizer)
                train_step(net, optimizer, 2)  # the restored state is one to train with
                close(ctx)
    return found


def save_and_restore_on_meshes(here: Rank, path: Path) -> tuple[Any, Any]:
    MESHES[2] = {name: MESHES[2][name] for name in QUICK}
    return save_on_meshes(here, path), restore_on_meshes(here, path)


def test_fsdp_and_tensor_parallelism_restore_each_other(tmp_path: Path) -> None:
    for name in QUICK:
        RunDir.create(tmp_path / f"2 {name}")
    for expected, found in spawn_ranks(save_and_restore_on_meshes, 2, path=tmp_path):
        assert len(found) == len(QUICK) ** 2
        for (run, _), by_name in found.items():
            assert by_name == expected[run.removeprefix("2 ")]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, str]]]:
    """Runs with the checkpoints of all meshes, and the hashes of their tensors by run."""
    path = tmp_path_factory.mktemp("meshes")
    expected: dict[str, dict[str, str]] = {}
    for num_ranks in (4, 2):
        for name in MESHES[num_ranks]:
            RunDir.create(path / f"{num_ranks} {name}")
        by_rank = spawn_ranks(save_on_meshes, num_ranks, path=path)
        assert all(found == by_rank[0] for found in by_rank)
        expected |= {f"{num_ranks} {name}": found for name, found in by_rank[0].items()}
    return path, expected


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_any_mesh_restores_what_any_mesh_has_saved(saved: Any, num_ranks: int) -> None:
    path, expected = saved
    for found in spawn_ranks(restore_on_meshes, num_ranks, path=path):
        assert len(found) == len(expected) * len(MESHES[num_ranks])
        for (run, _), by_name in found.items():
            assert by_name == expected[run]


@pytest.mark.slow
def test_one_process_reads_the_weights_of_every_mesh(saved: Any) -> None:
    path, expected = saved
    for run, by_name in expected.items():
        weights = load_weights(path / run / "checkpoints" / "step-00000002")
        assert list(weights) == list(Net().state_dict())
        assert {name: hash_of(tensor) for name, tensor in weights.items()}.items() <= by_name.items()


@pytest.mark.slow
def test_replicas_write_each_box_once_and_evenly(saved: Any) -> None:
    path, _ = saved

    def num_values(run: str) -> list[int]:
        found = []
        for file in sorted((path / run / "checkpoints" / "step-00000002").glob("shard-*.pt")):
            content = torch.load(file, weights_only=True)
            tensors = [*content["model"].values(), *content["trainer"].values()]
            found.append(sum(tensor.numel() for tensor in tensors))
        return found

    total = 3 * sum(parameter.numel() for parameter in Net().parameters())
    for run in ("4 fsdp", "4 hsdp", "4 fsdp and tp", "4 hsdp and tp", "2 tp", "2 replicas"):
        sizes = num_values(run)
        assert len(sizes) == int(run[0]), run
        assert sum(sizes) == total, run
        if run != "4 fsdp":  # rank 3 has no row of the embedding, of 7 rows
            assert max(sizes) - min(sizes) <= total // 10, (run, sizes)
    assert not list((path / "4 ddp").rglob("shard-*.pt"))


# --- a loop of `ctx.steps`


def train_loop(ctx: Context, sizes: dict[str, int], *, fail_in: int | None = None) -> None:
    net, optimizer = sharded(ctx, sizes, seed=3)
    average = Net()  # a second module: plain, beside the sharded one
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    for step in ctx.steps(12, model=net, optimizer=optimizer, scheduler=scheduler, average=average):
        if step == fail_in:
            raise RuntimeError("killed")
        train_step(net, optimizer, step)
        scheduler.step()
        average.scale += 1


def loop_in_attempts(here: Rank, path: Path, sizes: dict[str, int], attempts: list[dict[str, int]]) -> None:
    for attempt in attempts:
        with open_context(here, RunDir(path), CONFIG) as ctx:
            stop_at(ctx, attempt.get("stop"))
            try:
                train_loop(ctx, sizes, fail_in=attempt.get("fail"))
                close(ctx)
            except RuntimeError:
                ctx._saves.close()


@pytest.mark.parametrize("sizes", [{"shard": 2}, pytest.param({"tensor": 2}, marks=pytest.mark.slow)])
def test_stopped_and_killed_loops_on_a_mesh_end_bit_equal(tmp_path: Path, sizes: dict[str, int]) -> None:
    whole_run, broken = new_run(tmp_path / "whole"), new_run(tmp_path / "broken")
    spawn_ranks(loop_in_attempts, 2, path=whole_run.path, sizes=sizes, attempts=[{}])
    attempts = [{"stop": 5}, {"fail": 10}, {}]
    spawn_ranks(loop_in_attempts, 2, path=broken.path, sizes=sizes, attempts=attempts)
    for run in (whole_run, broken):
        assert sorted(folder.name for folder in run.checkpoints.iterdir()) == ["step-00000008", "step-00000012"]
    for rank in range(2):
        files = [run.checkpoints / "step-00000012" / f"shard-{rank:05d}.pt" for run in (whole_run, broken)]
        expected, found = (torch.load(file, weights_only=True) for file in files)
        assert_states_equal(found, expected)


def flip_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def restored_step(here: Rank, path: Path) -> tuple[int, list[str]]:
    handler = Texts()
    logging.getLogger("hpcdist.checkpoint.store").addHandler(handler)
    with open_context(here, RunDir(path), CONFIG) as ctx:
        net, optimizer = sharded(ctx, {"shard": 2}, seed=2)
        saved = ctx.restore(model=net, optimizer=optimizer)
        close(ctx)
    return (saved.step if saved is not None else 0), handler.texts


class Texts(logging.Handler):
    """Keeps the messages."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_flipped_byte_is_named_and_the_checkpoint_before_taken(tmp_path: Path, rank: int) -> None:
    run = new_run(tmp_path)
    spawn_ranks(loop_in_attempts, 2, path=run.path, sizes={"shard": 2}, attempts=[{}])
    file = run.checkpoints / "step-00000012" / f"shard-{rank:05d}.pt"
    flip_a_byte(file)
    main, other = spawn_ranks(restored_step, 2, path=run.path)
    assert main == (
        8,
        [f"skipping checkpoint {file.parent}: {file.name} has changed since it was written (its SHA-256 differs)"],
    )
    assert other == (8, [])


def resume_unusual_tensors(here: Rank, path: Path) -> list[Any]:
    found = []
    for step in (1, 2):
        with open_context(here, RunDir(path), CONFIG) as ctx:
            saved = ctx.restore()
            if saved is not None:
                found.append(saved.trainer)
            part = DTensor.from_local(torch.ones(2), ctx.mesh(shard=2), [TensorShard(0)])
            empty = DTensor.from_local(torch.ones(0, 3), ctx.mesh(shard=2), [TensorShard(0)])
            net = nn.ParameterDict({"part": nn.Parameter(part), "empty": nn.Parameter(empty)})
            ctx.save(step, model=net, trainer={"averages": {np.int64(7): part, "empty": empty}})
            close(ctx)
    return found


def test_paths_of_numpy_and_empty_tensors_are_resumed(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    for (trainer,) in spawn_ranks(resume_unusual_tensors, 2, path=run.path):
        assert torch.equal(trainer["averages"][7], torch.ones(4))
        assert trainer["averages"]["empty"].shape == (0, 3)
    weights = load_weights(run.checkpoints / "step-00000002")
    assert {name: list(tensor.shape) for name, tensor in weights.items()} == {"part": [4], "empty": [0, 3]}


# --- errors


def save_again_after_an_error(here: Rank, path: Path, failing: int) -> str:
    """Save a step twice; the first save of one rank ends with an error of an unreachable file system."""
    shard_exchange.OWNER_TIMEOUT_S = 20.0
    log_of = logging.getLogger("hpcdist.checkpoint.saver")
    handler = Texts()
    log_of.addHandler(handler)
    with open_context(here, RunDir(path), CONFIG) as ctx:
        net, _ = sharded(ctx, {"shard": 2}, seed=1)

        def fail_once(*args: Any, **options: Any) -> Any:
            shard_exchange.save_file = store.save_file  # type: ignore[attr-defined]
            ctx._saves._saver._before_publish = None
            raise OSError(errno.ESTALE, "Stale file handle")

        if here.rank == failing == 0:
            ctx._saves._saver._before_publish = fail_once
        elif here.rank == failing:
            shard_exchange.save_file = fail_once  # type: ignore[attr-defined]
        for _ in range(2):
            ctx.save(1, model=net)
        close(ctx)
    return " ".join(handler.texts)


@pytest.mark.parametrize("failing", [0, 1])
def test_step_is_saved_again_after_an_error_that_passes(tmp_path: Path, failing: int) -> None:
    run = new_run(tmp_path)
    by_rank = spawn_ranks(save_again_after_an_error, 2, path=run.path, failing=failing)
    assert "Stale file handle" in by_rank[0]
    assert ("Stale file handle" in by_rank[1]) == (failing == 1)
    assert [folder.name for folder in run.checkpoints.iterdir()] == ["step-00000001"]
    assert list(load_weights(run.checkpoints / "step-00000001")) == list(Net().state_dict())


class Wrapped:
    """Has the state of another optimizer."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> None: ...


def errors_of_saves(here: Rank, path: Path) -> list[str]:
    messages = []
    with open_context(here, RunDir(path), CONFIG) as ctx:
        net, _ = sharded(ctx, {"shard": 2}, seed=1)
        mesh = ctx.mesh(shard=2)
        sums = DTensor.from_local(torch.ones(2), mesh, [Partial()])
        for options in ({"shard": Shard()}, {"trainer": {"sums": sums}}):
            with pytest.raises(CheckpointError) as error:
                ctx.save(1, model=net, **options)
            messages.append(str(error.value))
        part = DTensor.from_local(torch.ones(2), mesh, [TensorShard(0)])
        flat = torch.optim.LBFGS([torch.ones(2)])
        for value, content in ((flat, [part]), (Wrapped(), part)):
            value.state_dict = lambda content=content: {"state": {0: {"moment": content}}}  # type: ignore[method-assign]
            with pytest.raises(CheckpointError) as error:
                ctx.save(1, model=net, optimizer=value)
            messages.append(str(error.value))
        other = nn.Linear(4, 2 + here.rank)
        fully_shard(other, mesh=mesh)
        with pytest.raises(CheckpointError) as error:
            ctx.save(1, model=other)
        messages.append(str(error.value))
    return messages


def test_sharded_state_that_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    main, _ = spawn_ranks(errors_of_saves, 2, path=new_run(tmp_path).path)
    assert main[0] == "ctx.save: model or optimizer have sharded tensors (DTensor): leave out shard="
    assert main[1] == (
        "a DTensor of shape [2] has the placements (Partial(sum),), so each rank has only a part of a sum: call"
        " redistribute before the save"
    )
    assert main[2] == (
        "the state of optimizer has sharded tensors (DTensor) in lists, as LBFGS has them, which cannot be restored:"
        " use an optimizer with one tensor by name and parameter, such as AdamW"
    )
    assert main[3] == (
        "the state of optimizer, a Wrapped, contains that of an optimizer with sharded tensors (DTensor), which cannot"
        " be restored: pass each optimizer under its own name, such as muon=…, adamw=…"
    )
    assert main[4].startswith(
        "ctx.save: the sharded tensors (DTensor) of rank 1 have other names or shapes than those of rank 0: pass the"
    )


def errors_of_restores(here: Rank, path: Path) -> list[str]:
    messages = []
    with open_context(here, RunDir(path), CONFIG) as ctx:
        ctx.save(1, model=sharded(ctx, {"shard": 2}, seed=1)[0])
        close(ctx)
    with open_context(here, RunDir(path), CONFIG) as ctx:
        larger, smaller, wider = Net(), Net(), Net()
        larger.extra = nn.Linear(2, 2)
        del smaller.norm
        wider.down = nn.Linear(10, 6)
        for net in (larger, smaller, wider):
            fully_shard(net, mesh=ctx.mesh(shard=2))
            with pytest.raises(CheckpointError) as error:
                ctx.restore(model=net)
            messages.append(str(error.value))
        close(ctx)
    return messages


def test_restore_names_what_does_not_fit_the_model(tmp_path: Path) -> None:
    for missing, unexpected, shape in spawn_ranks(errors_of_restores, 2, path=new_run(tmp_path).path):
        assert missing.startswith("model has extra.weight, extra.bias, which the checkpoint lacks: load it into")
        assert unexpected.startswith("the checkpoint has norm.weight, norm.bias of model, which model lacks: load")
        assert shape == (
            "down.weight has the shape [6, 10], but [5, 10] in the checkpoint: load it into the same model"
        )


# --- memory

MB = 1_000_000
#: A rank may need this much beside its part of the state.
MAX_EXTRA_BYTES = 64 * MB


def status_bytes(name: str) -> int:
    """Return a line of this process's status, which is in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{name}:")]
    return 1024 * int(line.split()[1])


class Peak:
    """The growth of this process's resident memory since the creation of this object."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is the memory of now
        self._before = status_bytes("VmRSS")

    def growth(self) -> int:
        return status_bytes("VmHWM") - self._before


def large_model(ctx: Context) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = nn.Sequential(*(nn.Linear(1200, 1200, bias=False) for _ in range(10)))
    for layer in net:
        fully_shard(layer, mesh=ctx.mesh(shard=2))
    return net, torch.optim.AdamW(net.parameters(), lr=0.1)


def memory_of_saves(here: Rank, path: Path) -> dict[str, int]:
    with open_context(here, RunDir(path), CONFIG) as ctx:
        net, optimizer = large_model(ctx)
        net(torch.ones(1, 1200)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        part = 3 * sum(value.to_local().nbytes for value in net.parameters() if isinstance(value, DTensor))
        ctx.groups.barrier()
        peak = Peak()
        for step in (1, 2):
            ctx.save(step, model=net, optimizer=optimizer)
            ctx._saves.wait()
        saving = peak.growth()
        close(ctx)
    del net, optimizer
    with open_context(here, RunDir(path), CONFIG) as ctx:
        net, optimizer = large_model(ctx)
        ctx.groups.barrier()
        peak = Peak()
        ctx.restore(model=net, optimizer=optimizer)
        restoring = peak.growth()
        close(ctx)
    return {"part": part, "saving": saving, "restoring": restoring}


@pytest.mark.slow
def test_save_and_restore_need_memory_for_the_part_of_a_rank(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    for found in spawn_ranks(memory_of_saves, 2, path=run.path):
        assert found["part"] > 80 * MB
        assert found["saving"] <= found["part"] + MAX_EXTRA_BYTES, found
        # New memory for the state of the optimizer, and the pages of the mapped file of this rank.
        assert found["restoring"] <= 2 * found["part"] + MAX_EXTRA_BYTES, found


def memory_of_a_start(here: Rank, path: Path) -> dict[str, int]:
    """Start a sharded layer from the sharded checkpoint of another run."""
    source = RunDir(path / "source")
    with open_context(here, source, CONFIG) as ctx:
        layer = nn.Linear(4000, 4000, bias=False)
        fully_shard(layer, mesh=ctx.mesh(shard=2))
        ctx.save(1, model=layer, trainer={})
        close(ctx)
    run = RunDir(path / "run")
    if here.rank == 0:
        checkpoint_weights("source", source.checkpoints / "step-00000001").copy_to(run.init_from)
    torch.distributed.barrier()
    with open_context(here, run, Config(model=ModelConfig(init_from="source"))) as ctx:
        other = nn.Linear(4000, 4000, bias=False)
        fully_shard(other, mesh=ctx.mesh(shard=2))
        ctx.groups.barrier()
        peak = Peak()
        ctx.init_from(other)
        growth = peak.growth()
        close(ctx)
    found, expected = other.weight, layer.weight
    assert isinstance(found, DTensor)
    assert isinstance(expected, DTensor)
    assert torch.equal(found.to_local(), expected.to_local())
    return {"part": expected.to_local().nbytes, "growth": growth}


def test_start_from_shards_needs_memory_for_the_own_part(tmp_path: Path) -> None:
    for name in ("source", "run"):
        RunDir.create(tmp_path / name)
    for found in spawn_ranks(memory_of_a_start, 2, path=tmp_path):
        # The pages of the mapped file of this rank. A whole tensor has twice as many bytes.
        assert found["growth"] < 1.5 * found["part"], found


# --- kills


class KillAtMoment:
    """Kills the ranks at the n-th operation of this one on files of checkpoints, in any thread."""

    def __init__(self, fatal: int, pids: list[int]) -> None:
        self._left = fatal
        self._pids = pids
        fsync, write = os.fsync, store._HashingFile.write

        def watched_fsync(fd: Any) -> None:
            self.moment()
            fsync(fd)

        def torn_write(file: Any, data: Any) -> int:
            if len(data) < 100:  # one of many zip headers
                return write(file, data)
            half = len(data) // 2
            done = write(file, data[:half])
            self.moment()
            return done + write(file, data[half:])

        sys.addaudithook(self.note)
        os.fsync = watched_fsync
        store._HashingFile.write = torn_write  # type: ignore[method-assign, assignment]

    def note(self, event: str, args: Any) -> None:
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir") and "step-" in str(args[0]):
            self.moment()

    def moment(self) -> None:
        self._left -= 1
        if self._left == 0:
            self.kill()

    def kill(self) -> None:
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)


def filled(net: nn.Module, number: float) -> dict[str, Tensor]:
    """Set all weights to a number, and return tensors of twice the number."""
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(number)
    return {name: 2 * parameter.detach() for name, parameter in net.named_parameters()}


def save_until_killed(here: Rank, path: Path, victim: int, fatal: int) -> None:
    """Continue at the newest checkpoint; after each save that is complete, write its step to `durable`."""
    with open_context(here, RunDir(path), CONFIG) as ctx:
        net = nn.Sequential(nn.Embedding(700, 6), nn.Linear(6, 5))
        fully_shard(net, mesh=ctx.mesh(shard=2))
        saved = ctx.restore(model=net)
        first = 0
        if saved is not None:
            first = saved.step
            assert {whole(value).unique().item() for value in net.parameters()} == {first}
            assert {value.unique().item() for value in saved.trainer["twice"].values()} == {2 * first}
        pids = ctx.groups.all_gather(os.getpid())
        pids.sort(key=lambda pid: pid == os.getpid())  # this one last
        killer = KillAtMoment(fatal if here.rank == victim else -1, pids)
        for step in range(first + 1, first + 6):
            ctx.save(step, model=net, trainer={"twice": filled(net, step)})
            ctx._saves.wait()
            ctx.groups.barrier()
            if ctx.is_main:
                (path / "durable").write_text(str(step))
        ctx.groups.barrier()
        if here.rank == victim:
            killer.kill()
        signal.pause()


def wait_and_kill_at_random(run: RunDir, num_kills: int) -> tuple[int, int]:
    """Return the number of kills during a save, and the newest step."""
    moments = random.Random(1)
    newest = 0
    num_during_save = 0
    for _ in range(num_kills):
        spawn_ranks(
            save_until_killed,
            2,
            killed={0, 1},
            path=run.path,
            victim=moments.randrange(2),
            fatal=moments.randrange(1, 80),
        )
        durable = run.path / "durable"
        reported = int(durable.read_text()) if durable.exists() else 0
        folder = CheckpointStore(run.checkpoints).latest()
        found = folder.step if folder is not None else 0
        assert found >= max(reported, newest)
        if folder is not None:
            weights = load_weights(folder.path)
            assert {tensor.unique().item() for tensor in weights.values()} == {found}
        num_during_save += bool(list(run.checkpoints.glob(".tmp-*")))
        newest = found
    return num_during_save, newest


@pytest.mark.parametrize(
    ("num_kills", "least_during_save"),
    [
        (4, 0),  # the threads of a save run beside the training: where a kill hits them is chance
        pytest.param(10, 1, marks=pytest.mark.slow),
        pytest.param(200, 40, marks=[pytest.mark.faults, pytest.mark.timeout(3000)]),
    ],
)
def test_kills_at_random_moments_leave_a_valid_checkpoint(
    tmp_path: Path, num_kills: int, least_during_save: int
) -> None:
    num_during_save, newest = wait_and_kill_at_random(new_run(tmp_path), num_kills)
    assert num_during_save >= least_during_save
    assert newest >= num_kills // 4
