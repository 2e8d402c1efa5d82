"""Command lines, configs, and damaged answers of Slurm give own errors only."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from config_strategies import NASTY, axes, files, overrides
from fuzzing import check_message, fuzz
from hypothesis import strategies as st

from hpcdist.cli.app import make_app
from hpcdist.config.loading import load_config, load_run_config
from hpcdist.config.slurm_notation import expand, expand_tasks
from hpcdist.config.topology import Topology, port_for
from hpcdist.config.written import secrets_of, to_yaml
from hpcdist.errors import ConfigError, HpcdistError, TopologyError
from hpcdist.rank.device import ranks_on_node
from hpcdist.run.sweeps import make_sweep, parse_axes
from hpcdist.slurm import output

APP = make_app()
#: Commands that start no processes; `run` has `--dry-run` for that.
COMMANDS = [["run", "--dry-run"]] + [
    [name] for name in ("config", "runs", "status", "logs", "explain", "stop", "cancel", "resume")
]
OPTIONS = ["ddp_digits", "--sweep", "--rank", "--attempt", "--help", "--schema", "--", "-x", "*", "a**b"]
#: Words without NUL characters, which arguments of a process cannot contain.
WORDS = st.one_of(
    st.sampled_from([*NASTY, *OPTIONS]), st.text(max_size=12), overrides, axes.map(lambda text: f"--sweep={text}")
).map(lambda text: text.replace("\0", ""))


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@fuzz(share=0.5, command=st.sampled_from(COMMANDS), words=st.lists(WORDS, max_size=3))
def test_command_line_gives_a_result_or_an_error(empty: None, command: list[str], words: list[str]) -> None:
    try:
        APP([*command, *words], standalone_mode=False)
    except HpcdistError as error:
        check_message(error)
    except OSError:
        pass  # an invalid file name, which `main` reports with its path
    except Exception as error:
        # Usage errors; their class is private in typer.
        if getattr(error, "exit_code", 0) != 2:
            raise


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@fuzz(share=4, data=files, words=st.lists(overrides, max_size=3))
def test_config_file_gives_a_config_or_an_error(folder: Path, data: bytes, words: list[str]) -> None:
    path = folder / "run.yaml"
    path.write_bytes(data)
    try:
        config = load_config(path, words)
    except ConfigError as error:
        check_message(error)
        return
    written = folder / "written.yaml"
    written.write_text(to_yaml(config))
    loaded = load_run_config(written, [], secrets_of(config))
    # Compared as text, since nan is not equal to itself.
    assert repr(loaded) == repr(config)


@fuzz(words=st.lists(axes, min_size=1, max_size=2), more=st.lists(overrides, max_size=1))
def test_sweep_axis_gives_cells_or_an_error(words: list[str], more: list[str]) -> None:
    try:
        sweep = make_sweep(
            parse_axes(words, more), lambda own: load_config("ddp_digits", [*more, *own]), lambda _: "fuzz"
        )
    except ConfigError as error:
        check_message(error)
        return
    names = [cell.name for cell in sweep.cells]
    assert len(set(names)) == len(names)
    assert all(len(name.encode()) <= 255 and "/" not in name for name in names)
    repr([cell.label for cell in sweep.cells]).encode()


RECORDED = sorted(Path(__file__).parents[1].glob("unit/**/slurm_[0-9]*_[0-9]*/*.txt"))
LINES = [line for path in RECORDED for line in path.read_text().splitlines()]
SLURM_WORDS = st.sampled_from(
    ["|", "||||||||", "=", " ", "\n", "JobId=", "JobState=", "Restarts=x", "Restarts=" + "9" * 5000, "ExitCode=9:9:9",
     "ExitCode=" + "9" * 5000 + ":0", "Restarts=²", "n[1-", "n[1-999999999]", "²", "9" * 5000, "+", "*", "(null)",
     "\0", "\x85", "\ufffd", "1.2.3K", "9" * 400 + "G", "Unknown", "9999-12-31T23:59:59", "0001-01-01T00:00:00"]
)  # fmt: skip


@st.composite
def outputs(draw: st.DrawFn) -> str:
    lines = draw(st.lists(st.sampled_from(LINES), max_size=4))
    text = "\n".join(lines)
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 30)))
        text = text[:start] + draw(st.one_of(SLURM_WORDS, st.text(max_size=6), st.just(""))) + text[end:]
    return text


@fuzz(text=outputs(), job=st.sampled_from(["1", "2_1", "3", "8", "10_2", "11", "", "x"]), more=outputs())
def test_parsers_skip_damaged_slurm_output(text: str, job: str, more: str) -> None:
    output.parse_record(text)
    for read in (output.parse_scontrol, output.parse_squeue, output.parse_sacct):
        info = value_or_error(partial(read, text, job))
        if info is not None:
            assert isinstance(info, output.JobInfo)
            info.describe(1e9)
    for partition in output.parse_partitions(text, more):
        partition.limit("MaxNodes")
        partition.allowed("Accounts")
    output.parse_settings(text)
    value_or_error(lambda: output.parse_starts(text, job))
    value_or_error(lambda: output.parse_node_states(text))
    value_or_error(lambda: output.parse_boot_times(text))


@fuzz(text=st.one_of(st.text(alphabet="0123456789KMGTBb. :-secmin²", max_size=20), st.text(max_size=8), SLURM_WORDS))
def test_parsers_accept_any_slurm_value(text: str) -> None:
    output.parse_memory_mb(text)
    output.parse_seconds(text)
    value_or_error(lambda: output.parse_minutes(text))
    value_or_error(lambda: output.parse_time(text))


def value_or_error(read: Callable[[], Any]) -> Any:
    """Return what `read` returns; None if it says that Slurm's text has a time that it cannot read."""
    try:
        return read()
    except output.SlurmError as error:
        check_message(error)
        return None


@fuzz(text=st.one_of(st.text(alphabet="n0123456789[]-,(x)a.", max_size=40), st.text(max_size=10), SLURM_WORDS))
def test_nodelist_gives_hosts_or_an_error(text: str) -> None:
    for read in (expand, expand_tasks):
        try:
            read(text)
        except TopologyError as error:
            check_message(error)


ENV_NAMES = (
    [f"HPCDIST_{name}" for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "NUM_NODES")]
    + ["HPCDIST_MASTER_ADDR", "HPCDIST_MASTER_PORT", "HPCDIST_JOB_ID", "HPCDIST_ATTEMPT"]
    + ["SLURM_PROCID", "SLURM_STEP_ID", "SLURM_STEP_TASKS_PER_NODE"]
    + ["SLURM_LOCALID", "SLURM_NODEID", "SLURM_JOB_ID"]
    + ["SLURM_RESTART_COUNT", "SLURM_GTIDS", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"]
)
ENV_VALUES = st.one_of(
    st.sampled_from(
        ["0", "1", "2", "n1", "n[1-2]", "1(x2)", "2", "4294967295", "9999999999", "localhost", "0,1", "-1"]
    ),
    SLURM_WORDS,
    st.text(max_size=6),
)


@fuzz(env=st.dictionaries(st.sampled_from(ENV_NAMES), ENV_VALUES, max_size=12))
def test_environment_gives_a_topology_or_an_error(env: dict[str, str]) -> None:
    try:
        topology = Topology.from_env(env)
        assert 0 <= topology.rank < topology.world_size
        ranks_on_node(topology, env)
        port_for(topology.job_id, topology.attempt)
    except TopologyError as error:
        check_message(error)
