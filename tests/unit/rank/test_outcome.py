"""The end of a rank: its process, in a process without torch, and its outcome file."""

import argparse
import ctypes
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from hpcdist.config.schema import Config
from hpcdist.config.training_schema import DataConfig, TrainerConfig
from hpcdist.errors import TopologyError, TrainerError
from hpcdist.host.json_files import read_json, write_json
from hpcdist.rank import memory_history, private_network
from hpcdist.rank.network_interface import INTERFACE_VARIABLES, interface_env
from hpcdist.rank.worker import Outcome, at_step, exit_as_return, load_trainer
from hpcdist.run.folder import RunDir

PROGRAM = """\
import atexit, os, signal, sys, threading
from pathlib import Path
from hpcdist.rank import worker as process_end
folder, limit_s, process_end.ATEXIT_S, process_end._STUCK_S = Path(sys.argv[1]), *map(float, sys.argv[2:])
forever = threading.Event().wait
kept = open(folder / "buffer", "w")
kept.write("written")

def conclude():
    (folder / "concluded").touch()
    return 3

def note_late(since, what, *, is_busy):
    if is_busy:
        what += ", busy"
    (folder / "late-end").write_text(what)

{actions}
process_end.end(conclude, limit_s, note_late)
"""
#: Threads often run as long as the main thread.
LATE = "threading.Thread(target=lambda: (threading.main_thread().join(), (folder / 'late').touch())).start()"
ENDLESS = "threading.Thread(target=forever, name='endless').start()"
ENDLESS_AT_EXIT = "atexit.register(forever)"
UNINTERRUPTED = "atexit.register(lambda: (signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM]), forever()))"
IGNORES_SIGTERM = """\
import multiprocessing, time
def work():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.closerange(1, 3)  # the test waits for the end of the output of all processes
    (folder / "ignores").touch()
    time.sleep(60)
child = multiprocessing.get_context("fork").Process(target=work, name="loader", daemon=True)
child.start()
while not (folder / "ignores").exists():
    time.sleep(0.01)
"""
BUSY = """\
def compute():
    while True:
        pass
threading.Thread(target=compute, name='busy').start()
"""
RAISES = "atexit.register(lambda: 1 / 0)"


def end(
    tmp_path: Path, *actions: str, limit_s: float = 60.0, atexit_s: float = 60.0, stuck_s: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Run a process that ends after some actions; all its files must be written."""
    program = PROGRAM.format(actions="\n".join(actions))
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), str(limit_s), str(atexit_s), str(stuck_s)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 3, done.stderr
    assert (tmp_path / "concluded").exists()
    return done


@pytest.mark.processes
def test_threads_and_atexit_functions_end_before_the_conclusion(tmp_path: Path) -> None:
    done = end(tmp_path, LATE, RAISES)
    assert (tmp_path / "late").exists(), "a thread that waits for the end of the main thread"
    assert (tmp_path / "buffer").read_text() == "written"
    assert "ZeroDivisionError" in done.stderr
    assert "cut off" not in done.stderr
    assert not (tmp_path / "late-end").exists()


@pytest.mark.processes
@pytest.mark.parametrize("endless", [ENDLESS, ENDLESS_AT_EXIT])
def test_what_does_not_end_is_cut_off_and_the_rest_is_done(tmp_path: Path, endless: str) -> None:
    # The limits of what ends leave time for pauses of the process on a busy machine.
    done = end(tmp_path, "atexit.register((folder / 'left').touch)", endless, limit_s=2.0, atexit_s=2.0)
    assert (tmp_path / "left").exists()
    assert (tmp_path / "buffer").read_text() == "written"
    assert ("thread 'endless' (" in done.stderr) == (endless == ENDLESS)
    kept_it = {ENDLESS: "thread 'endless' (", ENDLESS_AT_EXIT: "a function of atexit"}
    assert (tmp_path / "late-end").read_text().startswith(kept_it[endless])


@pytest.mark.processes
def test_function_that_cannot_be_interrupted_is_cut_off(tmp_path: Path) -> None:
    done = end(tmp_path, UNINTERRUPTED, limit_s=1.0, atexit_s=0.1, stuck_s=1.0)
    assert "a function of atexit does not end, and is cut off: thread 'MainThread' (" in done.stderr
    assert (tmp_path / "late-end").read_text().startswith("thread 'MainThread' (")


@pytest.mark.processes
def test_thread_that_computes_is_not_idle_at_the_end(tmp_path: Path) -> None:
    # On a busy machine, the thread may get less than a tenth of a core.
    done = end(tmp_path, "process_end._BUSY_SHARE = 0.005", BUSY, limit_s=1.0)
    assert "thread 'busy' (" in done.stderr
    assert re.fullmatch(r"thread 'busy' \(.*\), busy", (tmp_path / "late-end").read_text())


@pytest.mark.processes
def test_child_process_that_does_not_end_is_named(tmp_path: Path) -> None:
    done = end(tmp_path, IGNORES_SIGTERM, limit_s=0.3, atexit_s=0.3)
    found = re.search(r"child processes loader \((\d+)\): not ended, and killed", done.stderr)
    assert found, done.stderr
    os.kill(int(found[1]), signal.SIGKILL)  # as the parent of ranks does
    assert re.fullmatch(r"child processes loader \(\d+\)", (tmp_path / "late-end").read_text())


@pytest.mark.processes
def test_errors_and_unusual_files_do_not_change_the_end(tmp_path: Path) -> None:
    done = end(
        tmp_path,
        "import io, logging",
        "logging.basicConfig()",
        "full = open('/dev/full', 'w'); full.write('lost')",
        "detached = io.TextIOWrapper(io.BytesIO()); detached.detach()",
        "threading._register_atexit(lambda: 1 / 0)",
    )
    assert (tmp_path / "buffer").read_text() == "written"
    assert "'/dev/full'" in done.stderr
    assert "is not written completely: No space left on device" in done.stderr
    assert "ZeroDivisionError" in done.stderr


# --- the outcome file of a failed rank


def test_middle_of_a_long_exception_is_removed(runs_dir: Path) -> None:
    attempt = RunDir.create(runs_dir / "exp" / "run").new_attempt()
    outcome = Outcome(attempt, 0)
    with pytest.raises(ValueError, match="begin") as caught:
        raise ValueError("begin" + "x" * 2_000_000 + "end")
    assert outcome.write_error(caught.value) == 1
    assert attempt.outcome(0).stat().st_size < 30_000
    found = read_json(attempt.outcome(0))
    assert found is not None
    for text in (found["error"], "".join(found["traceback"])):
        assert "beginxxx" in text
        assert text.rstrip().endswith("xxxend")
        assert "characters, see the log" in text
    assert "".join(found["traceback"]).startswith("Traceback (most recent call last)")


def test_outcome_of_a_full_gpu_has_its_memory(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir.create(runs_dir / "exp" / "run")
    monkeypatch.setattr(memory_history, "memory_record", lambda message: {"device": "GPU 0"})
    of_cublas = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    of_nccl = (
        "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error\nncclUnhandledCudaError: Call to CUDA function failed.\n"
        "Last error:\nCuda failure 2 'out of memory'"
    )
    for error, expected in (
        (torch.OutOfMemoryError("CUDA out of memory"), {"device": "GPU 0"}),
        (RuntimeError(of_cublas), {"device": "GPU 0"}),
        (torch.distributed.DistBackendError(of_nccl), {"device": "GPU 0"}),
        (RuntimeError("CUDA error: out of memory"), {"device": "GPU 0"}),
        (RuntimeError("no CUDA out of memory"), None),
    ):
        attempt = run.new_attempt()
        outcome = Outcome(attempt, 0)
        outcome.num_micro_batches = lambda: 2
        outcome.write_error(error)
        found = read_json(attempt.outcome(0)) or {}
        assert found.get("device_memory") == expected
        assert found.get("num_micro_batches") == (2 if expected else None), "for launch.fit_batch"


def failed_in_user_code(run: RunDir, error: type[Exception], text: str) -> dict[str, Any]:
    """Return the outcome of a rank whose code, imported from the snapshot, raises an exception."""
    attempt = run.new_attempt()
    code = f"def train():\n    raise {error.__name__}({text!r})\n"
    found: dict[str, Any] = {}
    exec(compile(code, str(run.code / "pkg" / "train.py"), "exec"), found)
    with pytest.raises(error) as caught:
        found["train"]()
    assert Outcome(attempt, 0).write_error(caught.value) == 1
    return read_json(attempt.outcome(0)) or {}


def test_traceback_and_log_name_the_original_of_a_copied_file(runs_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = RunDir.create(runs_dir / "exp" / "run")
    text = f"see {run.code}/pkg/data.py"
    frame = f'File "{run.code}/pkg/train.py", line 2, in train'
    assert frame in "".join(failed_in_user_code(run, ValueError, text)["traceback"])
    write_json(run.environment, {"code": {"copied": True, "root": "/me/project"}})
    caplog.clear()
    found = failed_in_user_code(run, ValueError, text)
    assert found["error"] == "ValueError: see /me/project/pkg/data.py"
    for shown in ("".join(found["traceback"]), caplog.text):
        assert 'File "/me/project/pkg/train.py", line 2, in train' in shown
        assert str(run.code) not in shown


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("'no data in /data'", "exit status 1: no data in /data"),
        ("3", "exit status 3"),
        ("''", "exit status 1: "),
        ("2.5", "exit status 1: 2.5"),
    ],
)
def test_exit_of_a_script_shows_its_message_and_its_line(
    runs_dir: Path, tmp_path: Path, code: str, message: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import sys\n\n\ndef main():\n    sys.exit({code})\n\n\nmain()\n")
    attempt = RunDir.create(runs_dir / "exp" / "first").new_attempt()
    with pytest.raises(RuntimeError) as raised, exit_as_return("train.py"):
        runpy.run_path(str(script))
    Outcome(attempt, 0).write_error(raised.value)
    found = read_json(attempt.outcome(0)) or {}
    assert found["error"] == f"RuntimeError: train.py ended with {message}"
    *_, frame, line, error = "".join(found["traceback"]).splitlines()
    assert (frame, line) == (f'  File "{script}", line 5, in main', f"    sys.exit({code})")
    assert error == f"RuntimeError: train.py ended with {message}"


def test_exit_with_a_number_names_the_last_printed_line(capfd: pytest.CaptureFixture[str]) -> None:
    print("of an earlier block", file=sys.stderr, flush=True)
    arguments = argparse.ArgumentParser("train.py")
    arguments.add_argument("--lr", type=float)
    with pytest.raises(RuntimeError) as raised, exit_as_return("train.py"):
        arguments.parse_args(["--lr", "high"])
    reason = "train.py: error: argument --lr: invalid float value: 'high'"
    assert str(raised.value) == f"train.py ended with exit status 2; its last line: {reason}"
    with pytest.raises(RuntimeError, match=r"^train\.py ended with exit status 3$"), exit_as_return("train.py"):
        sys.exit(3)


def test_wrong_call_of_ctx_names_the_line_of_the_trainer(runs_dir: Path) -> None:
    run = RunDir.create(runs_dir / "exp" / "first")
    run.code.mkdir()
    trainer = run.code / "trainer.py"
    trainer.write_text("from hpcdist.rank.mesh import mesh_sizes\n\nmesh_sizes({}, 2)\n")
    attempt = run.new_attempt()
    with pytest.raises(TrainerError, match=r"^ctx\.mesh: pass the sizes") as raised:
        runpy.run_path(str(trainer))
    Outcome(attempt, 0).write_error(raised.value)
    found = read_json(attempt.outcome(0)) or {}
    assert found["outcome"] == "rejected"
    *_, frame, line = "".join(found["traceback"]).splitlines()
    assert (frame, line) == (f'  File "{trainer}", line 3, in <module>', "    mesh_sizes({}, 2)")
    outside = TrainerError("trainer.script: no such file: x.py")
    Outcome(attempt, 0).write_error(outside)
    assert (read_json(attempt.outcome(0)) or {})["traceback"] == []


@pytest.mark.parametrize("code", ["", "None", "0", "False"])
def test_exit_with_status_0_ends_a_script_without_an_error(tmp_path: Path, code: str) -> None:
    (tmp_path / "train.py").write_text(f"raise SystemExit({code})\n")
    with exit_as_return("train.py"):
        runpy.run_path(str(tmp_path / "train.py"))


def test_end_of_a_trainer_names_its_step() -> None:
    assert [at_step(*steps) for steps in ((200, 200), (7, None), (0, 9), (None, None))] == [
        " at step 200 of 200", " at step 7", "", "",
    ]  # fmt: skip


def test_import_errors_of_a_trainer_keep_their_traceback(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunDir.create(runs_dir / "exp" / "run")
    run.code.mkdir()
    (run.code / "lacks_module.py").write_text("import os\nimport no_such_module_of_mine\n")
    (run.code / "lacks_name.py").write_text("from os import no_such_name\n")
    (run.code / "imports_broken.py").write_text("\nimport is_broken\n")
    (run.code / "is_broken.py").write_text("x = 1\ny = = 2\n")
    monkeypatch.syspath_prepend(str(run.code))
    no_module = "ModuleNotFoundError: No module named 'no_such_module_of_mine'"
    for target, error, frame in (
        ("lacks_module:train", no_module, 'lacks_module.py", line 2'),
        ("lacks_name:train", "ImportError: cannot import name 'no_such_name'", 'lacks_name.py", line 1'),
        ("imports_broken:train", "SyntaxError: invalid syntax", 'is_broken.py", line 2'),
        ("no_such_module_of_mine:train", no_module, ""),
        ("lacks_module_too.train:train", "ModuleNotFoundError: No module named 'lacks_module_too'", ""),
    ):
        attempt = run.new_attempt()
        caplog.clear()
        with pytest.raises((TrainerError, SyntaxError)) as caught:
            load_trainer(target)
        assert Outcome(attempt, 0).write_error(caught.value) == 2
        found = read_json(attempt.outcome(0)) or {}
        assert (found["outcome"], error in found["error"]) == ("rejected", True)
        for shown in ("".join(found["traceback"]), caplog.text):
            assert (frame and error) in shown
            assert ("Traceback" in shown) == bool(frame)


# --- The network namespace of the ranks of a local run.


_PR_SET_DUMPABLE = 4


def in_child(function: Callable[[], Any], uid: int) -> Any:
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            if uid != os.geteuid():
                "host".encode("idna")  # imported while this process may read it
                os.setgroups([])
                os.setgid(uid)
                os.setuid(uid)
                ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1)  # as after the start of a program
            os.write(writer, json.dumps(function()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    with open(reader, "rb") as pipe:
        return json.loads(pipe.read())


def counted_links() -> set[str]:
    """Return the names of the network interfaces with counters that a rank sees."""
    lines = private_network.card_counters().splitlines()[2:]  # below two lines of titles
    return {line.partition(":")[0].strip() for line in lines}


@pytest.mark.processes
@pytest.mark.parametrize("uid", [os.geteuid(), 65534])
def test_loopback_of_a_rank_is_its_own(uid: int) -> None:
    if uid != os.geteuid() and os.geteuid() != 0:
        pytest.skip("only root can be another user")
    if private_network.why_refused():
        pytest.skip("this kernel or container refuses network namespaces")

    def enter() -> list[Any]:
        with socket.create_server(("127.0.0.1", 0)) as outside:
            private_network.enter()
            with socket.create_server(("127.0.0.1", 0)) as inside:
                socket.create_connection(inside.getsockname()).close()
            return [
                private_network.is_private(),
                os.geteuid(),
                [name for _, name in socket.if_nameindex()],
                socket.socket().connect_ex(outside.getsockname()) != 0,
                sorted(counted_links()),
            ]

    before = counted_links()
    *facts, counted = in_child(enter, uid)
    assert facts == [True, uid, ["lo"], True]
    # Those of this machine, without one that a dev cluster of other tests adds or removes meanwhile.
    assert before & counted_links() <= set(counted)
    assert not private_network.is_private()


def test_only_trainers_with_data_on_disk_have_it(tmp_path: Path) -> None:
    assert private_network.is_wanted(Config())
    images = Config(data=DataConfig(name="image_folder", root=str(tmp_path)))
    assert not private_network.is_wanted(images)
    (tmp_path / "train").mkdir()
    assert private_network.is_wanted(images)
    assert not private_network.is_wanted(Config(trainer=TrainerConfig(target="mine:train")))
    assert not private_network.is_wanted(Config(trainer=TrainerConfig(script=["train.py"])))


# --- Selection of the network interface by the routing table of this machine.


def test_interface_with_the_route_to_the_master_is_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert interface_env("127.0.0.1", {}) == dict.fromkeys(INTERFACE_VARIABLES, "lo")
    env = {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": ""}
    assert interface_env("127.0.0.1", env) == {"NCCL_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}
    assert interface_env("no.such.host.invalid", dict.fromkeys(INTERFACE_VARIABLES, "eth0")) == {}
    other = [SimpleNamespace(family=socket.AF_INET, address="192.0.2.1")]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth7": other})
    assert interface_env("127.0.0.1", {}) == {}

    def unknown(name: str) -> str:
        raise socket.gaierror(-2, f"{name} not known")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    problem = r"^the master 'n1' cannot be reached from .* \(.*n1 not known\): does its name resolve on every node\? "
    with pytest.raises(TopologyError, match=problem):
        interface_env("n1", {})


def test_full_gpu_of_a_script_without_torch_is_reported(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # its import fails
    monkeypatch.delitem(sys.modules, "torch.cuda")
    error_of_cupy = type("OutOfMemoryError", (MemoryError,), {})
    attempt = RunDir.create(runs_dir / "exp" / "run").new_attempt()
    assert Outcome(attempt, 0).write_error(error_of_cupy("Out of memory allocating 4 bytes")) == 1
    assert "Out of memory allocating 4 bytes" in (read_json(attempt.outcome(0)) or {})["error"]


def test_last_line_of_a_script_makes_no_rank_a_lost_peer(runs_dir: Path) -> None:
    run = RunDir.create(runs_dir / "exp" / "run")
    printed = "train.py ended with exit status 3; its last line: node1:12:12 [0] NCCL INFO comm 0x1 - Destroy COMPLETE"
    for text, is_lost in ((printed, False), ("NCCL error: remote process exited", True)):
        attempt = run.new_attempt()
        Outcome(attempt, 0).write_error(RuntimeError(text))
        assert (read_json(attempt.outcome(0)) or {})["peer_lost"] == is_lost
