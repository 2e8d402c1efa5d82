"""Parsers of py-spy and faulthandler stacks, and the location of a stack."""

from __future__ import annotations

import pytest

from hpcdist.supervisor.hang_node import Frame, location_of, parse_faulthandler, parse_py_spy

SPIED = """\
Process 24: /opt/v/bin/python -P -m hpcdist.rank.worker /runs/digits/hangs
Python v3.11.7 (/root/.pyenv/versions/3.11.7/bin/python3.11)

Thread 24 (idle): "MainThread"
    Condition.wait (/root/.pyenv/versions/3.11.7/lib/python3.11/threading.py:327)
    Event.wait (/root/.pyenv/versions/3.11.7/lib/python3.11/threading.py:629)
    train (/runs/digits/hangs/code/counting.py:28)
    _train (/src/hpcdist/rank/worker.py:212)
    <module> (/src/hpcdist/rank/worker.py:244)
    _run_module_as_main (<frozen runpy>:198)
Thread 35 (idle): "heartbeat"
    Condition.wait (/root/.pyenv/versions/3.11.7/lib/python3.11/threading.py:331)

--------------------------------------------------------------------------------
Process 30: /opt/v/bin/python -P -m hpcdist.rank.worker /runs/digits/hangs
Parent Process 24: /opt/v/bin/python -P -m hpcdist.rank.worker /runs/digits/hangs

Thread 30 (active+gil): "MainThread"
    decode (/runs/digits/hangs/code/counting.py:3)
"""
DUMPED = """\
Thread 0x00007fa67b0ea6c0 (most recent call first):
  File "/root/.pyenv/versions/3.11.7/lib/python3.11/threading.py", line 331 in wait

Current thread 0x00007fa736fe5b80 (most recent call first):
  File "/root/.pyenv/versions/3.11.7/lib/python3.11/threading.py", line 327 in wait
  File "/root/.pyenv/versions/3.11.7/lib/python3.11/threading.py", line 629 in wait
  File "/runs/digits/hangs/code/counting.py", line 28 in train
  File "/src/hpcdist/rank/worker.py", line 212 in _train
  File "<frozen runpy>", line 198 in _run_module_as_main
"""
#: Stack of a data loader worker, which is forked from the rank.
FORKED = """\
Current thread 0x00007fa736fe5b80 (most recent call first):
  File "/v/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py", line 281 in _worker_loop
  File "/root/.pyenv/versions/3.11.7/lib/python3.11/multiprocessing/process.py", line 314 in _bootstrap
  File "/runs/digits/hangs/code/counting.py", line 12 in train
"""
TEXT = "wait (threading.py:327), called by train (counting.py:28)"


def test_py_spy_and_faulthandler_give_the_same_location() -> None:
    by_spy = location_of(parse_py_spy(SPIED))
    frames, text = parse_faulthandler(f"step 14\n{DUMPED}WARNING: unrelated line\n")
    by_dump = location_of(frames)
    assert by_spy is not None
    assert by_dump is not None
    assert by_spy.key() == by_dump.key()
    assert by_dump.text() == TEXT
    assert by_spy.text() == f"Condition.{TEXT}"
    assert text == DUMPED, "all threads, without other lines of the log"
    assert len(parse_py_spy(SPIED)) == 6, "frames of the main thread, without child processes"


@pytest.mark.parametrize(
    "log",
    [
        DUMPED + FORKED,
        FORKED + DUMPED,
        DUMPED.replace("line 28", "line 1") + DUMPED,
        DUMPED.replace("line 28", "line 1") + "step 15\n" + DUMPED,
    ],
    ids=["forked process after", "forked process before", "two dumps", "two dumps with a line between"],
)
def test_last_dump_of_the_rank_itself_is_used(log: str) -> None:
    location = location_of(parse_faulthandler(log)[0])
    assert location is not None
    assert location.text() == TEXT


@pytest.mark.parametrize("log", ["", "step 14\n", "Thread 0x00 (most recent call first):\n"])
def test_log_without_stacks(log: str) -> None:
    assert parse_faulthandler(log) == ([], "")
    assert parse_py_spy(log) == []
    assert location_of([]) is None


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            ["/v/lib/python3.11/site-packages/torch/a.py", "/src/hpcdist/rank/stopping.py", "/home/me/net.py"],
            "f0 (torch/a.py:0), called by f2 (net.py:2)",
        ),
        (["/home/me/net.py"], "f0 (net.py:0)"),
        # A shipped trainer of an installed hpcdist: the function that the worker has called.
        (
            [
                "/v/lib/python3.12/site-packages/torch/a.py",
                "/v/lib/python3.12/site-packages/hpcdist/trainers/ddp/train.py",
                "/v/lib/python3.12/site-packages/hpcdist/rank/worker.py",
            ],
            "f0 (torch/a.py:0), called by f1 (hpcdist/trainers/ddp/train.py:1)",
        ),
        (
            ["/src/hpcdist/rank/stopping.py", "/src/hpcdist/trainers/ddp/train.py"],
            "f0 (stopping.py:0), called by f1 (train.py:1)",
        ),
        # The worker has not called the trainer yet.
        (
            ["/v/lib/python3.11/dataclasses.py", "<frozen runpy>", "/src/hpcdist/rank/worker.py", "<frozen runpy>"],
            "f0 (dataclasses.py:0), called by f2 (worker.py:2)",
        ),
        (["<frozen runpy>", "/usr/lib/python3/dist-packages/a.py"], "f0 (<frozen runpy>:0)"),
    ],
)  # fmt: skip
def test_location_names_the_innermost_line_of_user_code(files: list[str], expected: str) -> None:
    location = location_of([Frame(f"f{line}", file, line) for line, file in enumerate(files)])
    assert location is not None
    assert location.text() == expected
