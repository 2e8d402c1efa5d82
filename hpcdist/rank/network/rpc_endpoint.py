"""What the transports of RPC share: the place and functions of a rank, the answer to a call, and the form of values."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch exports it at run time

from hpcdist.errors import PeerLost, RemoteError
from hpcdist.rank.context import Context

_starts = itertools.count()


class Transport(Protocol):
    """Sends calls to ranks and answers theirs."""

    def call(self, rank: int, function: str, arguments: tuple[Any, ...], timeout_s: float) -> Future[Any]: ...
    def connected(self) -> None: ...  # called when every rank has called every other
    def close(self) -> None: ...


class Endpoint:
    """What a transport needs to know about this rank: its place, its functions, and how to name a peer."""

    def __init__(self, ctx: Context, names: tuple[str, ...], functions: Mapping[str, Callable[..., Any]]) -> None:
        self.ctx, self.names, self.functions = ctx, names, functions
        self.store_name = f"rpc-{next(_starts)}"
        self.store = PrefixStore(self.store_name, ctx.store)
        self.place = f"{names[ctx.rank]} (rank {ctx.rank} on {socket.gethostname()})"

    def lost(self, rank: int, reason: str) -> PeerLost:
        """Return the error of calls to a rank that does not answer."""
        return PeerLost(f"{self.names[rank]} (rank {rank}) does not answer: {reason}")

    def answer(self, function: str, arguments: tuple[Any, ...], reply: Callable[[bool, Any], None]) -> None:
        """Execute a call and pass its result to `reply`: True and the value, or False and the text of the error."""

        def send(value: Any) -> None:
            try:
                if isinstance(value, Future):
                    value.add_done_callback(lambda done: self._settle(done.result, send, fail))
                else:
                    reply(True, value)
            except Exception as error:
                fail(error)

        def fail(error: BaseException) -> None:
            text = str(error) if isinstance(error, RemoteError) else str(RemoteError.of(error, self.place))
            with suppress(PeerLost):  # the caller has ended
                reply(False, text)

        if function not in self.functions:
            known = ", ".join(sorted(name for name in self.functions if not name.startswith("_"))) or "none"
            reply(False, f"{self.place}: there is no function {function!r} for other ranks; there are: {known}")
            return
        self._settle(lambda: self.functions[function](*arguments), send, fail)

    @staticmethod
    def _settle(run: Callable[[], Any], send: Callable[[Any], None], fail: Callable[[BaseException], None]) -> None:
        try:
            value = run()
        except Exception as error:  # it reaches the caller as text
            fail(error)
        else:
            send(value)


def encode(value: Any, tensors: list[Tensor]) -> Any:
    """Return a value as JSON types; its tensors are appended to `tensors`. Raises TypeError for other types."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_quantized:
            raise TypeError(f"RPC sends dense tensors, not {value.layout}: use its indices and values")
        tensors.append(value.detach())
        return {"tensor": len(tensors) - 1}
    if isinstance(value, list):
        return [encode(item, tensors) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(item, tensors) for item in value]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: encode(item, tensors) for key, item in value.items()}}
    kind = "a dict with keys that are not strings" if isinstance(value, dict) else type(value).__name__
    raise TypeError(
        f"RPC cannot send {kind}: use None, bool, int, float, str, tensors, and lists, tuples, dicts of them"
    )


def decode(content: Any, tensors: Sequence[Tensor]) -> Any:
    """Return the value that `encode` was given. Raises ValueError for other content."""
    if isinstance(content, list):
        return [decode(item, tensors) for item in content]
    if not isinstance(content, dict):
        return content
    match content:
        case {"tensor": int(index)} if 0 <= index < len(tensors):
            return tensors[index]
        case {"tuple": list(items)}:
            return tuple(decode(item, tensors) for item in items)
        case {"dict": dict(items)}:
            return {key: decode(item, tensors) for key, item in items.items()}
    raise ValueError("not a value of RPC")
