"""The rendezvous of ranks: other programs on the port, missing ranks, and time limits."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hpcdist_runs import unused_port
from spawn import Rank, rank_env, spawn_ranks

from hpcdist.config.launch_schema import LaunchConfig
from hpcdist.config.schema import Config
from hpcdist.config.topology import Topology
from hpcdist.config.written import to_yaml
from hpcdist.errors import RendezvousError
from hpcdist.rank.process_group import deadline, open_store, process_groups
from hpcdist.run.folder import RunDir

CPU = torch.device("cpu")
KEY = bytes(range(32))


def topology_of(port: int, *, rank: int = 0, world_size: int = 2, job_id: str = "ours", num_nodes: int = 1) -> Topology:
    return Topology(
        rank=rank,
        world_size=world_size,
        local_rank=rank if num_nodes == 1 else 0,
        local_world_size=world_size // num_nodes,
        node_rank=rank if num_nodes > 1 else 0,
        num_nodes=num_nodes,
        master_addr="127.0.0.1",
        master_port=port,
        launcher="hpcdist",
        job_id=job_id,
        attempt=1,
    )


@pytest.fixture
def silent_listener() -> Iterator[socket.socket]:
    """A listening socket that accepts connections but sends no data."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def test_port_in_use_stops_rank_0_at_once(silent_listener: socket.socket, tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(
        RendezvousError,
        match=rf"rank 0 cannot listen on 127\.0\.0\.1:{port_of(silent_listener)}: .*Address already in use",
    ):
        open_store(topology_of(port_of(silent_listener), num_nodes=2), KEY, 60, tmp_path)
    assert time.monotonic() - began < 10


def test_unreachable_master_is_an_error_with_its_address(tmp_path: Path) -> None:
    port = unused_port()
    with pytest.raises(RendezvousError, match=rf"rank 1 cannot reach the master at 127\.0\.0\.1:{port}: "):
        open_store(topology_of(port, rank=1, num_nodes=2), KEY, 1, tmp_path)
    with pytest.raises(RendezvousError, match=rf"rank 1 cannot reach the master at {tmp_path}/store.sock: .*No such"):
        open_store(topology_of(port, rank=1), KEY, 1, tmp_path)


def test_ranks_of_other_attempts_and_other_programs_are_refused_as_rank_0(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, silent_listener: socket.socket
) -> None:
    open_store(topology_of(port := unused_port(), num_nodes=2, job_id="theirs"), KEY, 5, tmp_path)
    for key, theirs, limit_s, reason in (
        (KEY, port, 60, "it does not know this attempt's key"),
        (KEY[::-1], port, 60, "it does not know this attempt's key"),
        (KEY, port_of(silent_listener), 1, "it did not answer within 1 s"),
    ):
        problem = rf"the program at 127\.0\.0\.1:{theirs} is not rank 0 of this attempt \(hpcdist/ours/1\): {reason}"
        with pytest.raises(RendezvousError, match=problem):
            open_store(topology_of(theirs, rank=1, num_nodes=2), key, limit_s, tmp_path)


def test_deadline_fires_only_after_it_has_passed() -> None:
    fired = threading.Event()
    with deadline(30, fired.set):
        pass
    with pytest.raises(ValueError, match="inside"), deadline(30, fired.set):
        raise ValueError("inside")
    assert not fired.is_set()
    with deadline(0.01, fired.set):
        assert fired.wait(30)


def test_silent_listener_on_the_port_ends_the_rank_at_its_deadline(
    tmp_path: Path, silent_listener: socket.socket
) -> None:
    """After connecting to a silent listener, torch hangs in C++ for longer than its own timeout; the rank must end."""
    run = RunDir.create(tmp_path / "runs" / "exp" / "first")
    run.config.write_text(to_yaml(Config(runs_dir=str(tmp_path / "runs"), launch=LaunchConfig(init_timeout_s=2.0))))
    attempt = run.new_attempt()
    ours = topology_of(port_of(silent_listener), rank=1, num_nodes=2)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "NUM_NODES")
    variables = {f"HPCDIST_{name}": str(getattr(ours, name.lower())) for name in names}
    variables |= {
        "HPCDIST_MASTER_ADDR": ours.master_addr,
        "HPCDIST_MASTER_PORT": str(ours.master_port),
        "HPCDIST_JOB_ID": ours.job_id,
        "HPCDIST_ATTEMPT": str(ours.attempt),
    }
    done = subprocess.run(
        [sys.executable, "-P", "-m", "hpcdist.rank.worker", str(run.path)],
        env={**rank_env(), **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    address = f"127.0.0.1:{ours.master_port}"
    # The error of the deadline, or that of the connection.
    problem = (
        rf"the program at {address} is not rank 0 of this attempt"
        rf"|rank 1 could not connect to the other ranks at {address}"
    )
    assert done.returncode == 1, done.stderr
    assert re.search(problem, done.stderr)
    assert "Traceback" not in done.stderr
    outcome = attempt.outcomes()[1]
    assert outcome["outcome"] == "failed"
    assert re.match(problem, outcome["error"])
    assert not outcome["peer_lost"]


def test_single_rank_has_no_control_group(tmp_path: Path) -> None:
    topology = topology_of(unused_port(), world_size=1)
    with process_groups(
        topology,
        CPU,
        "gloo",
        KEY,
        tmp_path,
        init_timeout_s=30,
        timeout_s=30,
        on_expiry=lambda: os.kill(os.getpid(), signal.SIGABRT),
    ) as groups:
        assert groups.control is None
        assert dist.get_world_size() == 1
        value = torch.ones(1)
        dist.all_reduce(value)
        assert value.item() == 1.0
    assert not dist.is_initialized()


def rendezvous_twice(here: Rank, ports: list[int]) -> list[float]:
    """Create the process groups on one node and on two, as after a restart, and return the sums of all-reduces."""
    dist.destroy_process_group()
    sums = []
    for attempt in (0, 1):
        topology = topology_of(
            ports[attempt], rank=here.rank, world_size=2, job_id=f"job-{attempt}", num_nodes=1 + attempt
        )
        with process_groups(
            topology, CPU, "gloo", KEY, here.folder, init_timeout_s=30, timeout_s=30, on_expiry=_expired
        ) as groups:
            assert groups.control is not None
            for group in (None, groups.control):
                value = torch.tensor([float(here.rank + 1)])
                dist.all_reduce(value, group=group)
                sums.append(value.item())
        assert not dist.is_initialized()
    with (
        pytest.raises(ValueError, match="ours"),
        process_groups(
            topology_of(ports[2], rank=here.rank, num_nodes=2),
            CPU,
            "gloo",
            KEY,
            here.folder,
            init_timeout_s=30,
            timeout_s=30,
            on_expiry=_expired,
        ),
    ):
        raise ValueError("ours")
    assert dist.is_initialized(), "groups are not destroyed after an error, because peers may be dead"
    return sums


def _expired() -> None:
    raise AssertionError("the rendezvous took too long")


def test_both_groups_reduce_over_all_ranks() -> None:
    assert spawn_ranks(rendezvous_twice, 2, ports=[unused_port() for _ in range(3)]) == [[3.0] * 4] * 2
