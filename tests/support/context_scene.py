"""The `Context` of a rank on a run folder, without worker and supervisor."""

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from launcher_env import topology_of
from spawn import Rank
from torch.distributed import HashStore  # type: ignore[attr-defined]

from hpcdist.config.schema import Config
from hpcdist.rank.context import Context
from hpcdist.rank.process_group import Groups, seed_everything
from hpcdist.rank.processes import StopFlag
from hpcdist.rank.stopping import StopAgreement
from hpcdist.rank.telemetry import Heartbeat
from hpcdist.run.folder import RunDir
from hpcdist.run.rank_requests import RequestReader
from hpcdist.tracking.rank_records import RankRecords

#: A single rank without a process group.
SINGLE_RANK = Rank(0, 1, Path())
CPU = torch.device("cpu")


def new_run(folder: Path, name: str = "first") -> RunDir:
    return RunDir.create(folder / "runs" / "exp" / name)


@contextmanager
def open_context(
    here: Rank,
    run: RunDir,
    config: Config,
    flag: StopFlag | None = None,
    device: torch.device = CPU,
    num_nodes: int = 1,
) -> Iterator[Context]:
    """Yield the context of rank `here` in a new attempt, which rank 0 creates. The caller closes the context."""
    if here.rank == 0:
        run.new_attempt()
    if here.world_size > 1:
        dist.barrier()
    group = cast(dist.ProcessGroup, dist.new_group(backend="gloo")) if here.world_size > 1 else None
    # The store of `spawn_ranks` is a file.
    store = dist.distributed_c10d._get_default_store() if group else HashStore()
    attempt = run.attempts()[-1]
    seed_everything(config.seed)
    with closing(RankRecords(run, attempt=attempt.number, rank=here.rank, pid=os.getpid())) as records:
        yield Context(
            config=config,
            run=run,
            attempt=attempt,
            topology=topology_of(here.rank, here.world_size, num_nodes, attempt=attempt.number),
            device=device,
            groups=Groups(group, store),
            stop=StopAgreement(group, flag or StopFlag(), RequestReader(attempt) if here.rank == 0 else None),
            records=records,
            heartbeat=Heartbeat(attempt, here.rank, here.world_size, config.launch.hang_s),
        )


def stop_at(ctx: Context, last_step: int | None) -> None:
    """Let the ranks agree to stop after a step, as if `hpcdist stop` had asked them to; None: never."""
    original = ctx.should_stop

    def should_stop(step: int, total_steps: int | None = None) -> bool:
        ctx._stop.agreed = step == last_step
        return original(step, total_steps)

    ctx.should_stop = should_stop  # type: ignore[method-assign]
