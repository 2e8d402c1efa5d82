"""DDP with parameter servers: trainers hold the dense part of a model, servers hold its embedding tables.

A sample has numeric features and, for each table, a *bag* of ids; the dense part takes the sums of the rows of its
bags. Each trainer reads its own share of the samples, looks up the rows of its next batch one batch ahead, and sends
the gradients of the sums back. DDP averages the dense gradients over the trainers.

A server applies the gradients of all trainers as one update, in the order of the trainers. It sends the values that an
update has changed again, so that no trainer computes with older ones. The result equals a single process on the joint
batch, up to the order of sums.

The number of shares of the samples is that of the trainers at the first start. A resume with fewer trainers gives some
of them several shares, with one batch of each in a step: the joint batches, and the result up to the order of
sums, stay the same. A resume with more trainers than shares divides the samples anew.

Source of the method: https://docs.pytorch.org/tutorials/advanced/rpc_ddp_tutorial.html
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (the usual name)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hpcdist.checkpoint.initial_weights import initial_weights, load_into
from hpcdist.checkpoint.state import Shard
from hpcdist.config.roles import share_of
from hpcdist.config.schema import Config
from hpcdist.errors import DataError
from hpcdist.rank.context import Context, Restored
from hpcdist.rank.device import collective_backend
from hpcdist.rank.process_group import Groups, gloo_group
from hpcdist.rank.rpc import RpcGroup, rpc_group
from hpcdist.rank.training_loop import MAX_ORDER_FREE_RANKS, Meter, Progress, build_optimizer, settle_buckets
from hpcdist.run.figures import Curves
from hpcdist.trainers.hybrid import HybridConfig
from hpcdist.trainers.hybrid.click_logs import Clicks, FileLog, SyntheticLog, batches, identity, padded
from hpcdist.trainers.hybrid.tables import Lookup, TableClient, TableLayout, serve_tables, weight_name

log = logging.getLogger(__name__)
#: Test samples per trainer and batch.
EVAL_BATCH_SIZE = 4096
#: Fraction of the samples, at the end of the log, for the evaluation.
EVAL_FRACTION = 0.1
#: Maximum size of the tables for an export as MLflow model, since rank 0 has to hold all of them.
EXPORT_MAX_MB = 256


def train(ctx: Context, cfg: Config) -> None:
    """Train, evaluate after each epoch, save checkpoints and, if the tables are small, export the final model."""
    ctx.roles.require(trainer=None, parameter_server=None)  # any number of each
    hybrid = cfg.section(HybridConfig)
    layout = TableLayout(hybrid.tables, hybrid.embedding_dim, ctx.roles.count("parameter_server"))
    # Trainers decide on stops and saves: servers count no steps.
    trainers = ctx.roles.agree_among(ctx.roles.ranks_of("trainer"))
    dense_group = make_dense_group(ctx)
    if ctx.roles.own == "parameter_server":
        serve_tables(ctx, cfg, layout, whole_on_meta(hybrid))
        return
    # It restores at the same time as the servers, which restore before RPC starts.
    part = open_dense_part(ctx, cfg, layout, trainers, dense_group)
    with rpc_group(ctx) as rpc:
        final = train_dense_part(ctx, cfg, layout, trainers, part, rpc)
        if not ctx.is_main:
            rpc.serve({})  # until rank 0 has the tables of the final model
    if final is not None:
        ctx.export_model(*final)


def train_dense_part(
    ctx: Context,
    cfg: Config,
    layout: TableLayout,
    trainers: Groups,
    part: "DensePart",
    rpc: RpcGroup,
) -> tuple[nn.Module, Tensor] | None:
    """Train as a trainer, with constant learning rates. Returns the final model and its example on rank 0."""
    samples, progress, meter = part.samples, part.progress, part.meter
    # The client chooses the form of its messages by the rows of these batches.
    first_batches = islice(epoch_batches(cfg, samples, epoch=0), 2)
    tables = TableClient(ctx, rpc, layout, first_batches)
    steps = ctx.steps(progress.total_steps, save=partial(save_step, ctx, trainers, tables, rpc, part))
    ctx.timer.training_begins()  # the time until here counts as start-up
    if ctx.roles.count("trainer") > MAX_ORDER_FREE_RANKS:  # a resumed run must add in the same order
        num_inputs = next(part.model.parameters()).shape[1]
        example = torch.zeros(2, num_inputs, device=ctx.device)
        settle_buckets(part.model, lambda: part.model(example).sum())

    while not progress.end_reason:  # until a stop rule of the config applies, known after an evaluation
        remaining = epoch_batches(cfg, samples, progress.epoch, start=progress.step_in_epoch)
        lookups = tables.look_up(islice(remaining, progress.steps_until_evaluation), train=True)
        for _ in progress.until_evaluation(steps):
            clicks, lookup = next(lookups)
            meter.add(**train_step(ctx, part, tables, clicks, lookup))
            if steps.log_is_due:
                ctx.log(interval_metrics(trainers, progress, meter))
                meter.reset()
        if steps.is_stopped:  # on all trainers after the same step, which is saved
            return None
        with meter.paused():
            with ctx.timer.evaluating():  # its time counts apart from training
                metrics = evaluate(ctx, trainers, tables, part.model.module, samples)
            progress.end_epoch(metrics)
            steps.save(metrics)

    ctx.end_reason = progress.end_reason
    if not ctx.is_main:
        return None
    return final_model(cfg, layout, rpc, part.model.module, samples)


def train_step(
    ctx: Context, part: "DensePart", tables: TableClient, clicks: Clicks, lookup: Lookup
) -> dict[str, float]:
    """Do one step of the dense part, and send the gradient of the sums of the bags to the servers.

    Returns sums for the metrics. A step has a batch of each share.
    """
    pooled = lookup.pooled().to(ctx.device).requires_grad_()
    # The hook sends the gradient as soon as it is computed, while DDP exchanges those of the dense part.
    pooled.register_hook(lambda gradient: tables.push(lookup, gradient))
    logits = logits_of(part.model, pooled, clicks.numeric.to(ctx.device))
    loss = F.binary_cross_entropy_with_logits(logits, clicks.labels.to(ctx.device))
    (loss * part.loss_weight).backward()
    part.optimizer.step()
    part.optimizer.zero_grad()
    num_batches = len(part.samples.shares)
    return {"loss_sum": loss.item() * num_batches, "num_batches": num_batches, "num_samples": len(clicks)}


def save_step(
    ctx: Context,
    trainers: Groups,
    tables: TableClient,
    rpc: RpcGroup,
    part: "DensePart",
    step: int,
    metrics: Mapping[str, float],
) -> None:
    """Save on every rank: rank 0 orders the servers to save once they have applied all gradients so far."""
    tables.wait_until_applied()
    trainers.barrier()
    if ctx.is_main:
        rpc.send_command("save", step, to=rpc.of_role("parameter_server"))
    state = {
        "optimizer": part.optimizer.state_dict(),
        "position": part.progress.state_dict(),
        "num_trainers": ctx.roles.count("trainer"),
        "num_shares": part.samples.num_shares,
    }
    model = in_whole_model(part.model.module)  # the tables are in the shards of the servers
    ctx.save(step, model=model, trainer=state, local=part.meter.state_dict(), metrics=metrics, shard=Shard())


def interval_metrics(trainers: Groups, progress: Progress, meter: Meter) -> dict[str, float]:
    """Return the training metrics since the last logged step."""
    names = ("loss_sum", "num_batches", "num_samples")
    loss_sum, num_batches, num_samples = trainers.sum([meter.sums[name] for name in names])
    return {
        "train/loss": loss_sum / num_batches,
        "train/epoch": progress.epochs,
        "train/samples_per_s": num_samples / meter.elapsed_s,
        "samples": progress.add_samples(num_samples),
    }


@torch.no_grad()
def evaluate(
    ctx: Context, trainers: Groups, tables: TableClient, dense: nn.Module, samples: "Samples"
) -> dict[str, float]:
    """Return AUC and log-loss over the test set, equal on all trainers; for the synthetic log also its best AUC.

    The scores of all trainers are gathered: an AUC is not a mean of parts.
    """
    test = samples.test
    indices = torch.arange(len(test))
    # A trainer with fewer samples than others ends with empty batches.
    firsts = range(0, samples.num_eval_batches * EVAL_BATCH_SIZE, EVAL_BATCH_SIZE)
    parts = (test.take(indices[first:][:EVAL_BATCH_SIZE]) for first in firsts)
    logits_of_parts = [torch.zeros(0)]
    for clicks, lookup in tables.look_up(parts, train=False):
        if len(clicks):
            pooled = lookup.pooled().to(ctx.device)
            numeric = clicks.numeric.to(ctx.device)
            logits_of_parts.append(logits_of(dense, pooled, numeric).cpu())
        ctx.timer.alive()  # a heartbeat, since an evaluation counts no steps
    own_results = [torch.cat(logits_of_parts), test.labels]
    if test.best_scores is not None:
        own_results.append(test.best_scores)
    logits, labels, *best = torch.cat(trainers.all_gather(torch.stack(own_results)), dim=1)
    log_loss = F.binary_cross_entropy_with_logits(logits.double(), labels.double())
    has_both_labels = len(labels.unique()) > 1
    if ctx.is_main and has_both_labels:
        ctx.report.figure("calibration", calibration(logits.sigmoid().double(), labels))
    metrics = {"eval/auc": auc(logits, labels), "eval/log_loss": float(log_loss)}
    if best:
        metrics["eval/best_auc"] = auc(best[0], labels)
    return metrics


def logits_of(dense: nn.Module, pooled: Tensor, numeric: Tensor) -> Tensor:
    """Return logits [B] from the sums of all bags [B × tables, dim] and the numeric features [B, k]."""
    logits: Tensor = dense(torch.cat([pooled.view(len(numeric), -1), numeric], dim=1))
    return logits.squeeze(1)


# Set-up of a trainer: process groups, model, and its shares of the samples.


def make_dense_group(ctx: Context) -> Any:
    """Return the trainers' process group for gradients of the dense part, on their devices. Call it on every rank."""
    trainers = ctx.roles.ranks_of("trainer")
    devices = ctx.groups.all_gather(ctx.device.type)
    backends = {collective_backend(torch.device(devices[rank])) for rank in trainers}
    if len(backends) > 1 or backends == {"gloo"}:
        return gloo_group(trainers, ctx.groups.timeout)
    # With `device_id`, NCCL splits the default group, in which all ranks take part. Servers are no members: no device.
    device = None
    if ctx.rank in trainers:
        device = ctx.device
    return dist.new_group(list(trainers), ctx.groups.timeout, backends.pop(), device_id=device)


@dataclass(frozen=True, kw_only=True)
class DensePart:
    """The dense part in a trainer, what trains it, and how far."""

    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    samples: "Samples"
    progress: Progress  #: steps and epochs done so far
    meter: Meter  #: sums of the loss and of samples since the last logged step

    @property
    def loss_weight(self) -> float:
        """Factor of the mean loss: DDP and servers average over trainers that may have other numbers of shares."""
        return len(self.samples.shares) * self.samples.num_trainers / self.samples.num_shares


def open_dense_part(
    ctx: Context, cfg: Config, layout: TableLayout, trainers: Groups, dense_group: dist.ProcessGroup
) -> DensePart:
    """Build the dense part, load the newest checkpoint, and read this trainer's samples."""
    hybrid = cfg.section(HybridConfig)
    model = ctx.wrap(dense_part(hybrid), process_group=dense_group, static_graph=True)
    optimizer = build_optimizer(model.parameters(), cfg.optim)
    saved = ctx.restore()  # the newest valid checkpoint, None at the first start; servers restore in `serve_tables`
    position = None
    if saved is None:  # the weights of `model.init_from`, of which servers load their rows
        initial = initial_weights(ctx.run, whole_on_meta(hybrid), cfg.model)
        load_into(in_whole_model(model.module), initial)
    else:
        in_whole_model(model.module).load_state_dict(saved.model)
        optimizer.load_state_dict(saved.trainer["optimizer"])
        position = saved.trainer["position"]
    samples = load_samples(ctx, cfg, trainers, layout, num_shares_of(saved, ctx.roles.count("trainer")))
    num_in_dense = sum(weight.numel() for weight in model.module.parameters())
    num_in_tables = sum(hybrid.tables.values()) * hybrid.embedding_dim
    # Replaces the size of the dense part, which `wrap` has logged.
    ctx.report.log_model_size(num_in_dense + num_in_tables)
    return DensePart(
        model=model,
        optimizer=optimizer,
        samples=samples,
        progress=Progress(cfg, samples.steps_per_epoch, position),
        meter=Meter.restore(ctx, saved),
    )


@dataclass(frozen=True, kw_only=True)
class Samples:
    """A trainer's shares of the samples. Their ids are row numbers, counted over all servers."""

    train: Clicks  #: share after share, of equal size
    test: Clicks
    shares: range  #: of this trainer
    num_shares: int
    num_trainers: int
    steps_per_epoch: int
    num_eval_batches: int  #: equal on all trainers
    example: Tensor  #: two samples as input of `ClickModel`; all bags have the size of the largest one


def load_samples(ctx: Context, cfg: Config, trainers: Groups, layout: TableLayout, num_shares: int) -> Samples:
    """Read this trainer's shares of the click log, and log it as a dataset."""
    hybrid = cfg.section(HybridConfig)
    shares = share_of(ctx.roles.own_index, ctx.roles.count("trainer"), num_shares)
    alive = ctx.timer.alive  # the heartbeat, since loading counts no steps
    loaded = load_clicks(hybrid, cfg.seed, shares=shares, num_shares=num_shares, alive=alive)
    train, test = (clicks.placed(layout.place) for clicks in loaded)
    largest_bag = int(torch.cat([clicks.bags.offsets.diff() for clicks in loaded]).max())
    trainers.await_all(alive)
    test_sizes, largest_bags = zip(*trainers.all_gather((len(test), largest_bag)), strict=True)
    two_samples = loaded[0].take(torch.arange(2) % len(train))
    share_size = len(train) // len(shares)
    name, source, digest = identity(hybrid, cfg.seed)
    for split, count in (("train", share_size * num_shares), ("test", sum(test_sizes))):
        ctx.report.log_dataset(name, split=split, num_samples=count, digest=digest, source=source)
    log.info("%d training and %d test samples of this trainer", len(train), len(test))
    return Samples(
        train=train,
        test=test,
        shares=shares,
        num_shares=num_shares,
        num_trainers=ctx.roles.count("trainer"),
        steps_per_epoch=math.ceil(share_size / hybrid.batch_size),
        num_eval_batches=math.ceil(max(test_sizes) / EVAL_BATCH_SIZE),
        example=padded(two_samples, max(1, *largest_bags)),
    )


def load_clicks(
    cfg: HybridConfig, seed: int, *, shares: range, num_shares: int, alive: Callable[[], None] = lambda: None
) -> tuple[Clicks, Clicks]:
    """Return training and test samples of a trainer. Shares are equal: up to `num_shares` - 1 samples are not used.

    `alive` is called now and then.
    """
    alive()
    source: FileLog | SyntheticLog = FileLog(cfg) if cfg.file else SyntheticLog(cfg, seed)
    num_test = max(1, round(len(source) * EVAL_FRACTION))
    num_train = len(source) - num_test
    share_size = num_train // num_shares
    if share_size < 1:
        raise DataError(
            f"{cfg.file or 'the synthetic log'} has {len(source)} samples: too few for {num_shares} trainers"
        )
    train = source.read(shares.start * share_size, shares.stop * share_size, alive)
    first_test = num_train + num_test * shares.start // num_shares
    end_test = num_train + num_test * shares.stop // num_shares
    test = source.read(first_test, end_test, alive)
    return train, test


def num_shares_of(saved: Restored | None, num_trainers: int) -> int:
    """Return the number of shares of the samples: that of the checkpoint, unless there are more trainers."""
    if saved is None:
        return num_trainers
    num_shares = int(saved.trainer["num_shares"])
    if num_trainers > num_shares:
        log.warning(
            "%d trainers continue a run with %d shares of the samples, which are divided anew: sample order and joint"
            " batch differ from here on",
            num_trainers,
            num_shares,
        )
    return max(num_trainers, num_shares)


def epoch_batches(cfg: Config, samples: Samples, epoch: int, *, start: int = 0) -> Iterator[Clicks]:
    """Yield the samples of each step from `start` on: one batch of every share, in the same order in all shares."""
    share_size = len(samples.train) // len(samples.shares)
    batch_size = cfg.section(HybridConfig).batch_size
    firsts = torch.arange(len(samples.shares))[:, None] * share_size
    for batch in batches(share_size, batch_size, seed=cfg.seed, epoch=epoch, start=start):
        yield samples.train.take((firsts + batch).flatten())


def final_model(
    cfg: Config, layout: TableLayout, rpc: RpcGroup, dense: nn.Module, samples: Samples
) -> tuple[nn.Module, Tensor] | None:
    """Return the final model for one process and an example, if its tables are small enough to be gathered."""
    hybrid = cfg.section(HybridConfig)
    size_mb = 4e-6 * sum(layout.tables.values()) * layout.dim  # float32
    if size_mb > EXPORT_MAX_MB:
        log.info(
            "no model is exported: its tables have %.0f MB, more than %g; checkpoints/ has the weights",
            size_mb,
            EXPORT_MAX_MB,
        )
        return None
    bag_size = (samples.example.shape[1] - hybrid.num_numeric) // len(layout.tables)
    model = ClickModel(hybrid, bag_size)
    weights = in_whole_model(dense).state_dict()
    for table in layout.tables:
        parts = rpc.call_all("parameter_server", "table_rows", table)
        weights[weight_name(table)] = torch.cat([part.result() for part in parts])
    model.load_state_dict(weights)
    return model, samples.example


def dense_part(cfg: HybridConfig) -> nn.Sequential:
    """Return an MLP with ReLU that maps pooled embeddings and numeric features [B, num_inputs] to [B, 1]."""
    num_inputs = len(cfg.tables) * cfg.embedding_dim + cfg.num_numeric
    layers: list[nn.Module] = []
    for width in cfg.hidden_sizes:
        layers += [nn.Linear(num_inputs, width), nn.ReLU()]
        num_inputs = width
    return nn.Sequential(*layers, nn.Linear(num_inputs, 1))


def in_whole_model(dense: nn.Module) -> nn.Module:
    """Return the dense part with the names that its weights have in `ClickModel`."""
    return nn.ModuleDict({"dense": dense})


def whole_on_meta(cfg: HybridConfig) -> nn.Module:
    """Return the whole model without memory: its names and shapes."""
    with torch.device("meta"):
        return ClickModel(cfg, bag_size=1)


class ClickModel(nn.Module):
    """The whole model in one process, named as its checkpoints: `tables.<name>.weight`, `dense.<layer>.weight`.

    The input is float64 [B, num_numeric + tables × bag_size] (exact for ids up to 2^53): numeric features, then the
    ids of each table, padded with -1. The output is the probability of a click, [B].
    """

    def __init__(self, cfg: HybridConfig, bag_size: int) -> None:
        super().__init__()
        self.num_numeric = cfg.num_numeric
        self.bag_size = bag_size
        tables = {name: nn.EmbeddingBag(rows, cfg.embedding_dim, mode="sum") for name, rows in cfg.tables.items()}
        self.tables = nn.ModuleDict(tables)
        self.dense = dense_part(cfg)

    def forward(self, samples: Tensor) -> Tensor:
        """Return the probability of a click for each sample, [B]."""
        numeric = samples[:, : self.num_numeric].float()
        ids = samples[:, self.num_numeric :].long().unflatten(1, (len(self.tables), self.bag_size))
        pooled = []
        for number, table in enumerate(self.tables.values()):
            bags = ids[:, number]
            pooled.append(table(bags.clamp(min=0), per_sample_weights=(bags >= 0).float()))
        logits: Tensor = self.dense(torch.cat([*pooled, numeric], dim=1))
        return logits.squeeze(1).sigmoid()


def auc(scores: Tensor, labels: Tensor) -> float:
    """Return the area under the ROC curve of scores and labels, [N] each, from ranks (Mann and Whitney, 1947).

    Ties count half. It is NaN if all labels are equal.
    """
    _, place, counts = scores.unique(return_inverse=True, return_counts=True)  # sorted
    counts = counts.double()
    rank = (counts.cumsum(0) - (counts - 1) / 2)[place]
    is_click = labels == 1
    num_clicks = int(is_click.sum())
    num_others = int((~is_click).sum())
    if num_clicks == 0 or num_others == 0:
        return float("nan")
    smallest_rank_sum = num_clicks * (num_clicks + 1) / 2  # if all clicks have lower scores than the others
    return float((rank[is_click].sum() - smallest_rank_sum) / (num_clicks * num_others))


NUM_BINS = 10


def calibration(scores: Tensor, labels: Tensor) -> Curves:
    """Return the observed share of clicks against the predicted one, of NUM_BINS equally large groups of samples."""
    order = scores.argsort()
    score_groups = scores[order].tensor_split(NUM_BINS)
    label_groups = labels[order].tensor_split(NUM_BINS)
    points = []
    for group_scores, group_labels in zip(score_groups, label_groups, strict=True):
        if len(group_scores):
            points.append([float(group_scores.mean()), float(group_labels.double().mean())])
    smallest, largest = points[0][0], points[-1][0]
    return Curves(
        title=f"calibration of the test set, {NUM_BINS} groups of equal size",
        x_label="predicted share of clicks",
        y_label="observed share of clicks",
        lines={"model": points, "calibrated": [[smallest, smallest], [largest, largest]]},
    )
