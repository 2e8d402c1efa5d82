"""Comparison of what users see with golden files: a difference is a mistake or an intended change."""

import difflib
import os
import re
from pathlib import Path

import pytest
from hpcdist_runs import Runs

ROOT = Path(__file__).resolve().parents[2]
CONTRACT = ROOT / "tests/contract"


def check(name: str, text: str) -> None:
    """Compare a text with a golden file, or write the file."""
    path, text = CONTRACT / name, text.rstrip() + "\n"
    if os.environ.get("WRITE_CONTRACT") == "1":
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
        return
    before = path.read_text() if path.exists() else ""
    lines = before.splitlines(), text.splitlines()
    if diff := "\n".join(difflib.unified_diff(*lines, f"tests/contract/{name}", "now", lineterm="")):
        test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
        again = f"If this is intended: WRITE_CONTRACT=1 .venv/bin/python -m pytest -m '' '{test}'"
        pytest.fail(f"{diff}\n\n{again}", pytrace=False)


#: Sections whose keys do not depend on the trainer; `docs/config.schema.json` has them.
_GENERAL = ("checkpoint", "cluster", "container", "elastic", "launch", "notify", "preflight", "stop", "tracking")


def content_of(runs: Runs, name: str) -> str:
    """Return the names of the tags, parameters and metrics that a run has left in MLflow, one a line.

    Left out is what depends on the machine: the commit and the changes of the checkout, and GPUs.
    """
    names = {
        "tag": runs.tags(name),
        "param": (key for key in runs.params(name) if key.partition(".")[0] not in _GENERAL),
        # A short run may end before the first system metrics and step times.
        "metric": (key for key, _, _ in runs.points(name) if not key.startswith(("system/", "time/"))),
    }
    lines = (f"{kind:7}{one}" for kind, found in names.items() for one in sorted(set(found)))
    return "\n".join(line for line in lines if not re.search(r"git[._]|gpu_", line))


def compared(text: str, name: str) -> str:
    """Return how the lines of a text differ from those of a golden file."""
    lines = difflib.ndiff((CONTRACT / name).read_text().splitlines(), text.splitlines())
    return "\n".join(line for line in lines if line[0] in "+-")
