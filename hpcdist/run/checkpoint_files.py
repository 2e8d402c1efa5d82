"""The checkpoint folders of a run by their names and manifests, without tensors and torch.

Of the files of a plain script, hpcdist knows the folder only.
"""

import re
from contextlib import suppress
from pathlib import Path

from hpcdist.host import retry
from hpcdist.host.json_files import read_json
from hpcdist.run.folder import RunDir

#: Written last: a checkpoint without it is incomplete.
MANIFEST_FILE = "manifest.json"
#: Per-sample results of the evaluation at a checkpoint, if the trainer calls `ReportData.log_samples`.
SAMPLES_FILE = "samples.npy"
#: In `exported/`: the program of torch.export, and its example with the arrays `inputs`, `outputs` and torch's version
#: (`torch`).
PROGRAM_FILE = "model.pt2"  #: the name by which mlflow.pytorch finds it
EXAMPLE_FILE = "example.npz"


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    match = re.fullmatch(r"step-([0-9]{8,18})", folder.name)
    return int(match[1]) if match else None


def complete_checkpoints(run: RunDir) -> list[tuple[int, Path]]:
    manifests = retry.retry(lambda: list(run.checkpoints.glob(f"step-*/{MANIFEST_FILE}")), run.checkpoints)
    return sorted((step, path.parent) for path in manifests if (step := step_of(path.parent)) is not None)


def script_files(run: RunDir) -> list[str]:
    found = []
    for path in run.checkpoints.glob("[!.]*"):
        with suppress(FileNotFoundError):  # the script has just removed it
            found += [(path.lstat().st_mtime_ns, path.name)] if step_of(path) is None else []
    return [name for _, name in sorted(found)]


def newest_step(run: RunDir) -> int | None:
    for step, folder in reversed(complete_checkpoints(run)):
        if read_json(folder / MANIFEST_FILE) is not None:
            return step
    return None
