"""Parent processes of ranks, of one machine or in the tasks of a step, which a fake srun connects to the test.

Named pipes show which processes are alive.
"""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from forked_scene import HELD, SOON_S, TORCH, Scene, StepScene, end_of, parents_of, reports_of, wait_for_start
from hpcdist_runs import wait_for
from supervisor_scene import NamedPipe

from hpcdist.job.node_steps import kill_ranks, main
from hpcdist.supervisor.hang import find_ranks
from hpcdist.supervisor.parents import ParentRanks

#: All tests of this file may start processes.
pytestmark = pytest.mark.processes

NewStep = Callable[..., StepScene]


@pytest.fixture
def new_step(tmp_path: Path, runs_dir: Path) -> Iterator[NewStep]:
    scenes: list[StepScene] = []

    def create(torch: str = TORCH, **options: Any) -> StepScene:
        scenes.append(StepScene(tmp_path / "code", runs_dir, torch, **options))
        return scenes[-1]

    yield create
    for scene in scenes:
        scene.close()
        assert parents_of(scene.run) == []


@pytest.fixture(params=["machine", "step"])
def scene(request: pytest.FixtureRequest, tmp_path: Path, runs_dir: Path, new_step: NewStep) -> Iterator[Any]:
    """Two ranks that one parent starts on this machine, or each of two parents of a step."""
    if request.param == "step":
        yield new_step()
        return
    local = Scene(tmp_path / "code", runs_dir)
    with local.launcher:
        yield local
    assert local.parents() == []


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[NamedPipe]:
    with NamedPipe(tmp_path / "pipe") as pipe:
        yield pipe


# --- what a rank has


def test_forked_rank_has_what_an_executed_one_has(new_step: NewStep, tmp_path: Path) -> None:
    """Environment, processors, folder, log, session, signals and descriptors.

    An import changes variables and processors, as those of torch and OpenMP do.
    """
    (core, *_) = sorted(os.sched_getaffinity(0))
    bound = f"import os\nif 'BOUND' in os.environ:\n    os.sched_setaffinity(0, {{{core}}})\n"
    variables = {"CHANGED": "before", "REMOVED": "before", "BOUND": "yes"}
    changes = "os.environ |= {'TORCHINDUCTOR_CACHE_DIR': '/cache', 'CHANGED': 'after'}\ndel os.environ['REMOVED']\n"
    unbound = f"os.sched_setaffinity(0, {os.sched_getaffinity(0)})\n"
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "sitecustomize.py").write_text(bound)
    step = new_step(f"{TORCH}import os\n{changes}{unbound}", env=variables)
    parents = step.pids()
    forked = reports_of(step)
    assert [report["parent"] for report in forked] == parents
    step.execute_ranks()
    executed = reports_of(step)
    for rank in range(2):
        for report in (forked[rank], executed[rank]):
            assert report["is_leader"]
            del report["env"]["HPCDIST_ATTEMPT"]
            assert report["env"].pop("SLURM_TASK_PID") == str(report.pop("pid"))
            del report["parent"]
        assert (forked[rank].pop("mask"), executed[rank].pop("mask")) == (2, 0), "a forked one waits for its handlers"
        assert forked[rank]["env"].pop("TORCHINDUCTOR_CACHE_DIR") == "/cache"
        assert (forked[rank]["env"].pop("CHANGED"), executed[rank]["env"].pop("CHANGED")) == ("after", "before")
        assert executed[rank]["env"].pop("REMOVED") == "before"
        assert forked[rank] == executed[rank]
        assert forked[rank]["affinity"] == [core]
        assert forked[rank]["env"]["SLURM_PROCID"] == str(rank)
        assert forked[rank]["env"]["SLURM_STEP_TASKS_PER_NODE"] == "2(x1)"
        assert forked[rank]["files"] == ["0", "1", "2", "3"], "the folder itself is 3"
        assert forked[rank]["input"] == ""
        assert "SIG_IGN" in forked[rank]["handlers"]["SIGUSR2"]


def test_ends_of_ranks_are_reported_and_parents_stay(scene: Any) -> None:
    tell = "import os, signal, sys; print(os.getppid(), flush=True);"
    first, exits = scene.finish(f"{tell} sys.exit(5)", f"{tell} os.kill(os.getpid(), 9)")
    assert exits == {0: 5, 1: -9}
    second, exits = scene.finish(f"{tell} signal.signal(11, signal.SIG_DFL); os.kill(os.getpid(), 11)", tell)
    assert exits == {0: -11, 1: 0}
    for attempt in (first, second):
        parents = [int(attempt.log(rank).read_text()) for rank in range(2)]
        assert sorted({*parents}) == sorted(parents_of(scene.run))


def test_killed_rank_is_reported_while_others_run(scene: Any, pipe: NamedPipe) -> None:
    code = HELD.format(pipe=str(pipe.path))
    attempt, ranks = scene.start(code, code)
    wait_for_start(ranks, pipe)
    found = find_ranks(scene.run.path, attempt.number)
    os.kill(found[1].pid, signal.SIGKILL)
    while not ranks.exits:
        ranks.wait(SOON_S)
    assert (ranks.exits, ranks.remaining) == ({1: -9}, [0])
    ranks.close()
    assert ranks.exits == {1: -9, 0: -9}


def test_parents_report_their_hosts(new_step: NewStep) -> None:
    step = new_step(num_tasks=4)
    step.pids()
    assert step.parents.hosts == {0: "n1", 1: "n1", 2: "n2", 3: "n2"}


def test_output_of_imports_is_no_report(new_step: NewStep) -> None:
    step = new_step(f"{TORCH}print('at import', flush=True)\nimport os\nos.write(1, b'by a library\\n')")
    assert step.finish("pass", "pass")[1] == {0: 0, 1: 0}
    assert step.log_of(1) == "at import\nby a library\n"


# --- the end of an attempt

ORPHANS = """
import os, signal, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
pipe = open({pipe!r}, "w", buffering=1)
if os.fork() == 0:
    own_session = os.fork() == 0
    if own_session:
        os.setsid()
    pipe.write("up\\n")
    time.sleep(600)
"""


def test_end_of_an_attempt_kills_all_its_processes(scene: Any, pipe: NamedPipe) -> None:
    """Also children in another session; one rank ignores SIGTERM, the other one has ended before its children."""
    stays = ORPHANS.format(pipe=str(pipe.path)) + "time.sleep(600)"
    leaves = ORPHANS.format(pipe=str(pipe.path)) + "os._exit(0)"
    _, ranks = scene.start(stays, leaves)
    while ranks.absent():
        ranks.wait(SOON_S)
    assert [pipe.line() for _ in range(4)] == ["up"] * 4
    parents = parents_of(scene.run)  # now that forked ranks have names of their own
    while 1 in ranks.remaining:
        ranks.wait(SOON_S)
    assert ranks.exits == {1: 0}
    ranks.close()
    assert (ranks.exits, ranks.parents.is_usable) == ({1: 0, 0: -9}, True)
    assert pipe.is_released(0.0), "no process was left when the parents reported"
    assert scene.finish("import sys; sys.exit(3)", "pass")[1] == {0: 3, 1: 0}
    assert parents_of(scene.run) == parents


def test_no_rank_starts_beside_one_of_an_earlier_attempt(new_step: NewStep, pipe: NamedPipe) -> None:
    """A process that waits for a device survives SIGKILL. This one has not been killed."""
    step = new_step()
    code = HELD.format(pipe=str(pipe.path))
    first, before = step.start(code, code)
    wait_for_start(before, pipe)
    left = find_ranks(step.run.path, first.number)
    second, ranks = step.start("pass", "pass")
    assert end_of(ranks) == {0: 1, 1: 1}
    errors = {f"process {one.pid} of attempt 1 survives SIGKILL on this node" for one in left}
    assert ranks.last_message(0) in errors
    assert not second.log(0).exists()


def test_end_of_the_requests_ends_a_parent_of_a_machine(tmp_path: Path, runs_dir: Path, pipe: NamedPipe) -> None:
    """The supervisor has died, or will start no rank any more."""
    local = Scene(tmp_path / "code", runs_dir)
    with local.launcher:
        code = HELD.format(pipe=str(pipe.path))
        _, ranks = local.start(code, code)
        wait_for_start(ranks, pipe)
        end_requests(ranks)
        assert ranks.parents.process.wait(SOON_S) == 0
        assert pipe.is_released(SOON_S)
        assert end_of(ranks) == {0: -9, 1: -9}


def test_task_ends_with_its_rank_after_the_end_of_requests(new_step: NewStep, tmp_path: Path, pipe: NamedPipe) -> None:
    """The rank continues: the connection of a job to it may be lost."""
    os.mkfifo(go := tmp_path / "go")
    step = new_step()
    code = f"pipe = open({str(pipe.path)!r}, 'w', buffering=1); pipe.write('up\\n'); open({str(go)!r}).read()"
    _, ranks = step.start(code, "pass")
    wait_for_start(ranks, pipe, 1)
    while 1 in ranks.remaining:
        ranks.wait(SOON_S)
    first = parents_of(step.run)[0]
    end_requests(ranks)
    wait_for(lambda: parents_of(step.run) == [first], "the end of the parent without a rank", timeout_s=SOON_S)
    assert ranks.remaining == [0]
    go.write_text("")
    assert end_of(ranks) == {1: 0, 0: 0}
    assert step.parents.process.wait(SOON_S) == 0


def end_requests(ranks: ParentRanks) -> None:
    ranks.parents._channel.shutdown(socket.SHUT_WR)


def test_ranks_end_with_their_parents(new_step: NewStep, pipe: NamedPipe) -> None:
    step = new_step()
    code = HELD.format(pipe=str(pipe.path))
    _, ranks = step.start(code, code)
    wait_for_start(ranks, pipe)
    for pid in parents_of(step.run):
        os.kill(pid, signal.SIGKILL)
    assert end_of(ranks) == {0: -9, 1: -9}
    assert not ranks.parents.is_usable
    assert pipe.is_released(SOON_S)
    assert step.parents.output.read_text().count("Killed") == 2


# --- signals: for Slurm, a task is its rank

COUNT = """
import signal, sys
count, awaited = 0, (signal.SIGUSR2, signal.SIGTERM)
signal.pthread_sigmask(signal.SIG_BLOCK, awaited)  # a handler just before signal.pause would leave it waiting
signal.signal(signal.SIGUSR2, lambda *_: None)
print("up", file=open({pipe!r}, "w", buffering=1), flush=True)
while signal.sigwait(awaited) == signal.SIGUSR2:
    count += 1
    print("got", file=open({pipe!r}, "w", buffering=1), flush=True)
sys.exit(10 + count)
"""


def test_signals_to_a_task_reach_its_rank_once(new_step: NewStep, tmp_path: Path) -> None:
    with NamedPipe(tmp_path / "told", reopened=True) as pipe:
        code = COUNT.format(pipe=str(pipe.path))
        step = new_step()
        _, ranks = step.start(code, code)
        wait_for_start(ranks, pipe)
        first, second = parents_of(step.run)
        os.kill(first, signal.SIGUSR2)
        assert pipe.line() == "got"
        os.kill(first, signal.SIGTERM)
        os.kill(second, signal.SIGTERM)
        assert end_of(ranks) == {0: 11, 1: 10}


def test_signal_of_the_supervisor_reaches_all_ranks(scene: Any, tmp_path: Path) -> None:
    with NamedPipe(tmp_path / "told", reopened=True) as pipe:
        code = COUNT.format(pipe=str(pipe.path))
        _, ranks = scene.start(code, code)
        wait_for_start(ranks, pipe)
        ranks.signal(signal.SIGUSR2)
        assert [pipe.line(), pipe.line()] == ["got", "got"]
        ranks.signal(signal.SIGTERM)
        assert end_of(ranks) == {0: 11, 1: 11}


SIGWAIT = "import signal, sys; sys.exit(signal.sigwait([signal.SIGTERM]))"


def test_signal_to_a_task_that_imports_reaches_its_rank(new_step: NewStep, tmp_path: Path) -> None:
    """It waits in the rank until this has a handler."""
    os.mkfifo(begin := tmp_path / "begin")
    go = os.open(begin, os.O_RDWR)
    with NamedPipe(tmp_path / "told", reopened=True) as pipe:
        tell = f"print('up', file=open({str(pipe.path)!r}, 'w'))"
        step = new_step(f"import os\n{tell}\nos.read(os.open({str(begin)!r}, os.O_RDONLY), 1)\n{TORCH}")
        assert [pipe.line(), pipe.line()] == ["up", "up"]
    for pid in parents_of(step.run):
        os.kill(pid, signal.SIGTERM)
    os.write(go, b"12")  # a byte for each
    _, ranks = step.start(SIGWAIT, SIGWAIT)
    assert end_of(ranks) == {0: 15, 1: 15}
    os.close(go)


def test_signal_to_a_task_between_attempts_reaches_the_next(new_step: NewStep) -> None:
    step = new_step()
    assert step.finish("pass", "pass")[1] == {0: 0, 1: 0}
    for pid in parents_of(step.run):
        os.kill(pid, signal.SIGTERM)
    assert step.finish(SIGWAIT, SIGWAIT)[1] == {0: 15, 1: 15}


def test_sigusr2_is_ignored_by_a_rank_without_a_handler(new_step: NewStep, pipe: NamedPipe) -> None:
    """Slurm sends it ahead of the time limit."""
    unblocked = "import signal; signal.pthread_sigmask(signal.SIG_SETMASK, []);"
    code = unblocked + HELD.format(pipe=str(pipe.path))
    step = new_step()
    _, ranks = step.start(code, code)
    wait_for_start(ranks, pipe)
    for number in (signal.SIGUSR2, signal.SIGTERM):
        for pid in parents_of(step.run):
            os.kill(pid, number)
    assert end_of(ranks) == {0: -15, 1: -15}


def test_parent_of_a_machine_ignores_signals(tmp_path: Path, runs_dir: Path, pipe: NamedPipe) -> None:
    """A terminal and a job send them to all processes; the supervisor stops the ranks."""
    local = Scene(tmp_path / "code", runs_dir)
    with local.launcher:
        code = HELD.format(pipe=str(pipe.path))
        _, ranks = local.start(code, code)
        wait_for_start(ranks, pipe)
        (parent,) = local.parents()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(parent, number)
        ranks.close()
        assert ranks.parents.is_usable
        assert local.finish("import sys; sys.exit(3)", "pass")[1] == {0: 3, 1: 0}
        assert local.parents() == [parent]


# --- parents that do not fork


@pytest.mark.parametrize(
    ("torch", "reason"),
    [
        (f"{TORCH}import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()",
         "the imports have started 1 threads"),
        ("raise ImportError('no such library')", "ImportError: no such library"),
        ("from types import SimpleNamespace\ncuda = SimpleNamespace(_is_in_bad_fork=lambda: True)",
         "the imports have initialised CUDA"),
    ],
    ids=["thread", "error", "cuda"],
)  # fmt: skip
def test_ranks_are_executed_if_their_parent_cannot_fork(
    scene_of: Callable[[str], Any], caplog: pytest.LogCaptureFixture, torch: str, reason: str
) -> None:
    scene = scene_of(torch)
    code = "import os, sys; print(os.getppid(), len(os.listdir('/proc/self/task')), 'torch' in sys.modules)"
    for _ in range(2):
        attempt, exits = scene.finish(code, code)
        assert exits == {0: 0, 1: 0}
        for rank, parent in zip(range(2), parents_of(scene.run) * 2, strict=False):
            assert attempt.log(rank).read_text() == f"{parent} 1 False\n"
    assert f"each rank imports torch itself: {reason} (see {scene.run.path}/attempts/" in caplog.text


@pytest.fixture(params=["machine", "step"])
def scene_of(
    request: pytest.FixtureRequest, tmp_path: Path, runs_dir: Path, new_step: NewStep
) -> Iterator[Callable[[str], Any]]:
    if request.param == "step":
        yield new_step
        return
    scenes: list[Scene] = []

    def create(torch: str) -> Scene:
        scenes.append(Scene(tmp_path / "code", runs_dir, torch))
        scenes[-1].launcher.__enter__()
        return scenes[-1]

    yield create
    for scene in scenes:
        scene.launcher.__exit__()


def test_stack_of_long_imports_is_printed(new_step: NewStep) -> None:
    """By this limit the parents must have begun to import, on a busy machine, too."""
    step = new_step("import time\ntime.sleep(600)", limit_s=5.0)
    wait_for(lambda: len(parents_of(step.run)) == 2, "the parents", timeout_s=SOON_S)
    wait_for(lambda: 'torch.py", line 2 in <module>' in step.log_of(1), "the stack", timeout_s=2 * SOON_S)
    _, ranks = step.start("pass", "pass")
    ranks.wait(0.0)
    assert (ranks.absent(), ranks.last_message(0)) == ([0, 1], "their parent process has not finished its imports")
    ranks.close()


def test_rank_whose_command_does_not_exist_fails(new_step: NewStep) -> None:
    step = new_step(fork=False, command=["/no/such/python"])
    attempt, exits = step.finish("pass", "pass")
    assert exits == {0: 1, 1: 1}
    assert "No such file or directory: '/no/such/python'" in attempt.log(0).read_text()


# --- the search for ranks and their parents on a node


def test_rank_is_found_and_killed_with_its_task(new_step: NewStep, pipe: NamedPipe) -> None:
    step = new_step(num_tasks=4)
    code = HELD.format(pipe=str(pipe.path))
    _, ranks = step.start(code, code, code, code)
    wait_for_start(ranks, pipe, 4)
    parents = parents_of(step.run)
    found = find_ranks(step.run.path, 1, "n1")
    assert [one.rank for one in found] == [0, 1]
    assert [psutil.Process(one.pid).ppid() for one in found] == parents[:2]
    assert find_ranks(step.run.path, 2, "n1") == []
    assert [one.pid for one in find_ranks(step.run.path, None, "n2", parents=True)] == parents[2:]
    assert kill_ranks(step.run.path, "n1") == []
    wait_for(lambda: parents_of(step.run) == parents[2:], "the end of the parents on n1", timeout_s=SOON_S)
    assert [one.rank for one in find_ranks(step.run.path, 1)] == [2, 3]
    ranks.close()
    assert not ranks.parents.is_usable
    assert "srun: error: n1: task 1: Killed" in step.parents.output.read_text()


def test_task_that_imports_is_killed_with_the_ranks(
    new_step: NewStep, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would start a rank of an earlier attempt later on. Slurm cannot end its step if a node is lost."""
    step = new_step("import time\ntime.sleep(600)")
    wait_for(lambda: len(find_ranks(step.run.path, None, "n1", parents=True)) == 2, "the tasks", timeout_s=SOON_S)
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    main(["list", str(step.run.path)])
    assert '{"ranks":[]}' in capsys.readouterr().out, "none runs"
    assert kill_ranks(step.run.path, "n1") == []
    step.parents.process.wait(SOON_S)
    assert step.parents.output.read_text().count("Killed") == 2
