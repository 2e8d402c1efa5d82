"""The private network of the ranks of a local run: a namespace with a loopback that no other user reaches.

Reference: https://man7.org/linux/man-pages/man7/network_namespaces.7.html
"""

import ctypes
import fcntl
import os
import socket
import struct
from pathlib import Path

from hpcdist.config.schema import Config
from hpcdist.data.download import missing

#: Constants of Linux that Python's modules lack: unshare(2), netdevice(7), capset(2).
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 0x1
_CAPABILITY_VERSION = 0x20080522
#: Longest text of /proc/net/dev that is read.
_MAX_COUNTERS_BYTES = 1 << 20
#: Descriptor of the counters of this machine's network cards, opened before the namespace was entered; -1 outside one.
_host_counters = -1


def is_wanted(config: Config) -> bool:
    """Return whether the ranks need no network: they run a trainer of hpcdist with data on disk."""
    is_shipped = not config.trainer.script and ":" not in config.trainer.target
    return is_shipped and not missing(config.data)


def is_private() -> bool:
    """Return whether this process, or the parent that forked it, has entered a namespace of its own."""
    return _host_counters >= 0


def card_counters() -> str:
    """Return /proc/net/dev of this machine, in a namespace as well."""
    if not is_private():
        return Path("/proc/net/dev").read_text()
    return os.pread(_host_counters, _MAX_COUNTERS_BYTES, 0).decode()


def why_refused() -> str:
    """Return why the kernel or the container refuses the namespace to this user; empty if it does not.

    Tries it in another process, since a process cannot return from a namespace.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _unshare()
        except OSError as error:
            os.write(writer, (error.strerror or str(error)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        reason = pipe.read()
    os.waitpid(pid, 0)
    return reason


def enter() -> None:
    """Move this process into a namespace of its own, if that is possible. It must have one thread."""
    global _host_counters
    # Tried before, because a namespace without a loopback interface would be worse than none.
    if why_refused():
        return
    counters = os.open("/proc/net/dev", os.O_RDONLY)
    _unshare()
    _host_counters = counters


def _unshare() -> None:
    """Enter a network namespace, and start its loopback interface. Raises OSError if that is refused."""
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.geteuid(), os.getegid()
    # Only root may create a network namespace alone; other users need a user namespace around it.
    needs_user_namespace = libc.unshare(_CLONE_NEWNET) != 0
    if needs_user_namespace:
        _check(libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET))
        # Inside, user and group keep their numbers. Without `deny`, the kernel refuses the map of groups.
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("16sh22x", b"lo", _IFF_UP)  # struct ifreq: name, flags, padding
        fcntl.ioctl(sock, _SIOCSIFFLAGS, request)
    if needs_user_namespace:
        # Drop the capabilities in the user namespace, which would let ranks write to their user's read-only files.
        this_thread = struct.pack("Ii", _CAPABILITY_VERSION, 0)
        no_capabilities = bytes(24)  # two times the effective, permitted and inheritable ones, of 4 bytes each
        _check(libc.capset(this_thread, no_capabilities))


def _check(result: int) -> None:
    """Raise OSError if a function of the C library has failed."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
