"""Click logs: bags of ids, numeric features and a label per sample, from a file (`click_files.py`) or synthetic.

In the synthetic log each row of each table and each numeric feature has an effect, and a click is drawn from the sum
of a sample's effects. The AUC of that sum is the best that a model can reach.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from hpcdist.data.loading import digest_of
from hpcdist.errors import DataError
from hpcdist.trainers.hybrid import HybridConfig

#: Number of samples of the synthetic log that are drawn together.
BLOCK = 4096
#: Maximum number of ids in a bag of the synthetic log. Its first rows are the most popular: row = rows × u², u uniform.
MAX_BAG_SIZE = 3
#: Bytes at the start and at the end of a file that its digest covers.
_DIGEST_BYTES = 1 << 20
#: Scale of the effects of numeric features and rows, and the log-odds of a click without effects.
NUMERIC_EFFECT, ROW_EFFECT, BIAS = 0.4, 0.9, -1.0


@dataclass(frozen=True)
class Bags:
    """Ragged bags: `ids` int64 [n], `offsets` int64 [bags + 1]. The index of a bag is sample × tables + table."""

    ids: Tensor
    offsets: Tensor

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def take(self, bags: Tensor) -> Bags:
        """Return these bags [k], in this order."""
        lengths = (self.offsets[1:] - self.offsets[:-1])[bags]
        offsets = torch.zeros(len(bags) + 1, dtype=torch.int64)
        torch.cumsum(lengths, 0, out=offsets[1:])
        shift = self.offsets[bags] - offsets[:-1]
        places = shift.repeat_interleave(lengths).add_(torch.arange(int(offsets[-1])))
        return Bags(self.ids[places], offsets)


@dataclass(frozen=True)
class Clicks:
    """Samples of a click log: `numeric` float32 [N, k], `labels` float32 [N], and one bag per sample and table."""

    bags: Bags
    numeric: Tensor
    labels: Tensor
    tables: tuple[str, ...]
    best_scores: Tensor | None = None  #: float32 [N], of the model of the synthetic log

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, samples: Tensor) -> Clicks:
        """Return these samples [B], in this order."""
        count = len(self.tables)
        bags = self.bags.take((samples[:, None] * count + torch.arange(count)).flatten())
        best = None if self.best_scores is None else self.best_scores[samples]
        return Clicks(bags, self.numeric[samples], self.labels[samples], self.tables, best)

    def placed(self, place: Callable[[Tensor, Tensor], Tensor]) -> Clicks:
        """Return the same clicks with other ids, by a function of id and number of the table, int64 [n] each."""
        tables = (torch.arange(len(self.bags)) % len(self.tables)).repeat_interleave(self.bags.offsets.diff())
        return replace(self, bags=Bags(place(self.bags.ids, tables), self.bags.offsets))


def batches(num_samples: int, batch_size: int, *, seed: int, epoch: int, start: int = 0) -> Iterator[Tensor]:
    """Yield the sample indices of each batch of an epoch, shuffled by (seed, epoch), from batch `start` on."""
    order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
    yield from order.split(batch_size)[start:]


def identity(cfg: HybridConfig, seed: int) -> tuple[str, str, str]:
    """Return name, source and digest of the click log; for a file, the digest covers its size, start and end."""
    if not cfg.file:
        synthetic = (cfg.num_samples, cfg.tables, cfg.num_numeric_columns)
        return "synthetic-clicks", "generated", digest_of(list(synthetic), seed)
    path = Path(cfg.file).expanduser()
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _DIGEST_BYTES))
            end = file.read(_DIGEST_BYTES)
            file.seek(0)
            start = file.read(_DIGEST_BYTES)
    except OSError as error:
        raise DataError(f"{path} cannot be read as a click log: {error.strerror}") from error
    return path.stem, str(path), digest_of(size, start.hex(), end.hex())


class SyntheticLog:
    def __init__(self, cfg: HybridConfig, seed: int) -> None:
        self._cfg = cfg
        self._seed = seed
        generator = torch.Generator().manual_seed(seed)
        self._effects = [torch.randn(rows, generator=generator) for rows in cfg.tables.values()]
        self._numeric = torch.randn(cfg.num_numeric_columns, generator=generator)

    def __len__(self) -> int:
        return self._cfg.num_samples

    def read(self, first: int, end: int) -> Clicks:
        blocks = range(first // BLOCK, -(-end // BLOCK))
        return _joined([self._block(block) for block in blocks]).take(torch.arange(first, end) - blocks.start * BLOCK)

    def _block(self, block: int) -> Clicks:
        cfg, count = self._cfg, len(self._cfg.tables)
        generator = torch.Generator().manual_seed((self._seed + 1) * 1_000_003 + block)
        num_bags = BLOCK * count
        lengths = torch.randint(1, MAX_BAG_SIZE + 1, (num_bags,), generator=generator)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        table_of_id = (torch.arange(num_bags) % count).repeat_interleave(lengths)
        rows = torch.tensor(list(cfg.tables.values()))[table_of_id]
        u = torch.rand(len(rows), generator=generator, dtype=torch.float64)
        ids = (rows * u**2).long()
        effect = torch.empty(len(ids))
        for number, effects in enumerate(self._effects):
            mine = table_of_id == number
            effect[mine] = effects[ids[mine]]
        sample = torch.arange(BLOCK).repeat_interleave(lengths.view(BLOCK, count).sum(1))
        score = torch.zeros(BLOCK).index_add_(0, sample, effect)
        numeric = torch.randn(BLOCK, cfg.num_numeric_columns, generator=generator)
        num_ids = count * (MAX_BAG_SIZE + 1) / 2  # of a sample, on average
        score = BIAS + ROW_EFFECT * score / num_ids**0.5 + NUMERIC_EFFECT * numeric @ self._numeric
        labels = torch.bernoulli(score.sigmoid(), generator=generator)
        return Clicks(Bags(ids, offsets), numeric, labels, tuple(cfg.tables), score)


def _joined(parts: list[Clicks]) -> Clicks:
    lengths = torch.cat([part.bags.offsets.diff() for part in parts])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.cat([part.bags.ids for part in parts])
    best = [part.best_scores for part in parts if part.best_scores is not None]
    return Clicks(
        Bags(ids, offsets),
        torch.cat([part.numeric for part in parts]),
        torch.cat([part.labels for part in parts]),
        parts[0].tables,
        torch.cat(best) if best else None,
    )


def padded(clicks: Clicks, bag_size: int) -> Tensor:
    """Return the samples as input of `ClickModel`: float64 [N, num_numeric + tables × bag_size]."""
    ids = torch.full((len(clicks.bags), bag_size), -1.0, dtype=torch.float64)
    for row, bag in zip(ids, clicks.bags.ids.tensor_split(clicks.bags.offsets[1:-1]), strict=True):
        row[: len(bag)] = bag[:bag_size]
    return torch.cat([clicks.numeric.double(), ids.view(len(clicks), -1)], dim=1)
