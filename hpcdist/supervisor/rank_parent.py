"""The supervisor's side of the process that forks ranks (`rank/parent.py`)."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpcdist.machine.process_record import SPACE, SPACE_BYTES
from hpcdist.supervisor.plan import parent_command
from hpcdist.supervisor.process_guard import Guard

#: A parent that does not answer a request within this time counts as dead.
_ANSWER_S = 30.0
_MESSAGE_BYTES = 64 * 1024
#: Time for the parent to end after its socket is closed.
_LEAVE_S = 5.0


class ParentEnded(Exception):
    """The parent process has ended or does not answer."""


class RankParent:
    """A parent process of ranks, which is started at once and imports torch.

    Args:
        env: environment of the parent, and of ranks except for the variables given to `fork`.
        cwd: working directory.
        output: file for the output of the parent.
    """

    def __init__(self, run: Path, guard: Guard, *, env: Mapping[str, str], cwd: Path, output: Path) -> None:
        self._guard = guard
        self._env = dict(env)
        self._cwd = cwd
        #: File with the output of the parent.
        self.output = output
        #: Whether the imports have succeeded.
        self.was_ready = False
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                space = {SPACE: " " * SPACE_BYTES}
                command = parent_command(run)
                self._process = guard.start(command, env={**env, **space}, cwd=cwd, output=output, control=theirs)
        except BaseException:
            self._control.close()
            raise

    def fileno(self) -> int:
        return self._control.fileno()

    def is_ready(self) -> bool:
        """Return whether the parent has imported everything. Raises ParentEnded if it cannot fork."""
        if not self.was_ready and self._readable(0.0):
            self._receive()
            self.was_ready = True
        return self.was_ready

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def fork(self, env: Mapping[str, str], log: int) -> ForkedRank:
        """Fork a rank.

        Args:
            env: complete environment, which may differ from the parent's in a few variables.
            log: descriptor of the file for standard output and error.

        Raises:
            OSError: the process cannot be created.
            ParentEnded: the parent does not answer.
        """
        own = {name: value for name, value in env.items() if self._env.get(name) != value}
        answer = self._request({"env": own, "cwd": str(self._cwd)}, [self._guard.fileno(), log])
        if "error" in answer:
            raise OSError(answer["error"], os.strerror(answer["error"]))
        return ForkedRank(self, answer["pid"])

    def reap(self, pid: int) -> int | None:
        """Return the exit code of a rank (negative: signal); None if it runs. Raises ParentEnded."""
        code: int | None = self._request({"reap": pid})["code"]
        return code

    def close(self) -> None:
        """End the parent, and with it the ranks."""
        self._control.close()
        try:
            self._process.wait(_LEAVE_S if self.was_ready else 0)
        except subprocess.TimeoutExpired:  # it still imports, or is stopped
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._guard.forget(self._process.pid)

    def _request(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> Mapping[str, Any]:
        try:
            socket.send_fds(self._control, [json.dumps(message).encode()], descriptors)
        except OSError as error:
            raise ParentEnded from error
        if not self._readable(_ANSWER_S):
            # Its ranks end with it: they must not run unobserved.
            self._process.kill()
            raise ParentEnded
        return self._receive()

    def _readable(self, timeout_s: float) -> bool:
        return wait_readable(self._control.fileno(), timeout_s)

    def _receive(self) -> Mapping[str, Any]:
        try:
            data = self._control.recv(_MESSAGE_BYTES)
        except OSError as error:
            raise ParentEnded from error
        if not data:
            raise ParentEnded
        try:
            answer: Mapping[str, Any] = json.loads(data)
        except ValueError as error:  # printed by the start of the interpreter
            raise ParentEnded from error
        return answer


class ForkedRank:
    """A rank that the parent has forked, with the interface of `subprocess.Popen`.

    The parent reaps a rank only when asked to, so that its process id stays valid until then.
    """

    def __init__(self, parent: RankParent, pid: int) -> None:
        self._parent = parent
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        if self._code is None:
            try:
                self._code = self._parent.reap(self.pid)
            except ParentEnded:
                self._code = -signal.SIGKILL  # by the kernel, at the death of the parent
        return self._code

    def kill(self) -> None:
        """Send SIGKILL to the process, which need not lead its process group yet."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Wait for the end of the process. Returns its exit code."""
        with suppress(ProcessLookupError):  # the parent has ended, and the process as well
            descriptor = os.pidfd_open(self.pid)
            try:
                wait_readable(descriptor, None)
            finally:
                os.close(descriptor)
        code = self.poll()
        assert code is not None, "the process has ended"
        return code


def wait_readable(descriptor: int, timeout_s: float | None) -> bool:
    """Wait until a descriptor is readable, without a time limit if `timeout_s` is None; return whether it is."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))
