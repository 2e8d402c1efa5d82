"""The files in a run's folder `checkpoints`, found by their names and manifests, without torch.

A trainer writes checkpoints, each in a folder `step-NNNNNNNN`. A plain script saves files of its own choice there.
"""

import re
from contextlib import suppress
from pathlib import Path

from hpcdist.host import retry
from hpcdist.host.json_files import read_json
from hpcdist.run.folder import RunDir

#: Written last: a checkpoint without it is incomplete.
MANIFEST_FILE = "manifest.json"
#: In each checkpoint: the state dict of the model; the state of the trainer and of each rank.
MODEL_FILE = "model.pt"
TRAINER_FILE = "trainer.pt"
#: Per-sample results of the evaluation at a checkpoint, if the trainer calls `ReportData.log_samples`.
SAMPLES_FILE = "samples.npy"
#: In `exported/`: the program of torch.export, and its example with the arrays `inputs` and `outputs`, torch's version
#: (`torch`), and the dimensions of the inputs that may have other sizes (`free`).
PROGRAM_FILE = "model.pt2"  #: the name by which mlflow.pytorch finds it
EXAMPLE_FILE = "example.npz"


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """Return the step in the name of a checkpoint folder; None for another name."""
    match = re.fullmatch(r"step-([0-9]{8,18})", folder.name)
    if match is None:
        return None
    return int(match[1])


def complete_checkpoints(run: RunDir) -> list[tuple[int, Path]]:
    """Return step and folder of each checkpoint that has a manifest, in the order of the steps."""
    manifests = retry.retry(lambda: list(run.checkpoints.glob(f"step-*/{MANIFEST_FILE}")), run.checkpoints)
    checkpoints = []
    for manifest in manifests:
        folder = manifest.parent
        step = step_of(folder)
        if step is not None:
            checkpoints.append((step, folder))
    return sorted(checkpoints)


def script_files(run: RunDir) -> list[str]:
    """Return the names of the files and folders that a plain script has saved, the newest one last."""
    times_and_names = []
    for path in run.checkpoints.glob("[!.]*"):
        if step_of(path) is not None:
            continue
        with suppress(FileNotFoundError):  # the script has just removed it
            times_and_names.append((path.lstat().st_mtime_ns, path.name))
    return [name for _, name in sorted(times_and_names)]


def newest_step(run: RunDir) -> int | None:
    """Return the step of the newest checkpoint with a readable manifest; None without one."""
    for step, folder in reversed(complete_checkpoints(run)):
        if read_json(folder / MANIFEST_FILE) is not None:
            return step
    return None
