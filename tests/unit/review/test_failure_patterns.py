"""Tests of the patterns of known failures.

The texts are produced by the tests, recorded with torch 2.15 and Slurm 22.05.8, or quoted from public reports where the
recording would need a GPU or a memory limit of Slurm.
"""

from __future__ import annotations

import datetime
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hpcdist.review.explain import PATTERNS, QUOTE_CHARS, cause_of, first_match, quote


def pattern_name(text: str) -> str:
    """Return the name of the first pattern that matches a text."""
    found = first_match(text.splitlines())
    assert found is not None, text
    return found[0].name


# --- errors produced by the tests


def last_error_line(code: str) -> str:
    """Run a Python program that fails and return the last line of its error output."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done
    return done.stderr.splitlines()[-1]


@pytest.mark.processes
def test_missing_module() -> None:
    line = last_error_line("import nosuch.thing")
    assert pattern_name(line) == "missing-module"
    found = first_match([line])
    assert found is not None
    assert cause_of(found[0], line) == "the ranks' Python does not find nosuch"


@pytest.mark.processes
def test_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(10**15)
    assert pattern_name(str(raised.value)) == "out-of-memory"
    assert pattern_name(last_error_line("bytearray(10**17)")) == "out-of-memory"


@pytest.mark.processes
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full of Linux")
def test_full_disk() -> None:
    assert pattern_name(last_error_line("open('/dev/full', 'wb', buffering=0).write(b'x')")) == "disk-full"


def test_used_port() -> None:
    wait = datetime.timedelta(seconds=5)
    first = dist.TCPStore("127.0.0.1", 0, 1, True, timeout=wait, wait_for_workers=False)
    with pytest.raises(dist.DistNetworkError) as raised:
        dist.TCPStore("127.0.0.1", first.port, 1, True, timeout=wait, wait_for_workers=False)
    assert pattern_name(str(raised.value)) == "port-taken"


@pytest.mark.processes
def test_collective_timeout_of_gloo() -> None:
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
    assert pattern_name(done.stderr.splitlines()[-1]) == "collective-timeout"


def test_missing_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without GPU")
    with pytest.raises((RuntimeError, AssertionError)) as raised:
        torch.zeros(1).cuda()
    assert pattern_name(str(raised.value)) in ("no-driver", "driver-too-old")


# --- recorded and quoted texts


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (
            "slurmstepd-n1: error: *** STEP 27.0 ON n1 CANCELLED AT 2026-11-20T08:21:04 DUE TO TIME LIMIT ***",
            "time-limit",
        ),
        ("slurmstepd-n2: error: *** JOB 28 ON n2 CANCELLED AT 2026-11-20T08:20:35 DUE TO PREEMPTION ***", "preempted"),
        ("srun: error: Node failure on n4", "node-failure"),
        ("rank 2 on n2 was killed by SIGKILL after step 46; lost n2", "node-failure"),
        ("rank 2 on n2 was killed by SIGKILL after step 46", "killed"),
        ("rank 1 on n1 was killed by SIGSEGV after step 3", "crashed"),
        ("srun: error: Unable to create step for job 1: Requested nodes are busy", "not-started"),
        ("srun: Job 7 step creation temporarily disabled, retrying (Requested nodes are busy)", "not-started"),
        ("no rank was started within launch.init_timeout_s=120 s: no output of srun", "not-started"),
        ("rank 7 on n7 was not started within launch.init_timeout_s=120 s: no output of srun", "not-started"),
        (
            "rank 3 on n2 was killed by SIGKILL after step 50; step 2.1 (attempt-001) does not end,"
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
        # torch.save on a full tmpfs
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
def test_recorded_text_matches_its_pattern(line: str, name: str) -> None:
    assert pattern_name(line) == name


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
def test_quoted_text_matches_its_pattern(line: str, name: str) -> None:
    assert pattern_name(line) == name


# --- order of patterns and causes


def test_causes_precede_their_consequences() -> None:
    text = "Connection closed by peer\nslurmstepd: error: Detected 1 oom_kill event in StepId=1.0\nCUDA out of memory\n"
    assert pattern_name(text) == "cuda-out-of-memory"
    assert first_match(text.splitlines()[:2]) == (next(p for p in PATTERNS if p.name == "out-of-memory"), 1)
    assert first_match(["a line", "another"]) is None
    assert first_match([]) is None


def test_each_pattern_has_a_unique_name_a_cause_and_a_fix() -> None:
    assert len({pattern.name for pattern in PATTERNS}) == len(PATTERNS)
    assert [pattern.name for pattern in PATTERNS if not (pattern.cause and pattern.fix)] == []


def test_cause_contains_the_name_in_the_line() -> None:
    def cause(line: str) -> str:
        found = first_match([line])
        assert found is not None
        return cause_of(found[0], line)

    assert cause("srun: error: Node failure on n4") == "a node failed: n4"
    assert cause("STEP 1.0 CANCELLED DUE TO NODE FAILURE") == "a node failed"


def test_long_lines_are_cut() -> None:
    assert quote("  a\tb ") == "a b"
    assert len(quote("x" * 999)) == QUOTE_CHARS
