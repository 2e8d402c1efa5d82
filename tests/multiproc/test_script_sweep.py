"""A sweep over a script that only prints its losses, as nanoGPT does, with the real command."""

import json
import re
from pathlib import Path

import pytest
from hpcdist_runs import Runs, mlflow_runs

SCRIPT = """\
import sys
lr = float(sys.argv[1].partition("=")[2])
for step in range(0, 41, 10):
    loss = 4 - lr * step
    print(f"step {step}: train loss {loss:.4f}, val loss {loss + 0.1:.4f}")
"""
CONFIG = r"""
experiment: digits
trainer: {script: [train.py, "--lr=${params.lr}"]}
launch: {num_ranks: 1}
params: {lr: 0.01}
checkpoint: {monitor: val/loss, monitor_mode: min}
tracking:
  system_interval_s: 0
  drain_timeout_s: 300
  stdout_metrics:
    train/loss: 'step (?P<step>\d+): train loss ([0-9.]+)'
    val/loss: 'step (?P<step>\d+): .*val loss ([0-9.]+)'
"""


@pytest.mark.slow
def test_sweep_of_a_printing_script_is_ranked_and_drawn(tmp_path: Path, empty_database: Path) -> None:
    runs = Runs(tmp_path, empty_database)
    (runs.project / "train.py").write_text(SCRIPT)
    (runs.project / "nanogpt.yaml").write_text(CONFIG)
    tracking = f"tracking.uri=sqlite:///{runs.database}"
    code, output = runs.command("run", "nanogpt.yaml", "name=tune", tracking, "--sweep", "params.lr=0.01,0.05,0.03")
    assert code == 0, output
    assert re.search(r"lr=0.05 .*finished .* 2[.]1 ", output), "the values of all cells"

    code, output = runs.command("runs", "--sort", "best", "--json")
    assert code == 0, output
    results = json.loads(output)["results"]
    assert [(row["place"], row["name"], row["value"], row["metric"]) for row in results] == [
        (1, "digits/tune-lr_0.05", 2.1, "val/loss"),
        (2, "digits/tune-lr_0.03", 2.9, "val/loss"),
        (3, "digits/tune-lr_0.01", 3.7, "val/loss"),
    ]
    assert {row["runs"][0]["step"] for row in results} == {40}

    page = (runs.folder / "digits" / "tune" / "report.html").read_text()
    assert re.findall(r"<h3>(.*?)</h3>", page)[:2] == ["val/loss over the steps", "val/loss against params.lr"]
    assert set(mlflow_runs(runs.database, "tune")) == {"tune", "lr=0.01", "lr=0.05", "lr=0.03"}
