"""Ranks end as Python ends a process, and their output and loggers are their own: `support/user_code/ending.py`."""

from __future__ import annotations

from pathlib import Path

from hpcdist_runs import Runs


def written(folder: Path) -> list[str]:
    """Return the files in which the end of the ranks has left its text."""
    return sorted(path.name for path in folder.iterdir() if path.read_text() == "written")


def assert_complete(runs: Runs, name: str, folder: Path) -> None:
    """Assert that all ranks have left all their files, and rank 0 a metric that its thread has logged."""
    assert written(folder) == of_ranks(0, 1)
    (journal,) = runs.run_dir(name).journal.glob("attempt-001.rank-00000.jsonl")
    assert '"late":1.0' in journal.read_text()


def of_ranks(*ranks: int) -> list[str]:
    return [f"{name}-{rank}" for name in ("atexit", "buffer", "thread") for rank in ranks]


def start(runs: Runs, name: str, *overrides: str) -> tuple[int, str]:
    return runs.command("run", *runs.config(name, "tracking.drain_timeout_s=0", *overrides))


def test_script_ends_as_python_ends_it(runs: Runs, tmp_path: Path) -> None:
    code, output = start(runs, "script-end", f"trainer.script=[ending.py,{tmp_path}]")
    assert code == 0, output
    assert "finished: ending.py ended with exit status 0" in output
    assert_complete(runs, "script-end", tmp_path)
    # `logging.basicConfig` of the script works, and hpcdist adds nothing to its lines.
    assert "INFO of my own: rank 0\nprinted by rank 0\n" in output
    assert "INFO of my own: rank 1\n" in runs.attempt("script-end").log(1).read_text()


def test_failed_script_ends_likewise_and_does_not_wait_for_an_endless_thread(runs: Runs, tmp_path: Path) -> None:
    name = "script-fails"
    code, output = start(runs, name, f"trainer.script=[ending.py,{tmp_path},1]", "launch.max_restarts=0")
    assert code == 1, output
    assert "failed with ValueError: a mistake" in output.splitlines()[-1]
    assert written(tmp_path) == of_ranks(0, 1)
    log = runs.attempt(name).log(1).read_text()
    assert "thread 'endless upload'" in log
    code, output = runs.command("logs", name)
    assert log in output, "the log of the rank that failed"


def test_forked_rank_with_an_own_trainer_ends_as_python_ends_it(runs: Runs, tmp_path: Path) -> None:
    code, output = start(runs, "trainer-end", "trainer=ending:train", f"params.folder={tmp_path}")
    assert code == 0, output
    assert_complete(runs, "trainer-end", tmp_path)
    assert "\nINFO of my own: rank 0\nprinted by rank 0\n" in output
    assert "this is rank 0 of" not in output, "lines of hpcdist are in the log only"
