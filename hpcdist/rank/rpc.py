"""RPC between the ranks of a run: start, a check of every pair, commands from rank 0, and shutdown.

    with rpc_group(ctx, {"collect": observer.collect}) as group:
        if ctx.is_main:
            rollout = group.call("observer:0", "collect", weights).result()
        else:
            group.serve({"save": save_my_shard})  # until rank 0 leaves its block

Rank 0 is the leader. The other ranks answer calls in threads, and execute the commands of rank 0 in their main thread.
A command may contain collectives, because all ranks are in one process group as well.

`rpc_transport.py` connects the ranks. Values are None, bool, int, float, str, tensors, and lists, tuples and dicts of
these. Nothing received is unpickled.

On a GPU, calls are executed on the default stream, on which all threads of a rank work unless they choose another one.
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from hpcdist.errors import HpcdistError, PeerLost, RemoteError
from hpcdist.rank.context import Context
from hpcdist.rank.memory_history import is_out_of_memory
from hpcdist.rank.rpc_transport import Transport

log = logging.getLogger(__name__)

LEAVE = "leave"
#: How often a serving rank updates its heartbeat and checks that rank 0 answers, in seconds.
PULSE_INTERVAL_S = 1.0
#: A rank without GPU memory for a call has this time to reach `serve`: it may train for hours before.
SERVES_WITHIN_S = 10.0


class RpcGroup:
    """All ranks of a run by their RPC names, `role:index`.

    Attributes:
        name: the name of this rank.
        names: the names of all ranks, in rank order.
        peers: the names of the other ranks.
    """

    def __init__(
        self, ctx: Context, functions: Mapping[str, Callable[..., Any]], timeout_s: float, num_threads: int
    ) -> None:
        self._ctx = ctx
        self._timeout_s = timeout_s
        #: What `serve` executes, or raises.
        self._commands: queue.SimpleQueue[tuple[str, tuple[Any, ...]] | Exception] = queue.SimpleQueue()
        self._is_serving = threading.Event()
        self.names = tuple(ctx.roles.name_of(rank) for rank in range(ctx.world_size))
        self.name = self.names[ctx.rank]
        self.peers = [name for name in self.names if name != self.name]
        self._ranks = {name: rank for rank, name in enumerate(self.names)}
        own_functions: dict[str, Callable[..., Any]] = {
            "_command": self._receive_command,
            "_pulse": self._receive_pulse,
        }
        all_functions = {**functions, **own_functions}
        self.transport = Transport(ctx, self.names, all_functions, num_threads, self._ends_rank)

    def _ends_rank(self, error: Exception) -> bool:
        """Let `serve` raise the error of a call if the GPU is out of memory; return whether it will.

        This rank then ends as after a failure of its own code, and reports the users of its GPU's memory. Its callers
        lose their connection to it. A rank that does not serve yet has SERVES_WITHIN_S to begin.
        """
        if self._ctx.is_main or not is_out_of_memory(error):
            return False
        if not self._is_serving.wait(SERVES_WITHIN_S):
            return False
        self._commands.put(error)
        return True

    def _receive_pulse(self, stop: bool) -> None:
        """Answer a rank that checks whether this one responds; `stop` is whether it has received a stop signal."""
        if stop:
            self._ctx.roles.request_stop()

    def _receive_command(self, command: str, arguments: tuple[Any, ...]) -> None:
        if not isinstance(command, str) or not isinstance(arguments, tuple):
            raise TypeError("a command is a name and a tuple of arguments")  # to the caller: `serve` would end the rank
        self._commands.put((command, arguments))

    def of_role(self, role: str) -> list[str]:
        """Return the RPC names of the ranks of a role."""
        return [name for name in self.names if name.partition(":")[0] == role]

    def call(self, to: str | int, function: str, *arguments: Any, timeout_s: float | None = None) -> Future[Any]:
        """Call a function of another rank, and return the future of its result.

        The result raises RemoteError if the function failed there, and PeerLost if the rank has ended, such as one in
        `serve` without GPU memory, or has not answered in time. A tensor must not be changed before the call is
        answered, because it is not copied.
        `function` is a key of the mapping that the rank passed to `rpc_group`.
        """
        rank = to if isinstance(to, int) else self._ranks.get(to, -1)
        if not 0 <= rank < len(self.names):
            raise HpcdistError(f"there is no rank {to!r}: the ranks are {', '.join(self.names)}")
        if timeout_s is None:
            timeout_s = self._timeout_s
        return self.transport.call(rank, function, arguments, timeout_s)

    def call_all(
        self, role: str | Sequence[str], function: str, *arguments: Any, timeout_s: float | None = None
    ) -> list[Future[Any]]:
        """Call a function of all ranks of a role, or of the named ranks; see `call`."""
        names = self.of_role(role) if isinstance(role, str) else role
        return [self.call(name, function, *arguments, timeout_s=timeout_s) for name in names]

    def send_command(self, command: str, *arguments: Any, to: Sequence[str] | None = None) -> None:
        """Send a command from rank 0, which the receivers execute in `serve`; do not wait for its execution.

        Args:
            command: a key of the mapping that the receivers passed to `serve`.
            to: names of the receivers, by default all other ranks.
        """
        if to is None:
            to = self.peers
        for future in self.call_all(to, "_command", command, arguments):
            future.result()

    def serve(self, commands: Mapping[str, Callable[..., None]]) -> None:
        """Execute the commands of rank 0 until it leaves its block. Stop signals are forwarded to rank 0.

        Args:
            commands: the functions that rank 0 may call by `send_command`, by name.

        Raises the error of a call of another rank for which this rank's GPU has no memory.
        """
        is_stop_sent = False
        self._is_serving.set()
        while True:
            try:
                ordered = self._commands.get(timeout=PULSE_INTERVAL_S)
            except queue.Empty:
                self._ctx.timer.alive()
                stop = self._ctx.roles.is_stop_signalled and not is_stop_sent
                self.call(0, "_pulse", stop).result()
                is_stop_sent = self._ctx.roles.is_stop_signalled
                continue
            if isinstance(ordered, Exception):
                raise ordered
            command, arguments = ordered
            if command == LEAVE:
                self._is_serving.clear()
                return
            commands[command](*arguments)

    def close(self) -> None:
        """Wait until no rank needs this one, and close the connections.

        A rank may still evaluate, save or export. The supervisor ends the ranks if one of them has ended or hangs.
        """
        self._ctx.groups.await_all(self._ctx.timer.alive)
        self.transport.close()


@contextmanager
def rpc_group(
    ctx: Context,
    functions: Mapping[str, Callable[..., Any]] | None = None,
    *,
    timeout_s: float = 60.0,
    num_threads: int = 16,
) -> Iterator[RpcGroup]:
    """Start RPC on every rank, check every pair, and shut RPC down on all ranks after the block.

    After an error inside the block there is no shutdown: other ranks may have died, and it would wait for them. The
    worker then ends the process.

    Args:
        functions: the functions that other ranks may call, by name. If a function returns a
            `concurrent.futures.Future`, the caller gets the result of that future when it completes.
        timeout_s: default time limit of a call, in seconds.
        num_threads: number of calls that this rank answers at the same time.
    """
    # A rank may first load a checkpoint or its data, for longer than the store waits for an address.
    ctx.groups.await_all(ctx.timer.alive)
    group = RpcGroup(ctx, functions or {}, timeout_s, num_threads)
    for name, future in zip(group.names, group.call_all(group.names, "_pulse", False), strict=True):
        try:
            future.result()
        except (PeerLost, RemoteError) as error:
            raise PeerLost(f"{group.transport.place} cannot call {name}: {error}") from error
    ctx.groups.barrier()
    group.transport.remove_names()
    log.info("RPC: %s is connected to %d peers", group.name, len(group.peers))
    yield group
    if ctx.is_main:
        group.send_command(LEAVE)
    group.close()
