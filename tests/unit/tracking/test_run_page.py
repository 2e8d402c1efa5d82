"""Description, datasets, name, parameters and tags of a run in MLflow."""

import json
from dataclasses import replace
from typing import Any

import pytest
from tracking_scene import CONFIG, Scene

from hpcdist.config.schema import Config
from hpcdist.config.training_schema import TrainerConfig
from hpcdist.config.written import StoredConfig
from hpcdist.review.facts import AttemptFacts, CheckpointFacts, read_facts
from hpcdist.review.ledger import Entry, Ledger
from hpcdist.run.attempt_times import Cause
from hpcdist.run.config_origin import PLAIN_SCRIPT, Origin, write_origin
from hpcdist.run.figures import Text, write_figure
from hpcdist.run.folder import RunDir
from hpcdist.run.training_record import DatasetRecord, TrainingRecord, write_training
from hpcdist.tracking import run_page
from hpcdist.tracking.run_page import MARK, NOTE_TAG, below_text_of_user
from hpcdist.tracking.run_tags import run_name

DATA = (
    DatasetRecord(name="digits", num_samples=9, digest="ab", source="/data"),
    DatasetRecord(name="digits", split="test"),
    *(DatasetRecord(name="clicks", digest="7e8e", split=split) for split in ("train", "test")),
)


def note(scene: Scene) -> str:
    return str(scene.entity.data.tags[NOTE_TAG])


def beat(scene: Scene, step: int, **metrics: float) -> None:
    attempt = scene.run.attempt(1)
    attempt.path.mkdir(exist_ok=True)
    attempt.beat(0).write_text(json.dumps({"time": 1.0, "step": step, "metrics": metrics}))


def test_description_follows_the_state_and_is_final_at_the_end(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    beat(scene, 10)
    shipper = scene.shipper()
    shipper.ship_once()
    assert note(scene).startswith(f"**running** {MARK}\n")
    assert "step 10;" in note(scene)
    beat(scene, 20)
    shipper.ship_once()
    assert "step 10;" in note(scene), "at most one change per minute"
    monkeypatch.setattr(shipper._page, "_next", 0.0)
    shipper.ship_once()
    assert "step 20;" in note(scene)
    scene.state(status="finished", reason="trained 20 steps", ended=2.0)
    shipper.ship_once()
    assert "**finished**: trained 20 steps" in note(scene)


def test_text_of_the_user_is_kept(scene: Scene) -> None:
    scene.write_config(CONFIG | {"tracking": CONFIG["tracking"] | {"tags": {NOTE_TAG: "see the wiki"}}})
    scene.shipper().ship_once()
    assert note(scene).startswith(f"see the wiki\n\n**running** {MARK}\n")
    run_id = scene.entity.info.run_id
    scene.client.set_tag(run_id, NOTE_TAG, f"see the *wiki*, api_key=mine\n**running** {MARK}\n\nold")
    scene.state(status="stopped", reason="why")
    scene.shipper().ship_once()
    assert note(scene).startswith(f"see the *wiki*, api_key=mine\n\n**stopped**: why {MARK}\n")
    scene.client.set_tag(run_id, NOTE_TAG, "only my text" + "x" * 7900)
    scene.state(status="stopped", reason="why " * 100)
    scene.shipper().ship_once()
    assert note(scene).startswith("only my textxxx")
    assert MARK in note(scene)
    scene.state(reason="not " * 100)
    scene.shipper().ship_once()
    assert note(scene).count("**stopped**") == 1, "a description that was cut off is not taken for text of the user"
    assert len(note(scene)) == 8000


@pytest.mark.parametrize("above", ["", "see the wiki"])
def test_description_of_an_earlier_version_is_replaced(above: str) -> None:
    mark = "<!-- hpcdist: text above this line is kept -->"
    whole = f"{above}\n\nfirst {MARK}\n\nsecond".lstrip()
    assert below_text_of_user(f"{above}\n\n{mark}\n\n**old**".lstrip(), "first\n\nsecond") == whole
    assert below_text_of_user(whole, "first\n\nsecond") == whole
    # An earlier version takes all of it for text of the user.
    assert below_text_of_user(f"{whole}\n\n{mark}\n\n**old**", "first\n\nsecond") == whole


@pytest.mark.parametrize("num_chars", [run_page.MAX_DESCRIPTION, 7950, 8000, 12_000])
def test_text_of_the_user_without_room_below_it_stays(num_chars: int) -> None:
    own = "x" * num_chars
    whole = below_text_of_user(own, "first\n\nsecond")
    assert whole.startswith(own), "an experiment's description may be longer than that of a run"
    assert len(whole) <= max(num_chars, 8000)
    shortened = whole.replace(own, "x")
    assert below_text_of_user(shortened, "first") == f"x\n\nfirst {MARK}"


def test_datasets_are_inputs_once(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_page, "INTERVAL_S", 0.0)
    attempt = scene.run.new_attempt()
    shipper = scene.shipper()
    shipper.ship_once()
    assert scene.dataset_inputs == [], "none is declared yet"
    write_training(attempt, TrainingRecord(datasets=DATA))
    for _ in range(2):
        shipper.ship_once()
    scene.shipper().ship_once()
    found = {(item.dataset.name, item.tags[0].value): item.dataset for item in scene.dataset_inputs}
    assert len(scene.dataset_inputs) == len(found) == 4
    train = found["digits", "train"]
    assert train.profile is not None
    assert (train.digest, json.loads(train.source), json.loads(train.profile)) == (
        "ab", {"uri": "/data"}, {"num_rows": 9}
    )  # fmt: skip
    assert len(found["digits", "test"].digest) == 8, "MLflow requires a digest"
    splits = [found["clicks", split].digest for split in ("train", "test")]
    assert splits == ["7e8e-train", "7e8e-test"], "MLflow takes equal digests for one dataset"


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("mine", {"optim.lr": 0.1, "seed": 1}, "mine"),
        ("ddp-20261122-121700-1a2b", {"optim.lr": 0.1, "seed": 0}, "lr=0.1 (ddp-20261122-121700-1a2b)"),
        ("ddp-20261122-121700-1a2b", {"optim.lr": 0.1, "seed": 5, "data.lr": 1, "data.a": 1, "data.b": 2, "data.c": 3},
         "optim.lr=0.1 seed=5 data.lr=1 a=1 +2 (ddp-20261122-121700-1a2b)"),
        ("ddp-20261122-121700-1a2b", {"optim.lr": 0.001, "seed": 0, "params.a": "y" * 500},
         f"a={'y' * 221} (ddp-20261122-121700-1a2b)"),
    ],
)  # fmt: skip
def test_generated_run_name_says_what_differs(scene: Scene, name: str, values: dict[str, Any], expected: str) -> None:
    run = RunDir.create(scene.run.path.with_name(name))
    write_origin(run, Origin(config="ddp_digits", values={"optim.lr": 0.001, "seed": 0}))
    assert run_name(run, StoredConfig(values=values)) == expected


def test_script_run_without_a_config_is_named_by_its_arguments(scene: Scene) -> None:
    run = RunDir.create(scene.run.path.with_name("train-20261122-121700-1a2b"))
    write_origin(run, Origin(config=PLAIN_SCRIPT, values={"experiment": "hpcdist", "trainer.script": ["train.py"]}))
    script = ["/home/train.py", "--lr", "0.1", "--api-key", "s3cret"]
    config = Config(experiment="train", trainer=TrainerConfig(script=script))
    found = run_name(run, StoredConfig(config=config, values={"experiment": "train", "trainer.script": script}))
    assert found == "lr=0.1 api_key=*** (train-20261122-121700-1a2b)"


def test_summary_tags_have_result_cost_and_interruptions(scene: Scene) -> None:
    def attempt(number: int, steps_lost: int | None) -> AttemptFacts:
        return AttemptFacts(number=number, started=1.0, ended=2.0, status="failed", cause="x", steps_lost=steps_lost)

    seconds: dict[Cause, float] = {"compute": 2556.1, "idle": 1.0}
    entries = tuple(Entry(cause=cause, attempt=1, node="n1", seconds=value) for cause, value in seconds.items())
    best = CheckpointFacts(path=scene.run.path, step=1200, metrics={"eval/accuracy": 0.98239994049})
    attempts = (attempt(1, 7), attempt(2, None), attempt(3, 3))
    facts = replace(read_facts(scene.run), attempts=attempts, best=best, monitor="eval/accuracy")
    found = run_page.summary_tags(facts, Ledger(unit="GPU", entries=entries))
    assert found == {
        "hpcdist.best": "0.9824 at step 1,200",
        "hpcdist.cost": "0.71 GPU-hours, goodput 100 %",
        "hpcdist.interruptions": "1: x; 2: x; 3: x",
        "hpcdist.lost_steps": "10",
    }


def test_newest_sample_of_a_trainer_is_on_the_page(scene: Scene) -> None:
    shipper = scene.shipper()
    for step in (100, 200):
        write_figure(scene.run.artifacts, "sample", Text(title="a text", text=f"{MARK} of {step}"), step)
    shipper.ship_once()
    assert f"### Sample\n\na text, step 200:\n\n```text\n{MARK} of 200\n```" in note(scene)
    scene.state(status="finished", reason="")
    shipper.ship_once()
    assert note(scene).startswith(f"**finished** {MARK}\n"), "a mark in the text is not that of the page"
