"""Comparison of what users see with golden files: a difference is a mistake or an intended change.

`WRITE_CONTRACT=1` writes the files of the selected tests anew.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from pathlib import Path

import pytest

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


def normalised(text: str, folder: Path) -> str:
    """Return an output without what depends on the machine, on the test's folder, or on names of modules."""
    for value, name in ((sys.executable, "PYTHON"), (ROOT, "CHECKOUT"), (folder, "TMP")):
        text = text.replace(str(value), name)
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)  # the colours that typer prints on CI services
    text = re.sub(r"-m hpcdist\.[\w.]+", "-m hpcdist.MODULE", text)
    text = re.sub(r"CHECKOUT/hpcdist/\S+/", "CHECKOUT/hpcdist/PACKAGE/", text)
    text = re.sub(r"/hpcdist-\d+/", "/hpcdist-UID/", text)
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
