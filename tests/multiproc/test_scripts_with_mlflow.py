"""Scripts that log with MLflow and loggers built on it, unchanged, on two ranks; and scripts that hpcdist stops."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from doc_blocks import ROOT, blocks
from hpcdist_runs import Runs, finish, wait_for

EXAMPLES = ROOT / "examples" / "mlflow_loggers"


@pytest.fixture
def scripts(tmp_path: Path, empty_database: Path) -> Runs:
    """A runs folder whose project has the scripts of the example."""
    runs = Runs(tmp_path, empty_database, experiment="mlflow-loggers")
    shutil.copytree(EXAMPLES, runs.project, dirs_exist_ok=True)
    return runs


def run_script(scripts: Runs, name: str, *overrides: str) -> str:
    """Run a script of the example on two ranks, without a server; return the output."""
    uri = f"tracking.uri=sqlite:///{scripts.database}"
    script = f"trainer.script=[{name}.py]"
    code, output = scripts.command("run", "scripts.yaml", f"name={name}", script, uri, *quiet(), *overrides)
    assert code == 0, output
    return output


def quiet() -> list[str]:
    """Return the overrides of a run without system metrics, whose upload ends also on a slow machine."""
    return ["tracking.system_interval_s=0", "tracking.drain_timeout_s=300"]


def steps_of(scripts: Runs, name: str, key: str) -> list[int]:
    """Return the steps of a metric in MLflow, in order; a step that is there twice appears twice."""
    return sorted(step for found, step, _ in scripts.points(name) if found == key)


def test_plain_mlflow(scripts: Runs) -> None:
    output = run_script(scripts, "plain")
    assert "the experiment 'linear' of the script is not used" in output
    assert steps_of(scripts, "plain", "loss") == list(range(1, 21)), "of rank 0 alone"
    values = {key: value for key, step, value in scripts.points("plain") if step in (0, 20)}
    assert values["best_loss"] == values["loss"], "read back by the script"
    assert scripts.param("plain", "lr") == "0.05"
    assert scripts.param("plain", "seed") == "42", "of the script, which does not use the one of the config"
    tags = scripts.tags("plain")
    assert (tags["stage"], tags["mlflow.runName"], tags["script.runName"]) == ("tutorial", "plain", "first try")
    assert scripts.mlflow_status("plain") == "FINISHED"
    artifacts = scripts.artifacts("plain", "")
    assert (artifacts / "plots/loss.png").read_bytes()[:4] == b"\x89PNG"
    assert "losses" in (artifacts / "script/config.yaml").read_text()
    assert "experiment: mlflow-loggers" in (artifacts / "config.yaml").read_text()
    models = scripts._query("select name, status, source_run_id from logged_models")
    assert models == [("linear", 2, scripts.mlflow_id("plain"))], "one, which is READY"
    assert scripts._query("select name from datasets") == [("random",)]
    assert scripts._query("select count(*) from runs") == [(1,)]


#: The imports of these libraries take long. All write to the same MLflow store, as the one of `make slow`.
HEAVY = pytest.mark.faults


@pytest.mark.parametrize(
    ("name", "metrics", "param"),
    [
        pytest.param("lightning_logger", {"train_loss": list(range(1, 16, 2))}, ("lr", "0.1"), marks=pytest.mark.slow),
        pytest.param(
            "transformers_trainer", {"loss": [2, 4, 6, 8], "train_runtime": [8]}, ("n_embd", "16"), marks=HEAVY
        ),
        pytest.param("accelerate_tracker", {"train_loss": list(range(1, 17))}, ("layers", "1"), marks=HEAVY),
        pytest.param("autologged", {"train_loss": [0, 1, 2, 3]}, ("optimizer_name", "SGD"), marks=HEAVY),
    ],
)
def test_loggers_of_libraries(scripts: Runs, name: str, metrics: dict[str, list[int]], param: tuple[str, str]) -> None:
    run_script(scripts, name)
    for key, steps in metrics.items():
        assert steps_of(scripts, name, key) == steps
    assert scripts.param(name, param[0]) == param[1]
    assert scripts._query("select count(*) from runs") == [(1,)], "the run of hpcdist"
    assert scripts.mlflow_status(name) == "FINISHED"


@pytest.mark.slow
def test_a_script_is_stopped_and_continues(scripts: Runs) -> None:
    uri = f"tracking.uri=sqlite:///{scripts.database}"
    started = scripts.start("run", "scripts.yaml", "name=long", "trainer.script=[stoppable.py]", uri, *quiet())
    attempt = scripts.attempt("long")
    wait_for(lambda: attempt.path.exists() and (attempt.read_beat(0) or {}).get("step", 0) >= 5, "5 steps")
    code, saved = scripts.command("save", str(scripts.run_dir("long").path))
    assert code == 0, saved
    step, folder = re.fullmatch(r"rank 0: saved step (\d+): (\S+)\n", saved).groups()  # type: ignore[union-attr]
    assert torch.load(Path(folder) / "newest.pt")["step"] == int(step)
    code, stopped = scripts.command("stop", str(scripts.run_dir("long").path))
    assert code == 0, stopped
    assert "long: stoppable.py gets SIGTERM" in stopped
    code, output = finish(started)
    assert re.search(r"stopped: stoppable\.py obeyed hpcdist\.should_stop and saved checkpoints/newest\.pt at ", output)
    state = scripts.run_dir("long").read_state()
    assert (state.status, state.attempt) == ("stopped", 1)
    ends = [attempt.log(rank).read_text().rpartition("ended at ")[2] for rank in range(2)]
    assert ends[0] == ends[1]
    last = int(ends[0])
    assert (attempt.read_beat(0) or {})["step"] == last

    code, output = scripts.command("resume", str(scripts.run_dir("long").path))
    assert code == 0, output
    assert "finished: stoppable.py ended with exit status 0" in output
    assert f"rank 1 starts at {last}" in scripts.attempt("long", 2).log(1).read_text()
    assert steps_of(scripts, "long", "train/loss") == list(range(1, last + 6))


def side(diff: str, sign: str) -> str:
    """Return the text before (`-`) or after (`+`) a diff."""
    return "".join(line[1:] or "\n" for line in diff.splitlines(keepends=True) if line[0] in f" {sign}\n")


@pytest.mark.parametrize("num_lines", [pytest.param(3, marks=pytest.mark.slow), 5])
def test_lines_of_the_documentation_add_stop_and_save_to_a_plain_loop(scripts: Runs, num_lines: int) -> None:
    three, two = (b.text for b in blocks(ROOT / "docs/how-to/script-metrics.md") if b.language == "diff")
    assert [sum(line.startswith("+") for line in diff.splitlines()) for diff in (three, two)] == [3, 2]
    script, place = side(three, "+"), side(two, "-")
    assert place in script
    (scripts.project / "loop.py").write_text(script.replace(place, side(two, "+")) if num_lines == 5 else script)
    uri = f"tracking.uri=sqlite:///{scripts.database}"
    options = ["trainer.script=[loop.py]", "stop.pause_at_step=130", uri, *quiet()]
    code, output = scripts.command("run", "scripts.yaml", "name=loop", *options)
    assert code == 0, output
    assert "loop.py obeyed hpcdist.should_stop and saved checkpoints/newest.pt at " in output
    newest = scripts.run_dir("loop").checkpoints / "newest.pt"
    assert torch.load(newest)["step"] == 130

    code, output = scripts.command("resume", str(scripts.run_dir("loop").path), "stop.pause_at_step=null")
    assert code == 0, output
    assert "finished: loop.py ended with exit status 0" in output
    saved = torch.load(newest)
    assert saved["step"] == 1000
    assert {int(state["step"]) for state in saved["optimizer"]["state"].values()} == {1000}, "each step was done once"
    assert steps_of(scripts, "loop", "train/loss") == (list(range(1, 1001)) if num_lines == 5 else [])


@pytest.mark.slow
def test_a_trainer_logs_with_mlflow(scripts: Runs) -> None:
    uri = f"tracking.uri=sqlite:///{scripts.database}"
    trainer = ["trainer.script=[]", "trainer.target=logs_with_mlflow:train", "launch.num_ranks=1"]
    code, output = scripts.command("run", "scripts.yaml", "name=trainer", *trainer, uri, *quiet())
    assert code == 0, output
    for key in ("by_mlflow", "by_log", "by_context"):
        assert steps_of(scripts, "trainer", key) == [1, 2, 3]
    assert steps_of(scripts, "trainer", "of_child") == [1]
    assert scripts.param("trainer", "inner") == "yes"
