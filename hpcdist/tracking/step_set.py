"""A set of steps in little memory: regular sequences as ranges, others as sorted arrays of 64-bit integers."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right

#: An array of more steps than this is split into two.
MAX_ARRAY = 1024


class StepSet:
    """Steps of one metric in one attempt, added in any order.

    Steps that rise by a constant stride cost nothing; others cost 8 bytes each, with a reserve of 12 on average.
    """

    def __init__(self) -> None:
        #: The lowest step of each chunk. Chunks are sorted, do not overlap, and are never empty.
        self._firsts: list[int] = []
        self._chunks: list[range | array[int]] = []

    def __contains__(self, step: int) -> bool:
        place = bisect_right(self._firsts, step) - 1
        if place < 0:
            return False
        chunk = self._chunks[place]
        if isinstance(chunk, range):
            return step in chunk
        index = bisect_left(chunk, step)
        return index < len(chunk) and chunk[index] == step

    def __len__(self) -> int:
        return sum(map(len, self._chunks))

    def add(self, step: int) -> None:
        """Add a step; one that is there already changes nothing."""
        place = bisect_right(self._firsts, step) - 1
        if place < 0:
            self._insert_first(step)
            return
        chunk = self._chunks[place]
        if isinstance(chunk, range):
            self._add_to_range(place, chunk, step)
            return
        index = bisect_left(chunk, step)
        if index < len(chunk) and chunk[index] == step:
            return
        chunk.insert(index, step)
        if len(chunk) > MAX_ARRAY:
            self._replace(place, *_packed(chunk))

    def _insert_first(self, step: int) -> None:
        if self._chunks and not isinstance(self._chunks[0], range):
            self._chunks[0].insert(0, step)
            self._firsts[0] = step
            if len(self._chunks[0]) > MAX_ARRAY:
                self._replace(0, *_packed(self._chunks[0]))
        else:
            self._firsts.insert(0, step)
            self._chunks.insert(0, range(step, step + 1))

    def _add_to_range(self, place: int, chunk: range, step: int) -> None:
        last = chunk[-1]
        if step > last:
            if len(chunk) == 1:
                self._chunks[place] = range(chunk.start, step + 1, step - chunk.start)
            elif step == last + chunk.step:
                self._chunks[place] = range(chunk.start, step + 1, chunk.step)
            elif len(chunk) < MAX_ARRAY:
                # Too short for a regular sequence: what follows is probably irregular as well.
                self._chunks[place] = array("q", [*chunk, step])
            elif place + 1 < len(self._chunks) and not isinstance(after := self._chunks[place + 1], range):
                after.insert(0, step)
                self._firsts[place + 1] = step
            else:
                self._firsts.insert(place + 1, step)
                self._chunks.insert(place + 1, range(step, step + 1))
        elif step not in chunk:
            # Around the step a part of the range becomes an array, which has room for more steps like this.
            index = bisect_left(chunk, step)
            low, high = max(0, index - MAX_ARRAY // 4), index + MAX_ARRAY // 4
            middle = array("q", [*chunk[low:index], step, *chunk[index:high]])
            self._replace(place, chunk[:low], middle, chunk[high:])

    def _replace(self, place: int, *chunks: range | array[int]) -> None:
        kept = [chunk for chunk in chunks if len(chunk)]
        self._firsts[place : place + 1] = [chunk[0] for chunk in kept]
        self._chunks[place : place + 1] = kept


def _packed(chunk: array[int]) -> list[range | array[int]]:
    """Return a full array as a range where its steps are regular, else as its two halves."""
    stride = chunk[1] - chunk[0]
    regular = range(chunk[0], chunk[-1] + 1, stride)
    if len(regular) == len(chunk) and all(a == b for a, b in zip(regular, chunk, strict=True)):
        return [regular]
    middle = len(chunk) // 2
    return [chunk[:middle], chunk[middle:]]
