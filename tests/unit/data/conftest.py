from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
import torch


@pytest.fixture
def cifar_pickle() -> Callable[[torch.Tensor, list[int]], bytes]:
    """Return a function that pickles a batch as Python 2 and NumPy of 2009 did: byte strings, protocol 2."""

    def pickled(rows: torch.Tensor, labels: list[int]) -> bytes:
        return (
            b"\x80\x02}(U\x04datacnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntU\x01btR(I1\n"
            + b"(I%d\nI%d\nt" % tuple(rows.shape)
            + b"cnumpy\ndtype\n(U\x02u1I0\nI1\ntR(I3\nU\x01|NNNI-1\nI-1\nI0\ntb\x89T"
            + struct.pack("<I", rows.numel())
            + bytes(rows.flatten().tolist())
            + b"tbU\x06labels]("
            + b"".join(b"K" + bytes([label]) for label in labels)
            + b"eu."
        )

    return pickled
