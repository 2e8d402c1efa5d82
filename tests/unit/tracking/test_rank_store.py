"""MLflow's tracking store and artifact repository for the code of a rank, and the upload of what they record."""

import json
import logging
import os
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import mlflow
import pytest
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, LoggedModelOutput, Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking._tracking_service import utils
from tracking_scene import Scene

from hpcdist.errors import RunFolderError, TrackingError
from hpcdist.tracking import rank_records
from hpcdist.tracking.journal import EventWriter, event_files, read_events
from hpcdist.tracking.mlflow_client import MlflowRun
from hpcdist.tracking.rank_records import RankRecords, is_declared, run_id_of
from hpcdist.tracking.script_store import RankStore
from hpcdist.tracking.series import read_last_values, read_values

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:mlflow")

Enter = Callable[..., MlflowClient]


@pytest.fixture
def enter(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Iterator[Enter]:
    """A function that makes this process a rank of the scene's run, and returns the client that its code has."""
    begun: list[RankRecords] = []
    monkeypatch.setattr(rank_records, "_own", None)

    def as_rank(attempt: int = 1, rank: int = 0, pid: int | None = None) -> MlflowClient:
        records = RankRecords(scene.run, attempt=attempt, rank=rank, pid=pid or os.getpid())
        begun.append(rank_records.begin(records))
        utils._artifact_repos_cache.clear()  # by run id, which several tests share
        return MlflowClient(tracking_uri=records.uri)

    yield as_rank
    for records in begun:
        records.close()


def current_records() -> RankRecords:
    records = rank_records.current()
    assert records is not None
    return records


def ship(scene: Scene) -> None:
    scene.shipper().ship_once()


def test_the_package_declares_the_plugin_to_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_declared()
    older = EntryPoint("hpcdist", "hpcdist.former_module:tracking_store", "mlflow.tracking_store")
    monkeypatch.setattr("importlib.metadata.distribution", lambda _: SimpleNamespace(entry_points=(older,)))
    assert not is_declared(), "in another module: the installation is older than its code"


def test_metrics_parameters_and_tags_reach_the_run(scene: Scene, enter: Enter) -> None:
    client = enter()
    run = client.create_run(client.create_experiment("other"), tags={"mlflow.user": "eve", "mlflow.runName": "mine"})
    run_id = run.info.run_id
    assert run_id == run_id_of(scene.run)
    for step in (1, 2):
        client.log_metric(run_id, "loss", 1 / step, step=step)
    client.log_metric(run_id, "loss", 0.25, step=3, synchronous=False)
    client.log_batch(run_id, [Metric("a", 1, 5, 7), Metric("b", 2, 5, 7)], [Param("lr", "0.1")], [RunTag("k", "v")])
    client.log_param(run_id, "optim.lr", 5)
    client.log_param(run_id, "hub_token", "very-secret")
    client.set_tag(run_id, "mlflow.note.content", "a description")
    client.set_tag(run_id, "hpcdist.state", "mine")
    client.set_tag(run_id, "gone", "x")
    client.delete_tag(run_id, "gone")
    client.set_terminated(run_id)
    ship(scene)
    assert scene.steps() == [1, 2, 3]
    assert [(it.timestamp, it.step, it.value) for it in scene.client.get_metric_history(scene.run_id, "b")] == [
        (5, 7, 2.0)
    ]
    data = scene.entity.data
    assert (data.params["lr"], data.params["optim.lr"], data.params["script.optim.lr"]) == ("0.1", "0.001", "5")
    assert data.params["hub_token"] == "***"
    assert (data.tags["k"], data.tags["gone"], data.tags["script.runName"]) == ("v", "", "mine")
    assert (data.tags["script.note.content"], data.tags["script.hpcdist.state"]) == ("a description", "mine")
    assert (data.tags["mlflow.runName"], data.tags["hpcdist.state"], data.tags["mlflow.user"]) == (
        "first",
        "running",
        "ada",
    )
    assert scene.status() == "RUNNING", "the end of the run in the script is not the end of hpcdist's run"
    assert len(scene.client.search_runs([scene.entity.info.experiment_id])) == 1


def test_what_was_logged_is_read_back(scene: Scene, enter: Enter, caplog: pytest.LogCaptureFixture) -> None:
    client = enter()
    run_id = run_id_of(scene.run)
    found = client.get_experiment_by_name("exp")
    assert found is not None
    assert found.name == "exp"
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        by_id, by_name = client.get_experiment("17"), client.get_experiment_by_name("x")
        assert by_name is not None
        assert by_id.name == by_name.name == "exp"
        client.set_experiment_tag("0", "team", "vision")
    assert [record.message.partition(" of the script")[0] for record in caplog.records] == [
        "MLflow: the experiment '17'",
        "MLflow: the experiment 'x'",
        "MLflow: the tag of the experiment 'team'",
    ]
    client.log_metric(run_id, "loss", 1.0, step=1)
    client.log_metric(run_id, "loss", 2.0, step=2)
    client.log_param(run_id, "lr", 0.1)
    assert client.get_run(run_id).data.metrics == {"loss": 2.0}
    client.log_metric(run_id, "loss", 3.0, step=1)
    client.log_metric(run_id, "loss", 2.5, step=2)
    assert client.get_run(run_id).data.metrics == {"loss": 2.5}
    assert [it.value for it in client.get_metric_history(run_id, "loss")] == [1.0, 2.0, 3.0, 2.5]
    assert [it.info.run_id for it in client.search_runs(["0"], "params.lr = '0.1'")] == [run_id]
    assert client.search_runs(["0"], "params.lr = '7'") == []
    assert [it.name for it in client.search_experiments(filter_string="name = 'exp'")] == ["exp"]
    assert client.search_experiments(filter_string="name = 'other'") == []
    ship(scene)
    assert client.get_run(scene.run_id).info.run_id == run_id, "also by MLflow's own id"

    client = enter(attempt=2)
    run = client.get_run(run_id)
    assert (run.data.metrics, run.data.params) == ({"loss": 2.5}, {"lr": "0.1"}), "of the attempt before"


def test_steps_that_a_restart_repeats_keep_their_first_value(scene: Scene, enter: Enter) -> None:
    for attempt, offset in ((1, 0.0), (2, 100.0)):
        client = enter(attempt=attempt)
        for step in range(attempt, attempt + 3):
            client.log_metric(run_id_of(scene.run), "loss", step + offset, step=step)
        client.log_param(run_id_of(scene.run), "started", attempt)
    scene.state(attempt=2)
    ship(scene)
    values = {it.step: it.value for it in scene.client.get_metric_history(scene.run_id, "loss")}
    assert values == {1: 1.0, 2: 2.0, 3: 3.0, 4: 104.0}
    assert scene.entity.data.params["started"] == "1"
    assert scene.entity.data.tags["hpcdist.changed.started"] == "2"


def test_last_of_a_scripts_values_at_one_step_counts(scene: Scene, enter: Enter) -> None:
    scene.run.config.write_text("trainer: {script: [train.py]}\n")
    falling = [float(value) for value in range(50, 0, -1)]  # many of them in one millisecond
    client = enter()
    run_id = run_id_of(scene.run)
    for value in falling:
        client.log_metric(run_id, "loss", value, step=7)
    scene.state(attempt=1)
    ship(scene)
    history = scene.client.get_metric_history(scene.run_id, "loss")
    assert sorted(it.value for it in history) == falling[::-1], "all arrive, as without hpcdist"
    assert (scene.entity.data.metrics["loss"], read_last_values(scene.run)["loss"]) == (1.0, (7, 1.0))

    client = enter(attempt=2)
    for step, values in ((7, (3.0, 2.0)), (8, (9.0, 5.0))):  # a resume repeats step 7
        for value in values:
            client.log_metric(run_id, "loss", value, step=step)
    scene.state(attempt=2)
    ship(scene)
    latest = scene.entity.data.metrics["loss"]
    assert latest == client.get_run(run_id).data.metrics["loss"] == read_last_values(scene.run)["loss"].value == 5.0
    assert read_values(scene.run)["loss"] == {7: 2.0, 8: 5.0}
    assert len(scene.client.get_metric_history(scene.run_id, "loss")) == len(falling) + 4


def test_latest_value_of_two_processes_at_one_step_counts(scene: Scene, enter: Enter) -> None:
    scene.run.config.write_text("trainer: {script: [train.py]}\n")
    run_id = run_id_of(scene.run)
    enter(pid=os.getppid()).log_metric(run_id, "loss", 1.0, timestamp=1000, step=7)  # in the file that is read last
    enter().log_metric(run_id, "loss", 2.0, timestamp=2000, step=7)
    scene.state(attempt=1)
    ship(scene)
    assert scene.entity.data.metrics["loss"] == 2.0
    assert read_last_values(scene.run)["loss"] == (7, 2.0)
    assert read_values(scene.run)["loss"] == {7: 2.0}


def test_points_without_a_step_are_numbered(scene: Scene, enter: Enter) -> None:
    client = enter()
    for value in (5.0, 6.0, 7.0):
        client.log_metric(run_id_of(scene.run), "plain", value)
    for step in (0, 1, 2):
        client.log_metric(run_id_of(scene.run), "stepped", step, step=step)
    client.log_metric(run_id_of(scene.run), "stepped", 9.0, step=0)
    ship(scene)
    assert {it.step: it.value for it in scene.client.get_metric_history(scene.run_id, "plain")} == {0: 5, 1: 6, 2: 7}
    assert {it.step: it.value for it in scene.client.get_metric_history(scene.run_id, "stepped")} == {0: 0, 1: 1, 2: 2}


def test_nested_runs_are_prefixes(scene: Scene, enter: Enter, tmp_path: Path) -> None:
    client = enter()
    parent = run_id_of(scene.run)
    ids = [
        client.create_run("0", tags={"mlflow.parentRunId": parent, "mlflow.user": "x"}, run_name="trial").info.run_id
        for _ in range(2)
    ]
    assert len({parent, *ids}) == 3
    file = tmp_path / "plot.txt"
    file.write_text("x")
    for number, run_id in enumerate(ids):
        client.log_metric(run_id, "loss", number, step=1)
        client.log_param(run_id, "lr", number)
        client.set_tag(run_id, "kind", "trial")
        client.log_artifact(run_id, str(file))
    inner = client.get_run(ids[1])
    assert (inner.info.run_name, inner.data.params, inner.data.metrics) == ("trial", {"lr": "1"}, {"loss": 1.0})
    assert inner.data.tags["mlflow.parentRunId"] == parent
    ship(scene)
    data = scene.entity.data
    assert {key: value for key, value in data.metrics.items() if "loss" in key} == {
        "trial/loss": 0.0,
        "trial-2/loss": 1.0,
    }
    assert (data.params["trial-2/lr"], data.tags["trial/kind"]) == ("1", "trial")
    assert (scene.run.artifacts / "trial-2/plot.txt").read_text() == "x"


def test_other_ranks_are_accepted_and_dropped(scene: Scene, enter: Enter, tmp_path: Path) -> None:
    client = enter(rank=1)
    run_id = run_id_of(scene.run)
    client.log_metric(run_id, "loss", 3.0, step=1)
    client.log_param(run_id, "lr", 1)
    client.log_artifact(run_id, str(scene.run.config))
    model = client.create_logged_model("0", name="net", source_run_id=run_id)
    client.log_model_artifacts(model.model_id, str(scene.run.journal))
    client.finalize_logged_model(model.model_id, "READY")
    assert client.get_run(run_id).data.metrics == {"loss": 3.0}
    records = rank_records.current()
    assert records is not None
    records.log({f"key/{number}": number for number in range(rank_records.MAX_KEPT)}, 2)
    found = client.get_run(run_id).data.metrics
    assert (len(found), found["loss"]) == (rank_records.MAX_KEPT, 3.0)
    assert list(scene.run.journal.glob("*.jsonl")) == []
    assert not scene.run.artifacts.exists()
    assert not scene.run.logged_models.exists()


def test_a_process_that_a_rank_starts_writes_its_own_files(scene: Scene, enter: Enter) -> None:
    enter().log_metric(run_id_of(scene.run), "loss", 1.0, step=1)
    client = enter(pid=os.getppid())
    client.log_metric(run_id_of(scene.run), "loss", 2.0, step=2)
    client.set_tag(run_id_of(scene.run), "by", "child")
    child = f"attempt-001.rank-00000.pid-{os.getpid()}"
    assert {path.name for path in scene.run.journal.glob("*.jsonl")} == {
        "attempt-001.rank-00000.jsonl",
        f"{child}.jsonl",
        f"{child}.events.jsonl",
    }
    ship(scene)
    assert scene.steps() == [1, 2]
    assert scene.entity.data.tags["by"] == "child"


def test_artifacts_stay_in_their_folder(scene: Scene, enter: Enter, tmp_path: Path) -> None:
    client = enter()
    run_id = run_id_of(scene.run)
    folder = tmp_path / "files"
    (folder / "deep").mkdir(parents=True)
    for name in ("config.yaml", "deep/plot.txt"):
        (folder / name).write_text(name)
    client.log_artifacts(run_id, str(folder))
    client.log_artifacts(run_id, str(folder), "logs")
    client.log_text(run_id, "hello", "notes/a.txt")
    names = {path.relative_to(scene.run.artifacts).as_posix() for path in scene.run.artifacts.rglob("*.*")}
    assert names == {
        "script/config.yaml",
        "deep/plot.txt",
        "script/logs/config.yaml",
        "script/logs/deep/plot.txt",
        "notes/a.txt",
    }
    assert {it.path for it in client.list_artifacts(run_id)} == {"script", "deep", "notes"}
    (scene.run.artifacts / "link").symlink_to(tmp_path)
    for path in ("..", "a/../../b", "link", "link/x"):
        with pytest.raises(MlflowException, match="leaves the artifact folder"):
            client.log_artifact(run_id, str(folder / "config.yaml"), path)
    assert not (tmp_path / "config.yaml").exists()
    ship(scene)
    uploaded = {it.path for it in scene.client.list_artifacts(scene.run_id)}
    assert {"config.yaml", "script", "deep", "notes"} <= uploaded


def test_datasets_and_models_are_uploaded_once(
    scene: Scene, enter: Enter, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client = enter()
    run_id = run_id_of(scene.run)
    data = DatasetInput(Dataset("digits", "abc", "local", "{}"), [InputTag("mlflow.data.context", "training")])
    client.log_inputs(run_id, [data])
    files = tmp_path / "files"
    files.mkdir()
    (files / "MLmodel").write_text("flavors: {}\n")
    model = client.create_logged_model("0", name="net", source_run_id=run_id, tags={"a": "1"}, params={"p": "2"})
    client.log_model_artifacts(model.model_id, str(files))
    client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step=12)])
    outputs = client.get_run(run_id).outputs
    assert outputs is not None
    assert [output.model_id for output in outputs.model_outputs] == [model.model_id]
    ship(scene)
    experiment = [scene.entity.info.experiment_id]
    assert scene.client.search_logged_models(experiment) == [], "not complete"
    client.finalize_logged_model(model.model_id, "READY")
    client.set_logged_model_tags(model.model_id, {"b": "3"})
    client.log_model_params(model.model_id, {"q": "4"})
    client.delete_logged_model_tag(model.model_id, "b")
    saved = (scene.run.logged_models / model.model_id / "model.json").stat().st_mtime_ns
    client.delete_logged_model_tag(model.model_id, "b")
    assert (scene.run.logged_models / model.model_id / "model.json").stat().st_mtime_ns == saved, "nothing has changed"
    assert client.search_logged_models(["0"], "name = 'net'")[0].params == {"p": "2", "q": "4"}
    for _ in range(2):
        ship(scene)
        # As after a crash before the state was saved.
        (scene.run.journal / "sent-facts.json").unlink()
    (found,) = scene.client.search_logged_models(experiment)
    assert (found.name, found.status.value, found.tags["a"], found.params["p"]) == ("net", "READY", "1", "2")
    assert [it.model_id for it in scene.model_outputs] == [found.model_id]
    assert [it.dataset.name for it in scene.dataset_inputs if it.dataset.digest == "abc"] == ["digits"]
    (scene.run.logged_models / model.model_id / "files" / "link").symlink_to("/etc/passwd")
    client.set_logged_model_tags(model.model_id, {"c": "5"})
    ship(scene)
    assert "symbolic link that leaves the run folder: the model is not uploaded" in caplog.text
    assert "c" not in scene.client.get_logged_model(found.model_id).tags

    bad = client.create_logged_model("0", name="a/b", source_run_id=run_id)
    client.finalize_logged_model(bad.model_id, "READY")
    client.set_tag(run_id, "after", "yes")
    ship(scene)
    assert f"model {bad.model_id} of the script: not uploaded" in caplog.text
    assert scene.entity.data.tags["after"] == "yes"
    client.finalize_logged_model(bad.model_id, "READY")
    scene.client.delete_run(scene.run_id)
    with pytest.raises(TrackingError, match="is deleted in MLflow"):
        ship(scene)


def test_mistakes_are_mlflow_errors(scene: Scene, enter: Enter) -> None:
    client = enter()
    run_id = run_id_of(scene.run)
    with pytest.raises(MlflowException, match="metric 'loss' must be a number, got 'x'"):
        client.log_metric(run_id, "loss", "x", step=1)  # type: ignore[arg-type]
    with pytest.raises(MlflowException, match="is not the run of hpcdist in this rank"):
        client.get_run("f" * 32)
    with pytest.raises(MlflowException, match="is not of this run"):
        client.get_logged_model("m-unknown")
    for call in (client.delete_run, client.restore_run, client.delete_experiment):
        with pytest.raises(MlflowException, match="cannot delete, restore or rename the run"):
            call(run_id)
    with pytest.raises(TrackingError, match="is not a tracking URI that hpcdist has set for a rank"):
        MlflowClient(tracking_uri="hpcdist:///somewhere").search_experiments()


def test_events_are_read_defensively(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    writer = EventWriter(scene.run.journal, 1, 0)
    writer.record("tag", {"größe": "x" * 8_000})
    writer.record("dataset", {"dataset": {"name": "x", "digest": 3}})
    with caplog.at_level(logging.WARNING):
        writer.record("dataset", {"schema": "x" * 300_000})
    assert "is not recorded: it is too long" in caplog.text
    writer.close()
    (path,) = event_files(scene.run.journal)
    with open(path, "a") as file:
        file.write('{"t":1,"model":"../../etc"}\n[1]\nnot json\n{"t":1,"tag":{"a":1}}\n{"t":1,"tag":{"half"')
    events, end = read_events(path)
    assert [(event.kind, list(event.content)) for event in events] == [("tag", ["größe"]), ("dataset", ["dataset"])]
    assert end == path.stat().st_size - len('{"t":1,"tag":{"half"')
    assert caplog.text.count("skipped a damaged line") == 4
    ship(scene)
    assert len(scene.entity.data.tags["größe"]) == 8000
    path.write_text('{"format":99}\n')
    with pytest.raises(RunFolderError, match="newer hpcdist"):
        read_events(path)


@pytest.mark.processes
def test_the_fluent_functions_join_the_run(scene: Scene, enter: Enter, monkeypatch: pytest.MonkeyPatch) -> None:
    enter()
    records = rank_records.current()
    assert records is not None
    before = mlflow.get_tracking_uri()
    for name, value in records.environment().items():
        monkeypatch.setenv(name, value)
    try:
        with mlflow.start_run(run_name="x") as first:
            mlflow.log_metric("loss", 1.0, step=1)
            with mlflow.start_run(nested=True, run_name="inner"):
                mlflow.log_metric("loss", 2.0, step=1)
        mlflow.set_experiment("somewhere")
        with mlflow.start_run() as second:
            mlflow.log_metric("loss", 3.0, step=2)
    finally:
        mlflow.tracking.fluent._active_experiment_id = None
    assert first.info.run_id == second.info.run_id
    assert mlflow.get_tracking_uri() != before
    lines = (scene.run.journal / "attempt-001.rank-00000.jsonl").read_text().splitlines()[1:]
    assert [json.loads(line)["m"] for line in lines] == [{"loss": 1.0}, {"inner/loss": 2.0}, {"loss": 3.0}]


# --- values that MLflow does not store as they are


def test_long_values_are_cut_with_a_mark_and_a_warning(
    scene: Scene, enter: Enter, caplog: pytest.LogCaptureFixture
) -> None:
    client, run_id = enter(), run_id_of(scene.run)
    client.log_param(run_id, "prompt", "p" * 6001)
    client.set_tag(run_id, "answer", "a" * 8001)
    client.log_param(run_id, "fits", "f" * 6000)
    assert [message.partition(":")[0] for message in caplog.messages] == [
        "parameter prompt has 6001 characters and is cut to 6000, the limit of MLflow",
        "tag answer has 8001 characters and is cut to 8000, the limit of MLflow",
    ]
    ship(scene)
    data = scene.entity.data
    assert (len(data.params["prompt"]), len(data.tags["answer"])) == (6000, 8000)
    assert data.params["prompt"].endswith("pp… (cut, 6001 characters)")
    assert data.tags["answer"].endswith("aa… (cut, 8001 characters)")
    assert data.params["fits"] == "f" * 6000


def test_long_values_of_the_config_are_cut_with_a_mark(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    opened = MlflowRun(scene.run, scene.uri)
    for _ in range(2):
        opened.log_params({"trainer.script": "x" * 7000})
        opened.set_tags({"note": "y" * 9000})
    data = opened.current().data
    assert data.params["trainer.script"].endswith("x… (cut, 7000 characters)")
    assert data.tags["note"].endswith("y… (cut, 9000 characters)")
    assert caplog.messages == [
        "parameter trainer.script has 7000 characters and is cut to 6000, the limit of MLflow",
        "tag note has 9000 characters and is cut to 8000, the limit of MLflow",
    ]


def test_another_value_of_a_parameter_raises_as_in_mlflow(
    scene: Scene, enter: Enter, caplog: pytest.LogCaptureFixture
) -> None:
    client, run_id = enter(), run_id_of(scene.run)
    client.log_param(run_id, "lr", 1)
    client.log_param(run_id, "lr", 1)
    with pytest.raises(MlflowException, match=r"Changing param values is not allowed: parameter 'lr' .* '1', .* '2'"):
        client.log_param(run_id, "lr", 2)
    current_records().close()
    client = enter(attempt=2)
    client.log_param(run_id, "lr", 3)  # a restart repeats the script, which may log the time of its start
    with pytest.raises(MlflowException, match="Changing param values"):
        client.log_param(run_id, "lr", 1)


@pytest.mark.parametrize("name", ["usage/goodput", "system/cpu", "time/step_s"])
def test_metrics_do_not_share_a_series_with_hpcdists_own(
    scene: Scene, enter: Enter, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    client, run_id = enter(), run_id_of(scene.run)
    for step in (1, 2):
        client.log_metric(run_id, name, 0.5, step=step)
    assert [one.step for one in client.get_metric_history(run_id, name)] == [1, 2]
    ship(scene)
    assert scene.entity.data.metrics[f"script.{name}"] == 0.5
    assert name not in scene.entity.data.metrics
    prefix = name.partition("/")[0]
    assert caplog.messages == [f"metric {name} is logged as script.{name}: {prefix}/ is for hpcdist's own"]


def test_trace_says_that_it_is_not_recorded(scene: Scene, enter: Enter) -> None:
    enter()
    store = RankStore(current_records().uri)
    with pytest.raises(MlflowException, match="hpcdist records no traces in its runs: log texts or files as artifacts"):
        store.start_trace(None)
