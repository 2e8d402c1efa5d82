"""Step timing of real ranks, of which one has a slow forward pass and one slow data loading."""

from __future__ import annotations

import copy
import json
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from context_scene import new_run, open_context
from spawn import Rank, spawn_ranks
from torch import Tensor, nn

from hpcdist.config.launch_schema import TrackingConfig
from hpcdist.config.schema import Config
from hpcdist.host.files import read_json
from hpcdist.rank.context import Context
from hpcdist.rank.step_timing import Totals
from hpcdist.run.folder import RunDir

SLOW_S = 0.1
NUM_STEPS = 12
LOG_EVERY = 4


class SlowNetwork(nn.Module):
    """A small network with buffers and an artificial delay in the forward pass."""

    def __init__(self, forward_s: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        self.layers[0].weight.requires_grad_(False)
        self.forward_s = forward_s

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.forward_s)
        y: Tensor = self.layers(x)
        return y


def train(ctx: Context, first: int, *, compute_s: float = 0.0, data_s: float = 0.0, accumulate: int = 1) -> Totals:
    """Train a few steps; return the totals of all steps but the first."""
    model = ctx.wrap(SlowNetwork(compute_s))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    before = Totals()
    for step in range(first, first + NUM_STEPS + 1):
        for number in range(accumulate):
            time.sleep(data_s)  # data loading
            with nullcontext() if number == accumulate - 1 else model.no_sync():
                model(torch.ones(4, 4)).sum().backward()
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
    return Totals(*(after - then for after, then in zip(ctx.timer.totals, before, strict=True)))


def timed_totals(here: Rank) -> dict[str, Any]:
    config = Config(tracking=TrackingConfig(uri="", log_every_steps=LOG_EVERY))
    run = new_run(here.folder) if here.rank == 0 else RunDir(here.folder / "runs" / "exp" / "first")
    with open_context(here, run, config) as ctx:
        found = {
            "apart": train(ctx, 1, compute_s=SLOW_S * (here.rank == 1), data_s=SLOW_S * (here.rank == 2)),
            # All ranks wait for the buffers of rank 0 before the forward pass.
            "first": train(ctx, 21, data_s=SLOW_S * (here.rank == 0)),
            "accumulated": train(ctx, 41, data_s=SLOW_S * (here.rank == 2), accumulate=3),
        }
        ctx.close()
        journal, beat = run.journal / f"attempt-001.rank-{here.rank:05d}.jsonl", read_json(ctx.attempt.beat(here.rank))
    lines = journal.read_text().splitlines()[1:] if journal.exists() else []  # the first line has the format
    return {**found, "journal": [json.loads(line) for line in lines], "beat": beat}


def test_slow_compute_and_slow_data_are_attributed_to_the_slow_rank(tmp_path: Path) -> None:
    ranks = spawn_ranks(timed_totals, num_ranks=3)
    num_timed = NUM_STEPS - 2  # steps after an evaluation are not counted

    apart = [found["apart"] for found in ranks]
    assert [totals.own_steps for totals in apart] == [num_timed] * 3
    assert min(totals.step_s for totals in apart) >= num_timed * SLOW_S, "all ranks are as slow as the slowest"
    assert apart[1].compute_s >= num_timed * SLOW_S > max(apart[0].compute_s, apart[2].compute_s)
    assert apart[2].data_s >= num_timed * SLOW_S > max(apart[0].data_s, apart[1].data_s)

    first = [found["first"] for found in ranks]
    assert first[0].data_s >= num_timed * SLOW_S > max(first[1].data_s, first[2].data_s)
    assert max(totals.compute_s for totals in first) < num_timed * SLOW_S, "waiting for buffers is not compute time"

    accumulated = [found["accumulated"] for found in ranks]
    assert accumulated[2].data_s >= 3 * num_timed * SLOW_S > accumulated[0].data_s

    points = [line for line in ranks[0]["journal"] if "time/step_s" in line["m"]]
    assert [line["s"] for line in points[:3]] == [4, 8, 12]
    assert all(set(line["m"]) == {"time/step_s", "time/data_s", "time/compute_s"} for line in points)
    assert all("time/step_s" not in line["m"] for found in ranks[1:] for line in found["journal"]), "one rank per node"
    timing = ranks[2]["beat"]["timing"]
    assert timing["own_steps"] >= 3 * num_timed
    assert timing["data_s"] >= 4 * num_timed * SLOW_S


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

        module = SlowNetwork(0.0)
        module.layers.compile(backend="eager")
        wrapped = ctx.wrap(SlowNetwork(0.0), static_graph=True)
        found = {
            "plain": own_steps(wrapped),
            "compiled inside": own_steps(ctx.wrap(module)),
            "compiled outside": own_steps(torch.compile(ctx.wrap(SlowNetwork(0.0)), backend="eager")),  # type: ignore[arg-type]
        }
        copied = copy.deepcopy(wrapped)
        with torch.no_grad():
            copied.module.layers[3].weight.zero_()
            copied.module.layers[3].bias.fill_(7.0)
        copied.eval()
        found["copy"] = (copied(torch.ones(1, 4)).tolist(), copied._timer)
        ctx.close()
    return found


def test_compiled_models_are_timed_and_copies_are_not() -> None:
    (found,) = spawn_ranks(compiled_and_copied, num_ranks=1)
    assert found["copy"] == ([[7.0, 7.0]], None)
    assert (found["plain"], found["compiled inside"], found["compiled outside"]) == (3, 4, 4)
