"""The network of a rank: a namespace of its own on one machine, or the interface that reaches the master."""

import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

from hpcdist.config.schema import Config
from hpcdist.data.download import missing
from hpcdist.errors import TopologyError

# A network namespace of the ranks of a local run, whose loopback no other user of the machine reaches.
# Reference: https://man7.org/linux/man-pages/man7/network_namespaces.7.html

#: Constants of Linux that Python's modules lack: unshare(2), netdevice(7), capset(2).
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 0x1
_CAPABILITY_VERSION = 0x20080522
#: Descriptor of the counters of this machine's network cards, opened before the namespace was entered; -1 outside one.
_host_counters = -1


def is_wanted(config: Config) -> bool:
    """Return whether the ranks need no network: they run a trainer of hpcdist, whose data is on disk."""
    is_shipped = not config.trainer.script and ":" not in config.trainer.target
    return is_shipped and not missing(config.data)


def is_private() -> bool:
    """Return whether this process, or the parent that forked it, has entered a namespace of its own."""
    return _host_counters >= 0


def card_counters() -> str:
    """Return /proc/net/dev of this machine, in a namespace as well."""
    if not is_private():
        return Path("/proc/net/dev").read_text()
    return os.pread(_host_counters, 1 << 20, 0).decode()


def why_refused() -> str:
    """Return why the kernel or the container refuses the namespace to this user; empty if it does not."""
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
    if why_refused():  # tried in another process: a namespace without loopback would be worse than none
        return
    counters = os.open("/proc/net/dev", os.O_RDONLY)
    _unshare()
    _host_counters = counters


def _unshare() -> None:
    """Enter a network namespace, and start its loopback interface. Raises OSError if that is refused."""
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.geteuid(), os.getegid()
    needs_user = bool(libc.unshare(_CLONE_NEWNET))
    if needs_user:
        _check(libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET))
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", _IFF_UP))
    if needs_user:
        # The capabilities would let ranks write to their user's read-only files.
        _check(libc.capset(struct.pack("Ii", _CAPABILITY_VERSION, 0), bytes(24)))


def _check(result: int) -> None:
    """Raise OSError if a function of the C library has failed."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


# The network interface over which a node reaches rank 0.

#: Port of the discard protocol.
_DISCARD_PORT = 9
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def address_towards(host: str) -> str:
    """Return the IPv4 address of this node on its route to a host. Raises OSError if the name does not resolve."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # This sends no packet: connecting a datagram socket only looks up the route. Any port will do.
        probe.connect((socket.gethostbyname(host), _DISCARD_PORT))
        return str(probe.getsockname()[0])


def interface_env(master_addr: str, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that bind gloo, NCCL and TensorPipe to the interface that routes to the master.

    By default these libraries look up their own host name, which may be slow or resolve to an interface that other
    nodes cannot reach. Variables that are already set are left out. Raises TopologyError if the name of the master does
    not resolve.
    """
    unset = [name for name in INTERFACE_VARIABLES if not env.get(name)]
    if not unset:
        return {}
    try:
        address = address_towards(master_addr)
    except OSError as error:
        raise TopologyError(
            f"the master {master_addr!r} cannot be reached from {socket.gethostname()} ({error}): does its name resolve"
            " on every node? HPCDIST_MASTER_ADDR can name an address instead"
        ) from error
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.family == socket.AF_INET and entry.address == address for entry in addresses):
            return dict.fromkeys(unset, name)
    return {}
