"""Commands for the review of runs: cost, compare, export, ui, report and sync."""

import builtins
import functools
import json
import os
import re
import shutil
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from command_line import Cli, Make, Result, make_sweep, one_line
from hpcdist_runs import unused_port
from report_scene import BEGAN, account, add_attempt, sample

from hpcdist.checkpoint.store import CheckpointStore, Snapshot
from hpcdist.config.loading import load_config
from hpcdist.errors import TrackingError
from hpcdist.host.json_files import read_json, write_json
from hpcdist.run import create
from hpcdist.run.attempt_times import CAUSES, NodeShare, Resources
from hpcdist.run.folder import RunDir
from hpcdist.run.lease import hold
from hpcdist.run.samples import npy
from hpcdist.run.training_record import DatasetRecord, TrainingRecord, write_training
from hpcdist.slurm import client
from hpcdist.slurm.output import AccountedStart
from hpcdist.supervisor import local_launcher as supervisor_local
from hpcdist.tracking import mlflow_client, sync_runs, ui
from hpcdist.tracking.sync_runs import SyncReport
from hpcdist.trainers.comm.results import ARTIFACT

#: All tests of this file may start processes.
pytestmark = pytest.mark.processes

# --- `hpcdist cost`


@pytest.fixture
def runs(make: Make) -> list[RunDir]:
    """Two runs on cores, one on GPUs, and one of an older version."""
    found = [make("first"), make("second"), make("gpu"), make("old")]
    gpus = Resources(unit="GPU", nodes={"g1": NodeShare(allocated=2, share=1, ranks=[0, 1])})
    add_attempt(found[0], 1, 3601, [account(1, 3601)] * 4)
    add_attempt(found[1], 1, 7201, [account(1, 3601, closed=False)] * 4, failed=True)
    add_attempt(found[2], 1, 3601, [account(1, 3601)] * 2, gpus)
    return found


def test_cost_has_a_line_for_each_cause_or_run(hpcdist: Cli, runs: list[RunDir]) -> None:
    result = hpcdist("cost", "second")
    assert (result.code, result.err) == (0, "")
    assert "core-hours" in result.out
    assert "goodput: 0 %" in result.out, "the run failed without a checkpoint"
    assert "short run" not in result.out
    cells = [re.findall(r"[\w.%]+", line) for line in result.out.splitlines()]
    assert ["down", "4", "40", "%"] in cells
    assert [row[0] for row in cells if row and row[0] in CAUSES] == ["start", "discarded", "idle", "down"]
    result = hpcdist("cost", "exp")
    assert result.err == "1 runs without a ledger are left out, such as runs that have not started: old\n"
    assert [name in result.out for name in ("/first", "/second", "/gpu", "/old")] == [True, True, True, False]
    assert "down 40 %, discarded 40 %" in result.out, "the largest losses"
    assert "together: 15 core-hours, 2 GPU-hours\n" in result.out
    make_sweep(runs[0].path.parent, "first", "gpu")
    assert "together: 5 core-hours, 2 GPU-hours\n" in hpcdist("cost", "grid").out, "of its cells"
    assert hpcdist("cost", "old").out == "no runs with a ledger\n"


def test_cost_of_several_runs_counts_each_once(hpcdist: Cli, runs: list[RunDir], tmp_path: Path) -> None:
    shutil.copytree(runs[0].path.parent.parent, tmp_path / "other")
    result = hpcdist("cost", "first", "second", "exp/first", str(tmp_path / "other" / "exp" / "first"))
    assert (result.code, result.err) == (0, "")
    _, _, together = result.out.partition("together: 20 core-hours\n")
    cells = [re.findall(r"[\w.%]+", line) for line in together.splitlines()]
    assert ["down", "4", "20", "%"] in cells, "5 + 10 + 5 hours by cause"
    assert together.endswith("in the queue: 0 h\n")
    assert [name in result.out for name in ("exp/first", "exp/second", "/gpu")] == [True, True, False]
    assert "no run 'nope'" in one_line(hpcdist("cost", "first", "nope"))


def test_cost_shows_money_by_the_price_of_the_site(hpcdist: Cli, make: Make) -> None:
    site = ("cluster.price_per_gpu_hour=2.50 EUR", "cluster.price_per_core_hour=$0.01", "cluster.co2_g_per_kwh=400")
    gpus = Resources(unit="GPU", nodes={"g1": NodeShare(allocated=2, share=1, ranks=[0, 1])})
    add_attempt(run := make("gpu", *site), 1, 3601, [account(1, 3601)] * 2, gpus, supervised=1)
    for name in ("cores", "more"):
        add_attempt(make(name, *site), 1, 42, [account(1, 42)] * 4)
    assert hpcdist("cost", "gpu").out.endswith("goodput: 100 %, in the queue: 0 h, price: 5 EUR\n"), "nothing measured"
    beat = read_json(run.attempt(1).beat(0)) or {}
    write_json(run.attempt(1).beat(0), {**beat, "energy_j": {"GPU-a": 9e6}})
    assert hpcdist("cost", "gpu").out.endswith("energy: 2.5 kWh (GPUs), price: 5 EUR, CO₂: 1 kg\n")
    short = hpcdist("cost", "cores").out
    assert short.endswith("price: <$0.001\nshort run (42 s): its start and end dominate the shares\n")
    result = hpcdist("cost", "exp").out
    assert re.search(r"goodput .*kWh . +price . +CO₂", result), result
    assert "76 % (short run)" in result
    assert result.endswith("together: 0.12 core-hours, 2 GPU-hours, $0.0012, 5 EUR\n"), result


def test_a_run_with_unreadable_files_is_named_and_left_out(hpcdist: Cli, runs: list[RunDir]) -> None:
    phases = runs[0].attempt(1).phases
    phases.symlink_to(phases)
    result = hpcdist("cost", "exp")
    assert (result.code, "/first" in result.out, "/second" in result.out) == (0, False, True)
    assert f"run first is left out: [Errno 40] Too many levels of symbolic links: '{phases}'\n" in result.err
    assert one_line(hpcdist("cost", "first")).startswith("run first is left out: ")


def test_accounting_completes_the_starts_of_a_job(
    hpcdist: Cli, runs: list[RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = AccountedStart(
        name="train", began=BEGAN - 20, ended=BEGAN + 7300, queue_s=3600.0, nodes="n[1-2]", cores=5, gpus=0,
        energy_j=7.2e6,
    )  # fmt: skip
    asked: list[str] = []

    def accounted_starts(job_id: str) -> list[AccountedStart]:
        asked.append(job_id)
        return [start, replace(start, name="other", began=BEGAN + 9000)]

    monkeypatch.setattr(client, "accounted_starts", accounted_starts)
    write_json(runs[1].path / "slurm.json", {"job_id": "41", "job_name": "train"})
    write_json(runs[1].path / "job.json", {"job_id": "41", "starts": {"0": {"nodes": "n[1-2]", "began": BEGAN - 20.0}}})
    for _ in range(2):
        result = hpcdist("cost", "second")
        assert re.search(r"allocated . +10 ", result.out), "5 cores for 7320 s"
        assert result.out.endswith("in the queue: 1 h, energy: 2 kWh (nodes)\n")
    assert asked == ["41"], "complete records are not queried again"


# --- `hpcdist compare`


def test_compare_prints_the_differences_of_two_runs(hpcdist: Cli, make: Make, tmp_path: Path) -> None:
    first = make("first", status="finished", attempt=1)
    second = make("second", "optim.lr=0.5", status="failed", attempt=1)
    result = hpcdist("compare", "first", "second")
    assert (result.code, result.err) == (0, "")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.out.splitlines() if "│" in line]
    assert ["optim.lr", "0.001", "0.5"] in rows
    assert ["state", "finished", "failed"] in rows
    assert not [row for row in rows if row[0].startswith("data.")]
    document = json.loads(hpcdist("compare", "first", "second", "--json").out)
    assert document["runs"] == ["first", "second"]
    assert document["differences"]["config"] == {"optim.lr": ["0.001", "0.5"]}
    assert document["results"] == [], "no run has a best value or a speed"
    (save := second.checkpoints / "step-00000007").mkdir()
    (save / "manifest.json").write_text('{"step": 7, "metrics": {"eval/accuracy": 0.5}}')
    assert "Δ to first" in hpcdist("compare", "first", "second").out, "the base is the first run, also without a value"
    first.checkpoints.rmdir()
    shutil.copytree(second.checkpoints, first.checkpoints)
    for run in (first, second):
        run.checkpoints.joinpath("step-00000007", "samples.npy").write_bytes(npy([0, 1]))
        data = DatasetRecord(name="digits", split="test", num_samples=2, digest="1a")
        write_training(run.attempt(1), TrainingRecord(datasets=(data,)))
    assert "\nsecond: paired, 2 samples\n" in hpcdist("compare", "first", "second").out
    expected = "only first is given: name a second run to compare it with"
    assert one_line(hpcdist("compare", "first", str(first.path))) == expected
    assert one_line(hpcdist("compare", "first", "none")).startswith("no run 'none' under ")
    (tmp_path / "runs" / "other").mkdir()
    first.path.rename(tmp_path / "runs" / "other" / "first")
    make("first")
    document = json.loads(hpcdist("compare", "exp/first", "other/first", "--json").out)
    assert document["runs"] == ["exp/first", "other/first"], "labelled by experiment"


# --- `hpcdist export` in the process of the test


@pytest.fixture
def run(make: Make) -> RunDir:
    run = make("first", "checkpoint.monitor=eval/loss", "checkpoint.monitor_mode=min")
    for step, loss in ((10, 0.1), (20, 0.2)):
        weights = {"w": torch.full((2,), float(step))}
        metrics = {"eval/loss": loss}
        CheckpointStore(run.checkpoints).add(
            Snapshot(step=step, model=weights, trainer={}, rank_states=[None], metrics=metrics)
        )
    return run


def test_best_checkpoint_is_written_to_a_file_named_by_the_run(hpcdist: Cli, run: RunDir, tmp_path: Any) -> None:
    result = hpcdist("export", run.name, "--format", "torch")
    file = tmp_path / "first-step-10.pt"
    assert (result.code, result.out) == (0, f"first-step-10.pt: {file.stat().st_size:,} bytes, step 10 of first\n")
    assert torch.load(file, weights_only=True)["w"].tolist() == [10, 10]
    result = hpcdist("export", run.name, "--format", "torch", "--checkpoint", "final", "--output", "final.pt")
    assert result.code == 0
    assert torch.load(tmp_path / "final.pt", weights_only=True)["w"].tolist() == [20, 20]
    assert "exists: remove it" in one_line(hpcdist("export", run.name, "--format", "torch"))


def test_run_without_its_metric_exports_the_final_checkpoint(hpcdist: Cli, make: Make) -> None:
    """The tutorial's own trainer logs a loss only."""
    for name, monitor in (("own", "trainer=mine:train"), ("set", "checkpoint.monitor=eval/f1")):
        run = make(name, monitor)
        for step in (10, 20):
            CheckpointStore(run.checkpoints).add(
                Snapshot(step=step, model={"w": torch.ones(2)}, trainer={}, rank_states=[None], metrics={})
            )
    result = hpcdist("export", "own", "--format", "torch")
    assert (result.code, result.err) == (0, "the final checkpoint, step 20: checkpoint.monitor is empty\n")
    assert result.out.endswith("step 20 of own\n")
    assert (
        hpcdist("export", "set", "--format", "torch").err
        == "the final checkpoint, step 20: no checkpoint has eval/f1\n"
    )
    message = one_line(hpcdist("export", "own", "--format", "torch", "--checkpoint", "best"))
    assert message.startswith("no checkpoint of own has the metric of checkpoint.monitor (empty): choose --checkpoint")


def test_format_of_an_export_follows_from_the_ending(hpcdist: Cli, run: RunDir, tmp_path: Path) -> None:
    assert hpcdist("export", run.name, "--output", "a.pt").code == 0
    assert torch.load(tmp_path / "a.pt", weights_only=True)["w"].tolist() == [10, 10]
    assert hpcdist("export", run.name, "--output", "b.safetensors").code == 0
    assert safetensors.torch.load_file(tmp_path / "b.safetensors")["w"].tolist() == [10, 10]
    message = one_line(hpcdist("export", "a.pt", "--output", "b.safetensors"))
    assert message == (
        "a.pt is a file of weights, not a run, and other programs load it as it is: a run starts from it with"
        " model.init_from=a.pt"
    )
    for words in ((), ("--output", "weights.bin")):
        message = one_line(hpcdist("export", run.name, *words))
        assert message.startswith("no format: add --format safetensors, torch, dcp, huggingface, or an --output ")
    message = one_line(hpcdist("export", run.name, "--format", "torch", "--output", "c.safetensors"))
    assert message == "--format torch contradicts the ending of --output c.safetensors: leave out --format"


def test_mistakes_of_an_export_are_one_line(hpcdist: Cli, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    export = ("export", run.name, "--format")
    message = one_line(hpcdist(*export, "keras"))
    assert message.startswith("Invalid value for '--format': 'keras' is not one of 'safetensors', 'torch'")
    message = one_line(hpcdist(*export, "torch", "--checkpoint", "5"))
    assert "has no checkpoint of step 5: it has 10, 20" in message
    load = builtins.__import__

    def without_torch(name: str, *args: Any) -> Any:
        if name == "hpcdist.checkpoint":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        return load(name, *args)

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", without_torch)
        message = one_line(hpcdist(*export, "torch"))
    assert message == "export needs torch: run `pip install '.[train,export]'` in a checkout of hpcdist"


# --- `hpcdist sync` and `hpcdist ui`


def test_sync_uploads_runs_that_have_no_shipper(
    hpcdist: Cli, make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shipped: list[tuple[str, str]] = []
    waited: list[str] = []

    def ship(run: RunDir, uri: str, *, waits: bool) -> SyncReport:
        if run.name == "down":
            raise TrackingError("the server does not answer")
        shipped.append((run.name, uri))
        if waits:
            waited.append(run.name)
        return SyncReport(num_points=3)

    monkeypatch.setattr(sync_runs, "sync", ship)
    make("first")
    second = make("second", "tracking.uri=http://ada:s3cret@mlflow", "launch.env.API_KEY=s3cret")
    assert hpcdist("sync", "second").code == 0
    second.write_state(replace(second.read_state(), status="finished"))
    busy = make("third")
    uri = f"sqlite:///{tmp_path}/runs/mlflow.db"
    with hold(busy):
        assert hpcdist("sync", "first") == Result(0, "first: 3 points and 0 artifacts uploaded\n", "")
        result = hpcdist("sync")
    assert result.code == 2
    assert result.out.splitlines()[0] == "first: 3 points and 0 artifacts uploaded"
    assert result.out.splitlines()[1].startswith(f"third: its supervisor runs (process {os.getpid()} on ")
    assert result.out.splitlines()[2:] == ["3 runs: 1 uploaded, 1 failed, 1 busy"]
    assert result.err == (
        "second: the password of http://ada:***@mlflow is not kept in the run folder:"
        " set HPCDIST_TRACKING_URI to the whole URI\n"
    )
    monkeypatch.setenv("HPCDIST_TRACKING_URI", "http://ada:s3cret@mlflow")
    assert hpcdist("sync", "second").code == 0
    with_password = ("second", "http://ada:s3cret@mlflow")
    assert shipped == [with_password, ("first", uri), ("first", uri), with_password]
    make("down", status="finished")
    assert hpcdist("sync", "down") == Result(1, "", "down: the server does not answer\n")
    ship_all(monkeypatch, "second")
    assert hpcdist("sync").out == ("second: 3 points and 0 artifacts uploaded\n4 runs: 3 unchanged, 1 uploaded\n"), (
        "only news and a summary"
    )
    assert hpcdist("sync", "third").out == "third: 0 points and 0 artifacts uploaded\n", "named by the user"
    assert waited == ["second"], "an ended run that the user has named"


def ship_all(monkeypatch: pytest.MonkeyPatch, *new: str) -> None:
    """Replace the upload: the runs in `new` have records that MLflow lacks."""

    def ship(run: RunDir, uri: str, *, waits: bool) -> SyncReport:
        return SyncReport(num_points=3 if run.name in new else 0)

    monkeypatch.setattr(sync_runs, "sync", ship)


def test_ui_uploads_and_starts_mlflow_which_prints_one_link(
    hpcdist: Cli, make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[list[str]] = []
    masks: list[int] = []
    store = f"sqlite:///{tmp_path}/runs/mlflow.db"
    for name in ui.variables(store, tmp_path, ""):
        monkeypatch.setenv(name, "from the caller")  # restored after the test
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "false")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def execv(path: str, arguments: list[str]) -> None:
        # A link has been printed or follows at once: the port is held from now on, for uvicorn.
        with socket.socket(fileno=os.dup(stdin)) as listener:
            assert listener.getsockname() == ("127.0.0.1", port)
            assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        started.append(arguments)

    stdin = os.open(os.devnull, os.O_RDONLY)  # in place of that of the tests
    dup2 = os.dup2
    monkeypatch.setattr(os, "dup2", lambda descriptor, _: dup2(descriptor, stdin))
    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(os, "umask", lambda mask: masks.append(mask))
    uploading: list[tuple[Path, str]] = []

    def start_uploads(runs_dir: Path, env: Mapping[str, str]) -> None:
        uploading.append((runs_dir.absolute(), env["MLFLOW_DISABLE_TELEMETRY"]))

    monkeypatch.setattr(ui, "start_uploads", start_uploads)
    created: list[str] = []
    monkeypatch.setattr(mlflow_client, "open_client", created.append)
    ship_all(monkeypatch, "first")
    run = make("first", status="finished")
    write_json(run.mlflow, {"experiment_id": "7", "uri": store})
    port = unused_port()
    result = hpcdist("ui", "--port", str(port))
    (file,) = tmp_path.glob("state/hpcdist/ui/*.token")
    address = f"http://127.0.0.1:{port}"
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines() == [
        "first: 3 points and 0 artifacts uploaded",
        f"scripts: MLFLOW_TRACKING_URI={address} MLFLOW_TRACKING_TOKEN=$(cat {file})",
        "MLflow is starting, and will print its link; Ctrl-C ends it",
    ]
    listing = "#/experiments/7/runs?workflowType=machine_learning"
    assert os.environ["HPCDIST_UI_LINK"] == f"{address}/?token={file.read_text()}{listing}"
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert os.environ["MLFLOW_BACKEND_STORE_URI"] == store
    assert os.environ["HPCDIST_UI_TOKEN_FILE"] == str(file)
    assert started == [ui.command(port)]
    assert masks == [0o077]
    assert uploading == [(tmp_path / "runs", "false")], "with the variables of the user"
    assert created == [store], "under the lock of uploads, which the server does not take"

    (tmp_path / "runs" / "mlflow.db").write_bytes(b"with tables")
    port = unused_port()
    assert hpcdist("ui", "--port", str(port)).code == 0
    assert created == [store]


def test_ui_prints_the_link_to_an_existing_server(hpcdist: Cli, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("MLflow was started"))
    ship_all(monkeypatch)
    run = make("first", status="finished")
    write_json(run.mlflow, {"experiment_id": "7", "uri": "http://ada:***@mlflow"})
    listing = "http://mlflow/#/experiments/7/runs?workflowType=machine_learning"
    monkeypatch.setenv("HPCDIST_TRACKING_URI", "http://ada:s3cret@mlflow")
    assert hpcdist("ui") == (0, f"review in MLflow: {listing}\n", "")
    monkeypatch.delenv("HPCDIST_TRACKING_URI")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://other")
    page = "https://other/#/experiments?workflowType=machine_learning"
    assert hpcdist("ui").out == f"review in MLflow: {page}\n"

    def ship(run: RunDir, uri: str, *, waits: bool) -> SyncReport:
        raise TrackingError("the server does not answer")

    monkeypatch.setattr(sync_runs, "sync", ship)
    make("second", status="finished")
    monkeypatch.setenv("HPCDIST_TRACKING_URI", "http://mlflow")
    result = hpcdist("ui")
    assert (result.code, result.err) == (0, "first: the server does not answer\n"), "it is asked only once"


def test_report_is_written_and_its_path_printed(hpcdist: Cli, make: Make) -> None:
    run = make("first", status="finished", created=1.0)
    newer = make("second", status="finished", created=2.0)
    assert hpcdist("report", "first") == Result(0, "runs/exp/first/report.html\n", "")
    assert "first" in run.report.read_text()
    assert hpcdist("report").out == "runs/exp/second/report.html\n"
    assert newer.report.is_file()
    assert "report       runs/exp/first/report.html" in hpcdist("status", "first").out


# --- `hpcdist bench`


@pytest.fixture
def bench(hpcdist: Cli) -> Cli:
    """Run `hpcdist bench` in this process, in an empty folder."""
    return functools.partial(hpcdist, "bench")


def test_show_prints_the_report_of_a_benchmark(bench: Cli, tmp_path: Path) -> None:
    for name in ("first", "empty"):
        config = load_config("bench_comm", [f"name={name}", f"runs_dir={tmp_path}/runs"])
        artifact = create.create_run(config, tmp_path).artifacts / ARTIFACT
        if name == "first":
            artifact.parent.mkdir(parents=True)
            artifact.write_text(sample().to_json())
    result = bench("show", "fir")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("4 ranks on 4 nodes (n1, n2, n3, n4), gloo on cpu, partition main")
    assert "bandwidth: algorithm / bus, as defined by nccl-tests" in result.out
    assert len(json.loads(bench("show", "first", "--json").out)["rows"]) == len(sample().rows)
    assert "no run 'nowhere' under " in one_line(bench("show", "nowhere"))
    expected = "comm/results.json does not exist: is this a run of `hpcdist bench comm`"
    assert expected in one_line(bench("show", "empty"))


def test_plan_of_a_benchmark_and_its_report_command(
    bench: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = bench("comm", "--dry-run", "name=planned", "launch.num_ranks=3")
    assert (result.code, "3 × cpu, gloo" in result.out) == (0, True)
    result = bench("comm", "--dry-run", "--cluster", "devcluster", "name=planned", "cluster.nodes=4")
    assert (result.code, "#SBATCH --nodes=4" in result.out) == (0, True)
    assert not (tmp_path / "runs").exists()
    monkeypatch.setattr(supervisor_local, "detach", lambda run, env: 4711)
    result = bench("comm", "--detach", "name=first")
    assert (result.code, result.err) == (0, "")
    assert result.out.endswith("report after the end of the run: hpcdist bench show first\n")
