"""What a trainer gets, with real ranks where it takes more than one."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from context_scene import SINGLE_RANK, new_run, open_context
from spawn import Rank, spawn_ranks
from torch import nn

from hpcdist.checkpoint.weights import load_weights
from hpcdist.config.schema import CheckpointConfig, Config
from hpcdist.errors import CheckpointError
from hpcdist.rank.stop_signals import StopFlag
from hpcdist.run.folder import RunDir
from hpcdist.tracking.journal_reader import read_records

CONFIG = Config(seed=5, checkpoint=CheckpointConfig(every_steps=4))


def draws() -> tuple[float, float, float]:
    """The next number of each generator."""
    return torch.rand(()).item(), float(np.random.rand()), random.random()


def save_and_restore(here: Rank, path: Path) -> dict[str, Any]:
    run = RunDir(path)
    seen: dict[str, Any] = {}
    with open_context(here, run, CONFIG) as ctx:
        seen["first start"] = ctx.restore()
        model = nn.Linear(3, 2)
        wrapped = ctx.wrap(model, static_graph=True)
        seen["initial"] = model.weight.detach().clone()
        ctx.seed_per_rank()
        seen["per rank"] = draws()

        for step in range(1, 4):
            ctx.log({"loss": step / 2, "rank": here.rank}, step)
        # What single precision, or a sum over the wrong ranks, would not get right.
        seen["sum"] = ctx.sum_over_ranks([2.0**24 + 1, 0.1, here.rank, -(2.0**52)])

        ctx.save(4, model=wrapped, trainer={"lr": 0.5}, local={"mine": torch.full((2,), here.rank), "n": here.rank})
        seen["after saving"] = draws()
        ctx.close()

    with open_context(here, run, CONFIG) as ctx:
        restored = ctx.restore()
        assert restored is not None
        seen["after restoring"] = draws()
        seen["restored"] = restored
        seen["due"] = [step for step in range(4, 13) if ctx.should_save(step)]
        ctx.close()
    return seen


def restore_elsewhere(here: Rank, path: Path) -> dict[str, Any]:
    with open_context(here, RunDir(path), CONFIG) as ctx:
        restored = ctx.restore()
        assert restored is not None
        seen = {"restored": restored, "draws": draws()}
        ctx.close()
    return seen


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return new_run(tmp_path_factory.mktemp("context"))


@pytest.fixture(scope="module")
def ranks(run: RunDir) -> list[dict[str, Any]]:
    return spawn_ranks(save_and_restore, 2, path=run.path)


def test_a_first_start_finds_nothing_to_restore(ranks: list[dict[str, Any]]) -> None:
    assert [seen["first start"] for seen in ranks] == [None, None]


def test_ranks_begin_alike_and_draw_apart(ranks: list[dict[str, Any]]) -> None:
    assert torch.equal(ranks[0]["initial"], ranks[1]["initial"])
    for generator in range(3):
        assert ranks[0]["per rank"][generator] != ranks[1]["per rank"][generator]


def test_generators_and_local_state_of_every_rank_come_back(ranks: list[dict[str, Any]]) -> None:
    for rank, seen in enumerate(ranks):
        assert seen["after restoring"] == seen["after saving"]
        restored = seen["restored"]
        assert restored.step == 4
        assert restored.trainer == {"lr": 0.5}
        assert torch.equal(restored.local["mine"], torch.full((2,), rank))
        assert restored.local["n"] == rank
        assert set(restored.model) == {"weight", "bias"}
        assert torch.equal(restored.model["weight"], seen["initial"])


def test_what_was_restored_is_not_saved_again_at_once(ranks: list[dict[str, Any]]) -> None:
    assert [seen["due"] for seen in ranks] == [[8, 12]] * 2


def test_only_rank_0_writes_metrics(ranks: list[dict[str, Any]], run: RunDir) -> None:
    assert ranks
    (file,) = run.journal.glob("*.jsonl")
    assert file.name == "attempt-001.rank-00000.jsonl"
    records, _ = read_records(file)
    assert [(record.step, record.metrics) for record in records] == [
        (step, {"loss": step / 2, "rank": 0.0}) for step in (1, 2, 3)
    ]


def test_sums_are_in_double_precision_and_alike(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["sum"] == ranks[1]["sum"] == [2.0**25 + 2, 0.1 + 0.1, 1.0, -(2.0**53)]


def test_another_number_of_ranks_keeps_weights_and_draws_anew(ranks: list[dict[str, Any]], run: RunDir) -> None:
    others = spawn_ranks(restore_elsewhere, 3, path=run.path)
    for seen in others:
        assert seen["restored"].step == 4
        assert seen["restored"].local is None
        assert seen["restored"].trainer == {"lr": 0.5}
        assert torch.equal(seen["restored"].model["weight"], ranks[0]["initial"])
    assert len({seen["draws"] for seen in others}) == 3
    assert not {seen["draws"] for seen in others} & {seen["after saving"] for seen in ranks}

    with open_context(SINGLE_RANK, run, CONFIG) as ctx:
        restored = ctx.restore()
        assert restored is not None
        assert restored.local is None
        ctx.close()


# --- what one process alone can see


def save(ctx: Any, step: int) -> None:
    ctx.save(step, model=nn.Linear(2, 2), trainer={})


def test_a_broken_newest_checkpoint_is_passed_over_and_replaced(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    with open_context(SINGLE_RANK, run, CONFIG) as ctx:
        save(ctx, 4)
        save(ctx, 8)
        ctx.close()
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
        ctx.close()
    assert set(load_weights(newest)) == {"weight", "bias"}


def test_leaving_without_saving_an_agreed_stop_is_an_error(tmp_path: Path) -> None:
    run, flag = new_run(tmp_path), StopFlag()
    flag.is_set = True
    with open_context(SINGLE_RANK, run, CONFIG, flag) as ctx:
        assert ctx.should_stop(7, 100)
        assert ctx.should_save(7)
        with pytest.raises(CheckpointError, match=r"stopped at step 7 without saving it: call ctx\.save"):
            ctx.close()
    with open_context(SINGLE_RANK, run, CONFIG, flag) as ctx:
        assert ctx.should_stop(7, 100)
        save(ctx, 7)
        assert not ctx.should_save(7)
        ctx.close()


def test_a_save_that_fails_in_the_background_is_told_at_the_end(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    with open_context(SINGLE_RANK, run, CONFIG) as ctx:
        ctx.restore()
        run.checkpoints.rmdir()
        run.checkpoints.write_text("in the way")
        save(ctx, 4)
        with pytest.raises(CheckpointError, match="checkpoint of step 4 could not be written"):
            ctx.close()


def test_an_attempt_that_was_replaced_saves_nothing_more(tmp_path: Path) -> None:
    """As the ranks of a supervisor that was stalled for so long that another one took the run over."""
    run = new_run(tmp_path)
    with open_context(SINGLE_RANK, run, Config()) as ctx:
        ctx.save(1, model=nn.Linear(2, 2), trainer={})
        ctx._checkpoints.saver.wait()
        run.new_attempt()
        ctx.save(2, model=nn.Linear(2, 2), trainer={})
        with pytest.raises(CheckpointError, match="attempt 2 of run first has begun: attempt 1 must not save"):
            ctx.close()
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000001"]


def test_the_heartbeat_tells_how_far_the_rank_is(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    with open_context(SINGLE_RANK, run, CONFIG) as ctx:
        ctx.should_stop(3, 10)
        ctx.log({"loss": 0.25}, 3)
        ctx.close()
    beat = json.loads(run.attempts()[0].beat(0).read_text())
    assert (beat["step"], beat["total_steps"], beat["metrics"]) == (3, 10, {"loss": 0.25})


def who_am_i(here: Rank, path: Path) -> tuple[Any, ...]:
    with open_context(here, RunDir(path), Config(roles={"agent": 1, "observer": 2})) as ctx:
        found = (ctx.role, ctx.role_index, ctx.rpc_name, list(ctx.ranks_of("observer")), ctx.roles.name_of(2))
        ctx.close()
    return found


def test_a_rank_knows_its_role_and_those_of_the_others(tmp_path: Path) -> None:
    assert spawn_ranks(who_am_i, 3, path=new_run(tmp_path).path) == [
        ("agent", 0, "agent:0", [1, 2], "observer:1"),
        ("observer", 0, "observer:0", [1, 2], "observer:1"),
        ("observer", 1, "observer:1", [1, 2], "observer:1"),
    ]
