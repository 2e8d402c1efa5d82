"""Frames of Python's stacks: which of them is the user's code."""

import pytest

from hpcdist.run.stack_frames import Frame, caller_of, location_of


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["/v/lib/python3.11/site-packages/torch/a.py", "/src/hpcdist/rank/stopping.py", "/home/me/net.py"],
         "f0 (torch/a.py:0), called by f2 (net.py:2)"),
        # A shipped trainer of an installed hpcdist: the function that the worker has called.
        (
            [
                "/v/lib/python3.12/site-packages/torch/a.py",
                "/v/lib/python3.12/site-packages/hpcdist/trainers/ddp/train.py",
                "/v/lib/python3.12/site-packages/hpcdist/rank/worker.py",
            ],
            "f0 (torch/a.py:0), called by f1 (hpcdist/trainers/ddp/train.py:1)",
        ),
        # The worker has not called the trainer yet.
        (["/v/lib/python3.11/dataclasses.py", "<frozen runpy>", "/src/hpcdist/rank/worker.py", "<frozen runpy>"],
         "f0 (dataclasses.py:0), called by f2 (worker.py:2)"),
    ],
)  # fmt: skip
def test_location_names_the_innermost_line_of_user_code(files: list[str], expected: str) -> None:
    assert location_of([Frame(f"f{line}", file, line) for line, file in enumerate(files)]) == expected


PACKAGES = "/v/lib/python3.12/site-packages"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ([], ""),
        (["/me/own.py"], "f0 (own.py:0)"),
        ([f"{PACKAGES}/torch/a.py", "/tmp/torchinductor_me/ab/cab.py", "/me/own.py"], "f2 (own.py:2)"),
        # A library, and Python's own code between it and torch.
        (
            [f"{PACKAGES}/torch/a.py", "/usr/lib/python3.12/contextlib.py", f"{PACKAGES}/peft/b.py", "/me/own.py"],
            "f3 (own.py:3), in f2 (peft/b.py:2)",
        ),
        # A shipped trainer of an installed hpcdist.
        (
            [f"{PACKAGES}/torch/a.py", *(f"{PACKAGES}/hpcdist/{file}" for file in ("trainers/a.py", "rank/worker.py"))],
            "f1 (hpcdist/trainers/a.py:1)",
        ),
        ([f"{PACKAGES}/torch/a.py"], "f0 (torch/a.py:0)"),
    ],
)  # fmt: skip
def test_caller_is_a_line_of_user_code_and_what_it_called(files: list[str], expected: str) -> None:
    assert caller_of([Frame(f"f{line}", file, line) for line, file in enumerate(files)]) == expected
