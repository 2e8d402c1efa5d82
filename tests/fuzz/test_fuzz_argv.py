"""Any command line gives a result, one of the project's errors, or a usage error."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_strategies import NASTY, axes, overrides
from fuzzing import check_message, fuzz
from hypothesis import strategies as st

from hpcdist.cli.app import make_app
from hpcdist.errors import HpcdistError

APP = make_app()
#: Commands that start no processes; `run` has `--dry-run` for that.
COMMANDS = (
    ["run", "--dry-run"],
    ["config"],
    ["runs"],
    ["status"],
    ["logs"],
    ["explain"],
    ["stop"],
    ["cancel"],
    ["resume"],
)
#: Texts without NUL characters, which arguments of a process cannot contain.
TEXTS = st.one_of(st.sampled_from([text for text in NASTY if "\0" not in text]), st.text(max_size=12)).map(
    lambda text: text.replace("\0", "")
)
WORDS = st.one_of(
    TEXTS,
    overrides.map(lambda text: text.replace("\0", "")),
    st.sampled_from(
        ["ddp_digits", "--sweep", "--runs-dir", "--rank", "--attempt", "--help", "--schema", "--", "-x", "*", "a**b"]
    ),
    axes.map(lambda text: f"--sweep={text}".replace("\0", "")),
)


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@fuzz(share=0.5, command=st.sampled_from(COMMANDS), words=st.lists(WORDS, max_size=3))
def test_command_line_gives_a_result_or_an_error(empty: None, command: list[str], words: list[str]) -> None:
    try:
        APP([*command, *words], standalone_mode=False)
    except HpcdistError as error:
        check_message(error)
    except OSError:
        pass  # an invalid file name, which `main` reports with its path
    except Exception as error:
        # Usage errors; their class is private in typer.
        if getattr(error, "exit_code", 0) != 2:
            raise
