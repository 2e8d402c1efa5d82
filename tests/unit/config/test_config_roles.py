"""The sections `roles` and `cluster.roles`, and the devices of roles."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_files import Write, problems

from hpcdist.config.describe import describe
from hpcdist.config.launch_schema import RoleRequest
from hpcdist.config.loading import load_config, load_run_config
from hpcdist.config.schema import role_device
from hpcdist.config.written import to_yaml

ROLES = "roles: {server: 1, worker: 4}\ncluster:\n  roles:\n    worker: {gpus_per_node: 2, nodes: 2}\n"


def test_roles_keep_the_order_of_the_file(write: Write) -> None:
    config = load_config(write(ROLES), ["roles.server=2", "roles.judge=1", "cluster.roles.server.cpus_per_task=8"])
    assert list(config.roles.items()) == [("server", 2), ("worker", 4), ("judge", 1)]
    assert config.cluster.roles == {
        "worker": RoleRequest(gpus_per_node=2, nodes=2),
        "server": RoleRequest(cpus_per_task=8),
    }


def test_written_roles_load_in_the_same_order(write: Write, tmp_path: Path) -> None:
    config = load_config(write(ROLES))
    written = tmp_path / "written.yaml"
    written.write_text(to_yaml(config))
    assert load_run_config(written, [], {}) == config
    assert list(load_run_config(written, [], {}).roles) == ["server", "worker"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "roles: {a-b: 1}",
            "roles: 'a-b' is not a valid role name: use letters, digits and '_', starting with a letter",
        ),
        ("roles: {a: 0}", "roles.a must be >= 1, got 0"),
        (
            "roles: {a: many}",
            "roles.a must be int, got 'many'",
        ),
        ("cluster: {roles: {worker: {nodes: 2}}}", "cluster.roles.worker: no such role, `roles` has trainer"),
        ("roles: {a: 1}\nlaunch: {devices: {b: cpu}}", "launch.devices.b: no such role, `roles` has a"),
        (
            "roles: {a: 1, b: 1}\nlaunch: {backend: nccl, devices: {b: cpu}}",
            "launch.backend=nccl needs GPUs for all ranks, but b has none: use gloo",
        ),
        ("launch: {devices: {trainer: gpu}}", "launch.devices.trainer must be auto, cpu or cuda, got 'gpu'"),
        (
            "cluster: {roles: {trainer: {nodez: 2}}}",
            "cluster.roles.trainer.nodez is not a key: did you mean 'cluster.roles.trainer.nodes'?",
        ),
        (
            "cluster: {roles: {trainer: {nodes: x}}}",
            "cluster.roles.trainer.nodes must be int | None, got 'x'",
        ),
        (
            "cluster: {roles: {trainer: {nodes: 2}}}",
            "cluster.roles.trainer: `roles` is empty: set its number of ranks, such as roles.trainer=2",
        ),
        ("cluster: {roles: {trainer: 2}}", "cluster.roles.trainer is a section: give it keys, got 2"),
        ("cluster: {roles: {trainer: {nodes: 0}}}", "cluster.roles.trainer.nodes must be >= 1, got 0"),
        (
            "cluster: {roles: {trainer: {gpus_per_node: -1}}}",
            "cluster.roles.trainer.gpus_per_node must be >= 0, got -1",
        ),
    ],
)
def test_mistakes_in_roles_are_reported(write: Write, text: str, expected: str) -> None:
    assert problems(write(text)) == (expected,)


def test_het_accepts_on_off_and_null(write: Write) -> None:
    assert [load_config(write(f"cluster: {{het: {word}}}")).cluster.het for word in ("on", "off", "null")] == [
        True,
        False,
        None,
    ]


@pytest.mark.parametrize(
    ("more", "devices"),
    [
        ("", ("cpu", "auto")),  # GPUs are requested for the workers only
        ("launch: {device: cpu}", ("cpu", "cpu")),
        ("launch: {device: cuda}", ("cpu", "cuda")),
        ("launch: {devices: {server: auto, worker: cpu}}", ("auto", "cpu")),
    ],
)
def test_role_without_requested_gpus_uses_the_cpu(write: Write, more: str, devices: tuple[str, str]) -> None:
    config = load_config(write(f"{ROLES}{more}\n"))
    assert tuple(role_device(config, role) for role in config.roles) == devices


def test_role_with_zero_gpus_uses_the_cpu(write: Write) -> None:
    config = load_config(write("roles: {server: 1, worker: 4}\ncluster: {roles: {server: {gpus_per_node: 0}}}\n"))
    assert [role_device(config, role) for role in config.roles] == ["cpu", "auto"]


def test_schema_lists_the_keys_of_a_role_request() -> None:
    rows = {path: documentation for path, _, _, documentation in describe()}
    assert rows["cluster.roles.ROLE.nodes"].startswith("Number of nodes for this role")
