"""Find the newest valid checkpoint: all ranks verify its files together, since one rank would take minutes."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hpcdist.checkpoint.store import CheckpointStore, Manifest, read_manifest, verify_file
from hpcdist.errors import CheckpointError
from hpcdist.rank.process_group import Groups, call_of_all_ranks


class CheckpointSearch:
    """The search of a rank.

    Args:
        groups: all ranks.
        alive: is called before each file, and while the rank waits for others, which may need minutes longer.
    """

    def __init__(
        self, store: CheckpointStore, groups: Groups, rank: int, world_size: int, alive: Callable[[], None]
    ) -> None:
        self._store = store
        self._groups = groups
        self._rank = rank
        self._world_size = world_size
        self._alive = alive
        self._only_there = (
            ""  #: a problem with a file of the newest valid checkpoint that another rank has, but not rank 0
        )

    def newest(self) -> str:
        """Return the folder of the newest valid checkpoint; empty without one. Call it on every rank.

        Raises CheckpointError if a rank cannot read files that rank 0 can read.
        """
        if self._rank == 0:
            self._store.remove_leftovers()
            manifest = self._store.latest(self._verify)
            if self._only_there:
                raise CheckpointError(self._only_there)
            folder = ""
            if manifest is not None:
                folder = str(manifest.path)
            self._broadcast({"newest": folder})
            return folder
        while True:
            message = self._broadcast({})
            if "newest" in message:
                newest: str = message["newest"]
                return newest
            self._problems(Path(message["folder"]), message["hashes"])

    def _broadcast(self, message: Mapping[str, Any]) -> dict[str, Any]:
        with call_of_all_ranks("ctx.restore"):
            return self._groups.broadcast(dict(message))

    def _verify(self, folder: Path) -> Manifest:
        """Verify a checkpoint on rank 0, with the help of the others; raise CheckpointError if it is not valid."""
        self._only_there = ""
        only_there = ""
        manifest = read_manifest(folder)
        hashes = {name: record.sha256 for name, record in manifest.files.items()}
        self._broadcast({"folder": str(folder), "hashes": hashes})
        problems = self._problems(folder, hashes)
        for rank, problem in enumerate(problems):
            if not problem:
                continue
            for name in self._share(hashes, rank):  # raises the same error, unless only that rank has it
                verify_file(folder / name, hashes[name])
            # To take an older checkpoint would lose steps, because of one node.
            only_there = f"{problem}, on rank {rank} only: rank 0 reads the file as it was written"
        self._only_there = only_there  # not that of a folder that is skipped
        return manifest

    def _problems(self, folder: Path, hashes: Mapping[str, str]) -> list[str]:
        """Return on rank 0 what is wrong with the files of each rank's share. All ranks make this call."""
        problem = self._problem(folder, hashes)
        self._groups.await_all(self._alive)
        return self._groups.gather(problem)

    def _share(self, hashes: Mapping[str, str], rank: int) -> list[str]:
        """Return the files that a rank verifies."""
        return sorted(hashes)[rank :: self._world_size]

    def _problem(self, folder: Path, hashes: Mapping[str, str]) -> str:
        """Return the problem of the files of this rank's share; empty without one."""
        for name in self._share(hashes, self._rank):
            self._alive()
            try:
                verify_file(folder / name, hashes[name])
            except CheckpointError as error:
                return str(error)
        return ""
