"""Known failures by what programs really print. Texts are recorded here (torch 2.15, Slurm 22.05.8) unless a test
says that they are quoted: there is no GPU and no memory limit of Slurm's to record them with."""

from __future__ import annotations

import datetime
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hpcdist.diagnostics.failure_patterns import PATTERNS, QUOTE_CHARS, cause_of, first_match, quote


def known(text: str) -> str:
    """Name of the pattern that a text shows."""
    found = first_match(text.splitlines())
    assert found is not None, text
    return found[0].name


# --- the real thing, each time


def failing(code: str) -> str:
    """The last line of standard error of a Python that fails."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done
    return done.stderr.splitlines()[-1]


@pytest.mark.processes
def test_a_module_that_is_not_there() -> None:
    line = failing("import nosuch.thing")
    assert known(line) == "missing-module"
    found = first_match([line])
    assert found is not None
    assert cause_of(found[0], line) == "the ranks' Python does not find nosuch"


@pytest.mark.processes
def test_memory_that_is_not_there() -> None:
    with pytest.raises(RuntimeError) as refused:
        torch.empty(10**15)
    assert known(str(refused.value)) == "out-of-memory"
    assert known(failing("bytearray(10**17)")) == "out-of-memory"


@pytest.mark.processes
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux alone has /dev/full")
def test_a_disk_that_is_full() -> None:
    assert known(failing("open('/dev/full', 'wb', buffering=0).write(b'x')")) == "disk-full"


def test_a_port_that_is_taken() -> None:
    wait = datetime.timedelta(seconds=5)
    first = dist.TCPStore("127.0.0.1", 0, 1, True, timeout=wait, wait_for_workers=False)
    with pytest.raises(dist.DistNetworkError) as refused:
        dist.TCPStore("127.0.0.1", first.port, 1, True, timeout=wait, wait_for_workers=False)
    assert known(str(refused.value)) == "port-taken"


@pytest.mark.processes
def test_a_rank_that_waits_in_vain() -> None:
    """Gloo's own time-out, of a rank whose peer does not come."""
    code = (
        "import datetime, sys, torch, torch.distributed as d\n"
        "d.init_process_group('gloo', init_method='file://' + sys.argv[1], rank=int(sys.argv[2]), world_size=2,"
        " timeout=datetime.timedelta(seconds=3))\n"
        "d.all_reduce(torch.ones(1))\n"
        "sys.stdin.read() if sys.argv[2] == '1' else d.all_reduce(torch.ones(1))\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = [sys.executable, "-c", code, f"{folder}/store"]
        pipe = subprocess.PIPE
        with subprocess.Popen([*arguments, "1"], stdin=pipe, stderr=subprocess.DEVNULL) as peer:
            done = subprocess.run([*arguments, "0"], capture_output=True, text=True, check=False)
            peer.communicate(b"")
    assert known(done.stderr.splitlines()[-1]) == "collective-timeout"


def test_a_gpu_that_is_not_there() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises((RuntimeError, AssertionError)) as refused:
        torch.zeros(1).cuda()
    assert known(str(refused.value)) in ("no-driver", "driver-too-old")


# --- recorded


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (
            "slurmstepd-n1: error: *** STEP 27.0 ON n1 CANCELLED AT 2026-11-20T08:21:04 DUE TO TIME LIMIT ***",
            "time-limit",
        ),
        ("slurmstepd-n2: error: *** JOB 28 ON n2 CANCELLED AT 2026-11-20T08:20:35 DUE TO PREEMPTION ***", "preempted"),
        ("srun: error: Node failure on n4", "node-failure"),
        ("rank 2 on n2 was killed by SIGKILL (out of memory?) at step 46; lost n2", "node-failure"),
        ("rank 2 on n2 was killed by SIGKILL (out of memory?) at step 46", "killed"),
        ("rank 1 on n1 was killed by SIGSEGV at step 3", "crashed"),
        ("srun: error: Unable to create step for job 1: Requested nodes are busy", "not-started"),
        ("srun: Job 7 step creation temporarily disabled, retrying (Requested nodes are busy)", "not-started"),
        ("no rank was started within launch.init_timeout_s=120 s: no output of srun", "not-started"),
        ("rank 7 on n7 was not started within launch.init_timeout_s=120 s: no output of srun", "not-started"),
        (
            "rank 3 on n2 was killed by SIGKILL (out of memory?) at step 50; step 2.1 (attempt-001) does not end,"
            " although none of its ranks is left (n2 has rebooted)",
            "not-started",
        ),
        (
            "rank 0 on n1 made no progress for launch.hang_timeout_s=15 s (stack traces of all ranks are in /x)",
            "hang",
        ),
        (
            "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out"
            " waiting 3000ms for recv operation to complete",
            "collective-timeout",
        ),
        (
            "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:561] Connection closed by"
            " peer [127.0.0.1]:18064. This is typically caused by a remote worker crashing.",
            "peer-lost",
        ),
        (
            "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address."
            " port: 23460, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
            "port-taken",
        ),
        (
            "torch.distributed.DistNetworkError: The client socket has timed out after 2000ms while trying to connect"
            " to (127.0.0.1, 23999).",
            "unreachable",
        ),
        # what torch.save says of a full disk (a tmpfs of 1 MB)
        ("RuntimeError: [enforce fail at inline_container.cc:671] . unexpected pos 576 vs 534", "disk-full"),
        ("the program at 10.0.0.1:21000 is not rank 0 of this attempt (hpcdist/7/1): timed out", "stranger-on-port"),
        (
            "rank 1 could not connect to the other ranks at 10.0.0.1:21000 within launch.init_timeout_s=120 s:"
            " does another program listen on this port?",
            "stranger-on-port",
        ),
    ],
    ids=lambda value: value if len(value) < 20 else "",
)
def test_recorded_texts(line: str, name: str) -> None:
    assert known(line) == name


@pytest.mark.parametrize(
    ("line", "name"),
    [
        # https://www.osc.edu/documentation/knowledge_base/out_of_memory_oom_or_excessive_memory_usage
        (
            "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=14604003.0 cgroup. Some of your processes may"
            " have been killed by the cgroup out-of-memory handler.",
            "out-of-memory",
        ),
        ("srun: error: o0616: task 0: Out Of Memory", "out-of-memory"),
        # https://github.com/pytorch/pytorch/issues/16417
        (
            "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 22.00 MiB. GPU 0 has a total capacity"
            " of 23.65 GiB of which 11.06 MiB is free.",
            "cuda-out-of-memory",
        ),
        # https://github.com/XPixelGroup/BasicSR/issues/737
        (
            "[rank1]:[E626 06:24:44.903881913 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective operation"
            " timeout: WorkNCCL(SeqNum=808, OpType=ALLREDUCE, NumelIn=9801523, NumelOut=9801523, Timeout(ms)=600000)"
            " ran for 600020 milliseconds before timing out.",
            "collective-timeout",
        ),
        # https://github.com/lllyasviel/Fooocus/issues/1313
        (
            "RuntimeError: The NVIDIA driver on your system is too old (found version 11040). Please update your GPU"
            " driver by downloading and installing a new version",
            "driver-too-old",
        ),
    ],
    ids=["slurm-oom", "srun-oom", "cuda-oom", "nccl-timeout", "old-driver"],
)
def test_texts_quoted_from_others_since_they_cannot_be_had_here(line: str, name: str) -> None:
    assert known(line) == name


# --- choosing


def test_causes_stand_before_what_follows_from_them() -> None:
    text = "Connection closed by peer\nslurmstepd: error: Detected 1 oom_kill event in StepId=1.0\nCUDA out of memory\n"
    assert known(text) == "cuda-out-of-memory"
    assert first_match(text.splitlines()[:2]) == (next(p for p in PATTERNS if p.name == "out-of-memory"), 1)
    assert first_match(["a line", "another"]) is None
    assert first_match([]) is None


def test_every_pattern_has_a_cause_and_a_fix_and_a_name_of_its_own() -> None:
    assert len({pattern.name for pattern in PATTERNS}) == len(PATTERNS)
    assert [pattern.name for pattern in PATTERNS if not (pattern.cause and pattern.fix)] == []


def test_a_cause_names_what_the_line_names() -> None:
    def said(line: str) -> str:
        found = first_match([line])
        assert found is not None
        return cause_of(found[0], line)

    assert said("srun: error: Node failure on n4") == "a node failed: n4"
    assert said("STEP 1.0 CANCELLED DUE TO NODE FAILURE") == "a node failed"


def test_a_long_line_is_cut() -> None:
    assert quote("  a\tb ") == "a b"
    assert len(quote("x" * 999)) == QUOTE_CHARS
