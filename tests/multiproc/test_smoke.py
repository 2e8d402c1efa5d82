"""One run of two ranks with each shipped trainer; with the killed rank of `test_runs.py`, this is `make smoke`."""

import pytest
from contract import check, compared, content_of
from hpcdist_runs import Runs

from hpcdist import trainers

#: The shipped config of each trainer, and overrides for two ranks and few steps; `hpcdist bench comm` starts `comm`.
SMALL = {
    "lm": ("lm_small", ["lm.corpus.tokenizer=byte", "lm.num_eval_windows=4", "stop.max_steps=2"]),
    "rl": ("rl_cartpole", ["roles={agent: 1, observer: 1}", "stop.max_epochs=2"]),
    "rnn": ("rnn_lm", ["rnn.max_corpus_mb=0.05", "stop.max_epochs=1"]),
    "pipeline": ("pipeline_resnet50", ["model.name=resnet18", "data.batch_size=256", "stop.max_epochs=1"]),
    "hybrid": ("hybrid_clicks", ["roles.trainer=1", "roles.parameter_server=1", "stop.max_epochs=1"]),
}


def test_smoke_covers_all_shipped_trainers() -> None:
    assert {*SMALL, "ddp", "comm"} == set(trainers.NAMES)


@pytest.mark.smoke
@pytest.mark.parametrize("trainer", SMALL)
def test_trainer_finishes_with_two_ranks(runs: Runs, trainer: str) -> None:
    config, overrides = SMALL[trainer]
    name = f"smoke-{trainer}"
    overrides = [*overrides, f"experiment={runs.experiment}"]
    code, output = runs.command("run", config, *runs.config(name, *overrides)[1:])
    assert code == 0, output
    assert_is_complete(runs, name, trainer)


@pytest.mark.smoke
def test_ddp_finishes_with_two_ranks(runs: Runs, control_run: str) -> None:
    assert_is_complete(runs, control_run, "ddp")


@pytest.mark.smoke
def test_benchmark_finishes_with_two_ranks(runs: Runs, benchmark: tuple[str, str]) -> None:
    name, _ = benchmark
    assert_is_complete(runs, name, "comm")


def assert_is_complete(runs: Runs, name: str, trainer: str) -> None:
    """Assert that a run has finished on two ranks, and has left in MLflow what its trainer always leaves."""
    state = runs.run_dir(name).read_state()
    assert (state.status, state.world_size, state.restarts) == ("finished", 2, 0)
    found = content_of(runs, name)
    check(f"runs/{trainer}.txt", found if trainer == "ddp" else compared(found, "runs/ddp.txt"))
