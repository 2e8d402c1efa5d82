"""A config without interpolations is read without OmegaConf, and is equal to the one that OmegaConf reads.

`tests/fuzz/test_fuzz_config.py` compares the two for random files.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from config_files import Write

from hpcdist.config.loading import load_config
from hpcdist.config.shipped import shipped_configs


def by_omegaconf(source: str | Path, words: list[str]) -> str:
    with (
        patch("hpcdist.config.document.plain_value", return_value=None),
        patch("hpcdist.config.merging._without_omegaconf", return_value=None),
    ):
        return repr(load_config(source, words))


WORDS = ["optim.lr=3e-4", "stop.max_epochs=2", "launch.num_ranks=1", "params={a: [1, x]}", "experiment=other"]


@pytest.mark.processes
def test_shipped_configs_are_loaded_without_omegaconf() -> None:
    code = (
        "import sys\n"
        "from hpcdist.config.loading import load_config\n"
        f"for name in {list(shipped_configs())}: load_config(name, {WORDS[:2]})\n"
        "print([name for name in ('omegaconf', 'mlflow', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", shipped_configs())
def test_shipped_config_is_the_same_with_omegaconf(name: str) -> None:
    assert repr(load_config(name, WORDS)) == by_omegaconf(name, WORDS)


@pytest.mark.parametrize("word", ["1e5", "'1e5'", "1_0e5", "1.", ".5", "1:30", ".inf", "-1", "yes", "~", "???", "0x10"])
def test_values_are_the_same_with_omegaconf(word: str, write: Write) -> None:
    path = write(f"params: {{a: {word}, b: [{word}]}}\noptim: {{lr: 1}}\n")
    words = [f"params.c={word}"]
    if word == "???":
        path, words = write("params: {}"), ["params.c='${seed}'"]
    assert repr(load_config(path, words)) == by_omegaconf(path, words)


@pytest.mark.parametrize("value", ["runs here", "${seed}", "1e5", ""])
def test_defaults_from_the_environment_are_the_same_with_omegaconf(
    value: str, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HPCDIST_RUNS_DIR", "HPCDIST_DATA_DIR", "MLFLOW_TRACKING_URI"):
        monkeypatch.setenv(name, value)
    path = write("trainer: ddp")
    assert repr(load_config(path)) == by_omegaconf(path, [])
