"""A compact set of steps: regular sequences are ranges, others sorted arrays of 64-bit integers."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right

#: Maximum length of an array; a longer one is split in two.
MAX_ARRAY = 1024


class StepSet:
    """Steps of one metric in one attempt, added in any order.

    Steps of a constant stride take no memory, others 8 bytes each, 12 with the reserve of the arrays on average.
    """

    def __init__(self) -> None:
        #: Lowest step of each chunk. Chunks are sorted, disjoint and not empty.
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
        """Add a step, if it is not in the set."""
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
                # A short range is probably not the start of a regular sequence.
                self._chunks[place] = array("q", [*chunk, step])
            elif place + 1 < len(self._chunks) and not isinstance(after := self._chunks[place + 1], range):
                after.insert(0, step)
                self._firsts[place + 1] = step
            else:
                self._firsts.insert(place + 1, step)
                self._chunks.insert(place + 1, range(step, step + 1))
        elif step not in chunk:
            # The part of the range around the step becomes an array, which can take more irregular steps.
            index = bisect_left(chunk, step)
            low, high = max(0, index - MAX_ARRAY // 4), index + MAX_ARRAY // 4
            middle = array("q", [*chunk[low:index], step, *chunk[index:high]])
            self._replace(place, chunk[:low], middle, chunk[high:])

    def _replace(self, place: int, *chunks: range | array[int]) -> None:
        kept = [chunk for chunk in chunks if len(chunk)]
        self._firsts[place : place + 1] = [chunk[0] for chunk in kept]
        self._chunks[place : place + 1] = kept


def _packed(chunk: array[int]) -> list[range | array[int]]:
    """Return a full array as a range if its steps are regular, else as two halves."""
    stride = chunk[1] - chunk[0]
    regular = range(chunk[0], chunk[-1] + 1, stride)
    if len(regular) == len(chunk) and all(a == b for a, b in zip(regular, chunk, strict=True)):
        return [regular]
    middle = len(chunk) // 2
    return [chunk[:middle], chunk[middle:]]
