"""Load a checkpoint's weights outside of a run, such as for inference.

from hpcdist.checkpoint.weights import load_weights
model.load_state_dict(load_weights("runs/digits/first/checkpoints/step-00001200"))
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from hpcdist.checkpoint import checkpoint_folder
from hpcdist.checkpoint.shards import merge


def load_weights(path: Path | str) -> dict[str, Tensor]:
    """Return the model's state dict from one checkpoint folder, in host memory, for use in a single process.

    Keys are those of the bare model, whichever trainer saved it; shards of several ranks are merged.

    Args:
        path: a checkpoint folder, such as `runs/digits/first/checkpoints/step-00001200`, or a copy of one.

    Raises CheckpointError if the checkpoint is incomplete, has changed, or contains anything other than plain data.
    """
    folder = Path(path)
    manifest = checkpoint_folder.read_manifest(folder)
    checkpoint_folder.verify_hashes(folder, manifest)
    weights = checkpoint_folder.load_file(folder / checkpoint_folder.MODEL_FILE)
    shards = [checkpoint_folder.load_file(folder / name) for name in sorted(manifest.shards)]
    return weights | merge(shards, str(folder))
