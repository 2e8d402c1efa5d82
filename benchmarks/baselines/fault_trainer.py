"""The training of `fault_torchrun.py` as a trainer of hpcdist."""

from __future__ import annotations

from fault_task import Task
from fault_training import Samples, build_model, build_optimizer, train_step

from hpcdist import Config, Context


def train(ctx: Context, cfg: Config) -> None:
    task = Task.read(cfg.params["task"])
    marks = task.marks(ctx.rank)
    marks.add("entered")
    samples = Samples(task)
    model = ctx.wrap(build_model(task))
    optimizer = build_optimizer(model)
    marks.add("built")
    step = 0
    if (saved := ctx.restore()) is not None:
        model.module.load_state_dict(saved.model)
        optimizer.load_state_dict(saved.trainer["optimizer"])
        step = saved.step
    marks.add("restored", step)

    batches = samples.batches(step, ctx.rank, ctx.world_size)
    stop = False
    while step < task.steps and not stop:
        train_step(model, optimizer, next(batches))
        step += 1
        marks.add("step", step)
        if ctx.is_main and task.eval_every and step % task.eval_every == 0:
            marks.add("accuracy", step, samples.accuracy(model.module))
        stop = ctx.should_stop(step, task.steps)
        if ctx.should_save(step):
            ctx.save(step, model=model, trainer={"optimizer": optimizer.state_dict()})
            marks.add("saved", step)
    ctx.end_reason = f"reached step {step}"
