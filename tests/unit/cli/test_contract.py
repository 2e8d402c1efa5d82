"""Golden files of commands that start no run: help texts, plans and batch scripts, exit codes."""

import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from command_line import Cli, Make
from contract import ROOT, check, compared

from hpcdist.cli import app


def normalised(text: str, folder: Path) -> str:
    """Return an output without what depends on the machine, on the test's folder, or on names of modules."""
    for value, name in ((sys.executable, "PYTHON"), (ROOT, "CHECKOUT"), (folder, "TMP")):
        text = text.replace(str(value), name)
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)  # the colours that typer prints on CI services
    text = re.sub(r"-m hpcdist\.[\w.]+", "-m hpcdist.MODULE", text)
    text = re.sub(r"CHECKOUT/hpcdist/\S+/", "CHECKOUT/hpcdist/PACKAGE/", text)
    text = re.sub(r"/hpcdist-\d+/", "/hpcdist-UID/", text)
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


# --- Golden files of commands that start no run: help texts, plans and batch scripts, exit codes


def _walk(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, one in getattr(command, "commands", {}).items():
        if not one.hidden:
            yield from _walk(one, (*path, name))


@pytest.mark.processes
def test_help_texts(hpcdist: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = ""
    for path in _walk(typer.main.get_command(app.make_app())):
        result = hpcdist(*path, "--help")
        assert (result.code, result.err) == (0, ""), path
        text += f"$ {' '.join(['hpcdist', *path, '--help'])}\n{result.out}\n"
    check("help.txt", normalised(text, tmp_path))


# --- plans and batch scripts
SITE = """\
partition: gpu
account: climate
qos: long
constraint: a100|h100
exclude: n[7-9]
nodes: 2
tasks_per_node: 4
gpus_per_node: 4
cpus_per_task: 8
mem: 64G
time_limit_min: 90
sbatch: {mail-type: FAIL, exclusive: "true", hold: "false"}
srun: {mpi: none, exact: "true"}
env: {NCCL_DEBUG: WARN, GREETING: "it's $HOME"}
setup: [module load cuda]
"""


#: Keys of all runs, which `KEYS` stands for: the plan does not depend on the machine.
KEYS = "name=first launch.num_threads=1 --dry-run"

HERE = f"{KEYS} launch.device=cpu"

ON_SITE = f"{KEYS} --cluster site.yaml"

IMAGES = {
    "apptainer": "/images/hpcdist.sif",
    "enroot": "/images/hpcdist.sqsh",
    "pyxis": "/images/hpcdist.sqsh",
}

DRY_RUNS = {
    "here": f"run ddp_digits {HERE} launch.num_ranks=3",
    "here_roles": f"run hybrid_clicks {HERE}",
    "here_sweep": f"run ddp_digits {HERE} --sweep seed=1,2 --sweep optim.lr=0.1",
    "here_script": f"run {HERE} train.py --lr 0.1",
    "slurm": f"submit ddp_digits {ON_SITE}",
}
#: Their golden files have the differences to that of `slurm` only.
VARIANTS = {
    "slurm_script": f"submit {ON_SITE} train.py --lr 0.1",
    "slurm_sweep": f"submit ddp_digits {ON_SITE} --sweep seed=1,2 --array-parallelism 1",
    "slurm_elastic": f"submit ddp_digits {ON_SITE} cluster.nodes=2-4 cluster.spare_nodes=1 data.global_batch_size=96",
    "slurm_environment": (
        f"submit ddp_digits {ON_SITE} cluster.environment.kind=venv cluster.environment.path=/envs/train"
    ),
    "slurm_roles": (
        f"submit hybrid_clicks {ON_SITE} cluster.roles.trainer.nodes=2 cluster.roles.parameter_server.nodes=1"
        " cluster.gpus_per_node=a100:4 cluster.roles.parameter_server.gpus_per_node=0"
    ),
    **{
        f"slurm_{runtime}": f"submit ddp_digits {ON_SITE} container.runtime={runtime} container.image={image}"
        f" container.mounts=[/data:/data]"
        for runtime, image in IMAGES.items()
    },
}


@pytest.mark.processes
@pytest.mark.usefixtures("nothing_to_inherit")
@pytest.mark.parametrize("case", [*DRY_RUNS, *VARIANTS])
def test_dry_run(hpcdist: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: str) -> None:
    (tmp_path / "site.yaml").write_text(SITE)
    (tmp_path / "train.py").write_text("print('hello')\n")
    monkeypatch.setenv("HPCDIST_DATA_DIR", str(tmp_path / "data"))
    words = (DRY_RUNS | VARIANTS)[case]
    result = hpcdist(*words.split())
    assert (result.code, result.err) == (0, "")
    text = normalised(result.out, tmp_path)
    text = f"$ hpcdist {words}\n{text}"
    check(f"dry_run/{case}.txt", compared(text, "dry_run/slurm.txt") if case in VARIANTS else text)


# --- exit codes

#: Each of these runs has the status of its name; `rejected` has failed because of a user error.
RUNS = ("finished", "stopped", "failed", "rejected", "cancelled")


#: Commands on an existing run; no Slurm, no container engine and no other program is in PATH.
SITUATIONS = (
    *("", "--version", "--help", "nonsense", "run", "run nonsense", "run ddp_digits --nonsense"),
    *("run ddp_digits optim.lr=-1", "run ddp_digits nonsense=1", "run ddp_digits --dry-run"),
    "run ddp_digits tracking.uri=http://ada:***@mlflow",
    *("run ddp_digits --in podman", "run ddp_digits --sweep seed=1,1", "run ddp_digits name=finished experiment=exp"),
    *("config ddp_digits", "config ddp_digits seed=x", "config --schema", "config --json-schema", "config nonsense"),
    *("submit ddp_digits", "submit ddp_digits --dry-run", "submit ddp_digits --cluster nonsense --dry-run"),
    *("image build", "bench show finished", "runs", "compare finished failed", "compare finished absent"),
    *(f"{name} absent" for name in ("cost", "export", "report", "rerun", "doctor", "sync", "ui")),
    *(f"generate {run} a" for run in ("finished", "absent")),
    *(f"{name} finished" for name in ("cost", "export")),
    *(f"{name} {run}" for name in ("status", "explain", "logs", "stop", "cancel") for run in ("finished", "absent")),
    *(f"{name} {run}" for name in ("save", "profile", "resume") for run in ("finished", "absent")),
    *(f"follow {run}" for run in (*RUNS, "absent")),
)


@pytest.mark.processes
def test_exit_codes(hpcdist: Cli, make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in RUNS:
        status = "failed" if name == "rejected" else name
        make(name, status=status, rejected=name == "rejected", attempt=1, world_size=2)
    monkeypatch.setenv("PATH", str(tmp_path / "no-programs"))
    lines = [f"{hpcdist(*words.split()).code:3}  {f'hpcdist {words}'.rstrip()}" for words in SITUATIONS]
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # for the traceback of the defect
    for raised, situation in ((KeyboardInterrupt, "interrupted by Ctrl-C"), (ZeroDivisionError, "a defect of hpcdist")):

        def fail(*_: object, raised: type[BaseException] = raised) -> None:
            raise raised

        monkeypatch.setattr("hpcdist.run.lookup.list_runs", fail)
        lines.append(f"{hpcdist('runs').code:3}  hpcdist runs ({situation})")
    check("exit_codes.txt", "\n".join(lines))
