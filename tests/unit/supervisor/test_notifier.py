"""Notifications reach a real HTTP server or a command, and a receiver that fails or hangs does not affect the run."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from supervisor_scene import DONE, Scene, fails
from webhook import PATH, SECRET, Webhook, listening_webhook

from hpcdist.config.launch_schema import NotifyConfig
from hpcdist.config.loading import load_config, load_run_config
from hpcdist.config.written import run_yaml, secrets_of
from hpcdist.errors import ConfigError
from hpcdist.run.folder import RunDir
from hpcdist.supervisor import notifier

pytestmark = pytest.mark.processes
LOST = "not all notifications were delivered (see notifier.log)"


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    with listening_webhook() as server:
        yield server


@pytest.fixture
def hanging() -> Iterator[str]:
    """Yield the address of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}{PATH}"


@pytest.fixture
def scene(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setattr(notifier, "DRAIN_S", 240.0)  # the machine may be busy
    return Scene(RunDir.create(runs_dir / "exp" / "first"))


def texts_below(folder: Path) -> str:
    return "\n".join(path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file())


def test_webhook_receives_start_restart_and_end(scene: Scene, webhook: Webhook, tmp_path: Path) -> None:
    file = tmp_path / "webhook"
    file.write_text(webhook.url + "\n")
    file.chmod(0o600)
    scene.notify = {"webhook_file": str(file)}
    scene.script(first=[DONE, fails("ValueError: boom token=abc")], second=[DONE, DONE])
    scene.run.mlflow.write_text(json.dumps({"run_id": "0a1b"}))
    webhook.statuses = [500]
    assert scene.supervise().status == "finished"
    assert [(body["event"], body["run"], body["status"], body["attempt"]) for body in webhook.bodies] == [
        ("started", "exp/first", "running", 1),
        ("restarted", "exp/first", "running", 2),
        ("ended", "exp/first", "finished", 2),
    ]
    assert "ValueError: boom token=***" in webhook.bodies[1]["reason"]
    last = webhook.bodies[2]
    assert (last["folder"], last["mlflow_run_id"]) == (str(scene.run.path), "0a1b")
    assert last["reason"] == "all epochs are done"
    assert LOST not in scene.report.notes
    assert "'started' is not delivered: HTTP status 500" in (scene.run.path / "notifier.log").read_text()
    assert SECRET not in texts_below(scene.run.path)


def test_command_receives_arguments_and_json(scene: Scene, tmp_path: Path) -> None:
    command, output = tmp_path / "notify me", tmp_path / "output"
    command.write_text(f'#!/bin/sh\necho "$@" >> {output}\ncat >> {output}\necho >> {output}\necho done\n')
    command.chmod(0o700)
    scene.notify = {"command": str(command)}
    scene.script(first=[DONE, DONE])
    assert scene.supervise().status == "finished"
    started, _, ended, facts = output.read_text().splitlines()
    assert (started, ended) == ("started exp/first running", "ended exp/first finished")
    assert json.loads(facts)["reason"] == "all epochs are done"
    assert (scene.run.path / "notifier.log").read_text() == "done\n" * 2


def test_hanging_webhook_delays_the_end_by_a_bounded_time(
    scene: Scene, hanging: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "DRAIN_S", 0.5)
    scene.notify = {"webhook": hanging}
    scene.script(first=[DONE, DONE])
    assert scene.supervise().status == "finished"
    assert LOST in scene.report.notes
    assert SECRET not in texts_below(scene.run.path)


def test_file_that_others_can_read_is_refused_and_the_run_continues(scene: Scene, tmp_path: Path) -> None:
    file = tmp_path / "webhook"
    file.write_text("https://example.org/s3cret")
    file.chmod(0o640)
    scene.notify = {"webhook_file": str(file)}
    scene.script(first=[DONE, DONE])
    assert scene.supervise().status == "finished"
    assert scene.report.notes[0].startswith(f"notifications are not sent: {file} has mode 0640")
    assert not (scene.run.path / "notifier.log").exists()


@pytest.mark.parametrize(
    ("statuses", "num_delivered", "reason"),
    [([500, 503, 429], 2, "HTTP status 429"), ([302] * 5, 1, "HTTP status 302"), ([404] * 5, 1, "HTTP status 404")],
)
def test_tries_of_an_event_are_bounded(
    scene: Scene,
    webhook: Webhook,
    monkeypatch: pytest.MonkeyPatch,
    statuses: list[int],
    num_delivered: int,
    reason: str,
) -> None:
    monkeypatch.setattr(notifier, "_PAUSES_S", (0.0,) * 4)
    webhook.statuses = list(statuses)
    with notifier.Notifier(scene.run, NotifyConfig(webhook=webhook.url), {}, scene.report.note) as sender:
        for event in ("started", "ended"):
            sender.send(event, scene.run.read_state())
    assert [body["event"] for body in webhook.bodies] == ["started", "ended"][-num_delivered:]
    assert scene.report.notes == ([] if num_delivered == 2 else [LOST])
    lines = (scene.run.path / "notifier.log").read_text().splitlines()
    assert lines == [*lines[:-1], f"'started' is not delivered: {reason}"]
    assert len(lines) == len(statuses)


def test_reason_of_a_failure_does_not_show_the_url(
    scene: Scene, hanging: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(notifier, "DELIVERY_S", 0.2)
    monkeypatch.setattr(notifier, "_PAUSES_S", ())
    (fails := tmp_path / "fails").write_text("#!/bin/sh\nexit 3\n")
    fails.chmod(0o700)
    (hangs := tmp_path / "hangs").write_text("#!/bin/sh\nexec sleep 300\n")
    hangs.chmod(0o700)
    for settings in (
        *({"webhook": url} for url in (hanging, "http://127.0.0.1:1/s3cret", "http://h/s3 cret")),
        *({"command": str(command)} for command in (fails, hangs, "/no/such/file")),
    ):
        with notifier.Notifier(scene.run, NotifyConfig(**settings), {}, scene.report.note) as sender:
            sender.send("ended", scene.run.read_state())
    prefix = "'ended' is not delivered: "
    lines = (scene.run.path / "notifier.log").read_text().splitlines()
    assert [line.partition(" timed out after")[0] for line in lines] == [
        *(prefix + reason for reason in ("TimeoutError", "Connection refused", "InvalidURL")),
        f"{prefix}Command '['{fails}', 'ended', 'exp/first', 'created']' returned non-zero exit status 3.",
        f"{prefix}Command '['{hangs}', 'ended', 'exp/first', 'created']'",
        f"{prefix}No such file or directory",
    ]


def test_address_is_a_secret_of_the_config(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("trainer: ddp\n")
    config = load_config(path, ["notify.webhook=https://example.org/s3cret"])
    assert secrets_of(config) == {"HPCDIST_NOTIFY_WEBHOOK": "https://example.org/s3cret"}
    path.write_text(run_yaml(config))
    assert "s3cret" not in path.read_text()
    restored = load_run_config(path, [], {"HPCDIST_NOTIFY_WEBHOOK": "https://example.org/s3cret"})
    assert restored.notify == config.notify
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["notify.webhook=example.org/s3cret", "notify.command=notify.sh"])
    assert "notify.webhook must be an address" in str(caught.value)
    assert "exclude each other" in str(caught.value)
    assert "s3cret" not in str(caught.value)
