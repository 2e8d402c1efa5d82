"""`hpcdist rerun` with real ranks: a run repeated from its folder, and one of which only MLflow and git are left."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from hpcdist_runs import Runs, assert_equals_control

#: A step in the second epoch; log steps are even.
PAUSE_STEP = 50
NEW_NAME = re.compile(r"repeats \S+ .* as (\S+)/(\S+)")


def name_in(output: str) -> str:
    found = NEW_NAME.search(output)
    assert found is not None, output
    return found[2]


@pytest.fixture(scope="module")
def repeated(runs: Runs, control_run: str) -> tuple[str, str]:
    """The name of a rerun of the first steps, and the output of the command."""
    code, output = runs.command("rerun", runs.mlflow_id(control_run), "--steps", str(PAUSE_STEP))
    assert code == 0, output
    return name_in(output), output


def test_a_rerun_of_some_steps_repeats_the_values(runs: Runs, control_run: str, repeated: tuple[str, str]) -> None:
    original = runs.mlflow_id(control_run)
    name, output = repeated
    assert f"stopped: everything saved (stop.pause_at_step={PAUSE_STEP})" in output
    # Three training metrics and the samples at every second step, two of the evaluation after the first epoch.
    assert output.splitlines()[-1] == f"no value differs: {4 * PAUSE_STEP // 2 + 2} values of 6 metrics at 26 steps"
    assert runs.run_dir(name).read_state().status == "stopped"
    assert runs.checkpoint_steps(name)[-1] == PAUSE_STEP
    tags = runs.tags(name)
    assert tags["hpcdist.rerun_of"] == original
    assert f"**Repeats** &ensp;| {control_run} (MLflow run {original})" in tags["mlflow.note.content"]
    assert "**Values** &ensp;| no value differs: " in tags["mlflow.note.content"]


@pytest.mark.slow
def test_a_rerun_of_some_steps_continues_as_the_original(
    runs: Runs, control_run: str, repeated: tuple[str, str]
) -> None:
    """The schedule is that of the whole run, so the paused one ends with the same weights."""
    name, _ = repeated
    code, output = runs.command("resume", name, "stop.pause_at_step=null")
    assert code == 0, output
    assert_equals_control(runs, name, control_run)
    code, output = runs.command("rerun", name, "--compare")
    assert (code, output.splitlines()[-1].partition(":")[0]) == (0, "no value differs"), output


@pytest.mark.faults
def test_a_run_is_repeated_from_mlflow_and_git_after_its_folder_is_gone(runs: Runs, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "walk.py").write_text(
        "import torch\nfrom factor import FACTOR\n"
        "def train(ctx, cfg):\n"
        "    ctx.restore()\n"
        "    x = 0.0\n"
        "    for step in range(1, 21):\n"
        "        x += FACTOR * float(torch.rand(()))\n"
        "        ctx.log({'train/x': x}, step)\n"
        "        if ctx.should_stop(step, 20):\n"
        "            ctx.save(step, model=torch.nn.Linear(1, 1), trainer={})\n"
        "            return\n"
        "    ctx.end_reason = 'walked'\n"
    )
    (project / "factor.py").write_text("FACTOR = 1.0\n")

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=ada", "-c", "user.email=ada@example.org"]
        subprocess.run(["git", *identity, *arguments], cwd=project, check=True)

    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "-m", "first")
    (project / "factor.py").write_text("FACTOR = 2.0\n")
    (project / "notes.txt").write_text("not in git\n")
    runs.project, before = project, runs.project
    try:
        overrides = ["trainer=walk:train", f"experiment={runs.experiment}", "launch.num_ranks=1"]
        code, output = runs.command("run", *runs.config("walk", *overrides, export=True))
        assert code == 0, output
        run_id = runs.mlflow_id("walk")
        runs.run_dir("walk").path.rename(tmp_path / "gone")
        git("commit", "--quiet", "--all", "-m", "second")
        (project / "factor.py").write_text("FACTOR = 3.0\n")
        store = f"sqlite:///{runs.database}"

        code, output = runs.command("rerun", run_id, "--tracking-uri", store, "--yes")
        assert code == 0, output
        assert "not restored: files that were not in git: notes.txt" in output
        assert output.splitlines()[-1] == "no value differs: 20 values of 1 metrics at 20 steps"
        name = name_in(output)
        assert (runs.run_dir(name).code / "factor.py").read_text() == "FACTOR = 2.0\n"
        assert (project / "factor.py").read_text() == "FACTOR = 3.0\n"

        code, output = runs.command(
            "rerun", run_id, "--tracking-uri", store, "--yes", "--with-current-code", "--steps", "3"
        )
        assert code == 1, output
        assert output.splitlines()[-1].startswith("the first difference is at step 1: train/x was ")
    finally:
        runs.project = before
