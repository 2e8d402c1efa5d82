"""What 4,096 ranks on 512 nodes cost their supervisor, and the file system that all of them share. Simulated.

    python benchmarks/scale.py [--ranks 64,512,4096] [--seconds 20] [--json]

Real: supervisor, watch, srun step, lease, heartbeats, journals, rank derivation, batch script. Not real: srun, which
is a stub that only waits, and the ranks, which are threads of one process that write the files that ranks write. The
shipper is left out. In the end the last rank fails and all others report a lost peer: the supervisor must name it.

Calls that reach the file system are counted in both processes: opened, looked at, listed, renamed, written.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpcdist.config.schema import ClusterConfig, Config, LaunchConfig, TrackingConfig
from hpcdist.config.schema.preflight import PreflightConfig
from hpcdist.files.atomic import write_json
from hpcdist.rank.telemetry.heartbeat import Heartbeat
from hpcdist.rank.topology import Topology
from hpcdist.run.folder import RunDir
from hpcdist.run.lease import hold
from hpcdist.run.polling import system_interval_s, times_interval_s
from hpcdist.slurm.current_job import CurrentJob
from hpcdist.slurm.job.batch_step import JobLog
from hpcdist.slurm.job.rank_step import ended_tasks
from hpcdist.slurm.job.slurm_launcher import SlurmLauncher
from hpcdist.slurm.nodelist import expand
from hpcdist.slurm.submit.batch_script import render
from hpcdist.supervisor.restart_policy import first_failure
from hpcdist.supervisor.supervisor import Supervisor
from hpcdist.tracking.journal import JournalWriter

RANKS_PER_NODE = 8
STEP_S = 0.5
#: A power up to which a cost counts as linear. Sorting, N log N, has 1.17 from 64 ranks to 4,096, and a loop whose data
#: outgrow a processor's cache on the way looks like it; what is told apart from those is a loop within a loop, 2.
LINEAR_UP_TO = 1.2
#: One node's step times, and its system metrics.
TIMES = {f"time/n1/{what}_s": 0.5 for what in ("step", "data", "compute")}
POINT = {f"system/metric_{index}": 0.5 for index in range(8)}
STUB_SRUN = """\
#!/bin/sh
# Answers the roll call for all nodes.
case "$*" in *SLURMD_NODENAME*) exec cat "$SCALE_NODES" ;; esac
# Waits for the end that the benchmark decides on; says of the ranks what srun would.
read -r _ < "$SCALE_END"
cat "$SCALE_SAYS" >&2
exit 1
"""


def configured(num_ranks: int, runs: Path) -> Config:
    return Config(
        experiment="scale",
        name=f"{num_ranks}-ranks",
        runs_dir=str(runs),
        tracking=TrackingConfig(uri=""),
        launch=LaunchConfig(max_restarts=0),
        preflight=PreflightConfig(mode="off"),  # the stub of srun knows ranks alone
        cluster=ClusterConfig(nodes=num_ranks // RANKS_PER_NODE, tasks_per_node=RANKS_PER_NODE),
    )


def nodelist(num_nodes: int) -> str:
    return f"n[{1:04d}-{num_nodes:04d}]"


# --- counting


class Calls:
    """Counts what this process asks of the file system below a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self.counts: Counter[str] = Counter()
        sys.addaudithook(self._heard)
        # No audit event tells of these.
        os.stat = self._counting("stat", os.stat)  # type: ignore[assignment]
        os.write, os.pwrite = self._counting("write", os.write), self._counting("write", os.pwrite)

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        kind = {
            "open": "open",
            "os.scandir": "list",
            "os.listdir": "list",
            "os.rename": "rename",
            "os.remove": "remove",
        }
        if event in kind and self._is_inside(arguments[0]):
            self.counts[kind[event]] += 1

    def _counting(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(target: Any, *arguments: Any, **options: Any) -> Any:
            if kind == "write" or self._is_inside(target):
                self.counts[kind] += 1
            return call(target, *arguments, **options)

        return counted

    def _is_inside(self, target: object) -> bool:
        return isinstance(target, (str, os.PathLike)) and os.fspath(target).startswith(self._folder)


class Window:
    """From a thread: CPU time and calls of this process in a span of time; written to a file."""

    def __init__(self, calls: Calls, seconds: float, target: Path) -> None:
        self._calls, self._seconds, self._target = calls, seconds, target

    def open(self) -> None:
        threading.Thread(target=self._measure, daemon=True).start()

    def _measure(self) -> None:
        began, cpu, before = time.monotonic(), time.process_time(), Counter(self._calls.counts)
        threading.Event().wait(self._seconds)
        passed = time.monotonic() - began
        cpu_s, counts = time.process_time() - cpu, self._calls.counts - before
        report = {"cpu": cpu_s / passed, **{kind: count / passed for kind, count in counts.items()}}
        partial = self._target.with_suffix(".partial")
        partial.write_text(json.dumps(report))
        partial.rename(self._target)


# --- the two processes of the simulation


def be_supervisor(root: Path, num_ranks: int, seconds: float) -> None:
    """Supervise as a job's batch step does; the file `go` says when to measure."""
    calls = Calls(root / "runs")
    config = configured(num_ranks, root / "runs")
    run = RunDir(root / "runs" / config.experiment / config.name)
    signal.signal(signal.SIGUSR1, lambda *_: Window(calls, seconds, root / "supervisor.json").open())
    job = CurrentJob(id=os.environ["SLURM_JOB_ID"], restart_count=0, end_time=None)
    launcher = SlurmLauncher(run, config, job, env=os.environ, import_path=[], cwd=root)
    with hold(run, job_id=os.environ["SLURM_JOB_ID"]), launcher:
        began = time.monotonic()
        state = Supervisor(run, config, launcher, JobLog(), tracking_uri=None, env=os.environ).run()
    print(json.dumps({"reason": state.reason, "cpu_s": time.process_time(), "s": time.monotonic() - began}))


def be_ranks(root: Path, num_ranks: int, seconds: float) -> None:
    """Write what so many ranks write, training included; ends with the failure of all on a line of input."""
    threading.stack_size(64 * 1024)
    calls = Calls(root / "runs")
    config = configured(num_ranks, root / "runs")
    run = RunDir(root / "runs" / config.experiment / config.name)
    attempt = run.attempt(1)
    hang_s = config.launch.hang_timeout_s
    for rank in range(num_ranks):
        attempt.log(rank).touch()
    beats = [Heartbeat(attempt, rank, num_ranks, hang_s) for rank in range(num_ranks)]
    num_nodes = num_ranks // RANKS_PER_NODE
    journals = [JournalWriter(run.journal, 1, node * RANKS_PER_NODE) for node in range(num_nodes)]
    interval_s = system_interval_s(config.tracking.system_interval_s, num_nodes)
    due = [interval_s * node / num_nodes for node in range(num_nodes)]
    # Not more often than every fifth step, as a logging interval would have it.
    times_s = max(times_interval_s(num_nodes), 5 * STEP_S)
    times_due = [times_s * node / num_nodes for node in range(num_nodes)]
    ended = threading.Event()

    def totals() -> dict[str, float]:
        passed = time.monotonic() - began
        sums = {"step_s": passed, "data_s": 0.1 * passed, "compute_s": 0.5 * passed}
        return {"steps": passed / STEP_S, "own_steps": passed / STEP_S, **sums}

    began = time.monotonic()

    def train() -> None:
        step = 0
        while not ended.wait(max(0.0, began + STEP_S * step - time.monotonic())):
            step += 1
            for beat in beats:
                beat.step = step
                beat.timing = totals
                beat.beat()
            if step % round(1 / STEP_S) == 0:
                attempt.request.exists()  # rank 0's look, once a second
                journals[0].log({"train/loss": 1 / step}, step)
            for node, then in enumerate(due):
                if time.monotonic() - began >= then:
                    journals[node].log(POINT, step)
                    due[node] += interval_s
            for node, then in enumerate(times_due):
                if time.monotonic() - began >= then:
                    journals[node].log(TIMES, step)
                    times_due[node] += times_s

    trainer = threading.Thread(target=train)
    trainer.start()
    print("ready", flush=True)
    sys.stdin.readline()
    Window(calls, seconds, root / "ranks.json").open()
    sys.stdin.readline()
    ended.set()
    trainer.join()
    for rank in reversed(range(num_ranks)):
        is_cause = rank == num_ranks - 1
        error = "ValueError: the cause" if is_cause else "RuntimeError: Connection closed by peer"
        details = {"error": error, "peer_lost": not is_cause, "traceback": ["a line\n"] * 20}
        outcome = {"outcome": "failed", "rank": rank, "host": f"n{rank}", "time": time.time(), "step": 9}
        write_json(attempt.outcome(rank), outcome | details)
    print("failed", flush=True)
    sys.stdin.readline()
    os._exit(0)  # 4,096 threads need not be joined


def simulate(num_ranks: int, seconds: float) -> dict[str, Any]:
    """One run of so many ranks; rates per second, and what its end took."""
    with tempfile.TemporaryDirectory(prefix="scale_") as name:
        root = Path(name)
        config = configured(num_ranks, root / "runs")
        RunDir.create(root / "runs" / config.experiment / config.name)
        (root / "bin").mkdir()
        stub = root / "bin" / "srun"
        stub.write_text(STUB_SRUN)
        stub.chmod(0o700)
        squeue = root / "bin" / "squeue"
        squeue.write_text("#!/bin/sh\n")  # no step of an earlier life
        squeue.chmod(0o700)
        os.mkfifo(root / "end")
        nodes = expand(nodelist(config.cluster.nodes))
        says = [
            f"srun: error: {node}: tasks {8 * at}-{8 * at + 7}: Exited with exit code 1"
            for at, node in enumerate(nodes)
        ]
        (root / "nodes").write_text("\n".join(nodes) + "\n")
        (root / "says").write_text("\n".join(reversed(says)) + "\n")
        env = {
            **os.environ,
            "PATH": f"{root / 'bin'}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "1",
            "SLURM_JOB_NODELIST": nodelist(config.cluster.nodes),
            "SCALE_END": str(root / "end"),
            "SCALE_SAYS": str(root / "says"),
            "SCALE_NODES": str(root / "nodes"),
        }
        command = [sys.executable, __file__, "--root", str(root), "--ranks", str(num_ranks), "--seconds", str(seconds)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": env}
        with subprocess.Popen([*command, "--be", "supervisor"], **pipes) as supervisor:
            attempts = root / "runs" / config.experiment / config.name / "attempts" / "001" / "srun.log"
            await_file(attempts)
            with subprocess.Popen([*command, "--be", "ranks"], **pipes) as ranks:
                began = time.monotonic()
                expect(ranks, "ready")
                up_s = time.monotonic() - began
                threading.Event().wait(3.0)  # the files that were just made are searched through
                tell(ranks)
                supervisor.send_signal(signal.SIGUSR1)
                await_file(root / "supervisor.json")
                await_file(root / "ranks.json")
                cpu_before = cpu_of(supervisor.pid)
                tell(ranks)
                expect(ranks, "failed")
                written = time.monotonic()
                (root / "end").write_text("now\n")
                assert supervisor.stdout is not None
                end = json.loads(supervisor.stdout.readline())
                decided_s = time.monotonic() - written
                tell(ranks)
        wanted = f"rank {num_ranks - 1} on n{num_ranks - 1} failed with ValueError: the cause at step 9"
        assert end["reason"] == wanted, end
        return {
            "supervisor": json.loads((root / "supervisor.json").read_text()),
            "ranks": json.loads((root / "ranks.json").read_text()),
            "up_s": up_s,
            "end_cpu_s": end["cpu_s"] - cpu_before,
            "decided_s": decided_s,
        }


def cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def await_file(path: Path) -> None:
    deadline = time.monotonic() + 300
    while not path.exists():
        if time.monotonic() > deadline:
            sys.exit(f"waited in vain for {path}")
        time.sleep(0.05)


def expect(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    if (line := process.stdout.readline().strip()) != word:
        sys.exit(f"waited for {word!r}, got {line!r}")


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


# --- pure functions


def seconds_of(call: Callable[[], object], at_least_s: float = 0.3) -> float:
    """CPU seconds of a call, the least of many: how they grow is of interest here, not what the neighbours do."""
    times: list[float] = []
    while sum(times) < at_least_s or len(times) < 7:
        began = time.process_time()
        call()
        times.append(time.process_time() - began)
    return min(times)


def functions(num_ranks: int, root: Path) -> dict[str, float]:
    """Seconds of what is computed once, or once per rank, in a run of so many ranks."""
    config = configured(num_ranks, root)
    num_nodes = config.cluster.nodes
    run = RunDir(root / "scale" / config.name)
    middle = num_ranks // 2
    env = {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(middle),
        "SLURM_LOCALID": str(middle % RANKS_PER_NODE),
        "SLURM_NODEID": str(middle // RANKS_PER_NODE),
        "SLURM_STEP_NUM_TASKS": str(num_ranks),
        "SLURM_STEP_NODELIST": nodelist(num_nodes),
        "SLURM_STEP_TASKS_PER_NODE": f"{RANKS_PER_NODE}(x{num_nodes})",
    }
    assert Topology.from_env(env).world_size == num_ranks
    scattered = "n[" + ",".join(str(2 * node) for node in range(num_nodes)) + "]"
    says = "".join(f"srun: error: n{rank // 8}: task {rank}: Exited with exit code 1\n" for rank in range(num_ranks))
    ends = ended_tasks(says)
    lost = {"outcome": "failed", "host": "n", "step": 1, "error": "e", "traceback": [], "peer_lost": True}
    outcomes = dict.fromkeys(range(num_ranks), lost)
    exits = {rank: code for rank, (_, code) in ends.items()}
    return {
        "rank derivation, per rank": seconds_of(lambda: Topology.from_env(env)),
        "nodelist, a range": seconds_of(lambda: expand(nodelist(num_nodes))),
        "nodelist, scattered": seconds_of(lambda: expand(scattered)),
        "batch script and srun line": seconds_of(lambda: render(config, run)),
        "reading srun's last words": seconds_of(lambda: ended_tasks(says)),
        "finding the first failure": seconds_of(lambda: first_failure(exits, outcomes, lambda rank: None, str)),
    }


def lease_ms(root: Path) -> float:
    target = root / "lease"
    return 1e3 * seconds_of(lambda: write_json(target, {"host": "n1", "pid": 1, "renewed": time.time()}))


def exponent(times: dict[int, float]) -> float:
    """How a time grows from the smallest to the largest number of ranks: 1 is linear."""
    low, high = min(times), max(times)
    return math.log(times[high] / times[low]) / math.log(high / low) if low != high else 0.0


def log_power(sizes: list[int]) -> float:
    """The power by which N log N seems to grow over these sizes."""
    return exponent({size: size * math.log(size) for size in sizes})


def show(sizes: list[int], runs: dict[int, dict[str, Any]], costs: dict[int, dict[str, float]]) -> dict[str, Any]:
    """Print the tables; returns the figures that others read."""
    kinds = ("open", "stat", "list", "rename", "remove", "write")
    print(
        f"{'ranks':>8}{'nodes':>7}  {'CPU %':>6}  calls/s: " + "".join(f"{kind:>8}" for kind in kinds) + f"{'all':>8}"
    )
    figures: dict[str, Any] = {}
    for size in sizes:
        sums = {}
        for who in ("supervisor", "ranks"):
            rates = runs[size][who]
            sums[who] = sum(rates.get(kind, 0.0) for kind in kinds)
            cpu = f"{100 * rates['cpu']:6.2f}" if who == "supervisor" else " " * 6
            row = "".join(f"{rates.get(kind, 0.0):8.1f}" for kind in kinds)
            print(f"{size:8}{size // RANKS_PER_NODE:7}  {cpu}  {who:>10}{row[1:]}{sums[who]:8.1f}")
        figures[str(size)] = {
            "cpu_percent": 100 * runs[size]["supervisor"]["cpu"],
            "calls_per_s": sum(sums.values()),
            "end_cpu_s": runs[size]["end_cpu_s"],
            "decided_s": runs[size]["decided_s"],
        }
    print("\nwhen all ranks have failed: from srun's end to the supervisor's last word")
    for size in sizes:
        print(f"{size:8} ranks  {runs[size]['decided_s']:6.2f} s, {runs[size]['end_cpu_s']:6.2f} s of CPU")
    print(f"\n{'CPU ms':28}" + "".join(f"{size:>10}" for size in sizes) + "    grows with ranks to the power of")
    powers = {}
    for what in costs[sizes[0]]:
        powers[what] = exponent({size: costs[size][what] for size in sizes})
        print(f"{what:28}" + "".join(f"{1e3 * costs[size][what]:10.3f}" for size in sizes) + f"    {powers[what]:.2f}")
    print(f"1 is linear; up to {LINEAR_UP_TO:g} counts as such (N log N: {log_power(sizes):.2f})")
    return {"sizes": figures, "largest_power": max(powers.values()), "powers": powers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="64,512,4096")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    parser.add_argument("--be", choices=("supervisor", "ranks"), help=argparse.SUPPRESS)
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.be:
        resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
        role = be_supervisor if arguments.be == "supervisor" else be_ranks
        role(arguments.root, int(arguments.ranks), arguments.seconds)
        return
    sizes = [int(text) for text in arguments.ranks.split(",")]
    with tempfile.TemporaryDirectory(prefix="scale_") as name:
        costs = {size: functions(size, Path(name)) for size in sizes}
        renewal = lease_ms(Path(name))
    runs = {size: simulate(size, arguments.seconds) for size in sizes}
    figures = show(sizes, runs, costs)
    print(f"lease renewal, once in 10 s  {renewal:9.3f}")
    if arguments.json:
        print(json.dumps({"benchmark": "scale", "lease_ms": renewal, **figures}))


if __name__ == "__main__":
    main()
