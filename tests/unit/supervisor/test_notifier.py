"""Events of a run reach a real HTTP server once each, and a webhook that fails or hangs does not affect the run."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from supervisor_scene import DONE, Scene, fails
from webhook import PATH, Webhook, listening_webhook

from hpcdist.config.loading import load_config, load_run_config
from hpcdist.config.schema import NotifyConfig
from hpcdist.config.written import run_yaml, secrets_of
from hpcdist.errors import ConfigError
from hpcdist.files.atomic import write_json
from hpcdist.run.folder import RunDir
from hpcdist.supervisor import notifier
from hpcdist.supervisor.notifier import Notifier, NotifierProcess

pytestmark = pytest.mark.processes
FAILED = {"kind": "error", "rank": 1, "host": "n1", "step": 5, "error": "boom <&>", "traceback": []}


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
def scene(runs_dir: Path) -> Scene:
    return Scene(RunDir.create(runs_dir / "exp" / "first"))


def texts_below(folder: Path) -> str:
    return "\n".join(path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file())


def test_supervised_run_reports_failure_and_end_once(
    scene: Scene, webhook: Webhook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NotifierProcess.drain, "__defaults__", (240.0,))  # the machine may be busy
    file = tmp_path / "webhook"
    file.write_text(webhook.url + "\n")
    file.chmod(0o600)
    scene.notify = {"webhook_file": str(file)}
    scene.run.config.write_text(json.dumps({"notify": {"format": "json", "events": ["failure", "end"]}}))
    scene.script(first=[DONE, fails("ValueError: boom")], second=[DONE, DONE], third=[DONE, DONE])
    webhook.statuses = [500]
    assert scene.supervise().status == "finished"
    assert [(body["event"], body["attempt"], body["run"]) for body in webhook.bodies] == [
        ("failure", 1, "first"),
        ("end", 2, "first"),
    ]
    assert "ValueError: boom" in webhook.bodies[0]["text"]
    assert webhook.bodies[1]["text"].startswith("finished: ")
    assert webhook.bodies[1]["status"] == "finished"
    assert len({body["id"] for body in webhook.bodies}) == 2
    assert scene.report.notes[-1:] != ["not all events were sent to the webhook (see notifier.log)"]
    log = (scene.run.path / "notifier.log").read_text()
    assert "did not accept the event 'failure 1' (answered 500); trying again" in log
    assert "s3cretpath" not in texts_below(scene.run.path)
    assert scene.supervise().status == "finished"  # a resume, with a new attempt
    assert [body["event"] for body in webhook.bodies] == ["failure", "end", "end"]


def test_hanging_webhook_delays_the_end_by_a_bounded_time(
    scene: Scene, hanging: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NotifierProcess.drain, "__defaults__", (1.0,))
    scene.notify = {"webhook": hanging}
    scene.run.config.write_text(json.dumps({"notify": {"events": ["end"]}}))
    scene.script(first=[DONE, DONE])
    assert scene.supervise().status == "finished"
    assert "not all events were sent to the webhook (see notifier.log)" in scene.report.notes
    assert "s3cretpath" not in texts_below(scene.run.path)


def test_file_that_others_can_read_is_refused_and_the_run_continues(scene: Scene, tmp_path: Path) -> None:
    file = tmp_path / "webhook"
    file.write_text("https://example.org/s3cret")
    file.chmod(0o640)
    scene.notify = {"webhook_file": str(file)}
    scene.script(first=[DONE, DONE])
    assert scene.supervise().status == "finished"
    assert scene.report.notes[0] == (
        f"events are not sent to the webhook: {file} has mode 0640, so that other users can read the credentials in it:"
        f" `chmod 600 {file}`"
    )
    assert not (scene.run.path / "notifier.log").exists()


def run_with_failure(run: RunDir) -> None:
    attempt = run.new_attempt()
    write_json(attempt.failure, FAILED)
    slow = {"event": "slow", "text": "n1 is 40 % slower than the median node", "role": "trainer", "name": "n1"}
    attempt.stragglers.write_text(json.dumps(slow) + "\n" + json.dumps({**slow, "event": "over"}) + "\n")


def test_next_process_sends_only_new_events(scene: Scene, webhook: Webhook) -> None:
    run_with_failure(scene.run)
    assert Notifier(scene.run, NotifyConfig(), webhook.url).send_new()
    scene.run.write_state(replace(scene.run.read_state(), status="queued", attempt=1, reason="preempted"))
    assert Notifier(scene.run, NotifyConfig(), webhook.url).send_new()
    again = Notifier(scene.run, NotifyConfig(), webhook.url)
    assert again.send_new()
    assert again.send_new()
    assert [(body["event"], body["text"]) for body in webhook.bodies] == [
        ("straggler", "n1 is 40 % slower than the median node"),
        ("failure", "attempt 1 failed: rank 1 on n1 failed with boom <&> after step 5"),
        ("requeue", "requeued: preempted"),
    ]


def test_slack_message_and_choice_of_events(scene: Scene, webhook: Webhook) -> None:
    run_with_failure(scene.run)
    settings = NotifyConfig(format="slack", events=["failure"])
    assert Notifier(scene.run, settings, webhook.url).send_new()
    assert webhook.bodies == [
        {"text": "*exp/first* attempt 1 failed: rank 1 on n1 failed with boom &lt;&amp;&gt; after step 5"}
    ]


@pytest.mark.parametrize(
    ("statuses", "num_passes", "num_sent"),
    [([500, 503, 429], 4, 1), ([404], 1, 0), ([302], 1, 0), ([500] * 100, 8, 0)],
    ids=["passing", "not found", "redirect", "down"],
)
def test_retries_are_bounded(
    scene: Scene,
    webhook: Webhook,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    statuses: list[int],
    num_passes: int,
    num_sent: int,
) -> None:
    monkeypatch.setattr(notifier, "_PAUSES_S", (0.0,) * 7)
    webhook.statuses = list(statuses)
    run_with_failure(scene.run)
    sender = Notifier(scene.run, NotifyConfig(events=["failure"]), webhook.url)
    passes = [sender.send_new() for _ in range(num_passes)]
    assert passes == [False] * (num_passes - 1) + [True]
    assert len(webhook.bodies) == num_sent
    assert ("was not sent: the webhook answered" in caplog.text) == (not num_sent)
    assert "s3cretpath" not in caplog.text


def test_hanging_request_ends(scene: Scene, hanging: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifier, "REQUEST_S", 0.2)
    run_with_failure(scene.run)
    sender = Notifier(scene.run, NotifyConfig(), hanging)
    thread = threading.Thread(target=sender.send_new, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert notifier._post("http://127.0.0.1:1/s3cret", b"") == ("cannot be reached (Connection refused)", True)


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
        load_config(path, ["notify.webhook=example.org/s3cret", "notify.events=[end,party]"])
    assert str(caught.value).count("notify.") == 2
    assert "party" in str(caught.value)
    assert "s3cret" not in str(caught.value)
