"""The number of micro-batches that `launch.fit_batch` has found, in `fitted_batch.json` of the run folder.

The supervisor writes the file after a lack of GPU memory. All later attempts of the run use the number, also after a
resume: it is the larger one of this file and the config.
"""

from dataclasses import asdict, dataclass

from hpcdist.errors import RunFolderError
from hpcdist.host.json_files import fill, write_json
from hpcdist.run.folder import RunDir, read_record

#: Batch normalisation cannot train on a single sample, which is also why the steps of an epoch stay the same.
LEAST_SAMPLES = 2


@dataclass(frozen=True, kw_only=True)
class FittedBatch:
    """The content of the file."""

    num_micro_batches: int
    attempt: int  #: the last attempt that lacked memory


def read_fitted(run: RunDir) -> int | None:
    """Return the number of micro-batches; None if memory was never lacking. Raises RunFolderError if it is damaged."""
    record = read_record(run.fitted_batch)
    if record is None:
        return None
    number = fill(FittedBatch, record, run.fitted_batch).num_micro_batches
    if number < 1:
        raise RunFolderError(f"{run.fitted_batch} is damaged: {number} micro-batches; remove it")
    return number


def fit(run: RunDir, attempt: int, global_batch_size: int, num_micro_batches: int) -> int | None:
    """Double the number of micro-batches for the next attempts.

    Returns the new number; None if the parts would be unequal, or have fewer than LEAST_SAMPLES samples.
    """
    doubled = 2 * num_micro_batches
    if global_batch_size % doubled or global_batch_size // doubled < LEAST_SAMPLES:
        return None
    write_json(run.fitted_batch, asdict(FittedBatch(num_micro_batches=doubled, attempt=attempt)))
    return doubled
