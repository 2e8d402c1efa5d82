"""Parsers skip the damaged parts of outputs of Slurm, which were recorded from three releases."""

from __future__ import annotations

from pathlib import Path

from fuzzing import check_message, fuzz
from hypothesis import strategies as st

from hpcdist.config.topology import Topology, port_for
from hpcdist.errors import TopologyError
from hpcdist.host.nodelist import expand, expand_tasks
from hpcdist.rank.process_group import ranks_on_node
from hpcdist.slurm.output import (
    JobInfo,
    parse_boot_times,
    parse_memory_mb,
    parse_minutes,
    parse_node_features,
    parse_node_states,
    parse_partitions,
    parse_record,
    parse_sacct,
    parse_scontrol,
    parse_seconds,
    parse_settings,
    parse_squeue,
)

RECORDED = sorted(Path(__file__).parents[1].glob("unit/**/slurm_[0-9]*_[0-9]*/*.txt"))
LINES = [line for path in RECORDED for line in path.read_text().splitlines()]
WORDS = st.sampled_from(
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
        text = text[:start] + draw(st.one_of(WORDS, st.text(max_size=6), st.just(""))) + text[end:]
    return text


@fuzz(text=outputs(), job=st.sampled_from(["1", "2_1", "3", "8", "10_2", "11", "", "x"]), more=outputs())
def test_parsers_skip_damaged_slurm_output(text: str, job: str, more: str) -> None:
    parse_record(text)
    for parse in (parse_scontrol, parse_squeue, parse_sacct):
        info = parse(text, job)
        if info is not None:
            assert isinstance(info, JobInfo)
            info.describe(1e9)
    for partition in parse_partitions(text, more):
        partition.limit("MaxNodes")
        partition.allowed("Accounts")
    parse_settings(text)
    parse_node_states(text)
    parse_node_features(text)
    parse_boot_times(text)


@fuzz(text=st.one_of(st.text(alphabet="0123456789KMGTBb. :-secmin²", max_size=20), st.text(max_size=8), WORDS))
def test_parsers_accept_any_slurm_value(text: str) -> None:
    parse_memory_mb(text)
    parse_seconds(text)
    parse_minutes(text)


@fuzz(text=st.one_of(st.text(alphabet="n0123456789[]-,(x)a.", max_size=40), st.text(max_size=10), WORDS))
def test_nodelist_gives_hosts_or_an_error(text: str) -> None:
    for parse in (expand, expand_tasks):
        try:
            parse(text)
        except TopologyError as error:
            check_message(error)


NAMES = (
    [f"HPCDIST_{name}" for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "NUM_NODES")]
    + ["HPCDIST_MASTER_ADDR", "HPCDIST_MASTER_PORT", "HPCDIST_JOB_ID", "HPCDIST_ATTEMPT", "TORCHELASTIC_RUN_ID"]
    + ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE"]
    + ["SLURM_PROCID", "SLURM_STEP_ID", "SLURM_NTASKS", "SLURM_NNODES", "SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE"]
    + ["SLURM_LOCALID", "SLURM_NODEID", "SLURM_JOB_ID", "SLURM_HET_SIZE", "SLURM_JOB_NODELIST_HET_GROUP_0"]
    + ["SLURM_RESTART_COUNT", "SLURM_GTIDS", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"]
)
VALUES = st.one_of(
    st.sampled_from(
        ["0", "1", "2", "n1", "n[1-2]", "1(x2)", "2", "4294967295", "9999999999", "localhost", "0,1", "-1"]
    ),
    WORDS,
    st.text(max_size=6),
)


@fuzz(env=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=12))
def test_environment_gives_a_topology_or_an_error(env: dict[str, str]) -> None:
    try:
        topology = Topology.from_env(env)
        assert 0 <= topology.rank < topology.world_size
        ranks_on_node(topology, env)
        port_for(topology.job_id, topology.attempt)
    except TopologyError as error:
        check_message(error)
