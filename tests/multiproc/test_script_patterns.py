"""Scripts written like public projects run unchanged: the same losses as under torchrun, their arguments as parameters.

The scripts are in `tests/support/user_code/patterns`. Scripts with Accelerate, Lightning and the Transformers Trainer
are in `test_scripts_with_mlflow.py`.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hpcdist_runs import Runs


@pytest.fixture
def runs(tmp_path: Path, empty_database: Path) -> Runs:
    found = Runs(tmp_path, empty_database, experiment="patterns")
    launch = "{num_ranks: 2, device: cpu, max_restarts: 1}"
    (found.project / "patterns.yaml").write_text(f"{{experiment: patterns, launch: {launch}}}\n")
    return found


def folder(runs: Runs, name: str) -> Path:
    """Return a new folder for the files of a script."""
    path = runs.folder.with_name(name)
    path.mkdir()
    return path


def torchrun(runs: Runs, command: str, out: Path) -> list[str]:
    """Run `SCRIPT ARGUMENT …` on two ranks under torchrun; return the losses that it prints."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [word.format(out=out) for word in shlex.split(command)]
    done = subprocess.run(
        [*launcher, *words], cwd=runs.project, env=runs.env(), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return losses(done.stdout + done.stderr)


def losses(text: str) -> list[str]:
    """Return the losses in the output of a script; the order of ranks is not determined."""
    return sorted(re.findall(r"loss:? -?\d+\.\d{6}", text, re.IGNORECASE))


def run(runs: Runs, name: str, command: str, out: Path) -> list[str]:
    """Run the same command with hpcdist; return the losses in the logs of its last attempt."""
    words = [word.format(out=out) for word in shlex.split(command)]
    uri = f"tracking.uri=sqlite:///{runs.database}"
    code, output = runs.command("run", "patterns.yaml", f"name={name}", f"trainer.script={json.dumps(words)}", uri)
    assert code == 0, output
    assert f"finished: {Path(words[0]).name} ended with exit status 0" in output
    attempt = runs.attempt(name, runs.run_dir(name).read_state().attempt)
    return losses("".join(attempt.log(rank).read_text() for rank in range(2)))


def own_params(runs: Runs, name: str) -> dict[str, str]:
    """Return the parameters in MLflow that are the script's, not keys of the config."""
    return {key: value for key, value in runs.params(name).items() if "." not in key}


def test_ddp_series_continues_from_its_snapshot_after_a_killed_rank(runs: Runs) -> None:
    command = "patterns/ddp_series.py 4 1 --batch_size 8 --snapshot-path {out}/snapshot.pt"
    whole = torchrun(runs, command, folder(runs, "whole"))
    killed = run(runs, "killed", f"{command} --killed-in 2", out := folder(runs, "killed"))
    assert runs.run_dir("killed").read_state().restarts == 1
    assert "Resuming training from snapshot at Epoch 2" in runs.attempt("killed", 2).log(0).read_text()
    assert len(whole) == 8
    assert len(killed) == 4
    assert set(killed) < set(whole), "the last two epochs as in an uninterrupted run"
    assert own_params(runs, "killed") == {
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
        ("patterns/tensor_parallel.py", set(), {}),
        (
            "patterns/imagenet.py -a tiny -b 8 --lr 0.2 {out}",
            {"checkpoint.pth.tar", "model_best.pth.tar"},
            {"a": "tiny", "b": "8", "lr": "0.2"},
        ),
        (
            "patterns/timm_train.py -c patterns/timm.yaml --amp --lr 0.2 --output {out}",
            {"args.yaml", "summary.csv"},
            {"c": "patterns/timm.yaml", "amp": "true", "lr": "0.2"},
        ),
        ("patterns/fabric.py {out}/model.ckpt", {"model.ckpt"}, {}),
    ],
    ids=lambda value: value.partition(".")[0].rpartition("/")[2] if isinstance(value, str) else "",
)
def test_script_has_the_losses_and_files_of_torchrun(
    runs: Runs, command: str, files: set[str], params: dict[str, str]
) -> None:
    by_torchrun, here = folder(runs, "by_torchrun"), folder(runs, "here")
    expected = torchrun(runs, command, by_torchrun)
    assert expected
    assert run(runs, "first", command, here) == expected
    assert {path.name for path in by_torchrun.iterdir()} == {path.name for path in here.iterdir()} == files
    found = own_params(runs, "first")
    places = {key for key, value in found.items() if str(here) in value}
    assert {key: value for key, value in found.items() if key not in places} == params


@pytest.mark.slow
def test_nano_gpt_resumes_by_an_argument(runs: Runs) -> None:
    command, out = "patterns/nano_gpt.py --out_dir={out}", folder(runs, "out")
    assert len(run(runs, "first", f"{command} --max_iters=2", out)) == 2
    assert len(run(runs, "second", f"{command} --max_iters=5 --init_from=resume", out)) == 3
    assert "iter 3: loss" in runs.attempt("second").log(0).read_text()
    assert "loss" not in runs.attempt("second").log(1).read_text(), "only rank 0 prints"
