"""Elastic runs by command: a run that is resumed on another number of ranks, and its metrics in MLflow."""

from __future__ import annotations

import pytest
from hpcdist_runs import Runs, assert_states_equal

ELASTIC = [
    "data.global_batch_size=96",
    "elastic.micro_batches=6",
    "elastic.exact=true",
    "stop.max_epochs=2",
]
#: 1,433 samples: 15 steps per epoch.
LAST_STEP = 30


@pytest.mark.faults  # slow: three starts of ranks
def test_run_on_three_and_two_ranks_equals_a_run_on_one(runs: Runs) -> None:
    code, output = runs.command("run", *runs.config("elastic-alone", *ELASTIC, "launch.num_ranks=1"))
    assert code == 0, output
    name = "elastic-changing"
    code, output = runs.command("run", *runs.config(name, *ELASTIC, "launch.num_ranks=3", "stop.pause_at_step=9"))
    assert code == 0, output

    code, output = runs.command("resume", name, "data.global_batch_size=48")
    assert code == 2
    assert "data.global_batch_size was 96 when the checkpoint of step 9 was written and cannot be 48" in output
    code, output = runs.command("resume", name, "launch.num_ranks=7")
    assert code == 2
    assert "elastic.micro_batches=6 is less than the 7 ranks of the config" in output

    code, output = runs.command("resume", name, "launch.num_ranks=2", "stop.pause_at_step=null")
    assert code == 0, output
    assert f"finished: trained {LAST_STEP} steps, 2 epochs" in output

    alone, changing = runs.final_state("elastic-alone"), runs.final_state(name)
    assert_states_equal(changing["model.pt"], alone["model.pt"])
    assert_states_equal(changing["trainer.pt"]["trainer"]["optimizer"], alone["trainer.pt"]["trainer"]["optimizer"])

    expected, found = runs.series("elastic-alone"), runs.series(name)
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-6), key
    points = {(key, step): value for key, step, value in runs.points(name)}
    assert [points["samples", step] for step in (8, 10, 14, 16)] == [768, 960, 1344, 1433 + 96]
    sizes = {step: value for (key, step), value in points.items() if key == "world_size"}
    assert sizes == {1: 3, **dict.fromkeys(range(2, 10, 2), 3), **dict.fromkeys(range(10, LAST_STEP + 1, 2), 2)}
