"""The code blocks of README, tutorials and how-to guides work.

The commands of a console block marked `test` are executed in a temporary folder with the `file=NAME` blocks of the
page. `tests/slurm/test_submit.py` executes the blocks that are also marked `slurm`.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from doc_blocks import ROOT, blocks, pages

pytestmark = pytest.mark.processes
#: The README's trainer is one's own as well.
SLOW = ("own-trainer",)


def pages_with_commands() -> Iterator[object]:
    for page in pages():
        if any(block.words == ("test",) for block in blocks(page)):
            yield pytest.param(page, id=page.stem, marks=[pytest.mark.slow] if page.stem in SLOW else [])


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> dict[str, str]:
    """Return the environment of the commands, with one MLflow database for all pages."""
    database = shutil.copy(empty_database, tmp_path_factory.mktemp("mlflow") / "mlflow.db")
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "MLFLOW_TRACKING_URI": f"sqlite:///{database}",
    }


def execute(command: str, folder: Path, env: dict[str, str]) -> tuple[int, str]:
    """Return the exit code and the output of a command."""
    done = subprocess.run(shlex.split(command), cwd=folder, env=env, capture_output=True, text=True, check=False)
    return done.returncode, f"{command}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("page", [*pages_with_commands()])
def test_console_blocks_run(page: Path, tmp_path: Path, env: dict[str, str]) -> None:
    for block in blocks(page):
        if block.file:
            (tmp_path / block.file).write_text(block.text)
    for block in blocks(page):
        if block.words == ("test",):
            for command in block.commands:
                exit_code, output = execute(command, tmp_path, env)
                assert exit_code == 0, output


def test_readme_trainer_trains(tmp_path: Path, env: dict[str, str]) -> None:
    (code,) = [block.text for block in blocks(ROOT / "README.md") if block.language == "python"]
    (config,) = [block.text for block in blocks(ROOT / "README.md") if "mymodule:train" in block.text]
    (tmp_path / "mymodule.py").write_text(code)
    (tmp_path / "config.yaml").write_text(config)
    command = "hpcdist run config.yaml params.total_steps=20 launch.num_ranks=2 name=readme"
    exit_code, output = execute(command, tmp_path, env)
    assert exit_code == 0, output
    (journal,) = tmp_path.glob("runs/*/readme/journal/attempt-001.rank-00000.jsonl")
    assert '"s":20,' in journal.read_text()


SESSION = ROOT / "examples" / "agent" / "session.py"


def test_page_for_agents_has_the_commands_of_a_session() -> None:
    page, skill = (ROOT / "docs/how-to/for-agents.md").read_text(), (ROOT / "SKILL.md").read_text()
    used = set(re.findall(r'hpcdist\("(\w+)"', SESSION.read_text()))
    assert {"run", "status", "stop", "resume", "follow", "explain", "compare"} <= used
    assert [name for name in used if f"`hpcdist {name}" not in page or f"hpcdist {name}" not in skill] == []


@pytest.mark.slow
def test_session_of_an_agent_runs(tmp_path: Path, env: dict[str, str]) -> None:
    """It starts, stops, resumes, compares and repairs runs."""
    exit_code, output = execute(f"{sys.executable} {SESSION}", tmp_path, env)
    assert exit_code == 0, output
    for expected in (
        "optim.lr: {'first': '0.002', 'second': '0.01'}",
        "second against first: best eval/accuracy ",
        "cause: an exception in the training code",
    ):
        assert expected in output
    assert "{'digits/first': 'finished', 'digits/second': 'finished', 'agent_script/third': 'finished'}" in output
