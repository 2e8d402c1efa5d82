"""Stacks of the processes of a command that does not end, for the message of the test that waits for it."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress

import psutil

from hpcdist.supervisor.hang_node import py_spy

#: Frames of each thread; the innermost ones come first.
MAX_FRAMES = 6
SPY_TIMEOUT_S = 30.0


def kill_with_stacks(pid: int) -> str:
    """Kill a process and all its descendants; return what each of their threads did."""
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
        text = "\n".join(_stacks(process) for process in processes)
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        return text
    return "the process has ended"


def _stacks(process: psutil.Process) -> str:
    try:
        title = f"== {process.pid}: {' '.join(process.cmdline())[:150]}"
        spy = py_spy(os.environ)
        if spy is None:
            return f"{title}\npy-spy is not installed"
        command = [spy, "dump", "--pid", str(process.pid)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SPY_TIMEOUT_S, check=False)
    except (psutil.NoSuchProcess, subprocess.TimeoutExpired) as error:
        return f"== {process.pid}: {error}"
    if done.returncode != 0:
        return f"{title}\n{done.stderr[:200]}"
    threads = [thread.strip("\n").splitlines() for thread in done.stdout.split("\nThread ")[1:]]
    return "\n".join([title, *(line for thread in threads for line in thread[: MAX_FRAMES + 1])])
