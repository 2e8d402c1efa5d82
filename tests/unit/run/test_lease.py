"""The lease of a run, with processes that compete for it, and holders on other hosts."""

import getpass
import json
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from hpcdist.errors import LeaseLostError, RunFolderError
from hpcdist.host.json_files import read_json, write_json
from hpcdist.host.machine import boot_id, process_start
from hpcdist.run import lease
from hpcdist.run.folder import RunDir
from hpcdist.run.lease import hold, holder

#: Waits for a line, tries to hold the run, prints the result, and releases the run at the end of its input.
CONTENDER = """
import errno, fcntl, os, sys
from pathlib import Path
if sys.argv[2:] == ["without flock"]:
    def refuse(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    fcntl.flock = refuse
from hpcdist.errors import RunFolderError
from hpcdist.run.lease import hold
from hpcdist.run.folder import RunDir
print("ready", flush=True)
sys.stdin.readline()
try:
    with hold(RunDir(Path(sys.argv[1]))):
        print("won", flush=True)
        sys.stdin.read()
except RunFolderError as error:
    print(error, flush=True)
"""


@pytest.fixture
def contender(run: RunDir) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start processes that compete for the run, and kill them after the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*options: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", CONTENDER, str(run.path), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        with process:
            process.kill()


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture
def first(contender: Callable[..., subprocess.Popen[str]]) -> subprocess.Popen[str]:
    """A process that holds the run."""
    process = contender()
    go(process)
    assert [line_of(process), line_of(process)] == ["ready", "won"]
    return process


def write_lease(run: RunDir, **changes: Any) -> None:
    pid = os.getpid()
    known = {"host": socket.gethostname(), "pid": pid, "started": process_start(pid), "boot": boot_id(), "user": "ada"}
    times = {"acquired": time.time(), "renewed": time.time()}
    write_json(run.lease, known | times | changes)


@pytest.mark.processes
def test_error_names_the_process_that_holds_the_run(run: RunDir, first: subprocess.Popen[str]) -> None:
    with pytest.raises(RunFolderError) as caught, hold(run):
        pytest.fail("held by two")
    message = str(caught.value)
    assert f"run first is held by process {first.pid} of {getpass.getuser()} on {socket.gethostname()} since" in message
    assert message.endswith("wait for it, or end it with `hpcdist stop first`")
    found = holder(run)
    assert found is not None
    assert found["pid"] == first.pid

    assert first.stdin is not None
    first.stdin.close()
    assert first.wait() == 0
    assert holder(run) is None
    assert not run.lease.exists()
    with hold(run):
        pass


@pytest.mark.processes
def test_lease_of_a_killed_holder_is_free_at_once(run: RunDir, first: subprocess.Popen[str]) -> None:
    first.kill()
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)  # its exit status is not collected: it is a zombie
    assert holder(run) is None
    first.wait()
    assert run.lease.exists()
    assert holder(run) is None
    with hold(run):
        assert (read_json(run.lease) or {})["pid"] == os.getpid()


@pytest.mark.processes
@pytest.mark.parametrize("options", [[], ["without flock"]], ids=["flock", "no flock"])
def test_one_of_eight_processes_gets_the_lease(
    run: RunDir, contender: Callable[..., subprocess.Popen[str]], options: list[str]
) -> None:
    processes = [contender(*options) for _ in range(8)]
    for process in processes:
        assert line_of(process) == "ready"
    for process in processes:
        go(process)
    answers = [line_of(process) for process in processes]
    (winner,) = [process.pid for process, answer in zip(processes, answers, strict=True) if answer == "won"]
    assert sum(f"is held by process {winner} " in answer for answer in answers) == 7


def test_check_and_acquisition_of_the_lease_are_atomic(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads must not read the free lease before one of them has written it."""
    both_read = threading.Barrier(2)
    read = read_json

    def read_together(path: Path, **options: Any) -> dict[str, Any] | None:
        found = read(path, **options)
        with suppress(threading.BrokenBarrierError):
            both_read.wait(0.3)
        return found

    monkeypatch.setattr(lease, "read_json", read_together)
    answers: queue.Queue[str] = queue.Queue()
    ended = threading.Event()

    def contend() -> None:
        try:
            with hold(run):
                answers.put("won")
                ended.wait(20)
        except RunFolderError:
            answers.put("lost")

    threads = [threading.Thread(target=contend) for _ in range(2)]
    for thread in threads:
        thread.start()
    found = {answers.get(timeout=20), answers.get(timeout=20)}
    ended.set()
    for thread in threads:
        thread.join()
    assert found == {"won", "lost"}


def test_reused_process_id_is_another_process(run: RunDir) -> None:
    write_lease(run)
    assert holder(run) is not None
    write_lease(run, started=(process_start(os.getpid()) or 0) - 100)
    assert holder(run) is None
    write_lease(run, boot="another boot")
    assert holder(run) is None
    run.lease.write_text('{"host": ')
    assert holder(run) is None, "damaged"


@pytest.mark.processes
def test_holder_is_alive_after_the_clock_was_set(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """psutil derives the start of a process from the time of the boot, which moves with the clock."""
    with hold(run):
        monkeypatch.setattr("psutil.boot_time", lambda: 0.0)
        monkeypatch.setattr("psutil._pslinux.boot_time", lambda: 0.0)
        assert holder(run) is not None
    ended = subprocess.Popen(["true"])
    started = process_start(ended.pid)
    while started is not None:  # until it waits for this process to read its exit code
        started = process_start(ended.pid)
    ended.wait()
    assert process_start(ended.pid) is None


def test_lease_of_an_older_version_counts_by_its_renewals(run: RunDir) -> None:
    """Such a supervisor is still alive after an update of an editable installation."""
    write_lease(run, started=1.5)
    lease = read_json(run.lease) or {}
    del lease["boot"]
    write_json(run.lease, lease)
    assert holder(run) is not None
    write_json(run.lease, lease | {"renewed": time.time() - 3600})
    assert holder(run) is None


def test_lease_without_its_keys_is_taken_over(run: RunDir) -> None:
    run.lease.write_text('{"owner": "1234"}')
    with hold(run):
        assert (read_json(run.lease) or {})["pid"] == os.getpid()


@pytest.mark.parametrize(("age_s", "alive"), [(lease.STALE_S - 5, True), (lease.STALE_S + 5, False)])
def test_holder_on_another_host_is_alive_while_it_renews(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, age_s: float, alive: bool
) -> None:
    write_lease(run, host="n2", pid=1, renewed=time.time() - age_s)
    assert (holder(run) is not None) == alive
    if alive:
        with pytest.raises(RunFolderError, match=r"held by process 1 of ada on n2 since"), hold(run):
            pytest.fail("held by two")
    else:
        monkeypatch.setattr(lease, "STALE_S", 0.2)
        with hold(run):
            assert (read_json(run.lease) or {})["host"] == socket.gethostname()


def test_requeued_job_takes_over_its_lease_at_once(run: RunDir) -> None:
    """After a node failure, the last renewal of its lease is recent."""
    for mine, other in (("41", "42"), ("41", None), (None, "41")):
        write_lease(run, host="n2", pid=1, job_id=mine)
        with pytest.raises(RunFolderError, match=r"held by process 1 of ada on n2 since"), hold(run, job_id=other):
            pytest.fail("held by two")
    write_lease(run, host="n2", pid=1, job_id="41")
    with hold(run, job_id="41"):
        found = read_json(run.lease) or {}
        assert (found["host"], found["job_id"]) == (socket.gethostname(), "41")
    assert not run.lease.exists()


def test_renewals_continue_after_a_full_disk(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    times: list[float] = []
    renewed = threading.Event()

    def write(path: Path, value: dict[str, Any], **_: object) -> None:
        if threading.current_thread().name == "lease":
            times.append(value["renewed"])
            if len(times) <= 2:
                raise OSError(28, "No space left on device")
            renewed.set()
        path.write_text(json.dumps(value))

    monkeypatch.setattr(lease, "write_json", write)
    monkeypatch.setattr(lease, "RENEW_S", 0.001)
    with caplog.at_level(logging.WARNING), hold(run):
        assert renewed.wait(10)
    assert times[2] > times[0]
    assert caplog.messages == [
        "the lease of run first cannot be renewed: [Errno 28] No space left on device",
        "the lease of run first is renewed again",
    ]


# --- stalled holders, and other clocks


@pytest.mark.parametrize("skew_s", [61.0, -300.0], ids=["its clock is behind", "its clock is ahead"])
def test_holder_with_another_clock_keeps_its_lease(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, skew_s: float
) -> None:
    monkeypatch.setattr(lease, "POLL_S", 0.01)
    write_lease(run, host="n2", pid=1, renewed=time.time() - skew_s)
    num_reads = 0
    read = read_json

    def renew_meanwhile(path: Path, **options: Any) -> dict[str, Any] | None:
        nonlocal num_reads
        num_reads += 1
        if num_reads == 3:
            write_lease(run, host="n2", pid=1, renewed=time.time() - skew_s)
        return read(path, **options)

    monkeypatch.setattr(lease, "read_json", renew_meanwhile)
    with pytest.raises(RunFolderError, match=r"held by process 1 of ada on n2 since"), hold(run):
        pytest.fail("held by two")
    assert caplog.messages == [
        "run first was held by process 1 on n2; waiting up to 60 s to make sure that it is not renewed"
    ]


def test_lease_released_during_the_wait_is_free(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    write_lease(run, host="n2", pid=1, renewed=time.time() - 61)
    monkeypatch.setattr(lease, "POLL_S", 0.01)
    monkeypatch.setattr(time, "sleep", lambda _: run.lease.unlink(missing_ok=True))
    with hold(run):
        assert (read_json(run.lease) or {})["pid"] == os.getpid()


def test_stalled_holder_leaves_the_lease_of_its_successor(run: RunDir) -> None:
    with hold(run) as held:
        held.check()
        write_lease(run, host="n2", pid=7, owner="another")
        held.check()  # the last renewal is recent
        held._tried -= 3 * lease.RENEW_S  # as after SIGSTOP
        with pytest.raises(LeaseLostError, match=r"run first was taken over by process 7 of ada on n2, while process"):
            held.check()
        with pytest.raises(LeaseLostError, match="was taken over"):
            held.check()
    assert (read_json(run.lease) or {})["owner"] == "another"


def test_stalled_holder_detects_a_successor_that_has_ended(run: RunDir) -> None:
    with hold(run) as held:
        run.lease.unlink()
        held.renew()
        assert run.lease.exists()  # too recent for another process to have taken it over
        run.lease.unlink()
        held._renewed -= 2 * lease.STALE_S
        held.renew()
        with pytest.raises(LeaseLostError, match="by another process, which has ended, while process"):
            held.check()
    assert not run.lease.exists()
