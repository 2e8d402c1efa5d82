"""The number of examples that each target executed, for `make fuzz`."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

from fuzzing import EXECUTED, FOLDER


def pytest_sessionfinish() -> None:
    if folder := os.environ.get(FOLDER):
        path = Path(folder) / "executed.json"
        before = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(Counter(before) + EXECUTED))
