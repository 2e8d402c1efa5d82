"""Sweeps: cells and their names, the selection of cells that must run, and the folder of a sweep."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcdist.cli import sweep as cli_sweep
from hpcdist.cli.sweep import Choice, choose, prepare, verdict
from hpcdist.config.loading import load_config
from hpcdist.errors import ConfigError, RunFolderError, UserMistake
from hpcdist.host.json_files import read_json, write_json
from hpcdist.run.create import create_run, label_of
from hpcdist.run.folder import RunDir, State, Status
from hpcdist.run.lease import hold
from hpcdist.run.lookup import find_runs
from hpcdist.run.sweeps import Sweep, SweepDir, changes, make_sweep, mark, match, parse_axes, sweep_of, write_sweep
from hpcdist.slurm.client import JobSnapshot
from hpcdist.slurm.output import JobInfo

# --- Parsing of sweep axes, and the cells of a sweep and their names

Make = Callable[..., Sweep]


def maker(tmp_path: Path, keys: str) -> Make:
    """Return a function that makes a sweep of a config from `--sweep` arguments and overrides."""
    path = tmp_path / "run.yaml"
    path.write_text(f"{{experiment: exp, runs_dir: {tmp_path}/runs, {keys}}}\n")

    def make(axes: Sequence[str] = ("seed=1,2",), *overrides: str) -> Sweep:
        parsed = parse_axes(axes, overrides)
        return make_sweep(parsed, lambda more: load_config(path, [*overrides, *more]), label_of)

    return make


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return maker(tmp_path, "params: {a: 1}")


@pytest.fixture
def make_named(tmp_path: Path) -> Make:
    return maker(tmp_path, "name: tune")


@pytest.fixture
def make_matched(tmp_path: Path) -> Make:
    make = maker(tmp_path, "name: tune, trainer: 'mine:train'")
    return lambda *words: match(make(*words))


def problems_of(call: Callable[[], object]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        call()
    return list(caught.value.problems)


# --- parsing
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a.b=0.1, 0.01,1e-3", ("0.1", "0.01", "1e-3")),
        ("a=[1,2],[3]", ("[1,2]", "[3]")),
        ("a='x,y',\"z,\"", ("'x,y'", '"z,"')),
        ("a=['x]',2],it's,b", ("['x]',2]", "it's", "b")),
    ],
)
def test_comma_inside_brackets_or_quotes_belongs_to_the_value(text: str, words: tuple[str, ...]) -> None:
    assert parse_axes([text], []) == {text.partition("=")[0]: words}


@pytest.mark.parametrize(
    ("axes", "overrides", "problem"),
    [
        (["seed"], [], "'seed' is not an axis: write key=value,value as in optim.lr=0.1,0.01"),
        (["--seed=1,2"], [], "'--seed=1,2' is not an axis: write key=value,value as in optim.lr=0.1,0.01"),
        (["cluster.nodes=1,2"], [], "cluster.nodes cannot be swept: all cells share it"),
        (["tracking.uri=a,b"], [], "tracking.uri cannot be swept: all cells share it"),
        (["params={a: 1}", "params.a=3"], [], "params.a is swept twice: write its values in one --sweep"),
        (["params={a: 1}"], ["params.a=3"], "params is both swept and overridden: remove one of them"),
        (["params.a=[1,2"], [], "params.a: a bracket or quote is not closed in '[1,2'"),
        (["seed=1,,2"], [], "seed has an empty value in '1,,2': write null for none, '' for an empty text"),
    ],
)
def test_mistake_in_an_axis_is_reported(axes: list[str], overrides: list[str], problem: str) -> None:
    assert problems_of(lambda: parse_axes([*axes, "x"], overrides))[:-1] == [problem], "beside another mistake"


# --- cells
def test_cells_are_named_by_their_values(make: Make) -> None:
    sweep = make(["optim.lr=0.1,1e-2", "seed=1,2"], "name=tune")
    assert [cell.name for cell in sweep.cells] == [
        "tune-lr_0.1-seed_1",
        "tune-lr_0.1-seed_2",
        "tune-lr_0.01-seed_1",
        "tune-lr_0.01-seed_2",
    ]
    last = sweep.cells[-1]
    assert (last.label, last.values) == ("lr=0.01 seed=2", {"optim.lr": 0.01, "seed": 2})
    assert (last.config.name, last.config.optim.lr, last.config.seed) == (last.name, 0.01, 2)
    assert sweep.folder == Path(last.config.runs_dir) / "exp" / "tune"
    alike = make(["data.name=digits,mnist", "model.name=simple_cnn"], "name=tune")
    assert alike.cells[0].name == "tune-data.name_digits-model.name_simple_cnn"


def test_unusual_values_get_distinct_names(make: Make) -> None:
    long = "x" * 300
    words = ["1", "'1'", "true", "'true'", "null", "[1,2]", "a b", "a/b", "''", "-0.5", long, f"{long}y", "ä"]
    names = [cell.name for cell in make([f"params.b={','.join(words)}"], "name=t").cells]
    assert len(set(names)) == len(words)
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", name) and len(name) < 110 for name in names)
    assert (names[0], names[2], names[9]) == ("t-b_1", "t-b_true", "t-b_-0.5")


def test_equal_config_values_are_an_error(make: Make) -> None:
    assert problems_of(lambda: make(["optim.lr=0.1,1e-1"])) == ["optim.lr: 0.1 and 1e-1 are the same value"]
    assert problems_of(lambda: make(["seed=1,2,1"])) == ["seed: 1 is given twice"]
    assert len(make(["params.b=1,'1'"]).cells) == 2


def test_mistakes_of_all_cells_are_reported_once(make: Make) -> None:
    problems = problems_of(lambda: make(["optim.lr=0.1,-1,x", "seed=1,2"]))
    assert problems[0] == "optim.lr must be > 0, got -1.0"
    assert problems[1].startswith("optim.lr must be float, got 'x'")
    assert len(problems) == 2
    assert problems_of(lambda: make(["optim.lrr=1,2"])) == ["optim.lrr is not a key: did you mean 'optim.lr'?"]


def test_secrets_cannot_be_swept(make: Make) -> None:
    (problem,) = problems_of(lambda: make(["launch.env.API_TOKEN=abc,def"]))
    assert (
        problem == "launch.env.API_TOKEN looks like a secret, and cells are named by their values: it cannot be swept"
    )


HYBRID = ("trainer=hybrid", "roles={trainer: 1, parameter_server: 1}", "hybrid.tables={user: 9}")


@pytest.mark.parametrize("overrides", [HYBRID, ("trainer=ddp",)])
def test_section_of_a_trainer_and_its_short_form_can_be_swept(make: Make, overrides: tuple[str, ...]) -> None:
    sweep = make(["hybrid.table_optimizer=sgd,adagrad"], *overrides, "name=t")
    assert [cell.values["hybrid.table_optimizer"] for cell in sweep.cells] == ["sgd", "adagrad"]
    sweep = make(["trainer=mine:train,theirs:train"], "name=t")
    assert [cell.config.trainer.target for cell in sweep.cells] == ["mine:train", "theirs:train"]


# --- identity of a sweep
def test_derived_name_depends_on_config_and_keys(make: Make) -> None:
    name = make(["optim.lr=0.1", "seed=1,2"]).name
    assert re.fullmatch(r"ddp-lr-seed-[0-9a-f]{8}", name)
    assert make(["optim.lr=0.1,0.2", "seed=3"]).name == name, "values can be added"
    assert make(["optim.lr=0.1", "seed=1"], "cluster.time_limit_min=7", "launch.max_restarts=9").name == name
    assert make(["optim.lr=0.1", "seed=1"], "optim.momentum=0.5").name != name
    assert make(["optim.lr=0.1"]).name != name


def test_base_holds_values_that_all_cells_share(make: Make) -> None:
    base = make(["seed=1,2"]).base
    assert "seed" not in base
    assert not [key for key in base if key.startswith(("cluster.", "launch.", "tracking."))]
    assert changes(base, make(["seed=3"], "launch.num_threads=2", "tracking.log_every_steps=7").base) == []
    assert changes(base, make(["seed=3"], "optim.lr=0.5").base) == ["optim.lr was 0.001, is 0.5"]
    assert changes(base, make(["seed=3"], "params.b=2").base) == ["params.b was None, is 2"]
    older = {key: value for key, value in base.items() if key != "optim.momentum"}
    assert changes(older, base) == [], "a key that a newer version has added"


# --- Selection of the cells that must run, and preparation of their folders


@pytest.fixture
def project(project: Path) -> Path:
    (project / "mine.py").write_text("first\n")
    return project


def start(sweep: Sweep, cwd: Path, launcher: str = "local") -> list[Choice]:
    """Prepare the cells that must run."""
    chosen = [choice for choice in choose(sweep) if choice.runs]
    folder = write_sweep(sweep)
    with hold(folder):
        prepare(chosen, folder, cwd, launcher=launcher)
    return chosen


def verdicts(sweep: Sweep) -> list[tuple[bool, str]]:
    return [(choice.runs, choice.why) for choice in choose(sweep)]


def end(run: RunDir, status: Status, **more: Any) -> None:
    run.write_state(replace(run.read_state(), status=status, attempt=1, **more))


# --- selection
@pytest.mark.processes
@pytest.mark.parametrize(
    ("status", "held", "in_queue", "runs", "why"),
    [
        ("finished", True, "RUNNING", False, "finished"),
        ("failed", False, None, True, "failed"),
        ("failed", False, "COMPLETING", True, "failed"),
        ("stopped", False, "PENDING", False, "queued (pending)"),
        ("running", True, None, False, "running"),
        ("failed", True, None, False, "running"),
        ("running", False, None, True, "lost"),
        ("queued", False, "PENDING", False, "queued (pending)"),
        ("queued", False, "UNKNOWN", False, "queued (unknown)"),
        ("queued", False, None, True, "lost"),
        ("created", False, None, True, "not started"),
    ],
)
def test_new_failed_stopped_and_lost_cells_run(
    status: Status, held: bool, in_queue: str | None, runs: bool, why: str
) -> None:
    facts = None if in_queue in (None, "UNKNOWN") else JobInfo(id="7", state=str(in_queue))
    job = None if in_queue is None else JobSnapshot(info=facts, error="no answer" * (in_queue == "UNKNOWN"))
    assert verdict(State(status=status), held=held, job=job) == (runs, why)
    if in_queue is None:
        assert verdict(State(status=status), held=held, job=JobSnapshot()) == (runs, why)


@pytest.mark.processes
def test_folder_of_another_run_is_an_error(make_matched: Make, project: Path) -> None:
    sweep = make_matched()
    run = create_run(sweep.cells[0].config, project)
    assert verdicts(sweep)[0] == (True, "new"), "the command was killed before it marked the cell"
    end(run, "finished")
    with pytest.raises(RunFolderError, match=r"tune-seed_1 is a run outside of sweep tune"):
        choose(sweep)
    for path in ("state.json", "config.yaml"):
        (run.path / path).unlink()
    with pytest.raises(RunFolderError, match=r"tune-seed_1 exists and holds no run: remove it"):
        choose(sweep)


# --- preparation


@pytest.mark.processes
def test_no_new_folder_remains_on_errors(make_matched: Make, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = make_matched()

    def create(config: Any, cwd: Path, **options: Any) -> RunDir:
        if config.seed == 2:
            raise UserMistake("disk full")
        return create_run(config, cwd, **options)

    monkeypatch.setattr(cli_sweep, "create_run", create)
    with pytest.raises(UserMistake, match="disk full"):
        start(sweep, project)
    assert [path.name for path in sweep.folder.parent.iterdir()] == ["tune"]


@pytest.mark.processes
@pytest.mark.parametrize(("status", "code"), [("failed", "second\n"), ("stopped", "first\n")])
def test_failed_cell_gets_the_current_code(make_matched: Make, project: Path, status: Status, code: str) -> None:
    sweep = make_matched()
    run = start(sweep, project)[0].run
    end(run, status)
    write_json(run.path / "slurm.json", {"job_id": "7_0"})
    (project / "mine.py").write_text("second\n")
    start(make_matched(["seed=1"], "launch.max_restarts=9", "cluster.time_limit_min=7"), project, "slurm")
    assert (run.code / "mine.py").read_text() == code
    config = load_config(run.config)
    assert (config.launch.max_restarts, config.cluster.time_limit_min) == (9, 7)
    assert (run.path / "slurm.json").exists()
    start(make_matched(["seed=1"]), project)
    assert not (run.path / "slurm.json").exists(), "it now runs locally"


# --- The folder of a sweep: whether a command continues the same sweep, and the state derived from its cells

SEEDS = ["seed=1,2,3"]


def make_cells(sweep: Sweep, *statuses: Status) -> tuple[SweepDir, list[RunDir]]:
    folder = write_sweep(sweep)
    runs = []
    for cell, status in zip(sweep.cells, statuses, strict=False):
        run = RunDir.create(folder.path.parent / cell.name)
        attempt = 0 if status in ("created", "queued") else 1
        run.write_state(replace(run.read_state(), status=status, attempt=attempt, ended=9e9))
        mark(run, folder, cell)
        runs.append(run)
    return folder, runs


# --- continuing a sweep


def test_values_can_be_added_and_cells_keep_their_names(make_named: Make) -> None:
    folder = write_sweep(make_named(["optim.lr=0.1", "seed=1,2"]))
    uid = folder.read()["uid"]
    again = match(make_named(["seed=2,3", "optim.lr=0.1"]))
    names = ["tune-lr_0.1-seed_2", "tune-lr_0.1-seed_3"]
    assert [(cell.name, cell.config.name) for cell in again.cells] == [(name, name) for name in names]
    assert again.keys == ("optim.lr", "seed")
    write_sweep(again)
    assert [cell["name"] for cell in folder.read()["cells"]] == [f"tune-lr_0.1-seed_{seed}" for seed in (1, 2, 3)]
    assert folder.read()["uid"] == uid
    assert read_json(folder.mlflow) == {"run_uid": uid}


def test_other_keys_and_another_config_are_errors(make_named: Make) -> None:
    write_sweep(make_named(SEEDS))
    with pytest.raises(RunFolderError, match=r"^sweep tune is over seed, not over optim.lr: .* choose another `name`$"):
        match(make_named(["optim.lr=0.1"]))
    wanted = "sweep tune was started with another config (optim.lr was 0.001, is 0.5): its cells could not be compared"
    with pytest.raises(RunFolderError, match=f"^{re.escape(wanted)}; choose another `name`$"):
        match(make_named(SEEDS, "optim.lr=0.5"))
    assert match(make_named(SEEDS, "cluster.time_limit_min=5")).name == "tune"


def test_existing_run_with_the_name_is_an_error(make_named: Make) -> None:
    sweep = make_named(SEEDS)
    RunDir.create(sweep.folder)
    with pytest.raises(RunFolderError, match=r"/exp/tune is a run, not a sweep: choose another `name`$"):
        match(sweep)


# --- folders
def test_cells_are_runs_and_the_sweep_is_not(make_named: Make) -> None:
    folder, runs = make_cells(make_named(SEEDS), "finished", "failed")
    for run in runs:
        run.config.write_text("{}")
    assert [run.name for run in find_runs(folder.path.parents[1])] == ["tune-seed_1", "tune-seed_2"]
    found = sweep_of(runs[0])
    assert found is not None
    assert found.path == folder.path
    folder.file.unlink()
    assert sweep_of(runs[0]) is None
    assert sweep_of(folder) is None


@pytest.mark.parametrize(
    ("statuses", "status", "reason"),
    [
        (("finished", "failed", "stopped"), "failed", "3 cells: 1 failed, 1 finished, 1 stopped"),
        (("finished", "stopped", "cancelled"), "cancelled", "3 cells: 1 cancelled, 1 finished, 1 stopped"),
        (("finished", "stopped", "finished"), "stopped", "3 cells: 2 finished, 1 stopped"),
        (("finished", "finished"), "stopped", "3 cells: 2 finished, 1 missing"),
        (("finished", "running", "finished"), "failed", "3 cells: 2 finished, 1 running"),
    ],
)
def test_state_of_an_ended_sweep(make_named: Make, statuses: tuple[Status, ...], status: str, reason: str) -> None:
    """A cell in state `running` without a holder has lost its supervisor."""
    folder, _ = make_cells(make_named(SEEDS), *statuses)
    state = folder.read_state()
    assert (state.status, state.reason) == (status, reason)
    assert state.ended is not None


def test_sweep_is_active_while_a_cell_runs_or_waits(make_named: Make) -> None:
    folder, (first, run, _) = make_cells(make_named(SEEDS), "finished", "running", "created")
    assert folder.read_state().status == "failed"
    with hold(run):
        state = folder.read_state()
    assert (state.status, state.ended) == ("running", None)
    run.write_state(replace(run.read_state(), status="created", attempt=0))
    assert folder.read_state().status == "stopped"
    with hold(folder):
        assert folder.read_state().status == "running"
    for cell in folder.cells():
        cell.write_state(replace(cell.read_state(), status="queued", attempt=0))
        write_json(cell.path / "slurm.json", {"job_id": "1"})
    assert folder.read_state().status == "queued"
    first.write_state(replace(first.read_state(), status="running", attempt=1))
    assert folder.read_state().status == "running", "only Slurm knows the state of a job without a holder"
