"""Windows of fixed length of a file of token ids, in an order of each epoch that is computed and not stored.

The order is a permutation of (seed, epoch). It is neither stored nor read from the beginning, so the position in the
training, a step, is all that a resume needs, on any number of ranks.
"""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hpcdist.errors import DataError

Int64Array = npt.NDArray[np.int64]
_UInt64Array = npt.NDArray[np.uint64]

#: From so many items on, a permutation is computed item by item. A smaller one is drawn as a whole: that is quicker,
#: and uniform, which the network is not on a handful of items.
MIN_COMPUTED_ITEMS = 1 << 20
#: Rounds of the Feistel network. Four make a pseudorandom permutation of a perfect round function
#: (https://en.wikipedia.org/wiki/Feistel_cipher#Theoretical_work); two more make up for a simple one.
_ROUNDS = 6
#: Types of token ids in a file.
TOKEN_TYPES = (np.dtype(np.uint16), np.dtype(np.uint32))


def token_type(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """Return the smallest type of a token file for the ids 0 to `vocab_size` - 1."""
    for kind in TOKEN_TYPES:
        if vocab_size - 1 <= np.iinfo(kind).max:
            return kind
    raise ValueError(f"a vocabulary of {vocab_size} tokens is larger than {np.iinfo(np.uint32).max}")


def permutation(num_items: int, *, seed: int, epoch: int) -> Callable[[Int64Array], Int64Array]:
    """Return a function from positions in an epoch to items: a bijection of 0 to `num_items` - 1, int64 [n] each."""
    if num_items >= MIN_COMPUTED_ITEMS:
        return feistel_permutation(num_items, seed=seed, epoch=epoch)
    order = _drawn_order(num_items, seed + epoch)
    return lambda positions: order[positions]


@lru_cache(maxsize=2)  # of this epoch and the next
def _drawn_order(num_items: int, seed: int) -> Int64Array:
    """Return all items in the order of `BatchDivision.order`, int64 [num_items]."""
    order: Int64Array = torch.randperm(num_items, generator=torch.Generator().manual_seed(seed)).numpy()
    return order


def feistel_permutation(num_items: int, *, seed: int, epoch: int) -> Callable[[Int64Array], Int64Array]:
    """Return a permutation as `permutation` does, computed by a Feistel network.

    The network permutes the numbers of an even number of bits. One that is no item is permuted again until it is
    (cycle walking, https://en.wikipedia.org/wiki/Format-preserving_encryption#FPE_from_cycle_walking). There are
    less than four times as many numbers as items. Integers alone: the result is the same on every platform.
    """
    num_bits = max(num_items - 1, 1).bit_length()
    half = np.uint64((num_bits + 1) // 2)
    mask = np.uint64((1 << int(half)) - 1)
    keys = np.random.SeedSequence([seed, epoch]).generate_state(_ROUNDS, np.uint64)

    def permute_numbers(numbers: _UInt64Array) -> _UInt64Array:
        left = numbers >> half
        right = numbers & mask
        for key in keys:
            left, right = right, left ^ (_mix(right + key) & mask)
        return (left << half) | right

    def items_at(positions: Int64Array) -> Int64Array:
        numbers = permute_numbers(np.asarray(positions, dtype=np.uint64))
        is_outside = numbers >= num_items
        while is_outside.any():
            numbers[is_outside] = permute_numbers(numbers[is_outside])
            is_outside = numbers >= num_items
        return numbers.astype(np.int64)

    return items_at


def _mix(numbers: _UInt64Array) -> _UInt64Array:
    """Return hashes of 64 bits: the last steps of SplitMix64. Arrays of numpy overflow without a warning."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


class TokenWindows:
    """Windows of `length` + 1 tokens, inputs and targets, of a memory-mapped file of token ids.

    Window i begins at token i × `length`: its last token is the first one of the next window. Tokens at the end of the
    file that fill no window are left out.

    Args:
        path: a file of numpy's format `.npy` with an array of one dimension, uint16 or uint32.
        length: number of inputs of a window.
        seed: with the epoch, determines the order of the windows.

    Raises DataError if the file cannot be read or is no such array.
    """

    def __init__(self, path: Path, length: int, *, seed: int) -> None:
        self.length = length
        self.seed = seed
        try:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        # numpy raises ValueError for a truncated file, EOFError for an empty one.
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"{path} cannot be read as a file of tokens ({error}): remove it") from error
        if tokens.ndim != 1 or tokens.dtype not in TOKEN_TYPES:
            raise DataError(
                f"{path} is not a file of tokens: it has {tokens.dtype} {list(tokens.shape)}, expected uint16 or"
                " uint32 [n]"
            )
        self.num_tokens = len(tokens)
        self.num_windows = max(0, (len(tokens) - 1) // length)
        self._windows = np.empty((0, length + 1), dtype=tokens.dtype)
        if self.num_windows:
            # Views of the file, [num_windows, length + 1].
            self._windows = np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[::length]

    def read(self, epoch: int, positions: Int64Array) -> Tensor:
        """Return the windows at these positions of an epoch, int64 [n, length + 1]."""
        items_at = permutation(self.num_windows, seed=self.seed, epoch=epoch)
        return self.read_items(items_at(positions))

    def read_items(self, items: Int64Array) -> Tensor:
        """Return windows by their number in the file, as for an evaluation: int64 [n, length + 1]."""
        return torch.from_numpy(self._windows[items].astype(np.int64))
