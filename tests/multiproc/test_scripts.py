"""Scripts that log with MLflow and loggers built on it, unchanged, on two ranks; and scripts that hpcdist stops."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from doc_blocks import ROOT, blocks
from hpcdist_runs import Runs, finish

from hpcdist.checkpoint.state import load_weights

EXAMPLES = ROOT / "examples" / "mlflow_loggers"
#: From this step on, a slowed script has time to be stopped.
SLOW_AFTER = 50


@pytest.fixture
def scripts(tmp_path: Path, empty_database: Path) -> Runs:
    """A runs folder with a project that has the scripts of the example."""
    runs = Runs(tmp_path, empty_database, experiment="mlflow-loggers")
    shutil.copytree(EXAMPLES, runs.project, dirs_exist_ok=True)
    return runs


def run_script(scripts: Runs, name: str, *overrides: str) -> str:
    """Run a script of the example on two ranks, without a server; return the output."""
    script = f"trainer.script=[{name}.py]"
    code, output = scripts.command("run", "scripts.yaml", f"name={name}", script, *tracked(scripts), *overrides)
    assert code == 0, output
    return output


def tracked(runs: Runs) -> list[str]:
    """Return overrides without server and system metrics: the upload then ends also on a slow machine."""
    uri = f"tracking.uri=sqlite:///{runs.database}"
    return [uri, "tracking.system_interval_s=0", "tracking.drain_timeout_s=300"]


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


def side(diff: str, sign: str) -> str:
    """Return the text before (`-`) or after (`+`) a diff."""
    return "".join(line[1:] or "\n" for line in diff.splitlines(keepends=True) if line[0] in f" {sign}\n")


def slowed(script: str) -> str:
    """Return the script with 0.1 s more for each step of the first attempt after SLOW_AFTER."""
    (line,) = re.findall(r"^ +step \+= 1\n", script, re.MULTILINE)
    indent = line[: line.index("step")]
    added = f"import os, time\nif step > {SLOW_AFTER} and os.environ['HPCDIST_ATTEMPT'] == '1': time.sleep(0.1)\n"
    return script.replace(line, line + textwrap.indent(added, indent))


def stop_slowed(runs: Runs, name: str, *arguments: str) -> str:
    """Run a slowed script, and stop it after SLOW_AFTER; return the output of the run."""
    process = runs.start("run", *arguments, f"name={name}", *tracked(runs))
    runs.wait_step(name, 1, SLOW_AFTER)
    code, output = runs.command("stop", name)
    assert code == 0, output
    code, output = finish(process)
    assert code == 0, output
    return output


@pytest.mark.parametrize("num_lines", [pytest.param(3, marks=pytest.mark.slow), 5])
def test_documented_lines_add_stop_and_save_to_a_plain_loop(scripts: Runs, num_lines: int) -> None:
    three, two = (b.text for b in blocks(ROOT / "docs/how-to/script-metrics.md") if b.language == "diff")
    assert [sum(line.startswith("+") for line in diff.splitlines()) for diff in (three, two)] == [3, 2]
    script, place = side(three, "+"), side(two, "-")
    assert place in script
    script = script.replace(place, side(two, "+")) if num_lines == 5 else script
    (scripts.project / "loop.py").write_text(slowed(script))
    output = stop_slowed(scripts, "loop", "scripts.yaml", "trainer.script=[loop.py]")
    assert "loop.py obeyed hpcdist.should_stop and saved checkpoints/newest.pt; " in output
    newest = scripts.run_dir("loop").checkpoints / "newest.pt"
    assert SLOW_AFTER < torch.load(newest)["step"] < 1000

    code, output = scripts.command("resume", str(scripts.run_dir("loop").path))
    assert code == 0, output
    assert "finished: loop.py ended with exit status 0 at step 1000" in output
    saved = torch.load(newest)
    assert saved["step"] == 1000
    assert {int(state["step"]) for state in saved["optimizer"]["state"].values()} == {1000}, "each step was done once"
    assert steps_of(scripts, "loop", "train/loss") == (list(range(1, 1001)) if num_lines == 5 else [])


# --- Scripts written like public projects run unchanged: the losses of torchrun, and arguments as parameters.
#
# The scripts are in `tests/support/user_code/patterns`. Scripts with Accelerate, Lightning and the Transformers Trainer
# are above.


@pytest.fixture
def pattern_runs(tmp_path: Path, empty_database: Path) -> Runs:
    found = Runs(tmp_path, empty_database, experiment="patterns")
    launch = "{num_ranks: 2, device: cpu, max_restarts: 1}"
    (found.project / "patterns.yaml").write_text(f"{{experiment: patterns, launch: {launch}}}\n")
    (found.project / "patterns/nano_config.py").write_text("learning_rate = 0.02\n")
    return found


def folder(pattern_runs: Runs, name: str) -> Path:
    """Return a new folder for the files of a script."""
    path = pattern_runs.folder.with_name(name)
    path.mkdir()
    return path


def torchrun(pattern_runs: Runs, command: str, out: Path) -> list[str]:
    """Run `SCRIPT ARGUMENT …` on two ranks under torchrun; return the losses that it prints."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [word.format(out=out) for word in shlex.split(command)]
    # A rank of this control run, in which hpcdist has no part, has once aborted (std::terminate, torch 2.15).
    for _ in range(3):
        done = subprocess.run(
            [*launcher, *words],
            cwd=pattern_runs.project,
            env=pattern_runs.env(),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if "terminate called without an active exception" not in done.stderr:
            break
        shutil.rmtree(out)  # of the last try, which may have saved a snapshot before
        out.mkdir()
    assert done.returncode == 0, done.stderr
    return losses(done.stdout + done.stderr)


def losses(text: str) -> list[str]:
    """Return the losses in the output of a script; the order of ranks is not determined."""
    return sorted(re.findall(r"loss:? -?\d+\.\d{6}", text, re.IGNORECASE))


def run(pattern_runs: Runs, name: str, command: str, out: Path) -> list[str]:
    """Run the same command with hpcdist; return the losses in the logs of its last attempt."""
    words = [word.format(out=out) for word in shlex.split(command)]
    code, output = pattern_runs.command(
        "run", "patterns.yaml", f"name={name}", f"trainer.script={json.dumps(words)}", *tracked(pattern_runs)
    )
    assert code == 0, output
    assert f"finished: {Path(words[0]).name} ended with exit status 0" in output
    attempt = pattern_runs.attempt(name, pattern_runs.run_dir(name).read_state().attempt)
    return losses("".join(attempt.log(rank).read_text() for rank in range(2)))


def own_params(pattern_runs: Runs, name: str) -> dict[str, str]:
    """Return the parameters in MLflow that are the script's, not keys of the config."""
    return {key: value for key, value in pattern_runs.params(name).items() if "." not in key}


def test_ddp_series_continues_from_its_snapshot_after_a_kill(pattern_runs: Runs) -> None:
    command = "patterns/ddp_series.py 4 1 --batch_size 8 --snapshot-path {out}/snapshot.pt"
    whole = torchrun(pattern_runs, command, folder(pattern_runs, "whole"))
    killed = run(pattern_runs, "killed", f"{command} --killed-in 2", out := folder(pattern_runs, "killed"))
    assert pattern_runs.run_dir("killed").read_state().restarts == 1
    assert "Resuming training from snapshot at Epoch 2" in pattern_runs.attempt("killed", 2).log(0).read_text()
    assert len(whole) == 8
    assert len(killed) == 4
    assert set(killed) < set(whole), "the last two epochs as in an uninterrupted run"
    assert own_params(pattern_runs, "killed") == {
        "arg1": "4", "arg2": "1", "batch_size": "8", "snapshot_path": f"{out}/snapshot.pt", "killed_in": "2"
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "files", "params"),
    [
        (
            "patterns/nano_gpt.py patterns/nano_config.py --out_dir={out} --max_iters=5",
            {"ckpt.pt"},
            {"arg1": "patterns/nano_config.py", "max_iters": "5"},
        ),
        ("patterns/fsdp2.py --dcp-dir {out} --steps 3", {".metadata", "__0_0.distcp", "__1_0.distcp"}, {"steps": "3"}),
    ],
    ids=lambda value: value.partition(".")[0].rpartition("/")[2] if isinstance(value, str) else "",
)
def test_script_has_the_losses_and_files_of_torchrun(
    pattern_runs: Runs, command: str, files: set[str], params: dict[str, str]
) -> None:
    by_torchrun, here = folder(pattern_runs, "by_torchrun"), folder(pattern_runs, "here")
    expected = torchrun(pattern_runs, command, by_torchrun)
    assert expected
    assert run(pattern_runs, "first", command, here) == expected
    assert {path.name for path in by_torchrun.iterdir()} == {path.name for path in here.iterdir()} == files
    found = own_params(pattern_runs, "first")
    places = {key for key, value in found.items() if str(here) in value}
    assert {key: value for key, value in found.items() if key not in places} == params


# --- A script of Hydra, whose omegaconf is another one than that of hpcdist alone, as the cells of a sweep.


TRAIN = """\
import json, os, sys
from dataclasses import dataclass
from pathlib import Path
import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

@hydra.main(version_base=None, config_path="conf", config_name="train")
def main(cfg: DictConfig) -> None:
    folder = Path(HydraConfig.get().runtime.output_dir)
    found = {**OmegaConf.to_container(cfg, resolve=True), "argv": sys.argv[1:], "file": __file__}
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def project(tmp_path: Path, empty_database: Path) -> Runs:
    runs = Runs(tmp_path, empty_database, experiment="app.train")
    package = runs.project / "app"
    (package / "conf").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "train.py").write_text(TRAIN)
    (package / "conf/train.yaml").write_text("lr: 0.5\ntwice: ${lr}${lr}\nname: none\n")
    return runs


@pytest.mark.slow
def test_script_of_hydra_runs_unchanged_in_a_sweep(project: Runs, tmp_path: Path) -> None:
    hydra = [f"hydra.run.dir={tmp_path}/out/" + "${params.lr}", "lr=${params.lr}", "name='010'"]
    axes = ["--sweep", "params.lr=0.1,0.2"]
    config = ["launch.num_ranks=1", "name=tune", *tracked(project)]
    code, output = project.command("run", *axes, *config, "-m", "app.train", *hydra)
    assert code == 0, output
    assert "sweep tune: 2 finished\n" in output
    for lr in (0.1, 0.2):
        found = json.loads((tmp_path / f"out/{lr}/rank0.json").read_text())
        assert found["argv"] == [f"hydra.run.dir={tmp_path}/out/{lr}", f"lr={lr}", "name='010'"]
        assert (found["lr"], found["twice"], found["name"]) == (lr, f"{lr}{lr}", "010")
        assert found["file"].startswith(str(project.run_dir(f"tune-lr_{lr}").code)), "of the copy"


# --- The examples of the repository, started with the real command.


@pytest.fixture
def examples(request: pytest.FixtureRequest, tmp_path: Path, empty_database: Path) -> Runs:
    """A runs folder with a project that has only the files of an example; the experiment is that of its config."""
    name: str = request.param
    runs = Runs(tmp_path, empty_database, experiment=name.replace("_", "-"))
    shutil.rmtree(runs.project)
    shutil.copytree(ROOT / "examples" / name, runs.project)
    return runs


@pytest.mark.slow
@pytest.mark.parametrize("examples", ["sharded_model"], indirect=True)
def test_sharded_example_continues_on_one_rank(examples: Runs) -> None:
    small = ["params.width=16", "checkpoint.every_steps=5"]
    code, output = examples.command("run", "sharded.yaml", "name=first", "params.total_steps=10", *small)
    assert code == 0, output
    folder = examples.run_dir("first").checkpoints
    assert len(list((folder / "step-00000010").glob("shard-*.pt"))) == 2
    code, output = examples.command("resume", "first", "params.total_steps=15", "launch.num_ranks=1")
    assert code == 0, output
    assert "finished: the trainer has finished at step 15 of 15" in output
    assert load_weights(folder / "step-00000015")["0.up.weight"].shape == (64, 16)


@pytest.mark.slow
@pytest.mark.parametrize("examples", ["own_trainer"], indirect=True)
def test_own_trainer_is_resumed_tracked_and_exported(examples: Runs) -> None:
    code, output = examples.command("run", "regression.yaml", "name=whole", *tracked(examples))
    assert code == 0, output
    assert "finished: the trainer has finished at step 400 of 400" in output
    found = examples.params("whole")
    assert (found["params.hidden"], found["params.total_steps"], found["optim.lr"]) == ("32", "400", "0.01")
    assert "model.name" not in found, "a section that the trainer does not read"
    code, output = examples.command("run", "regression.yaml", "params.hiden=3")
    assert (code, "params.hiden is not a key: did you mean 'hidden'?" in output) == (2, True), output
    run = examples.run_dir("whole")
    assert (run.code / "regression.py").read_text() == (ROOT / "examples/own_trainer/regression.py").read_text()
    assert [step for key, step, _ in examples.points("whole") if key == "train/loss"] == [1, *range(20, 401, 20)]
    assert (run.model / "MLmodel").is_file()

    # Stopped at step 200 and resumed: the same final weights, from the code of the first start.
    no_export = f"launch.env.PYTHONPATH={examples.no_mlflow}"
    code, output = examples.command(
        "run", "regression.yaml", "name=halves", "params.total_steps=200", no_export, *tracked(examples)
    )
    assert code == 0, output
    (examples.project / "regression.py").write_text("raise SystemError('changed after the start')\n")
    code, output = examples.command("resume", "halves", "params.total_steps=400")
    assert code == 0, output
    whole, halves = (load_weights(examples.run_dir(name).checkpoints / "step-00000400") for name in ("whole", "halves"))
    assert whole.keys() == halves.keys()
    assert all(bool((whole[key] == halves[key]).all()) for key in whole)


@pytest.mark.slow
@pytest.mark.parametrize("examples", ["torchrun_script"], indirect=True)
def test_torchrun_script_runs_unmodified(examples: Runs) -> None:
    code, output = examples.command("run", "script.yaml", "name=first", "launch.device=cpu", *tracked(examples))
    assert code == 0, output
    assert "step 200 of 200: loss" in output
    assert "finished: train.py ended with exit status 0" in output
    attempt = examples.attempt("first")
    for rank in range(2):
        assert f"local rank {rank} of 2 done" in attempt.log(rank).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("examples", ["parameter_server"], indirect=True)
def test_ranks_that_count_steps_stop_a_script_with_roles(examples: Runs) -> None:
    """The parameter server gets SIGTERM as well, and goes on answering until the trainers have saved."""
    script = examples.project / "train.py"
    script.write_text(slowed(script.read_text()))
    output = stop_slowed(examples, "first", "parameter_server.yaml")
    assert "stopped: train.py obeyed hpcdist.should_stop and saved checkpoints/newest.pt" in output
    code, output = examples.command("resume", "first")
    assert code == 0, output
    assert "finished: train.py ended with exit status 0" in output
    losses = [(step, value) for key, step, value in examples.points("first") if key == "train/loss"]
    assert [step for step, _ in losses] == list(range(1, 201))
    assert losses[50][1] < losses[0][1] / 100, "continued with the saved weights"
