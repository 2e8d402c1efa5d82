p='hpcdist/trainers/pipeline/train.py'
s=open(p).read()
a=s.index('def train(ctx: Context, cfg: Config) -> None:')
b=s.index('def select_micro_batches(')
new='''@dataclass(frozen=True, kw_only=True)
class PipelineLoop:
    """State of the training loop of one stage."""

    ctx: Context
    cfg: Config
    setup: StageSetup
    num_micro_batches: int
    position: TrainingPosition
    meter: Meter


def train(ctx: Context, cfg: Config) -> None:
    """Train, evaluate after each epoch, save checkpoints and export the final model."""
    ctx.roles.require(stage=None)
    with open_stage(ctx, cfg) as setup:
        loop, data = make_loop(ctx, cfg, setup), setup.data
        ctx.end_reason = run_epochs(
            ctx,
            cfg,
            loop.position,
            loop.meter,
            train_epoch=lambda: train_epoch(loop),
            interval_metrics=lambda: interval_metrics(loop),
            evaluate=lambda: evaluate(ctx, cfg, data, setup.engine),
            save=lambda metrics: save(loop, metrics),
        )
        whole = _gather_model(ctx, cfg, data, setup.stage) if ctx.end_reason else None
    # The export follows the end of RPC, which has a shorter time limit.
    if whole is not None:
        images, _ = next(data.test.batches(torch.arange(2), batch_size=2, device=ctx.device))
        ctx.export_model(whole, as_rgb(cfg, images))


def make_loop(ctx: Context, cfg: Config, setup: StageSetup) -> PipelineLoop:
    """Choose the number of micro-batches and the position to continue from; call it on every rank."""
    saved, steps_per_epoch = setup.saved, len(setup.data.train) // cfg.data.batch_size
    return PipelineLoop(
        ctx=ctx,
        cfg=cfg,
        setup=setup,
        num_micro_batches=select_micro_batches(ctx, cfg, setup),
        position=TrainingPosition.resume(saved.trainer["position"] if saved else None, steps_per_epoch, cfg.stop),
        meter=Meter(saved.local if saved else None, ctx.device),
    )


def train_epoch(loop: PipelineLoop) -> Iterator[None]:
    """Do the remaining steps of the epoch with this rank's stage."""
    ctx, cfg, setup, position = loop.ctx, loop.cfg, loop.setup, loop.position
    setup.stage.train()
    for images, labels in step_batches(ctx, cfg, setup.data, epoch=position.epoch, start=position.step_in_epoch):
        set_lr(setup.optimizer, cfg.optim.lr * lr_factor(position.step, position.total_steps, cfg.schedule))
        idle_s = setup.engine.idle_s
        loss = train_step(cfg, setup, images, labels, loop.num_micro_batches)
        # The loss is that of the last stage, zero elsewhere.
        loop.meter.add(loss_sum=loss, num_steps=1, idle_s=setup.engine.idle_s - idle_s)
        yield


def interval_metrics(loop: PipelineLoop) -> dict[str, float]:
    """Return the training metrics since the last logged step, and the time that each stage has computed."""
    ctx, meter = loop.ctx, loop.meter
    elapsed_s, idle_s, num_steps = meter.elapsed_s, meter.sums["idle_s"], meter.sums["num_steps"]
    busy_s = [0.0] * ctx.world_size
    busy_s[ctx.rank] = elapsed_s - idle_s
    sums = ctx.sum_over_ranks([float(meter.sums["loss_sum"]), idle_s, elapsed_s, *busy_s])
    loss_sum, all_idle_s, all_elapsed_s, *busy_s = sums
    return {
        "train/loss": loss_sum / num_steps,
        "train/lr": loop.setup.optimizer.param_groups[0]["lr"],
        "train/epoch": loop.position.epochs,
        "train/samples_per_s": loop.cfg.data.batch_size * num_steps / elapsed_s,
        "pipeline/bubble": all_idle_s / all_elapsed_s,
        "pipeline/bubble_in_theory": ideal_bubble(ctx.world_size, loop.num_micro_batches),
        **{f"pipeline/busy_s/stage_{index}": seconds / num_steps for index, seconds in enumerate(busy_s)},
    }


def save(loop: PipelineLoop, metrics: Mapping[str, float]) -> None:
    """Save a checkpoint, to which each stage adds its shard; call it on every rank."""
    loop.ctx.save(
        loop.position.step,
        model=None,
        trainer={
            "position": asdict(loop.position),
            "units": [list(names) for names in loop.setup.units],
            "num_micro_batches": loop.num_micro_batches,
        },
        local=loop.meter.sums,
        metrics=metrics,
        shard=stage_shard(loop.setup.stage, loop.setup.optimizer),
    )


'''
s=s[:a]+new+s[b:]
s=s.replace('from dataclasses import asdict\n','from dataclasses import asdict, dataclass\n')
open(p,'w').write(s)
