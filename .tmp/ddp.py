import re
p='hpcdist/trainers/ddp/train.py'
s=open(p).read()
start=s.index('def train(ctx: Context, cfg: Config) -> None:')
end=s.index('def build_ddp_model(')
new='''@dataclass(frozen=True, kw_only=True)
class DdpLoop:
    """State of the training loop of one rank."""

    ctx: Context
    cfg: Config
    data: ImageData
    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    position: TrainingPosition
    meter: Meter


def train(ctx: Context, cfg: Config) -> None:
    """Train, evaluate after each epoch, save checkpoints and export the final model."""
    loop = make_loop(ctx, cfg)
    ctx.end_reason = run_epochs(
        ctx,
        cfg,
        loop.position,
        loop.meter,
        train_epoch=lambda: train_epoch(loop),
        interval_metrics=lambda: interval_metrics(loop),
        evaluate=lambda: evaluate(ctx, loop.model.module, loop.data, cfg),
        save=lambda metrics: save(loop, metrics),
    )
    if ctx.end_reason:
        example, _ = next(loop.data.test.batches(torch.arange(2), batch_size=2, device=ctx.device))
        ctx.export_model(loop.model.module, example)


def make_loop(ctx: Context, cfg: Config) -> DdpLoop:
    """Load the dataset, build model and optimizer, and restore the newest checkpoint; call it on every rank."""
    if ctx.topology.local_rank == 0:
        prepare(cfg.data)
    ctx.barrier()  # the other ranks of the node wait for the download
    data = load_datasets(cfg.data, cfg.seed)
    model = build_ddp_model(ctx, cfg, data)
    optimizer = build_optimizer(model.parameters(), cfg.optim)
    scaler = torch.amp.GradScaler(ctx.device.type, enabled=cfg.precision.dtype == "fp16")
    batches_per_epoch = math.ceil(math.ceil(len(data.train) / ctx.world_size) / cfg.data.batch_size)
    steps_per_epoch = math.ceil(batches_per_epoch / cfg.optim.grad_accum_steps)

    saved = ctx.restore()
    if saved is not None:
        model.module.load_state_dict(saved.model)
        optimizer.load_state_dict(saved.trainer["optimizer"])
        scaler.load_state_dict(saved.trainer["scaler"])
    return DdpLoop(
        ctx=ctx,
        cfg=cfg,
        data=data,
        model=model,
        optimizer=optimizer,
        scaler=scaler,
        position=TrainingPosition.resume(saved.trainer["position"] if saved else None, steps_per_epoch, cfg.stop),
        meter=Meter(saved.local if saved else None, ctx.device),
    )


def train_epoch(loop: DdpLoop) -> Iterator[None]:
    """Do the remaining steps of the epoch."""
    ctx, cfg, position, optimizer = loop.ctx, loop.cfg, loop.position, loop.optimizer
    loop.model.train()
    batches = loop.data.train.batches(
        epoch_indices(ctx, cfg, loop.data, position.epoch),
        batch_size=cfg.data.batch_size,
        device=ctx.device,
        start_batch=position.step_in_epoch * cfg.optim.grad_accum_steps,
        epoch=position.epoch,
        channels_last=cfg.model.channels_last,
    )
    for micro_batches in grouped(batches, cfg.optim.grad_accum_steps):
        set_lr(optimizer, cfg.optim.lr * lr_factor(position.step, position.total_steps, cfg.schedule))
        loss = train_step(ctx, cfg, loop.model, optimizer, loop.scaler, micro_batches)
        loop.meter.add(loss_sum=loss, num_steps=1)
        yield


def interval_metrics(loop: DdpLoop) -> dict[str, float]:
    """Return the training metrics since the last logged step."""
    ctx, cfg, sums = loop.ctx, loop.cfg, loop.meter.sums
    # Reading the loss is the only place where a step waits for the device.
    loss_sum, num_steps = ctx.sum_over_ranks([float(sums["loss_sum"]), sums["num_steps"]])
    samples_per_step = cfg.data.batch_size * cfg.optim.grad_accum_steps * ctx.world_size
    return {
        "train/loss": loss_sum / num_steps,
        "train/lr": loop.optimizer.param_groups[0]["lr"],
        "train/epoch": loop.position.epochs,
        "train/samples_per_s": samples_per_step * sums["num_steps"] / loop.meter.elapsed_s,
    }


def save(loop: DdpLoop, metrics: Mapping[str, float]) -> None:
    """Save a checkpoint; call it on every rank."""
    position, optimizer, scaler = loop.position, loop.optimizer.state_dict(), loop.scaler.state_dict()
    state = {"optimizer": optimizer, "scaler": scaler, "position": asdict(position)}
    loop.ctx.save(position.step, model=loop.model, trainer=state, local=loop.meter.sums, metrics=metrics)


'''
s=s[:start]+new+s[end:]
s=s.replace('from dataclasses import asdict\n','from dataclasses import asdict, dataclass\n')
# docstring: reading order
open(p,'w').write(s)
