"""The tag `hpcdist.command` of an MLflow run, on a real database; the ranks are replaced."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from tracking_scene import CONFIG, Scene

from hpcdist.errors import TrackingError, UserMistake
from hpcdist.host.files import read_json
from hpcdist.run.commands import CommandResult, LiveCommand, read_command, write_result
from hpcdist.run.lease import hold
from hpcdist.tracking import command_tag
from hpcdist.tracking.command_tag import parse
from hpcdist.tracking.delivery import Delivery


class Live:
    """A running run whose config allows commands."""

    def __init__(self, scene: Scene, *allowed: str) -> None:
        self.scene = scene
        scene.write_config(CONFIG | {"tracking": {**CONFIG["tracking"], "commands": list(allowed)}})
        self.attempt = scene.run.new_attempt()
        scene.state(world_size=4)
        self.shipper = scene.shipper()
        self.shipper.ship_once()

    def set(self, text: str) -> None:
        self.scene.client.set_tag(self.scene.run_id, "hpcdist.command", text)

    def tags(self) -> dict[str, str]:
        return dict(self.scene.entity.data.tags)

    def result(self) -> str:
        """Return the result of the last command, without its time."""
        return self.tags().get("hpcdist.command.result", "").partition(" UTC ")[2]

    def ship(self) -> None:
        """Upload in a pass that reads the tag once."""
        self.shipper._command._next = -math.inf
        self.shipper.ship_once()

    def obey(self, text: str) -> str:
        self.set(text)
        self.ship()
        return self.result()


@pytest.fixture
def live(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    monkeypatch.setattr(command_tag, "INTERVAL_S", 3600.0)
    with hold(scene.run):
        yield Live(scene, "stop", "save", "profile")


def test_stop_is_requested_once_and_answered(live: Live) -> None:
    assert live.obey("stop") == "stop: first will save and stop; `hpcdist status first` shows its progress"
    request = read_json(live.attempt.request) or {}
    assert (request["action"], request["cause"], request["by"]) == ("stop", "user", "the tag hpcdist.command in MLflow")
    assert "hpcdist.command" not in live.tags()
    live.attempt.request.unlink()
    live.ship()
    assert not live.attempt.request.exists()


def test_command_that_is_set_before_the_tag_is_removed_is_obeyed_next(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = command_tag.CommandTag._note

    def note_and_set(self: command_tag.CommandTag, command: command_tag.SentCommand) -> None:
        note(self, command)
        if command.text == "save" and not command.result:
            live.set("stop")

    monkeypatch.setattr(command_tag.CommandTag, "_note", note_and_set)
    assert live.obey("save") == "save: sent to the ranks"
    assert live.tags()["hpcdist.command"] == "stop"
    live.ship()
    assert (read_json(live.attempt.request) or {})["action"] == "stop"
    assert "hpcdist.command" not in live.tags()


def test_results_of_the_ranks_follow(live: Live) -> None:
    text = "profile steps=3 ranks=2,0"
    assert live.obey(text) == f"{text}: sent to the ranks"
    command = read_command(live.attempt, 1)
    assert command == LiveCommand(
        action="profile",
        by="the tag hpcdist.command in MLflow",
        num_steps=3,
        ranks=[0, 2],
        time=command.time if command else 0.0,
        key=command.key if command else "",
    )
    write_result(live.attempt, 1, 0, CommandResult(step=8, num_steps=3, path="artifacts/a"))
    live.ship()
    assert live.result() == f"{text}: sent to the ranks"
    write_result(live.attempt, 1, 2, CommandResult(error="no space"))
    Delivery(live.scene.run, live.scene.uri).ship_once()  # another process continues
    assert live.result() == f"{text}: rank 0: profiled 3 steps from step 8 on: artifacts/a; rank 2: no space"
    assert live.obey("save") == "save: sent to the ranks"
    live.scene.state(status="finished", ended=1.0)
    live.shipper = live.scene.shipper()
    live.ship()
    assert live.result() == "save: rank 0: attempt 1 ended before it was done"


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("halt", "refused: 'halt' is no command: set stop, save or profile, such as 'profile steps=10 ranks=0,3'"),
        ("profile ranks=4", "refused: run first has no rank 4: its ranks are 0 to 3"),
        ("profile steps=0", "refused: a profile has 1 to 1000 steps, got 0"),
    ],
)
def test_invalid_commands_are_refused(live: Live, text: str, result: str) -> None:
    assert live.obey(text) == f"{text}: {result}"
    assert "hpcdist.command" not in live.tags()
    assert not live.attempt.command(1).exists()


def test_config_allows_commands(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_tag, "INTERVAL_S", 3600.0)
    with hold(scene.run):
        some = Live(scene, "save")
        assert some.obey("stop") == "stop: refused: tracking.commands allows save, not stop: add it to the config"
        assert not some.attempt.request.exists()
        scene.write_config(CONFIG)
        some.shipper = scene.shipper()
        some.obey("save")
    assert some.tags()["hpcdist.command"] == "save"
    assert not some.attempt.command(1).exists()


def test_command_to_an_ended_run_does_not_stop_its_resume(live: Live) -> None:
    live.set("stop")
    live.scene.state(status="stopped", ended=1.0)
    live.ship()
    assert live.result() == "stop: ignored, since the run has ended: it is stopped"
    live.set("stop")
    live.scene.state(status="running", ended=None, attempt=2)
    live.scene.run.new_attempt()
    live.shipper = live.scene.shipper()
    live.ship()
    assert live.result() == "stop: ignored, since it was set before the run was resumed"
    assert not live.scene.run.attempt(2).request.exists()
    assert live.obey("stop").startswith("stop: first will save and stop")


def test_crash_after_the_tag_was_read(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("hpcdist.tracking.mlflow_client.MlflowRun.delete_tag", crash)
        with pytest.raises(KeyboardInterrupt):
            live.obey("save")
    live.shipper = live.scene.shipper()
    live.ship()
    assert live.result() == "save: sent to the ranks"
    assert live.attempt.command(1).exists()
    with monkeypatch.context() as patch:
        patch.setattr("hpcdist.tracking.mlflow_client.MlflowRun.delete_tag", crash)
        with pytest.raises(KeyboardInterrupt):
            live.obey("stop")
    live.scene.state(attempt=2)
    live.scene.run.new_attempt()
    live.shipper = live.scene.shipper()
    live.ship()
    assert live.result() == "stop: ignored, since it was set during attempt 1"


@pytest.mark.parametrize("text", ["save", "profile", "stop"])
def test_command_is_obeyed_once_if_the_shipper_dies_after_obeying(
    live: Live, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    note = command_tag.CommandTag._note

    def crash_before_the_result(self: command_tag.CommandTag, command: command_tag.SentCommand) -> None:
        if command.result:
            raise KeyboardInterrupt
        note(self, command)

    with monkeypatch.context() as patch:
        patch.setattr(command_tag.CommandTag, "_note", crash_before_the_result)
        with pytest.raises(KeyboardInterrupt):
            live.obey(text)
    live.shipper = live.scene.shipper()
    live.ship()
    assert not live.attempt.command(2).exists()
    if text == "stop":
        assert (read_json(live.attempt.request) or {})["action"] == "stop"
        assert live.result().startswith("stop: first will save and stop")
    else:
        assert live.result() == f"{text}: sent to the ranks"
        assert live.attempt.command(1).exists()
        assert live.obey(text) == f"{text}: sent to the ranks", "another command with the same text"
        assert live.attempt.command(2).exists()


def test_unavailable_tag_does_not_stop_the_upload(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> str:
        raise TrackingError("no tags today")

    monkeypatch.setattr("hpcdist.tracking.mlflow_client.MlflowRun.delete_tag", fail)
    live.set("save")
    live.scene.log(range(3))
    with pytest.raises(TrackingError, match="no tags today"):
        live.ship()
    assert live.scene.steps() == [0, 1, 2]


def test_commands_are_parsed() -> None:
    assert parse("stop") is None
    assert parse(" save ") == LiveCommand(action="save", by=command_tag.AUTHOR)
    profile = LiveCommand(action="profile", by=command_tag.AUTHOR)
    assert parse("profile") == profile
    assert parse("profile ranks=3,1 steps=20") == replace(profile, num_steps=20, ranks=[1, 3])
    for text, message in (
        ("stop now", "'stop now' is no command: set stop, save or profile, such as 'profile steps=10 ranks=0,3'"),
        ("profile depth=2", "'profile depth=2' is no command"),
        ("profile steps=ten", "steps=ten: expected a number"),
        ("profile ranks=a", "ranks 'a': expected ranks, separated by commas, such as 0,3"),
    ):
        with pytest.raises(UserMistake, match=message):
            parse(text)
