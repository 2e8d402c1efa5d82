"""`Context`, the API of trainers, with one rank and with several."""

import copy
import json
import logging
import math
import random
import re
from pathlib import Path
from textwrap import dedent
from typing import Any, cast

import numpy as np
import pytest
import torch
from context_scene import SINGLE_RANK, new_run, open_context
from hpcdist_runs import assert_states_equal
from spawn import Rank, spawn_ranks
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hpcdist.checkpoint.sharded import Box
from hpcdist.checkpoint.state import Shard, load_weights
from hpcdist.config.launch_schema import LaunchConfig
from hpcdist.config.record_schema import CheckpointConfig, TrackingConfig
from hpcdist.config.schema import Config
from hpcdist.config.training_schema import DataConfig, ElasticConfig
from hpcdist.errors import CheckpointError, ConfigError, TrainerError
from hpcdist.host.json_files import read_json
from hpcdist.rank import compile_cache, process_group
from hpcdist.rank.context import Context, close
from hpcdist.rank.processes import StopFlag
from hpcdist.rank.step_timing import Totals
from hpcdist.run.folder import RunDir
from hpcdist.tracking.journal import read_records

CONFIG = Config(seed=5, checkpoint=CheckpointConfig(every_steps=4))


def draws() -> tuple[float, float, float]:
    """Return the next random number of each generator."""
    return torch.rand(()).item(), float(np.random.rand()), random.random()


def save_and_restore(here: Rank, path: Path) -> dict[str, Any]:
    run = RunDir(path)
    values: dict[str, Any] = {}
    with open_context(here, run, CONFIG) as ctx:
        values["first start"] = ctx.restore()
        model = nn.Linear(3, 2)
        wrapped = ctx.wrap(model, static_graph=True)
        values["initial"] = model.weight.detach().clone()
        values["per rank"] = draws()

        for step in range(1, 4):
            ctx.log({"loss": step / 2, "rank": here.rank}, step)
        # The second sample is of both ranks; a save without the metric leaves the results to the next one.
        ctx.report.log_samples("eval/accuracy", [True, here.rank == 0], [1, 2 * here.rank])
        ctx.report.log_samples("eval/loss", [9.0], [0])
        ctx.save(3, model=wrapped, trainer={})
        # Values that would be wrong in single precision or as a sum over other ranks.
        values["sum"] = ctx.groups.sum([2.0**24 + 1, 0.1, here.rank, -(2.0**52)])

        ctx.save(
            4,
            model=wrapped,
            trainer={"lr": 0.5},
            local={"mine": torch.full((2,), here.rank), "n": here.rank},
            metrics={"eval/accuracy": 2 / 3},
        )
        values["after saving"] = draws()
        close(ctx)

    with open_context(here, run, CONFIG) as ctx:
        restored = ctx.restore()
        assert restored is not None
        values["after restoring"] = draws()
        values["restored"] = restored
        values["due"] = [step for step in range(4, 13) if ctx.should_save(step)]
        close(ctx)
    return values


class _Told(logging.Handler):
    """Lets the other rank go on after a warning of this one."""

    def __init__(self, store: Store) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        self._store = store

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        self._store.set(f"told {len(self.texts)}", "")


def call_first_on_rank_0(here: Rank, path: Path) -> list[str]:
    if here.rank == 0:  # the other one waits for a busy rank 0, too, but for less than the usual limit
        process_group.WAIT_S = 0.1
    with open_context(here, RunDir(path), CONFIG) as ctx:
        told = _Told(ctx.groups.store)
        logging.getLogger("hpcdist.rank.process_group").addHandler(told)
        calls = (
            lambda: ctx.save(1, model=nn.Linear(1, 1), trainer={}),
            lambda: [ctx.should_stop(step) for step in (1, 2)],
            ctx.groups.barrier,
        )
        for number, call in enumerate(calls, 1):
            if here.rank == 1:
                ctx.groups.store.wait([f"told {number}"])
            call()
        close(ctx)
    return told.texts


def test_rank_that_waits_alone_says_who_must_call(tmp_path: Path) -> None:
    first, second = spawn_ranks(call_first_on_rank_0, 2, path=new_run(tmp_path).path)
    assert first == [
        f"this rank has waited 0.1 s in {name} for the other ranks: each of them must call it, too"
        for name in ("ctx.save", "should_stop", "ctx.groups.barrier")
    ]
    assert second == [], "the others are there already"


def restore_with_other_world_size(here: Rank, path: Path) -> dict[str, Any]:
    with open_context(here, RunDir(path), CONFIG) as ctx:
        restored = ctx.restore()
        assert restored is not None
        values = {"restored": restored, "draws": draws()}
        close(ctx)
    return values


def test_ranks_start_equal_and_restore_their_own_random_state(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    ranks = spawn_ranks(save_and_restore, 2, path=run.path)
    assert torch.equal(ranks[0]["initial"], ranks[1]["initial"])
    assert all(one != other for one, other in zip(ranks[0]["per rank"], ranks[1]["per rank"], strict=True))
    for rank, values in enumerate(ranks):
        assert values["first start"] is None
        assert values["after restoring"] == values["after saving"]
        assert values["due"] == [8, 12], "not the restored step"
        restored = values["restored"]
        assert (restored.step, restored.trainer, restored.local["n"]) == (4, {"lr": 0.5}, rank)
        assert torch.equal(restored.local["mine"], torch.full((2,), rank))
        assert set(restored.model) == {"weight", "bias"}
        assert torch.equal(restored.model["weight"], values["initial"])
    (file,) = run.checkpoints.rglob("samples.npy")
    assert (file.parent.name, np.load(file).tolist()) == ("step-00000004", [1, 1, 0])
    # Rank 0 logs, and sums are equal on all ranks.
    assert ranks[0]["sum"] == ranks[1]["sum"] == [2.0**25 + 2, 0.1 + 0.1, 1.0, -(2.0**53)]
    (file,) = run.journal.glob("*.jsonl")
    assert file.name == "attempt-001.rank-00000.jsonl"
    logged = [(record.step, record.metrics) for record in read_records(file)[0]]
    assert logged == [(step, {"loss": step / 2, "rank": 0.0}) for step in (1, 2, 3)]

    # Another number of ranks restores the weights and seeds the generators anew.
    others = spawn_ranks(restore_with_other_world_size, 3, path=run.path)
    for values in others:
        assert values["restored"].step == 4
        assert values["restored"].local is None
        assert values["restored"].trainer == {"lr": 0.5}
        assert torch.equal(values["restored"].model["weight"], ranks[0]["initial"])
    assert len({values["draws"] for values in others}) == 3
    assert not {values["draws"] for values in others} & {values["after saving"] for values in ranks}


def test_context_has_at_most_22_public_names(tmp_path: Path) -> None:
    with open_context(SINGLE_RANK, new_run(tmp_path), CONFIG) as ctx:
        names = [name for name in dir(ctx) if not name.startswith("_")]
        assert len(names) <= 22, names
        close(ctx)


def train_the_example(here: Rank, path: Path) -> None:
    """Run the trainer in the docstring of `Context`."""
    example = re.search(r"(?s)\n(        def train\(.*?)\n\n    \S", Context.__doc__ or "")
    assert example is not None
    step = {"build_model": lambda: nn.Linear(1, 1), "train_step": lambda model, optimizer: torch.tensor(0.5)}
    names: dict[str, Any] = {"Config": Config, "Context": Context, "torch": torch, **step}
    exec(dedent(example[1]), names)
    config = Config(params={"total_steps": 25})
    with open_context(here, RunDir(path), config) as ctx:
        names["train"](ctx, config)
        close(ctx)


def test_documented_example_logs_and_saves_the_last_step(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    spawn_ranks(train_the_example, 2, path=run.path)
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000025"]
    (file,) = run.journal.glob("*.jsonl")
    assert [record.step for record in read_records(file)[0] if "train/loss" in record.metrics] == [1, 25]


# --- sharded models


def meshes(here: Rank, path: Path) -> dict[str, Any]:
    with open_context(here, RunDir(path), Config(launch=LaunchConfig(hang_timeout_s=77.0))) as ctx:
        mesh = ctx.mesh(replicate=1, shard=-1, tensor=2)
        tensor = torch.tensor([float(here.rank)])
        dist.all_reduce(tensor, group=mesh.get_group("tensor"))
        timeouts = {
            ctx.groups.timeout - group._get_backend(ctx.device).options._timeout for group in mesh.get_all_groups()
        }
        with pytest.raises(TrainerError) as error:
            ctx.mesh(replicate=2, shard=3)
        close(ctx)
    return {
        "sizes": dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)),
        "ranks": mesh["tensor"].mesh.tolist(),
        "sum": tensor.item(),
        "device": mesh.device_type,
        "timeouts": [difference.total_seconds() for difference in timeouts],
        "error": str(error.value),
    }


def test_mesh_has_named_dimensions_and_the_rest_of_the_ranks(tmp_path: Path) -> None:
    for rank, values in enumerate(spawn_ranks(meshes, 4, path=new_run(tmp_path).path)):
        own = [0, 1] if rank < 2 else [2, 3]
        assert values["sizes"] == {"replicate": 1, "shard": 2, "tensor": 2}
        assert (values["ranks"], values["sum"], values["device"]) == (own, float(sum(own)), "cpu")
        assert values["timeouts"] == [0.0]
        assert values["error"] == (
            "ctx.mesh: replicate=2, shard=3: the product of the sizes is 6, but the run has 4 ranks: set a size to -1,"
            " which means all other ranks"
        )


def sharded_model(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model of FSDP2 with other weights for each seed."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return net, torch.optim.Adam(net.parameters(), lr=0.1)


def train_sharded(here: Rank, path: Path) -> dict[str, Any]:
    """Save after two steps and train on; the whole state in the checkpoint continues another model equally."""
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(here.rank))
    whole = StateDictOptions(full_state_dict=True)

    def losses(net: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> list[float]:
        found = []
        for _ in range(num_steps):
            loss = net(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    with open_context(here, RunDir(path), CONFIG) as ctx:
        net, optimizer = sharded_model(seed=1)
        losses(net, optimizer, 2)
        with pytest.raises(CheckpointError, match=r"sharded over ranks \(DTensor\), but rank 1 passes no shard: pass"):
            ctx.save(1, model=net if here.rank == 0 else None, trainer={})
        ctx.save(2, model=net, trainer={"optimizer": get_optimizer_state_dict(net, optimizer)})
        weights = {name: full(value) for name, value in net.state_dict().items()}
        expected = losses(net, optimizer, 2)
        ctx.export_model(net, x)  # a warning: the forward pass of rank 0 alone would wait for the others
        assert not ctx.run.model.exists()
        close(ctx)
    with open_context(here, RunDir(path), CONFIG) as ctx:
        saved = ctx.restore()
        assert saved is not None
        saved_model = dict(saved.model)
        net, optimizer = sharded_model(seed=2)
        set_model_state_dict(net, cast(Any, saved.model), options=whole)
        set_optimizer_state_dict(net, optimizer, saved.trainer["optimizer"], options=whole)
        found = losses(net, optimizer, 2)
        close(ctx)
    return {"expected": expected, "found": found, "weights": weights, "saved": saved_model}


def full(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value.clone()


def test_whole_state_of_a_sharded_model_resumes_exactly(tmp_path: Path) -> None:
    results = spawn_ranks(train_sharded, 2, path=new_run(tmp_path).path)
    for values in results:
        assert values["found"] == values["expected"]
        assert_states_equal(values["saved"], results[0]["weights"])  # buffers are those of rank 0
        assert values["saved"]["0.weight"].shape == (5, 3)


# --- single rank


def save(ctx: Any, step: int) -> None:
    ctx.save(step, model=nn.Linear(2, 2), trainer={})


def test_invalid_newest_checkpoint_is_skipped_and_replaced(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    with open_context(SINGLE_RANK, run, CONFIG) as ctx:
        save(ctx, 4)
        save(ctx, 8)
        close(ctx)
    newest = run.checkpoints / "step-00000008"
    (newest / "model.pt").write_bytes(b"torn")
    leftover = run.checkpoints / ".tmp-step-00000012-0123abcd"
    leftover.mkdir()
    with open_context(SINGLE_RANK, run, CONFIG) as ctx:
        restored = ctx.restore()
        assert restored is not None
        assert restored.step == 4
        assert not leftover.exists()
        save(ctx, 8)
        close(ctx)
    assert set(load_weights(newest)) == {"weight", "bias"}


def test_per_sample_results_must_be_complete(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = new_run(tmp_path)
    with open_context(SINGLE_RANK, run, Config()) as ctx:
        for num, indices, found in (
            (1, [0, 1], r"\[1\] .*\[2\] .*from 0 to 1"),
            (2, [-1, 10**6], "from -1 to 1000000"),
        ):
            with pytest.raises(
                TrainerError, match=rf"^ctx.report.log_samples: .*{found}: pass a value and an index, 0 to 999,9"
            ):
                ctx.report.log_samples("eval/accuracy", [1.0] * num, indices)
        for values, indices in (([1.0, math.nan], [0, 1]), ([1.0, 0.0], [0, 2])):
            ctx.report.log_samples("eval/accuracy", values, indices)
        assert caplog.text.count("log_samples are not kept: some samples have none, or none that is finite") == 2
        ctx.save(1, model=nn.Linear(2, 2), trainer={}, metrics={"eval/accuracy": 0.5})
        close(ctx)
    assert not list(run.checkpoints.rglob("samples.npy"))


def test_return_without_save_after_an_agreed_stop_is_an_error(tmp_path: Path) -> None:
    run, flag = new_run(tmp_path), StopFlag()
    flag.is_raised = True
    with open_context(SINGLE_RANK, run, CONFIG, flag) as ctx:
        assert ctx.should_stop(7, 100)
        assert ctx.should_save(7)
        with pytest.raises(CheckpointError, match=r"stopped at step 7 without saving it: call ctx\.save"):
            close(ctx)
    with open_context(SINGLE_RANK, run, CONFIG, flag) as ctx:
        assert ctx.should_stop(7, 100)
        save(ctx, 7)
        assert not ctx.should_save(7)
        close(ctx)


def test_replaced_attempt_cannot_save(tmp_path: Path) -> None:
    """As when a supervisor was suspended and another one has started the next attempt."""
    run = new_run(tmp_path)
    with open_context(SINGLE_RANK, run, Config()) as ctx:
        ctx.save(1, model=nn.Linear(2, 2), trainer={})
        ctx._saves.wait()
        run.new_attempt()
        ctx.save(2, model=nn.Linear(2, 2), trainer={})
        with pytest.raises(CheckpointError, match="attempt 2 of run first has begun: attempt 1 must not save"):
            close(ctx)
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000001"]


def test_restored_run_keeps_the_division_of_its_training_set(tmp_path: Path) -> None:
    def elastic(global_batch_size: int = 24, micro_batches: int | None = None) -> Config:
        data, launch = DataConfig(global_batch_size=global_batch_size), LaunchConfig(num_ranks=4)
        return Config(data=data, launch=launch, elastic=ElasticConfig(micro_batches=micro_batches))

    run = new_run(tmp_path)
    with open_context(SINGLE_RANK, run, elastic()) as ctx:
        assert ctx.restore() is None
        assert ctx.elastic.division(100).num_micro_batches == 4
        save(ctx, 4)
        close(ctx)
    for config, num_samples, problem in (
        (elastic(48), 100, r"data\.global_batch_size=48, but the checkpoint was saved with 24: set that, or start"),
        (elastic(24, 6), 100, r"elastic\.micro_batches=6, but the checkpoint was saved with 4: set that, or start"),
        (elastic(), 99, "the training set has 99 samples, but the checkpoint was saved with 100: use the same data"),
    ):
        with open_context(SINGLE_RANK, run, config) as ctx:
            ctx.elastic.division(num_samples)  # before the checkpoint is known
            ctx.restore()
            with pytest.raises(ConfigError, match=f"^{problem}"):
                ctx.elastic.division(num_samples)
            close(ctx)
    for second in (100, 50):  # a second training set
        with open_context(SINGLE_RANK, run, elastic(24, 4)) as ctx:
            ctx.restore()
            ctx.elastic.division(second)
            ctx.elastic.division(50)
            save(ctx, 8)
            close(ctx)


# --- Checkpoints of a model that several ranks own: each rank writes its shard, one process reads the whole model.


TABLE = torch.arange(10.0).view(5, 2)


def shard_of(rank: int, scale: float = 1.0) -> Shard:
    """Return the shard of a rank: ranks 1 and 2 own rows of a table, rank 2 also a bias, rank 0 no parameters."""
    if rank == 0:
        return Shard()
    rows = slice(0, 3) if rank == 1 else slice(3, 5)
    model = {"table.weight": scale * TABLE[rows]} | ({"bias": torch.full((2,), scale)} if rank == 2 else {})
    return Shard(
        model=model, boxes={"table.weight": Box((rows.start, 0), (5, 2))}, trainer={"rank": rank, "scale": scale}
    )


def save_twice(here: Rank, path: Path) -> None:
    with open_context(here, RunDir(path), Config()) as ctx:
        assert ctx.restore() is None
        for step, scale in ((1, 1.0), (2, 3.0)):
            shard = shard_of(here.rank, scale)
            torch.manual_seed(0)
            ctx.save(step, model=nn.Linear(2, 2) if ctx.is_main else None, trainer={"at": step}, shard=shard)
            for tensor in shard.model.values():
                tensor.fill_(-1)  # changes after the save must not be in the checkpoint
        ctx.save(2, model=None, trainer={"at": 2}, shard=shard_of(here.rank), metrics={"eval/loss": 1.0})
        close(ctx)


def restore(here: Rank, path: Path) -> Any:
    with open_context(here, RunDir(path), Config()) as ctx:
        found = ctx.restore()
        assert found is not None
        return found.trainer, [found.shard(rank) for rank in range(3)], set(found.model)


def test_one_process_reads_a_model_saved_in_shards(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    spawn_ranks(save_twice, 3, path=run.path)
    whole = load_weights(run.checkpoints / "step-00000002")
    assert set(whole) == {"weight", "table.weight", "bias"}
    assert torch.equal(whole["table.weight"], 3 * TABLE)
    assert torch.equal(whole["bias"], torch.full((2,), 3.0))
    assert torch.equal(load_weights(run.checkpoints / "step-00000001")["table.weight"], TABLE)
    assert [path.name for path in run.checkpoints.iterdir() if path.name.startswith(".")] == []
    for trainer, shards, own in spawn_ranks(restore, 3, path=run.path):
        assert trainer == {"at": 2}
        assert shards[0] is None
        assert [shard["trainer"] for shard in shards[1:]] == [{"rank": 1, "scale": 3.0}, {"rank": 2, "scale": 3.0}]
        assert own == {"weight", "bias"}

    # A checkpoint with a damaged shard is invalid.
    (run.checkpoints / "step-00000002" / "shard-00001.pt").write_bytes(b"")
    assert spawn_ranks(restore, 3, path=run.path)[0][0] == {"at": 1}


def fail_to_write(here: Rank, path: Path) -> str:
    with open_context(here, RunDir(path), Config()) as ctx:
        if here.rank == 2:  # a folder with the name of the shard
            (ctx._store.staging(1, ctx.topology.attempt) / "shard-00002.pt").mkdir(parents=True)
        ctx.groups.barrier()
        ctx.save(1, model=None, trainer={}, shard=shard_of(here.rank))
        try:
            close(ctx)
        except CheckpointError as error:
            return str(error)
    return "closed"


def test_shard_that_cannot_be_written_leaves_no_checkpoint(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    main, other, failed = spawn_ranks(fail_to_write, 3, path=run.path)
    assert other == "closed"
    assert failed.startswith("rank 2 could not write its shard of step 1: Is a directory")
    assert failed in main
    assert list(run.checkpoints.iterdir()) == []


def test_compiled_code_is_kept_after_first_step_and_at_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[str] = []
    monkeypatch.setattr(compile_cache, "save_soon", lambda: kept.append(""))
    with open_context(SINGLE_RANK, new_run(tmp_path), Config()) as ctx:
        for step in (1, 2):
            ctx.should_stop(step)
            assert len(kept) == 1
        ctx.save(2, model=nn.Linear(1, 1))
        assert len(kept) == 2
        close(ctx)


# --- Step timing of real ranks by a clock of the test, of which one has a slow forward pass and one slow data loading.


#: Seconds of a slow part of a step, and of each wait for other ranks.
SLOW_S = 0.5
WAIT_S = 4.0
NUM_STEPS = 12
LOG_EVERY = 4


class Clock:
    """A clock that the test sets forward."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds


class SlowNetwork(nn.Module):
    """A small network with buffers; its forward pass takes `forward_s` seconds of a clock."""

    def __init__(self, clock: Clock | None = None, forward_s: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        self.layers[0].weight.requires_grad_(False)
        self.clock = clock
        self.forward_s = forward_s

    def forward(self, x: Tensor) -> Tensor:
        if self.clock is not None:
            self.clock.seconds += self.forward_s
        y: Tensor = self.layers(x)
        return y


def train(ctx: Context, clock: Clock, first: int, *, compute_s: float = 0.0, data_s: float = 0.0) -> Totals:
    """Train a few steps; return the totals of all steps but the first."""
    model = ctx.wrap(SlowNetwork(clock, compute_s))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    before = Totals()
    for step in range(first, first + NUM_STEPS + 1):
        clock.seconds += data_s  # data loading
        model(torch.ones(4, 4)).sum().backward()
        clock.seconds += WAIT_S  # the gradients of the other ranks, which arrive after the last one of this rank
        optimizer.step()
        optimizer.zero_grad()
        ctx.should_stop(step)
        if step == first:
            before = ctx.timer.totals
        if step % 5 == 0:  # an evaluation, with the wrapped model, and a checkpoint
            model.eval()
            model(torch.ones(4, 4))
            model.train()
            ctx.save(step, model=model, trainer={})
    differences: list[Any] = [after - then for after, then in zip(ctx.timer.totals, before, strict=True)]
    return Totals(*differences)


def timed_totals(here: Rank) -> dict[str, Any]:
    clock = Clock()
    exchange_buffers = DistributedDataParallel._sync_buffers

    def exchange_slowly(model: DistributedDataParallel) -> None:
        exchange_buffers(model)  # type: ignore[no-untyped-call]
        clock.seconds += WAIT_S  # for the buffers of rank 0, before the forward pass

    DistributedDataParallel._sync_buffers = exchange_slowly  # type: ignore[method-assign]
    config = Config(tracking=TrackingConfig(uri="", log_every_steps=LOG_EVERY))
    run = new_run(here.folder) if here.rank == 0 else RunDir(here.folder / "runs" / "exp" / "first")
    with open_context(here, run, config) as ctx:
        ctx.timer._now = ctx.timer._mark = clock.now
        compute_s = SLOW_S if here.rank == 1 else 0.0
        data_s = SLOW_S if here.rank == 2 else 0.0
        totals = train(ctx, clock, 1, compute_s=compute_s, data_s=data_s)
        close(ctx)
        journal = run.journal / f"attempt-001.rank-{here.rank:05d}.jsonl"
        beat = read_json(run.attempt(1).beat(here.rank))
    lines = journal.read_text().splitlines()[1:] if journal.exists() else []  # the first line has the format
    return {"totals": totals, "journal": [json.loads(line) for line in lines], "beat": beat}


def test_slow_compute_and_data_are_attributed_to_the_slow_rank(tmp_path: Path) -> None:
    ranks = spawn_ranks(timed_totals, num_ranks=3)
    num_timed = NUM_STEPS - 2  # steps after an evaluation are not counted
    slow_s = num_timed * SLOW_S

    totals = [found["totals"] for found in ranks]
    assert [total.own_steps for total in totals] == [num_timed] * 3
    assert [total.steps for total in totals] == [num_timed] * 3
    assert [total.compute_s for total in totals] == [0.0, slow_s, 0.0], "waiting for buffers is not compute time"
    assert [total.data_s for total in totals] == [0.0, 0.0, slow_s], "waiting for gradients is not data time"
    assert [total.step_s for total in totals] == [2 * num_timed * WAIT_S + own for own in (0.0, slow_s, slow_s)]

    points = [line for line in ranks[0]["journal"] if "time/step_s" in line["m"]]
    assert [line["s"] for line in points] == [4, 8, 12]
    assert all(set(line["m"]) == {"time/step_s", "time/data_s", "time/compute_s"} for line in points)
    assert all("time/step_s" not in line["m"] for found in ranks[1:] for line in found["journal"]), "one rank per node"
    timing = ranks[2]["beat"]["timing"]
    assert timing["own_steps"] >= num_timed
    assert timing["data_s"] >= slow_s


def compiled_and_copied(here: Rank) -> dict[str, Any]:
    """Return the number of timed steps of compiled models, and the output and timer of a copied model."""
    run = new_run(here.folder)
    with open_context(here, run, Config(tracking=TrackingConfig(uri=""))) as ctx:

        def own_steps(model: nn.Module) -> int:
            before = ctx.timer.totals.own_steps
            for step in range(4):
                model(torch.ones(4, 4)).sum().backward()
                ctx.should_stop(step + 1)
            return ctx.timer.totals.own_steps - before

        module = SlowNetwork()
        module.layers.compile(backend="eager")
        wrapped = ctx.wrap(SlowNetwork(), static_graph=True)
        found: dict[str, Any] = {
            "plain": own_steps(wrapped),
            "compiled inside": own_steps(ctx.wrap(module)),
            "compiled outside": own_steps(torch.compile(ctx.wrap(SlowNetwork()), backend="eager")),  # type: ignore[arg-type]
        }
        copied = copy.deepcopy(wrapped)
        with torch.no_grad():
            copied.module.layers[3].weight.zero_()
            copied.module.layers[3].bias.fill_(7.0)
        copied.eval()
        found["copy"] = (copied(torch.ones(1, 4)).tolist(), copied._timer)
        close(ctx)
    return found


def test_compiled_models_are_timed_and_copies_are_not() -> None:
    (found,) = spawn_ranks(compiled_and_copied, num_ranks=1)
    assert found["copy"] == ([[7.0, 7.0]], None)
    assert (found["plain"], found["compiled inside"], found["compiled outside"]) == (3, 4, 4)
