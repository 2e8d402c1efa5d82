"""DDP and parameter servers: trainers hold the dense part of a model, servers its embedding tables, spread by row.

Trainer 0 is rank 0 and leads; there is no master beside it, since a rank that computes nothing costs a core. Every
trainer reads its own share of the data, looks up its bags one batch ahead, and sends the gradients of the sums back;
DDP averages the dense gradients over the trainers alone.

`mode: sync` takes the trainers' steps together: a server applies the gradients of all trainers as one update, in the
trainers' order, and a value never leaves before the update that would change it. That is a single process on the joint
batch, up to the order of sums. `mode: async` applies each trainer's gradients when they come (Hogwild, Niu et al.
2011), and answers a lookup at once: it misses the trainer's own last update, and whatever others have under way.
Trainers then wait for each other in DDP alone. It is not repeatable, and sparse rows that are used often may need a
smaller `table_lr`.

Source of the method: https://docs.pytorch.org/tutorials/advanced/rpc_ddp_tutorial.html
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from itertools import islice
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (the name everyone uses)
from torch import Tensor, nn
from torch.distributed import rpc
from torch.nn.parallel import DistributedDataParallel

from hpcdist.checkpoint.shards import Shard
from hpcdist.config.schema import Config
from hpcdist.rank.context import Context
from hpcdist.rank.ddp_buckets import settle_buckets
from hpcdist.rank.network.rpc import RpcGroup, remote, rpc_group
from hpcdist.rank.optimizer import build_optimizer
from hpcdist.rank.training_position import Position
from hpcdist.trainers.hybrid.click_logs import Clicks, batches, load_clicks, padded
from hpcdist.trainers.hybrid.click_model import ClickModel, auc, dense_part
from hpcdist.trainers.hybrid.exchange import TableServer
from hpcdist.trainers.hybrid.lookups import Lookup, Lookups, Plan, Units, choose
from hpcdist.trainers.hybrid.schema import HybridConfig
from hpcdist.trainers.hybrid.tables import Layout, TableShard, weight_name

log = logging.getLogger(__name__)


@dataclass
class Meter:
    """This trainer's loss since the last logged point."""

    loss_sum: float = 0.0
    num_steps: int = 0
    since: float = 0.0


@dataclass(frozen=True)
class Groups:
    """Who talks to whom. Every rank makes all of them, in this order."""

    exchange: dist.ProcessGroup  #: lookups and gradients, all ranks, on the host
    host: dist.ProcessGroup  #: the trainers' small numbers
    dense: dist.ProcessGroup  #: the trainers' dense gradients, on their devices


@dataclass(frozen=True)
class Training:
    """What a trainer has that does not change while training."""

    ctx: Context
    cfg: Config
    rpc: RpcGroup
    groups: Groups
    train: Clicks
    test: Clicks
    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    lookups: Lookups
    steps_per_epoch: int
    num_eval_batches: int
    total_steps: int = 0  #: set once it is known where training goes on from


@dataclass(frozen=True)
class Prepared:
    """A batch before its lookup: what of the bags is to be asked of whom, and what the trainer has by itself."""

    units: Units
    numeric: Tensor
    labels: Tensor


def train(ctx: Context, cfg: Config) -> None:
    """Train, evaluate after each epoch, and leave checkpoints and, where the tables are small, the final model."""
    ctx.roles.require(trainer=None, parameter_server=None)
    layout = Layout(
        cfg.section(HybridConfig).tables, cfg.section(HybridConfig).embedding_dim, ctx.roles.count("parameter_server")
    )
    ctx.agree_among(ctx.ranks_of("trainer"))
    groups = _make_groups(ctx, cfg)
    with rpc_group(ctx) as group:
        if ctx.role == "parameter_server":
            _serve(ctx, cfg, layout, groups, group)
        else:
            _train(ctx, cfg, layout, groups, group)


def _make_groups(ctx: Context, cfg: Config) -> Groups:
    trainers = ctx.ranks_of("trainer")

    def make(ranks: range, backend: str) -> dist.ProcessGroup:
        # A rank that is not in it gets a number instead, and does not use it.
        timeout = timedelta(seconds=cfg.launch.hang_timeout_s + 60)
        return cast(dist.ProcessGroup, dist.new_group(list(ranks), backend=backend, timeout=timeout))

    exchange, host = make(range(ctx.world_size), "gloo"), make(trainers, "gloo")
    devices: list[str] = [""] * ctx.world_size
    dist.all_gather_object(devices, ctx.device.type, group=exchange)
    on_gpus = all(devices[rank] == "cuda" for rank in trainers)
    return Groups(exchange, host, make(trainers, "nccl") if on_gpus and dist.is_nccl_available() else host)


# --- servers

_shard: TableShard | None = None


def _serve(ctx: Context, cfg: Config, layout: Layout, groups: Groups, group: RpcGroup) -> None:
    """Hold rows of the tables, until rank 0 leaves."""
    global _shard
    hybrid = cfg.section(HybridConfig)
    shard = _shard = TableShard(
        layout,
        ctx.role_index,
        optimizer=hybrid.table_optimizer,
        lr=hybrid.table_lr,
        scale=hybrid.init_scale,
        seed=cfg.seed,
        device=ctx.device,
    )
    if (saved := ctx.restore()) is not None:
        own_first = sorted(range(saved.world_size), key=lambda rank: rank != ctx.rank)
        shard.load(saved.shard(rank) for rank in own_first)
    trainers = list(ctx.ranks_of("trainer"))
    server = TableServer(shard, groups.exchange, len(trainers))
    together = [trainers] if hybrid.mode == "sync" else [[trainer] for trainer in trainers]
    # Not as a context manager: after an error it would wait for threads that wait for a peer.
    pool = ThreadPoolExecutor(len(together), thread_name_prefix="tables")
    work = [pool.submit(server.serve, ranks, sync=hybrid.mode == "sync") for ranks in together]

    def save(step: int) -> None:
        ctx.save(step, model=None, trainer={}, shard=shard.checkpoint())

    group.serve({"save": save}, work)
    pool.shutdown()


@remote
def _rows_of(table: str) -> Tensor:
    """This server's rows of a table, [rows, dim], on the host."""
    assert _shard is not None
    return _shard.table_rows(table).cpu()


# --- trainers


def _train(ctx: Context, cfg: Config, layout: Layout, groups: Groups, group: RpcGroup) -> None:
    run = _set_up(ctx, cfg, layout, groups, group)
    at, meter = _restore(run)
    run = replace(run, total_steps=at.total_steps(cfg.stop))
    while not (reason := at.end_reason(cfg.stop, cfg.checkpoint, run.total_steps)):
        if not _train_epoch(run, at, meter):
            run.lookups.leave()
            return  # stopped, and saved
        metrics = evaluate(run)
        ctx.log(metrics, at.step)
        at.note_evaluation(metrics, cfg.checkpoint)
        _save(run, at, meter, metrics)
    ctx.end_reason = reason
    run.lookups.leave()
    if ctx.is_main:
        _export(run, layout)


def _set_up(ctx: Context, cfg: Config, layout: Layout, groups: Groups, group: RpcGroup) -> Training:
    hybrid, num_trainers = cfg.section(HybridConfig), ctx.roles.count("trainer")
    shares = load_clicks(hybrid, cfg.seed, share=ctx.role_index, num_shares=num_trainers)
    data, test = (clicks.with_ids(layout.place(clicks.bags.ids, clicks.table_of_id)) for clicks in shares)
    num_inputs = len(hybrid.tables) * hybrid.embedding_dim + data.numeric.shape[1]
    dense = dense_part(num_inputs, hybrid.hidden_sizes)
    model = ctx.wrap(dense, process_group=groups.dense, static_graph=True)
    if num_trainers > 2:  # a + b is b + a, so two trainers agree in any order
        example = torch.zeros(2, num_inputs, device=ctx.device)
        settle_buckets(model, lambda: model(example).sum())
    first_two = [data.take(samples).bags for samples in islice(_samples_of(cfg, data, epoch=0, start=0), 2)]
    plan = choose([(bags.ids, bags.offsets) for bags in first_two], layout.starts, num_trainers)
    # A setting wins over what was found; without waiting for updates there is nothing to be had later.
    plan = Plan(
        pool_at_server=plan.pool_at_server if hybrid.pool_on == "auto" else hybrid.pool_on == "parameter_server",
        ahead=hybrid.mode == "async" or (plan.ahead if hybrid.prefetch == "auto" else hybrid.prefetch == "values"),
    )
    log.info("%d training and %d test samples; %s", len(data), len(test), plan)
    num_test = _sums(groups, [0.0] * ctx.role_index + [len(test)] + [0.0] * (num_trainers - ctx.role_index - 1))
    return Training(
        ctx=ctx,
        cfg=cfg,
        rpc=group,
        groups=groups,
        train=data,
        test=test,
        model=model,
        optimizer=build_optimizer(model.parameters(), cfg.optim),
        lookups=Lookups(groups.exchange, ctx.ranks_of("parameter_server"), layout, plan),
        steps_per_epoch=math.ceil(len(data) / hybrid.batch_size),
        num_eval_batches=math.ceil(max(num_test) / hybrid.eval_batch_size),
    )


def _sums(groups: Groups, values: Sequence[float]) -> list[float]:
    """Each value's sum over the trainers."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, group=groups.host)
    return [float(value) for value in tensor.tolist()]


# --- one epoch, one step


def _samples_of(cfg: Config, data: Clicks, *, epoch: int, start: int) -> Iterator[Tensor]:
    return batches(len(data), cfg.section(HybridConfig).batch_size, seed=cfg.seed, epoch=epoch, start=start)


def _prepared(run: Training, data: Clicks, samples: Tensor) -> Prepared:
    batch, device = data.take(samples), run.ctx.device
    units = run.lookups.prepare(batch.bags.ids, batch.bags.offsets)
    return Prepared(units, batch.numeric.to(device), batch.labels.to(device))


def _train_epoch(run: Training, at: Position, meter: Meter) -> bool:
    """Do what is left of the epoch; False when the trainers agreed to stop, with everything saved."""
    ctx, lookups = run.ctx, run.lookups
    samples = _samples_of(run.cfg, run.train, epoch=at.epoch, start=at.step_in_epoch)
    prepared = (_prepared(run, run.train, one) for one in islice(samples, run.total_steps - at.step))
    batch = next(prepared, None)  # none where it was stopped before an evaluation
    lookup = lookups.request(batch.units, train=True) if batch is not None else None
    following = next(prepared, None)
    run.model.train()
    meter.since = time.perf_counter()
    while batch is not None and lookup is not None:
        with ctx.timer.waiting():
            pooled = lookups.collect(lookup)
        ahead = lookups.request(following.units, train=True) if following is not None else None
        meter.loss_sum += _step(run, batch, lookup, pooled)
        meter.num_steps += 1
        at.count_step()
        after = next(prepared, None)  # made while the servers apply the gradients
        if at.step % run.cfg.tracking.log_every_steps == 0:
            _log(run, at, meter)
        stop = ctx.should_stop(at.step, run.total_steps)
        # A save before an evaluation waits for it, unless the trainers leave before.
        if ctx.should_save(at.step) and (stop or not at.before_evaluation(run.total_steps)):
            _save(run, at, meter, {})
        if stop:
            return False
        batch, lookup, following = following, ahead, after
    at.close_epoch()
    return True


def _step(run: Training, batch: Prepared, lookup: Lookup, pooled: Tensor) -> float:
    """One step of the dense part; the bags' gradients are on their way to the servers at its end. Returns the loss."""
    inputs = pooled.to(run.ctx.device).requires_grad_()
    # As soon as it is there, before DDP's exchange is over.
    inputs.register_hook(lambda gradient: run.lookups.push(lookup, gradient))
    loss = F.binary_cross_entropy_with_logits(_logits(run.model, inputs, batch.numeric), batch.labels)
    loss.backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    return loss.item()


def _logits(dense: nn.Module, pooled: Tensor, numeric: Tensor) -> Tensor:
    """[B] from the sums of all bags [B × tables, dim] and the numeric features [B, k]."""
    logits: Tensor = dense(torch.cat([pooled.view(len(numeric), -1), numeric], dim=1))
    return logits.squeeze(1)


def _log(run: Training, at: Position, meter: Meter) -> None:
    """Record the interval's mean loss over all trainers."""
    loss_sum, num_steps = _sums(run.groups, [meter.loss_sum, meter.num_steps])
    samples_per_step = run.cfg.section(HybridConfig).batch_size * run.ctx.roles.count("trainer")
    now = time.perf_counter()
    metrics = {
        "train/loss": loss_sum / num_steps,
        "train/epoch": at.epochs,
        "train/samples_per_s": samples_per_step * meter.num_steps / (now - meter.since),
    }
    run.ctx.log(metrics, at.step)
    meter.loss_sum, meter.num_steps, meter.since = 0.0, 0, now


# --- evaluation and the end


@torch.no_grad()
def evaluate(run: Training) -> dict[str, float]:
    """AUC and log-loss over the whole test set, equal on all trainers; of the synthetic log the best AUC that there is.

    Scores of all trainers are brought together, eight bytes a sample and trainer: an AUC is not a mean of parts.
    """
    size = run.cfg.section(HybridConfig).eval_batch_size
    starts = range(0, run.num_eval_batches * size, size)  # a share that is one sample shorter may end in an empty batch
    prepared = (_prepared(run, run.test, torch.arange(len(run.test))[start : start + size]) for start in starts)
    scores = []
    for batch in prepared:
        pooled = run.lookups.collect(run.lookups.request(batch.units, train=False)).to(run.ctx.device)
        scores.append(_logits(run.model.module, pooled, batch.numeric).cpu())
        run.ctx.alive()
    mine = [torch.cat(scores), run.test.labels] + ([] if run.test.best_scores is None else [run.test.best_scores])
    found: list[Any] = [None] * run.ctx.roles.count("trainer")
    dist.all_gather_object(found, torch.stack(mine), group=run.groups.host)
    logits, labels, *best = torch.cat(found, dim=1)
    log_loss = F.binary_cross_entropy_with_logits(logits.double(), labels.double())
    metrics = {"eval/auc": auc(logits, labels), "eval/log_loss": float(log_loss)}
    return metrics | ({"eval/best_auc": auc(best[0], labels)} if best else {})


def _export(run: Training, layout: Layout) -> None:
    """The final model in one process, where its tables are small enough to be brought together at rank 0."""
    hybrid = run.cfg.section(HybridConfig)
    num_mb = 4e-6 * sum(layout.tables.values()) * layout.dim
    if num_mb > hybrid.export_max_mb:
        log.info(
            "tables of %.0f MB (hybrid.export_max_mb=%g): the final model is in checkpoints/ alone",
            num_mb,
            hybrid.export_max_mb,
        )
        return
    test, _ = load_clicks(hybrid, run.cfg.seed, share=0, num_shares=run.ctx.roles.count("trainer"))
    example = padded(test.take(torch.arange(2)), bag_size := int(test.bags.offsets.diff().max().clamp(min=1)))
    model = ClickModel(
        layout.tables,
        dim=layout.dim,
        num_numeric=run.test.numeric.shape[1],
        hidden=hybrid.hidden_sizes,
        bag_size=bag_size,
    )
    state = {f"dense.{name}": value for name, value in run.model.module.state_dict().items()}
    servers = run.rpc.of_role("parameter_server")
    for table in layout.tables:
        parts = [rpc.rpc_async(server, _rows_of, (table,)) for server in servers]
        state[weight_name(table)] = torch.cat([part.wait() for part in parts])
    model.load_state_dict(state)
    run.ctx.export_model(model, example)


# --- checkpoints


def _save(run: Training, at: Position, meter: Meter, metrics: dict[str, float]) -> None:
    """Every rank saves: trainers here, servers as rank 0 orders, when all gradients up to this step are applied."""
    run.lookups.flush()
    dist.barrier(group=run.groups.host)
    if run.ctx.is_main:
        run.rpc.order("save", at.step, to=run.rpc.of_role("parameter_server"))
    run.ctx.save(
        at.step,
        model=nn.ModuleDict({"dense": run.model}),
        trainer={"optimizer": run.optimizer.state_dict(), "position": asdict(at)},
        local={"loss_sum": meter.loss_sum, "num_steps": meter.num_steps},
        metrics=metrics,
        shard=Shard(),
    )


def _restore(run: Training) -> tuple[Position, Meter]:
    at, meter = Position(steps_per_epoch=run.steps_per_epoch), Meter()
    saved = run.ctx.restore()
    if saved is None:
        return at, meter
    run.model.module.load_state_dict({name.removeprefix("dense."): value for name, value in saved.model.items()})
    run.optimizer.load_state_dict(saved.trainer["optimizer"])
    if saved.local is not None:
        meter = Meter(**saved.local)
    at = Position(**saved.trainer["position"])
    at.rescale(run.steps_per_epoch)
    return at, meter
