"""Small things that cost a night, on a real Slurm: each scene beside a control run in which the thing does not happen.

All nine, with those in other files: `pytest -m lost_night`.
"""

import hashlib
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from containers import SMALL_PYTHON, Containers, mismatch
from hpcdist_runs import wait_for
from runtime_cases import missing_program, prepared
from slurm_runs import SlurmRuns

from hpcdist.host.json_files import read_json
from hpcdist.review.ledger import read_ledger
from hpcdist.run.folder import State

pytestmark = [pytest.mark.slow, pytest.mark.lost_night]

ONE_RANK = ("cluster.nodes=1", "cluster.tasks_per_node=1", "launch.num_ranks=1", "cluster.cpus_per_task=2")


def submit(runs: SlurmRuns, name: str, program: str, *overrides: str, **env: str) -> str:
    """Submit a script of one rank. Returns the job's id."""
    file = runs.project / f"{name.replace('-', '_')}.py"
    file.write_text(program)
    words = runs.config(name, f"trainer.script=[{file.name}]", "preflight=off", *ONE_RANK, *overrides)
    code, output = runs.command("submit", *words, "--cluster", "devcluster", **env)
    assert code == 0, output
    return runs.job_id(name)


def ended(runs: SlurmRuns, name: str, program: str, *overrides: str, **env: str) -> State:
    """Return the last state of a script that is submitted."""
    return runs.wait_end(name, submit(runs, name, program, *overrides, **env))


# --- clean images


#: The values that reach the ranks. The token is only compared: its text must not be in any file.
SEES = """\
import hashlib, json, os, pathlib
names = ["HF_HOME", "TORCH_HOME", "https_proxy", "no_proxy", "SSL_CERT_FILE"]
found = {name: os.environ.get(name) for name in names}
found["token"] = hashlib.sha256(os.environ.get("HF_TOKEN", "").encode()).hexdigest()
found["certificate"] = pathlib.Path(found["SSL_CERT_FILE"]).read_text()
found["dotfile"] = (pathlib.Path.home() / ".of-the-user").exists()
try:
    import module_of_the_user
    found["user_module"] = True
except ImportError:
    found["user_module"] = False
found["in_container"] = "APPTAINER_CONTAINER" in os.environ
pathlib.Path(os.environ["HPCDIST_RUN_DIR"], "seen.json").write_text(json.dumps(found))
"""


def files_with(text: str, folder: Path) -> list[Path]:
    """Return the files below a folder that contain a text."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if text.encode() in path.read_bytes()]


def test_variables_reach_a_clean_image_and_the_home_does_not(
    slurm_runs: SlurmRuns, containers: Containers, tmp_path: Path
) -> None:
    if (reason := mismatch() or missing_program("apptainer-sif")) is not None:
        assert os.environ.get("HPCDIST_REQUIRE_CONTAINERS") != "1", reason
        pytest.skip(reason)
    home, token = tmp_path / "home", f"hf_{secrets.token_hex(16)}"
    user_site = home / f".local/lib/python3.{SMALL_PYTHON[1]}/site-packages"
    for folder in (user_site, tmp_path / "hf", tmp_path / "torch"):
        folder.mkdir(parents=True)
    for file in (user_site / "module_of_the_user.py", home / ".of-the-user"):
        file.touch()
    (tmp_path / "ca.pem").write_text("a certificate")
    values = {"HF_HOME": f"{tmp_path}/hf", "TORCH_HOME": f"{tmp_path}/torch", "SSL_CERT_FILE": f"{tmp_path}/ca.pem"}
    values |= {"https_proxy": "http://proxy.invalid:3128", "no_proxy": "localhost,127.0.0.1"}
    env = {**values, "HF_TOKEN": token, "HOME": str(home)}

    def seen(name: str, *overrides: str, **more: str) -> dict[str, Any]:
        state = ended(slurm_runs, name, SEES, *overrides, **env, **more)
        assert state.status == "finished", slurm_runs.job_log(name)
        assert files_with(token, slurm_runs.run_dir(name).path) == []
        return read_json(slurm_runs.run_dir(name).path / "seen.json") or {}

    with prepared("apptainer-sif", containers, slurm_runs) as runtime:
        boxed = seen("clean-image", *runtime.overrides, **runtime.env)
    control = seen("clean-image-control")
    reached = {**values, "token": hashlib.sha256(token.encode()).hexdigest(), "certificate": "a certificate"}
    assert boxed == {**reached, "in_container": True, "dotfile": False, "user_module": False}
    assert control.items() >= {**reached, "in_container": False, "dotfile": True}.items()


# --- out of memory told apart


LIMIT_MIB = 1024
LOADS = """\
import torch


class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return len(b"x" * ({mib} * 2**20))


try:
    for size in torch.utils.data.DataLoader(Images(), num_workers=1):
        print(int(size))
except RuntimeError as error:
    print("the loader has failed:", error)
"""


@pytest.fixture
def limited_steps(tmp_path: Path) -> Iterator[str]:
    """The command of a batch script by which the steps after it have a memory limit.

    Slurm gives steps such a control group with task/cgroup, which the dev cluster does not use.
    """
    tops = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))  # version 1 has a folder for the memory controller
    group = next(top for top in tops if top.is_dir()) / f"step_{os.getpid()}"
    try:
        group.mkdir()
        version_1 = (group / "memory.limit_in_bytes").exists()
        (group / ("memory.limit_in_bytes" if version_1 else "memory.max")).write_text(str(LIMIT_MIB * 2**20))
    except OSError as error:
        pytest.skip(f"control groups cannot be created here: {error}")
    prolog = tmp_path / "prolog.sh"
    prolog.write_text(f"#!/bin/sh\necho $PPID > {group}/cgroup.procs\n")
    prolog.chmod(0o755)
    yield f"export SLURM_TASK_PROLOG={prolog}"

    def is_removed() -> bool:
        with suppress(OSError):  # the last process of an ended job may not be gone
            group.rmdir()
        return not group.exists()

    wait_for(is_removed, f"the processes in {group} to end")


def test_killed_loader_of_a_rank_that_exits_0_is_no_success(slurm_runs: SlurmRuns, limited_steps: str) -> None:
    overrides = (f"cluster.setup=['{limited_steps}']", "launch.max_restarts=0")
    state = ended(slurm_runs, "loader-killed", LOADS.format(mib=2 * LIMIT_MIB), *overrides)
    assert (state.status, state.attempt) == ("failed", 1), state
    assert "ended with exit status 0, but the kernel killed a child process of rank 0 on n" in state.reason
    assert "the loader has failed: DataLoader worker" in slurm_runs.attempt("loader-killed").log(0).read_text()
    code, output = slurm_runs.command("explain", "loader-killed")
    assert code == 0
    assert "cause:    the processes of the Slurm step on a node needed more memory than it has there" in output
    assert f"with a limit of {LIMIT_MIB:,} MiB for the Slurm step" in output
    control = ended(slurm_runs, "loader-control", LOADS.format(mib=1), *overrides)
    assert control.status == "finished", control


# --- compile caches that outlive the process


COMPILES = "import torch\ntorch.compile(lambda x: x.sin() + 1)(torch.ones(8))\n"


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler: apt-get install g++")
def test_job_on_another_node_compiles_nothing_again(slurm_runs: SlurmRuns, tmp_path: Path) -> None:
    calls, compiler = tmp_path / "calls", tmp_path / "g++"
    compiler.write_text(f'#!/bin/sh\necho "$*" >> {calls}\nexec g++ "$@"\n')
    compiler.chmod(0o755)

    def num_compilations(name: str, *overrides: str) -> int:
        calls.write_text("")
        disk = tmp_path / name  # of the node
        disk.mkdir(mode=0o700)
        variables = (f"launch.env.CXX={compiler}", f"cluster.env.TMPDIR={disk}")
        state = ended(slurm_runs, name, COMPILES, *variables, *overrides)
        assert state.status == "finished", slurm_runs.job_log(name)
        assert list(disk.glob(f"torchinductor_{os.geteuid()}/torch-*/*/*.so")), "the node's own disk is used"
        return sum(" -shared " in line for line in calls.read_text().splitlines())

    store = f"launch.cache_dir={tmp_path}/store"
    assert num_compilations("compiles-first", store) > 0
    assert num_compilations("compiles-again", store) == 0
    assert num_compilations("compiles-control", f"launch.cache_dir={tmp_path}/empty") > 0


# --- idle guard


WAITS = "import time\nwhile True:\n    time.sleep(1)\n"
COMPUTES = "import time\nend = time.monotonic() + 30\nwhile time.monotonic() < end:\n    sum(range(100_000))\n"


def test_job_that_does_nothing_gives_its_node_back(slurm_runs: SlurmRuns) -> None:
    overrides = ("launch.idle_timeout_s=10", "launch.stop_grace_s=20")
    jobs = {name: submit(slurm_runs, name, text, *overrides) for name, text in (("idle", WAITS), ("busy", COMPUTES))}
    state = slurm_runs.wait_end("idle", jobs["idle"])
    assert state.status == "stopped"
    assert "idle: no step, no output, and no use of CPU, GPU or files for launch.idle_timeout_s=10 s" in state.reason
    assert read_ledger(slurm_runs.run_dir("idle")).seconds["idle"] >= 2 * 10  # two cores
    assert "idle.py" in slurm_runs.attempt("idle").stacks_summary.read_text()
    assert slurm_runs.wait_end("busy", jobs["busy"]).status == "finished"
    assert slurm_runs.run_dir("busy").read_state().attempt == 1


# --- one failure, no second night


FAILS = """\
import os, pathlib, time
import hpcdist
folder = hpcdist.checkpoint_dir()
if {saves}:
    (folder / "saved.pt").touch()
{end}
"""


def test_exception_without_a_checkpoint_is_not_repeated(slurm_runs: SlurmRuns) -> None:
    error = "raise KeyError('key')"
    state = ended(slurm_runs, "fails-unsaved", FAILS.format(saves=False, end=error))
    assert (state.status, state.attempt) == ("failed", 1), state
    assert "no restart from the beginning, since fails_unsaved.py has saved nothing" in state.reason
    # The controls: with a checkpoint, and after a kill, a run restarts.
    state = ended(slurm_runs, "fails-saved", FAILS.format(saves=True, end=error))
    assert (state.status, state.attempt) == ("failed", 2), state
    killed = "if not pathlib.Path('killed').exists():\n    pathlib.Path('killed').touch()\n    os.kill(os.getpid(), 9)"
    state = ended(slurm_runs, "killed-unsaved", FAILS.format(saves=False, end=killed))
    assert (state.status, state.attempt) == ("finished", 2), state


# --- metrics of scripts that do not speak MLflow


PRINTS = """\
import csv, os, pathlib
for step in range(1, 6):
    print(f"step {step}: loss {1 / step:.4f}", flush=True)
    with open("log.csv", "a", newline="") as file:
        csv.writer(file).writerows([["step", "accuracy"]] * (step == 1) + [[step, step / 10]])
"""


def test_printed_and_csv_metrics_arrive_once(slurm_runs: SlurmRuns) -> None:
    patterns = "tracking.stdout_metrics={loss: 'loss ([0-9.]+)'}"
    state = ended(slurm_runs, "prints", PRINTS, patterns)
    assert state.status == "finished"
    control = ended(slurm_runs, "prints-nothing", "print('done')\n")
    assert "it logged no metrics: use MLflow" in control.reason
    assert "it logged no metrics" not in state.reason
    code, output = slurm_runs.command("sync", "prints")
    assert code == 0, output
    points = [point for point in slurm_runs.points("prints") if not point[0].startswith(("system/", "usage/"))]
    counts = Counter((key, step) for key, step, _ in points)
    assert set(counts.values()) == {1}, "each point once"
    series = {key: sorted(value for name, _, value in points if name == key) for key in {key for key, *_ in points}}
    assert series["loss"] == [0.2, 0.25, 0.3333, 0.5, 1.0]
    assert series["accuracy"] == [0.1, 0.2, 0.3, 0.4, 0.5]


# --- a script's outputs are not its code


WRITES = """\
from pathlib import Path
folder = Path({folder!r})
with open(folder / "model.pt", "wb") as file:
    file.truncate(300 * 2**20)
(folder / "out.log").write_text("log")
"""


def test_outputs_beside_a_script_do_not_change_its_code(slurm_runs: SlurmRuns) -> None:
    def digest(name: str) -> str:
        return str((read_json(slurm_runs.run_dir(name).environment) or {})["code_digest"])

    program = WRITES.format(folder=str(slurm_runs.project))
    names = ("writes-first", "writes-second", "writes-control")
    try:
        for name in names:
            (slurm_runs.project / "writes.py").write_text(program)
            if name == "writes-control":
                (slurm_runs.project / "writes.py").write_text(f"{program}\n# changed\n")
            words = slurm_runs.config(name, "trainer.script=[writes.py]", "preflight=off", *ONE_RANK)
            code, output = slurm_runs.command("submit", *words, "--cluster", "devcluster")
            assert code == 0, output
            state = slurm_runs.wait_end(name, slurm_runs.job_id(name))
            assert state.status == "finished", slurm_runs.job_log(name)
            assert (slurm_runs.project / "model.pt").exists()
    finally:
        (slurm_runs.project / "model.pt").unlink(missing_ok=True)
    assert digest(names[0]) == digest(names[1])
    assert digest(names[0]) != digest(names[2])
    code, output = slurm_runs.command("compare", names[0], names[2])
    assert "writes.py" in output
    assert (slurm_runs.run_dir(names[1]).code / "model.pt").is_symlink(), "it is not copied"
