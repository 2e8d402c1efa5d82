"""Rank and host in every line, and nothing said twice."""

from __future__ import annotations

import logging
import re
import socket
import warnings
from collections.abc import Iterator

import pytest

from hpcdist.host import log_files


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("hpcdist")
    before = root.handlers[:], root.level, ours.level, ours.handlers[:]
    yield
    logging.captureWarnings(False)
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    ours.setLevel(before[2])
    ours.handlers[:] = before[3]
    ours.propagate = True


def test_a_ranks_lines_say_which_one_and_where(capsys: pytest.CaptureFixture[str]) -> None:
    log_files.configure(rank=3)
    log_files.configure(rank=3)
    logging.getLogger("hpcdist.rank").info("resumed at step %d", 7)
    out, err = capsys.readouterr()
    assert out == ""
    host = re.escape(socket.gethostname())
    assert re.fullmatch(rf"\d\d:\d\d:\d\d INFO rank 3 on {host}: resumed at step 7\n", err)


def test_elsewhere_a_line_is_just_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    log_files.configure()
    logging.getLogger("hpcdist").warning("careful")
    logging.getLogger("hpcdist").debug("not this")
    logging.getLogger("someone.else").info("nor this")
    assert re.fullmatch(r"\d\d:\d\d:\d\d WARNING careful\n", capsys.readouterr().err)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old API", stacklevel=1)
    assert "WARNING" in capsys.readouterr().err


def test_in_a_rank_all_loggers_but_ours_belong_to_the_user(capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger().handlers[:] = []
    log_files.configure(rank=0)
    logging.basicConfig(level=logging.INFO, format="mine: %(message)s")
    logging.getLogger("someone.else").info("shown")
    logging.getLogger("hpcdist.rank").info("once")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "mine: shown"
    assert [log_files.RANK_LINE.sub("", line) for line in lines[1:]] == ["once"]
