"""Facts of this machine. GPUs: the parsers, on text as nvidia-smi prints it; there is none here to ask."""

from __future__ import annotations

import os
import runpy
import socket
import threading
from importlib.metadata import distribution
from pathlib import Path

import pytest

import hpcdist
from hpcdist.machine import facts
from hpcdist.machine.facts import Gpu, Lookups, parse_gpus, visible_gpus

LISTING = """\
0, GPU-5a1c9f0e-0000-0000-0000-000000000001, NVIDIA H200, 4, 143771, 0, 0x0000000000000001
1, GPU-5a1c9f0e-0000-0000-0000-000000000002, NVIDIA H200, 90210, 143771, 2, 0x00000000000000C4
2, GPU-5a1c9f0e-0000-0000-0000-000000000003, NVIDIA GeForce RTX 4090, 12, 24564, [N/A], 0x0000000000000000
3, GPU-5a1c9f0e-0000-0000-0000-000000000004, NVIDIA H200, [N/A], [N/A], [N/A], [N/A]
"""
PROCESSES = """\
GPU-5a1c9f0e-0000-0000-0000-000000000002, 4711
GPU-5a1c9f0e-0000-0000-0000-000000000002, 4712
"""


def test_gpus_of_a_listing_written_down_beforehand() -> None:
    first, second, third, fourth = parse_gpus(LISTING, PROCESSES)
    assert first == Gpu(index=0, name="NVIDIA H200", used_mb=4, total_mb=143771, uncorrected_errors=0), (
        "idle is no throttle"
    )
    assert (second.used_mb, second.uncorrected_errors, second.pids) == (90210, 2, (4711, 4712))
    assert second.throttled == ("too hot (hardware slowdown)", "power brake"), "a power cap alone is normal"
    assert (third.name, third.uncorrected_errors) == ("NVIDIA GeForce RTX 4090", None)
    assert (fourth.used_mb, fourth.total_mb, fourth.throttled) == (None, None, ())


@pytest.mark.processes
@pytest.mark.parametrize(
    ("script", "num_gpus"),
    [
        ('case "$1" in *clocks_event*) cat listing;; *apps*) exit 0;; esac', 4),
        ('case "$1" in *clocks_event*) exit 2;; *clocks_throttle*) cat listing;; *) exit 6;; esac', 4),
        ("echo 'NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver'; exit 9", 0),
    ],
    ids=["new driver", "before 535", "no driver"],
)
def test_gpus_are_asked_of_nvidia_smi(
    script: str, num_gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "listing").write_text(LISTING)
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncd {tmp_path}\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert len(facts.gpus()) == num_gpus


@pytest.mark.processes
def test_no_gpus_without_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert facts.gpus() == []


@pytest.mark.parametrize(
    ("value", "count"),
    [(None, 2), ("0,1", 2), ("", 0), ("-1", 0), ("GPU-5a1c", 1), ("0,1,2", 2), ("MIG-a,MIG-b,MIG-c", 3)],
)
def test_gpus_that_a_program_may_see(value: str | None, count: int) -> None:
    assert visible_gpus(2, {} if value is None else {"CUDA_VISIBLE_DEVICES": value}) == count


def test_versions_are_those_of_this_python() -> None:
    found = facts.versions()
    assert found["hpcdist"] == hpcdist.__version__
    assert found["source"] == facts.source_digest(str(Path(hpcdist.__file__).parent))
    # Importing torch would take a second and tell the same.
    torch = runpy.run_path(str(distribution("torch").locate_file("torch/version.py")))
    assert found["torch"] == torch["__version__"]
    assert found.get("cuda") == torch["cuda"], "the file also names cuda among what it exports"
    if torch["cuda"]:
        assert found["nccl"] == distribution(f"nvidia-nccl-cu{torch['cuda'].partition('.')[0]}").version


def test_who_listens_on_a_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert facts.listener(port).startswith(f"pid {os.getpid()} (")
    assert facts.listener(port) == ""


def test_names_are_looked_up_with_their_times() -> None:
    found = Lookups(["localhost", "no-such-host.invalid"], reverse=["localhost"]).result(30.0)
    assert found["localhost"]["address"] == "127.0.0.1"
    assert found["localhost"]["forward_s"] >= 0
    assert "reverse_s" in found["localhost"]
    assert found["no-such-host.invalid"]["error"]


def test_a_resolver_that_takes_too_long_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    monkeypatch.setattr(socket, "gethostbyname", lambda name: never.wait())
    assert Lookups(["n1"], reverse=[]).result(0.0) == {"n1": {"late": 0.0}}
    never.set()


def test_loopback_is_no_interface_to_others() -> None:
    assert all(not card["address"].startswith("127.") and card["name"] != "lo" for card in facts.interfaces())


def test_variables_that_matter_to_the_network_alone_are_told() -> None:
    env = {"NCCL_DEBUG": "INFO", "HOME": "/root", "GLOO_SOCKET_IFNAME": "eth0", "SECRET_TOKEN": "x"}
    assert facts.network_variables(env) == {"NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "eth0"}
