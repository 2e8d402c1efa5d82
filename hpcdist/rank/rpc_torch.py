"""RPC by torch.distributed.rpc (`launch.rpc: torch`), only where nobody can reach its sockets or everybody is trusted.

TensorPipe executes TorchScript builtins for every process that connects to it. Pickles are signed with the attempt's
key, and only signed ones are loaded. The signature is checked once at the start, because it replaces private objects of
torch: a rank refuses an unsigned pickle from itself, or fails.

Reference: https://docs.pytorch.org/docs/stable/rpc.html
"""

import hmac
import json
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store, rpc  # type: ignore[attr-defined]  # torch exports them at run time
from torch.distributed.rendezvous import register_rendezvous_handler
from torch.distributed.rpc import api, internal

from hpcdist.errors import ConfigError, HpcdistError, RemoteError
from hpcdist.rank.private_network import is_private
from hpcdist.rank.rpc_zmq import Endpoint, decode, encode

_SIGNATURE_BYTES = 32
#: InfiniBand if available, else TCP. TensorPipe's `shm` listens on a Unix socket to which every local user can connect,
#: and polls without a pause in every rank.
_TRANSPORTS = ["ibv", "uv"]
_endpoint: Endpoint | None = None


class _SignedPickler(internal._InternalRPCPickler):
    """torch's RPC pickler with a signature at the start of each message. Tensors are sent separately."""

    def __init__(self, key: bytes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._key = hmac.digest(key, b"rpc", "sha256")

    def serialize(self, obj: Any) -> tuple[bytes, list[Any]]:
        content, tensors = super().serialize(obj)  # type: ignore[no-untyped-call]  # torch's
        return hmac.digest(self._key, content, "sha256") + content, tensors

    def deserialize(self, binary_data: bytes, tensor_table: list[Any]) -> Any:
        signature, content = binary_data[:_SIGNATURE_BYTES], binary_data[_SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, hmac.digest(self._key, content, "sha256")):
            raise HpcdistError("an RPC message is not signed with this attempt's key")
        return super().deserialize(content, tensor_table)  # type: ignore[no-untyped-call]  # torch's


class TorchTransport:
    """Starts torch's RPC on this rank. Raises ConfigError where its sockets can be reached by others."""

    def __init__(self, endpoint: Endpoint, num_threads: int) -> None:
        global _endpoint
        ctx = endpoint.ctx
        if not (ctx.config.launch.rpc_trusted_nodes or ctx.world_size == 1 or is_private()):
            raise ConfigError(
                "launch.rpc=torch: every user and program that can reach a rank could read its files, because"
                " torch.distributed.rpc authenticates nobody: use launch.rpc=zmq, or set launch.rpc_trusted_nodes="
                "true if all of them are trusted"
            )
        self._endpoint = _endpoint = endpoint
        device = ctx.device if ctx.device.type == "cuda" else None
        endpoint.store.set(f"gpu/{ctx.rank}", "" if device is None else str(device))
        devices = [endpoint.store.get(f"gpu/{rank}").decode() for rank in range(len(endpoint.names))]
        self._has_gpu = [bool(text) for text in devices]
        maps: dict[str, dict[Any, Any]] = {
            name: {device: torch.device(text)}
            for name, text in zip(endpoint.names, devices, strict=True)
            if device is not None and text and name != endpoint.names[ctx.rank]
        }
        options = rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=num_threads, init_method="hpcdist://", device_maps=maps or None, _transports=_TRANSPORTS
        )
        signed = _SignedPickler(ctx.attempt.read_key())
        unsigned = internal._InternalRPCPickler()
        internal._internal_rpc_pickler = api._default_pickler = signed
        with _quiet():
            rpc.init_rpc(
                endpoint.names[ctx.rank], rank=ctx.rank, world_size=ctx.world_size, rpc_backend_options=options
            )
        api._default_pickler = unsigned
        try:
            rpc.rpc_sync(endpoint.names[ctx.rank], _accept)
        except RuntimeError as error:
            if "is not signed with this attempt's key" not in str(error):
                raise
        else:
            raise HpcdistError(
                f"launch.rpc=torch: torch {torch.__version__} loads pickles without hpcdist's signature: use"
                " launch.rpc=zmq"
            )
        api._default_pickler = signed

    def call(self, rank: int, function: str, arguments: tuple[Any, ...], timeout_s: float) -> Future[Any]:
        content, tensors = _packed(arguments, to_gpu=self._has_gpu[rank])
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # it cannot be cancelled

        def finish(done: torch.futures.Future[Any]) -> None:
            try:
                is_result, answer, answered = done.value()
            except RuntimeError as error:
                is_late = "ran for more than set timeout" in str(error)
                reason = f"no answer in {timeout_s:g} s" if is_late else str(error).partition("\n")[0]
                future.set_exception(self._endpoint.lost(rank, reason))
                return
            _order(answered, self._endpoint.ctx.device)
            value = decode(json.loads(answer), answered)
            if is_result:
                future.set_result(value)
            else:
                future.set_exception(RemoteError(value))

        wants_gpu = self._has_gpu[self._endpoint.ctx.rank]
        try:
            sent = rpc.rpc_async(
                self._endpoint.names[rank], _answer, (function, content, tensors, wants_gpu), timeout=timeout_s
            )
        except RuntimeError as error:
            future.set_exception(self._endpoint.lost(rank, str(error).partition("\n")[0]))
        else:
            sent.add_done_callback(finish)
        return future

    def connected(self) -> None:
        """Do nothing: the sockets have no names."""

    def close(self) -> None:
        """Shut RPC down; every rank has finished its calls."""
        global _endpoint
        with _quiet():
            rpc.shutdown(graceful=False)
        _endpoint = None


def _accept() -> None:
    """Do nothing: a call with an unsigned pickle must not arrive here."""


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def _answer(function: str, content: str, tensors: list[Tensor], wants_gpu: bool) -> torch.futures.Future[Any]:
    assert _endpoint is not None
    device = _endpoint.ctx.device
    answer: torch.futures.Future[Any] = torch.futures.Future(devices=[device] if device.type == "cuda" else None)

    def reply(is_result: bool, value: Any) -> None:
        answer.set_result((is_result, *_packed(value, to_gpu=wants_gpu)))

    with _order(tensors, device):
        _endpoint.answer(function, decode(json.loads(content), tensors), reply)
    return answer


def _order(received: list[Tensor], device: torch.device) -> AbstractContextManager[Any]:
    """Let the default stream, which all other threads use, wait for received tensors; return a context that uses it.

    torch receives them on this thread's stream, and would give their memory to others when only that has used them.
    """
    if device.type != "cuda":
        return nullcontext()
    default = torch.cuda.default_stream(device)
    default.wait_stream(torch.cuda.current_stream(device))
    for tensor in received:
        if tensor.is_cuda:
            tensor.record_stream(default)
    return torch.cuda.stream(default)


def _packed(value: Any, *, to_gpu: bool) -> tuple[str, list[Tensor]]:
    tensors: list[Tensor] = []
    content = json.dumps(encode(value, tensors))
    return content, tensors if to_gpu else [tensor.cpu() for tensor in tensors]


def _rendezvous(url: str, **_: Any) -> Iterator[tuple[Store, int, int]]:
    """Use the ranks' store, which is authenticated already: RPC needs no second port and no second proof."""
    assert _endpoint is not None
    yield _endpoint.store, _endpoint.ctx.rank, _endpoint.ctx.world_size


register_rendezvous_handler("hpcdist", _rendezvous)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress a deprecation warning about torch's own start and shutdown of RPC (torch 2.10 to 2.15)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You are using a Backend .* as a ProcessGroup", category=UserWarning)
        yield
