"""A simulated run of many ranks for `scale.py`: a real supervisor, a stub of srun, and one process for all ranks.

The stub reports as the parents of all ranks do. The process of the ranks writes the files that real ranks write. It and
the supervisor count their calls to the file system.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpcdist.config.cluster_schema import ClusterConfig
from hpcdist.config.launch_schema import LaunchConfig, PreflightConfig
from hpcdist.config.record_schema import TrackingConfig
from hpcdist.config.schema import Config
from hpcdist.config.slurm_notation import expand
from hpcdist.environments.rank_environment import RankEnvironment
from hpcdist.host.json_files import write_json
from hpcdist.job.batch_step import JobLog
from hpcdist.job.launcher import SlurmLauncher
from hpcdist.rank.processes import MARK, PARENT_MODULE
from hpcdist.rank.telemetry import Heartbeat
from hpcdist.run.folder import Attempt, RunDir, system_interval_s, times_interval_s
from hpcdist.run.lease import hold
from hpcdist.slurm.client import CurrentJob
from hpcdist.supervisor.supervisor import Supervisor
from hpcdist.tracking.journal import JournalWriter

RANKS_PER_NODE = 8
STEP_S = 0.5
#: Step times and system metrics of one node.
STEP_TIMES = {f"time/n1/{part}_s": 0.5 for part in ("step", "data", "compute")}
SYSTEM_METRICS = {f"system/metric_{index}": 0.5 for index in range(8)}
#: It acts as the parents of all ranks (the protocol is in `hpcdist/rank/parent.py`), and starts no process.
STUB_SRUN = f"""\
#!{sys.executable}
import json, os, signal, sys
from pathlib import Path

words = " ".join(sys.argv)
nodes = Path(os.environ["SCALE_NODES"]).read_text().split()
if "SLURMD_NODENAME" in words:  # the roll call of the nodes
    sys.exit(print(*(f"hpcdist-node {{node}}" for node in nodes), sep="\\n"))
if "{PARENT_MODULE}" not in words:  # the watchdog of the job, until it is killed
    signal.pause()
ranks = range({RANKS_PER_NODE} * len(nodes))


def report(reports):
    sys.stdout.write("".join(f"{MARK}{{json.dumps(fields)}}\\n" for fields in reports))
    sys.stdout.flush()


report({{"parent": rank, "ready": nodes[rank // {RANKS_PER_NODE}], "problem": ""}} for rank in ranks)
attempt = json.loads(sys.stdin.readline())["start"]
report({{"parent": rank, "rank": rank, "attempt": attempt, "pid": os.getpid()}} for rank in ranks)
Path(os.environ["SCALE_END"]).read_text()  # a named pipe, to which the benchmark writes when the ranks have failed
end = {{"attempt": attempt, "code": 1, "memory_kill": None}}
report({{"parent": rank, "rank": rank, **end}} for rank in reversed(ranks))
for line in sys.stdin:
    if "end" in json.loads(line):
        report({{"parent": rank, "over": attempt}} for rank in ranks)
"""
STUB_SQUEUE = "#!/bin/sh\n"  # no steps of an earlier life of the job
AUDIT_EVENTS = {
    "open": "open",
    "os.scandir": "list",
    "os.listdir": "list",
    "os.rename": "rename",
    "os.remove": "remove",
}


def make_config(num_ranks: int, runs: Path) -> Config:
    return Config(
        experiment="scale",
        name=f"{num_ranks}-ranks",
        runs_dir=str(runs),
        tracking=TrackingConfig(uri=""),
        launch=LaunchConfig(max_restarts=0),
        preflight=PreflightConfig(mode="off"),  # the stub of srun does not run a preflight
        cluster=ClusterConfig(nodes=num_ranks // RANKS_PER_NODE, tasks_per_node=RANKS_PER_NODE),
    )


def nodelist(num_nodes: int) -> str:
    return f"n[{1:04d}-{num_nodes:04d}]"


def run_of(config: Config) -> RunDir:
    return RunDir(Path(config.runs_dir) / config.experiment / config.name)


# --- counting calls


class CallCounter:
    """Counts the calls of this process to the file system below a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self.counts: Counter[str] = Counter()
        sys.addaudithook(self._on_event)
        # These calls have no audit event.
        os.stat = self._counting("stat", os.stat)
        os.write, os.pwrite = self._counting("write", os.write), self._counting("write", os.pwrite)

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in AUDIT_EVENTS and self._is_inside(arguments[0]):
            self.counts[AUDIT_EVENTS[event]] += 1

    def _counting(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(target: Any, *arguments: Any, **options: Any) -> Any:
            if kind == "write" or self._is_inside(target):
                self.counts[kind] += 1
            return call(target, *arguments, **options)

        return counted

    def _is_inside(self, target: object) -> bool:
        return isinstance(target, (str, os.PathLike)) and os.fspath(target).startswith(self._folder)

    def measure(self, seconds: float, target: Path) -> None:
        """Write CPU time and calls per second of this process to a file, from a thread, after some seconds."""

        def run() -> None:
            began, cpu, before = time.monotonic(), time.process_time(), Counter(self.counts)
            time.sleep(seconds)
            passed = time.monotonic() - began
            cpu_s, counts = time.process_time() - cpu, self.counts - before
            write_json(target, {"cpu": cpu_s / passed, **{kind: count / passed for kind, count in counts.items()}})

        threading.Thread(target=run, daemon=True).start()


# --- the two processes of the simulation


def run_supervisor(root: Path, num_ranks: int, seconds: float) -> None:
    """Supervise as in a batch step; SIGUSR1 starts the measurement."""
    counter = CallCounter(root / "runs")
    config = make_config(num_ranks, root / "runs")
    run = run_of(config)
    signal.signal(signal.SIGUSR1, lambda *_: counter.measure(seconds, root / "supervisor.json"))
    job = CurrentJob(id=os.environ["SLURM_JOB_ID"], restart_count=0, end_time=None)
    environment = RankEnvironment(python=sys.executable, env=dict(os.environ))
    launcher = SlurmLauncher(run, config, job, environment, import_path=[], cwd=root)
    with hold(run, job_id=os.environ["SLURM_JOB_ID"]), launcher:
        state = Supervisor(run, config, launcher, JobLog(), tracking_uri=None, env=os.environ).run()
    print(json.dumps({"reason": state.reason, "cpu_s": time.process_time()}))


def run_ranks(root: Path, num_ranks: int, seconds: float) -> None:
    """Act as all ranks; the first line of input starts the measurement, the second one makes all ranks fail."""
    threading.stack_size(64 * 1024)
    counter = CallCounter(root / "runs")
    config = make_config(num_ranks, root / "runs")
    run = run_of(config)
    attempt = run.attempt(1)
    ended = threading.Event()
    trainer = threading.Thread(target=train, args=(config, run, attempt, num_ranks, ended))
    for rank in range(num_ranks):
        attempt.log(rank).touch()
    trainer.start()
    print("ready", flush=True)
    sys.stdin.readline()
    counter.measure(seconds, root / "ranks.json")
    sys.stdin.readline()
    ended.set()
    trainer.join()
    write_failures(attempt, num_ranks)
    print("failed", flush=True)
    sys.stdin.readline()
    os._exit(0)  # without joining the threads of 4,096 heartbeats


def train(config: Config, run: RunDir, attempt: Attempt, num_ranks: int, ended: threading.Event) -> None:
    """Write heartbeats, metrics and step times of all ranks at their intervals."""
    num_nodes = num_ranks // RANKS_PER_NODE
    beats = [Heartbeat(attempt, rank, num_ranks, config.launch.hang_s) for rank in range(num_ranks)]
    journals = [JournalWriter(run.journal, 1, node * RANKS_PER_NODE) for node in range(num_nodes)]
    intervals_s = [
        (SYSTEM_METRICS, system_interval_s(config.tracking.system_interval_s, num_nodes)),
        # At most every fifth step, as with a logging interval of five steps.
        (STEP_TIMES, max(times_interval_s(num_nodes), 5 * STEP_S)),
    ]
    due = [[interval_s * node / num_nodes for node in range(num_nodes)] for _, interval_s in intervals_s]
    began = time.monotonic()

    def totals() -> dict[str, float]:
        passed = time.monotonic() - began
        sums = {"step_s": passed, "data_s": 0.1 * passed, "compute_s": 0.5 * passed}
        return {"steps": passed / STEP_S, "own_steps": passed / STEP_S, **sums}

    step = 0
    while not ended.wait(max(0.0, began + STEP_S * step - time.monotonic())):
        step += 1
        for beat in beats:
            beat.step = step
            beat.timing = totals
            beat.beat()
        if step % round(1 / STEP_S) == 0:
            attempt.request.exists()  # rank 0 checks for a request once per second
            journals[0].log({"train/loss": 1 / step}, step)
        for (metrics, interval_s), times in zip(intervals_s, due, strict=True):
            for node, journal in enumerate(journals):
                if time.monotonic() - began >= times[node]:
                    journal.log(metrics, step)
                    times[node] += interval_s


def write_failures(attempt: Attempt, num_ranks: int) -> None:
    """Write the outcomes of all ranks: the last rank fails, and the others report a lost peer."""
    for rank in reversed(range(num_ranks)):
        is_cause = rank == num_ranks - 1
        error = "ValueError: the cause" if is_cause else "RuntimeError: Connection closed by peer"
        details = {"error": error, "peer_lost": not is_cause, "traceback": ["a line\n"] * 20}
        outcome = {"outcome": "failed", "rank": rank, "host": f"n{rank}", "time": time.time(), "step": 9}
        write_json(attempt.outcome(rank), outcome | details)


PROCESSES = {"supervisor": run_supervisor, "ranks": run_ranks}


# --- the simulation


def simulate(num_ranks: int, seconds: float) -> dict[str, Any]:
    """Simulate one run; return rates per second of both processes, and the cost of the end of the run."""
    with tempfile.TemporaryDirectory(prefix="scale_") as name:
        root = Path(name)
        config = make_config(num_ranks, root / "runs")
        env = make_cluster(root, config)
        RunDir.create(run_of(config).path)
        arguments = ["--root", name, "--ranks", str(num_ranks), "--seconds", str(seconds)]
        with started("supervisor", arguments, env) as supervisor:
            wait_for_file(run_of(config).attempt(1).path / "srun.log")
            with started("ranks", arguments, env) as ranks:
                expect(ranks, "ready")
                time.sleep(3.0)  # until the supervisor has read the new files
                send_line(ranks)
                supervisor.send_signal(signal.SIGUSR1)
                wait_for_file(root / "supervisor.json")
                wait_for_file(root / "ranks.json")
                cpu_before = cpu_of(supervisor.pid)
                send_line(ranks)
                expect(ranks, "failed")
                written = time.monotonic()
                (root / "end").write_text("now\n")
                assert supervisor.stdout is not None
                end = json.loads(supervisor.stdout.readline())
                decided_s = time.monotonic() - written
                send_line(ranks)
        expected = f"rank {num_ranks - 1} on n{num_ranks - 1} failed with ValueError: the cause after step 9"
        assert end["reason"] == expected, end
        return {
            "supervisor": json.loads((root / "supervisor.json").read_text()),
            "ranks": json.loads((root / "ranks.json").read_text()),
            "end_cpu_s": end["cpu_s"] - cpu_before,
            "decided_s": decided_s,
        }


def make_cluster(root: Path, config: Config) -> dict[str, str]:
    """Write the stubs of Slurm's commands and their input; return the environment of a batch step."""
    (root / "bin").mkdir()
    for name, script in (("srun", STUB_SRUN), ("squeue", STUB_SQUEUE)):
        (root / "bin" / name).write_text(script)
        (root / "bin" / name).chmod(0o700)
    os.mkfifo(root / "end")
    nodes = expand(nodelist(config.cluster.nodes))
    (root / "nodes").write_text("\n".join(nodes) + "\n")
    return {
        **os.environ,
        "PATH": f"{root / 'bin'}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": nodelist(config.cluster.nodes),
        "SCALE_END": str(root / "end"),
        "SCALE_NODES": str(root / "nodes"),
    }


@contextmanager
def started(role: str, arguments: list[str], env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Start one of PROCESSES by `scale.py --role ROLE`; wait for its end."""
    command = [sys.executable, str(Path(__file__).with_name("scale.py")), "--role", role, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        yield process


def cpu_of(pid: int) -> float:
    """Return the CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_for_file(path: Path) -> None:
    deadline = time.monotonic() + 300
    while not path.exists():
        if time.monotonic() > deadline:
            sys.exit(f"{path} does not exist after 300 s")
        time.sleep(0.05)


def expect(process: subprocess.Popen[str], word: str) -> None:
    """Read a line of a process that must be `word`."""
    assert process.stdout is not None
    if (line := process.stdout.readline().strip()) != word:
        sys.exit(f"expected {word!r}, got {line!r}")


def send_line(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
