"""Signatures of RPC messages: a rank unpickles only messages that are signed with the attempt's key.

The signature covers the pickle but not the tensors, which are sent separately and cannot execute code: signing 4 MB
takes as long as sending them.
"""

from __future__ import annotations

import hmac
import logging
from typing import Any

from torch.distributed.rpc import api, internal

from hpcdist.errors import HpcdistError
from hpcdist.rank.network.store_gate import sign

log = logging.getLogger(__name__)
_SIGNATURE_BYTES = 32


class _SignedPickler(internal._InternalRPCPickler):
    """torch's RPC pickler with a signature at the start of each message."""

    def __init__(self, key: bytes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._key = sign(key, b"rpc")  # a signature made for another purpose is not valid for a message
        self._refused = 0

    def serialize(self, obj: Any) -> tuple[bytes, list[Any]]:
        content, tensors = super().serialize(obj)  # type: ignore[no-untyped-call]  # torch's
        return hmac.digest(self._key, content, "sha256") + content, tensors

    def deserialize(self, binary_data: bytes, tensor_table: list[Any]) -> Any:
        signature, content = binary_data[:_SIGNATURE_BYTES], binary_data[_SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, hmac.digest(self._key, content, "sha256")):
            self._refused += 1
            if self._refused == 1:
                log.warning("refused an RPC message that is not signed with this attempt's key")
            raise HpcdistError("an RPC message is not signed with this attempt's key")
        return super().deserialize(content, tensor_table)  # type: ignore[no-untyped-call]  # torch's


def sign_messages(key: bytes) -> None:
    """Sign the RPC messages that this process sends from now on, and reject received messages without a signature."""
    pickler = _SignedPickler(key)
    internal._internal_rpc_pickler = pickler
    api._default_pickler = pickler
