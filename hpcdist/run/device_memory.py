"""The memory of a GPU when an allocation failed, by line of code: from torch's snapshot to sentences.

A rank that ends because of it stores the result in its outcome file, and `hpcdist explain` and the run's page show it.
https://docs.pytorch.org/docs/stable/torch_cuda_memory.html describes the snapshot.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from hpcdist.errors import RunFolderError, memory_size, plural
from hpcdist.host.json_files import fill
from hpcdist.run.stack_frames import Frame, caller_of

#: In the messages of CUDA's driver, cuBLAS and NCCL, which allocate memory beside torch's allocator.
OUT_OF_MEMORY_BESIDE_TORCH = (
    r"CUDA error: out of memory|Cuda failure (?:\d+ )?'out of memory'|CUBLAS_STATUS_ALLOC_FAILED"
)
#: Lines of code that are kept: with the line of sums, a reader sees six lines.
NUM_LINES = 5
#: Begins the states of blocks that are in use, also those that wait for work of another stream.
_LIVE = "active"


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The live allocations of one line of code."""

    place: str  #: empty if no line of Python made them, as in a backward pass, or if it is unknown
    num_bytes: int
    num_blocks: int
    largest_bytes: int  #: of one block

    @property
    def size(self) -> str:
        """Size and number of the blocks: `2.0 GiB`, or `6.0 GiB in 12 blocks of at most 512 MiB`."""
        text = memory_size(self.num_bytes)
        if self.num_blocks > 1:
            text += f" in {plural(self.num_blocks, 'block')} of at most {memory_size(self.largest_bytes)}"
        return text


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """The memory of a GPU, as one process sees it."""

    device: str
    allocated_bytes: int  #: of live blocks
    reserved_bytes: int  #: that torch has, with its free blocks
    used_bytes: int  #: by all programs
    total_bytes: int
    has_history: bool  #: whether torch knows the lines of code
    holders: list[Holder]  #: the largest first

    @classmethod
    def of_snapshot(cls, snapshot: Mapping[str, Any], device_index: int, free_bytes: int, total_bytes: int) -> Self:
        """Reduce a snapshot of torch's allocator to the lines of code that hold most.

        Args:
            snapshot: a result of `torch.cuda.memory._snapshot`.
            free_bytes: of the device, which other programs use too.
        """
        segments = [segment for segment in snapshot["segments"] if segment["device"] == device_index]
        sizes: dict[str, list[int]] = defaultdict(list)
        has_history = False
        for block in _live_blocks(segments):
            frames = [Frame(frame["name"], frame["filename"], frame["line"]) for frame in block.get("frames", ())]
            has_history |= bool(frames)
            sizes[caller_of(frames)].append(block["size"])
        holders = []
        for place, blocks in sizes.items():
            holder = Holder(place=place, num_bytes=sum(blocks), num_blocks=len(blocks), largest_bytes=max(blocks))
            holders.append(holder)
        holders.sort(key=lambda holder: holder.num_bytes, reverse=True)
        return cls(
            device=f"GPU {device_index}",
            allocated_bytes=sum(holder.num_bytes for holder in holders),
            reserved_bytes=sum(segment["total_size"] for segment in segments),
            used_bytes=total_bytes - free_bytes,
            total_bytes=total_bytes,
            has_history=has_history,
            holders=holders[:NUM_LINES],
        )

    @classmethod
    def of_record(cls, record: Mapping[str, Any], path: Path) -> Self:
        """Return the value of a file. Raises RunFolderError if it is damaged."""
        memory = fill(cls, record, path)
        entries: list[Any] = [*memory.holders]
        holders = []
        for entry in entries:
            if not isinstance(entry, dict):
                raise RunFolderError(f"{path} is damaged: holders has {str(entry)[:40]!r}")
            holders.append(fill(Holder, entry, path))
        return cls(**{**vars(memory), "holders": holders})

    def record(self) -> dict[str, Any]:
        """Return the value as JSON."""
        return asdict(self)

    @property
    def lines(self) -> tuple[str, ...]:
        """Sentences for users, at most NUM_LINES + 1."""
        outside_bytes = max(0, self.used_bytes - self.reserved_bytes)
        allocated, reserved, outside, total = map(
            memory_size, (self.allocated_bytes, self.reserved_bytes, outside_bytes, self.total_bytes)
        )
        sums = f"{allocated} allocated, {reserved} reserved by torch, {outside} used outside of it, of {total}"
        return (f"{sums} of {self.device}", *(f"{holder.size}: {self._what_made(holder)}" for holder in self.holders))

    def _what_made(self, holder: Holder) -> str:
        if holder.place:
            return holder.place
        if self.has_history:
            return "no line of Python, as in a backward pass"
        return "by unknown lines of code, since torch's history of allocations was off"


def _live_blocks(segments: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for segment in segments:
        for block in segment["blocks"]:
            if block["state"].startswith(_LIVE):
                yield block
