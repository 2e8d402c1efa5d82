"""Words of a command line: any of them end in a result, in one of the project's errors, or in click's usage errors."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_strategies import NASTY, axes, overrides
from fuzzing import check_message, fuzz
from hypothesis import strategies as st

from hpcdist.cli.app import app
from hpcdist.errors import HpcdistError

#: Commands that start nothing: those that would are given `--dry-run` first.
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
#: No NUL: the kernel passes none.
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
        app([*command, *words], standalone_mode=False)
    except HpcdistError as error:
        check_message(error)
    except OSError:
        pass  # a name that the file system refuses: `main` prints it with its path
    except Exception as error:
        # click's usage errors, told as `cli.main` tells them: typer has a click of its own.
        if getattr(error, "exit_code", 0) != 2:
            raise
