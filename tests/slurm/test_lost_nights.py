"""Small things that cost a night, on a real Slurm: each scene beside a control run in which the thing does not happen.

All nine, with those in other files: `pytest -m lost_night`.
"""

import os
import shutil
from collections import Counter
from pathlib import Path

import pytest
from slurm_runs import SlurmRuns

from hpcdist.host.json_files import read_json
from hpcdist.review.ledger import read_ledger
from hpcdist.run.folder import State

pytestmark = [pytest.mark.slow, pytest.mark.lost_night]

ONE_RANK = ("cluster.nodes=1", "cluster.tasks_per_node=1", "launch.num_ranks=1", "cluster.cpus_per_task=2")


def submit(runs: SlurmRuns, name: str, program: str, *overrides: str, **env: str) -> str:
    """Submit a script of one rank. Returns the job's id."""
    file = runs.project / f"{name.replace('-', '_')}.py"
    file.write_text(program)
    words = runs.config(name, f"trainer.script=[{file.name}]", "preflight=off", *ONE_RANK, *overrides)
    code, output = runs.command("submit", *words, "--cluster", "devcluster", **env)
    assert code == 0, output
    return runs.job_id(name)


def ended(runs: SlurmRuns, name: str, program: str, *overrides: str, **env: str) -> State:
    """Return the last state of a script that is submitted."""
    return runs.wait_end(name, submit(runs, name, program, *overrides, **env))


# --- compile caches that outlive the process


COMPILES = "import torch\ntorch.compile(lambda x: x.sin() + 1)(torch.ones(8))\n"


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler: apt-get install g++")
def test_job_on_another_node_compiles_nothing_again(slurm_runs: SlurmRuns, tmp_path: Path) -> None:
    calls, compiler = tmp_path / "calls", tmp_path / "g++"
    compiler.write_text(f'#!/bin/sh\necho "$*" >> {calls}\nexec g++ "$@"\n')
    compiler.chmod(0o755)

    def num_compilations(name: str, *overrides: str) -> int:
        calls.write_text("")
        disk = tmp_path / name  # of the node
        disk.mkdir(mode=0o700)
        variables = (f"launch.env.CXX={compiler}", f"cluster.env.TMPDIR={disk}")
        state = ended(slurm_runs, name, COMPILES, *variables, *overrides)
        assert state.status == "finished", slurm_runs.job_log(name)
        assert list(disk.glob(f"torchinductor_{os.geteuid()}/torch-*/*/*.so")), "the node's own disk is used"
        return sum(" -shared " in line for line in calls.read_text().splitlines())

    store = f"launch.cache_dir={tmp_path}/store"
    assert num_compilations("compiles-first", store) > 0
    assert num_compilations("compiles-again", store) == 0
    assert num_compilations("compiles-control", f"launch.cache_dir={tmp_path}/empty") > 0


# --- idle guard


WAITS = "import time\nwhile True:\n    time.sleep(1)\n"
COMPUTES = "import time\nend = time.monotonic() + 30\nwhile time.monotonic() < end:\n    sum(range(100_000))\n"


def test_job_that_does_nothing_gives_its_node_back(slurm_runs: SlurmRuns) -> None:
    overrides = ("launch.idle_timeout_s=10", "launch.stop_grace_s=20")
    jobs = {name: submit(slurm_runs, name, text, *overrides) for name, text in (("idle", WAITS), ("busy", COMPUTES))}
    state = slurm_runs.wait_end("idle", jobs["idle"])
    assert state.status == "stopped"
    assert "idle: no step, no output, and no use of CPU or GPU for launch.idle_timeout_s=10 s" in state.reason
    assert read_ledger(slurm_runs.run_dir("idle")).seconds["idle"] >= 2 * 10  # two cores
    assert "idle.py" in slurm_runs.attempt("idle").stacks_summary.read_text()
    assert slurm_runs.wait_end("busy", jobs["busy"]).status == "finished"
    assert slurm_runs.run_dir("busy").read_state().attempt == 1


# --- one failure, no second night


FAILS = """\
import os, pathlib, time
import hpcdist
folder = hpcdist.checkpoint_dir()
if {saves}:
    (folder / "saved.pt").touch()
{end}
"""


def test_exception_without_a_checkpoint_is_not_repeated(slurm_runs: SlurmRuns) -> None:
    error = "raise KeyError('key')"
    state = ended(slurm_runs, "fails-unsaved", FAILS.format(saves=False, end=error))
    assert (state.status, state.attempt) == ("failed", 1), state
    assert "no restart from the beginning, since fails_unsaved.py has saved nothing" in state.reason
    # The controls: with a checkpoint, and after a kill, a run restarts.
    state = ended(slurm_runs, "fails-saved", FAILS.format(saves=True, end=error))
    assert (state.status, state.attempt) == ("failed", 2), state
    killed = "if not pathlib.Path('killed').exists():\n    pathlib.Path('killed').touch()\n    os.kill(os.getpid(), 9)"
    state = ended(slurm_runs, "killed-unsaved", FAILS.format(saves=False, end=killed))
    assert (state.status, state.attempt) == ("finished", 2), state


# --- metrics of scripts that do not speak MLflow


PRINTS = """\
import csv, os, pathlib
for step in range(1, 6):
    print(f"step {step}: loss {1 / step:.4f}", flush=True)
    with open("log.csv", "a", newline="") as file:
        csv.writer(file).writerows([["step", "accuracy"]] * (step == 1) + [[step, step / 10]])
"""


def test_printed_and_csv_metrics_arrive_once(slurm_runs: SlurmRuns) -> None:
    patterns = "tracking.stdout_metrics={loss: 'loss ([0-9.]+)'}"
    state = ended(slurm_runs, "prints", PRINTS, patterns)
    assert state.status == "finished"
    control = ended(slurm_runs, "prints-nothing", "print('done')\n")
    assert "it logged no metrics: use MLflow" in control.reason
    assert "it logged no metrics" not in state.reason
    code, output = slurm_runs.command("sync", "prints")
    assert code == 0, output
    points = [point for point in slurm_runs.points("prints") if not point[0].startswith(("system/", "usage/"))]
    counts = Counter((key, step) for key, step, _ in points)
    assert set(counts.values()) == {1}, "each point once"
    series = {key: sorted(value for name, _, value in points if name == key) for key in {key for key, *_ in points}}
    assert series["loss"] == [0.2, 0.25, 0.3333, 0.5, 1.0]
    assert series["accuracy"] == [0.1, 0.2, 0.3, 0.4, 0.5]


# --- a script's outputs are not its code


WRITES = """\
from pathlib import Path
folder = Path({folder!r})
with open(folder / "model.pt", "wb") as file:
    file.truncate(300 * 2**20)
(folder / "out.log").write_text("log")
"""


def test_outputs_beside_a_script_do_not_change_its_code(slurm_runs: SlurmRuns) -> None:
    def digest(name: str) -> str:
        return str((read_json(slurm_runs.run_dir(name).environment) or {})["code_digest"])

    program = WRITES.format(folder=str(slurm_runs.project))
    names = ("writes-first", "writes-second", "writes-control")
    try:
        for name in names:
            (slurm_runs.project / "writes.py").write_text(program)
            if name == "writes-control":
                (slurm_runs.project / "writes.py").write_text(f"{program}\n# changed\n")
            words = slurm_runs.config(name, "trainer.script=[writes.py]", "preflight=off", *ONE_RANK)
            code, output = slurm_runs.command("submit", *words, "--cluster", "devcluster")
            assert code == 0, output
            state = slurm_runs.wait_end(name, slurm_runs.job_id(name))
            assert state.status == "finished", slurm_runs.job_log(name)
            assert (slurm_runs.project / "model.pt").exists()
    finally:
        (slurm_runs.project / "model.pt").unlink(missing_ok=True)
    assert digest(names[0]) == digest(names[1])
    assert digest(names[0]) != digest(names[2])
    code, output = slurm_runs.command("compare", names[0], names[2])
    assert "writes.py" in output
    assert (slurm_runs.run_dir(names[1]).code / "model.pt").is_symlink(), "it is not copied"
