"""Start each RPC trainer many times while another user attacks its sockets: `python scripts/attack.py STARTS`.

Needs root, which starts the runs and lets the attacker be user 65534. Each run has a network namespace of its own with
the attacker in it, and `launch.private_network=false`, without which the attacker would reach no TCP socket. Prints a
line for each start; returns 1 if a run did not finish in its first attempt, or the attacker has reached one of its Unix
sockets or files.
"""

from __future__ import annotations

import json
import os
import random
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hpcdist.run.folder import RunDir

ATTACKER = 65534
RANDOM = random.SystemRandom()
#: The shipped config of each trainer by RPC, and overrides for few steps.
RUNS = {
    "rl": ("rl_cartpole", "roles={agent: 1, observer: 3}", "stop.max_epochs=1"),
    "rnn": ("rnn_lm", "rnn.max_corpus_mb=0.02", "stop.max_steps=5"),
    "hybrid": ("hybrid_clicks", "roles={trainer: 2, parameter_server: 2}", "stop.max_steps=5"),
    "pipeline": ("pipeline_resnet50", "model.name=resnet18", "data.batch_size=32", "stop.max_steps=2"),
}


def listening() -> Iterator[tuple[int, tuple[str, int]]]:
    """Yield family and address of each TCP socket of this network namespace that listens (inet_diag, sock_diag(7)).

    /proc/net/tcp takes milliseconds, since the kernel looks at its connections as well.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4) as diag:  # NETLINK_SOCK_DIAG
        for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
            # nlmsghdr (a dump by family) and inet_diag_req_v2 (TCP, the state LISTEN)
            request = struct.pack("=IHHII BBBxI48x", 72, 20, 0x301, 1, 0, family, socket.IPPROTO_TCP, 0, 1 << 10)
            diag.send(request)
            while (answer := diag.recv(1 << 16))[4:6] != b"\x03\x00":  # NLMSG_DONE
                while answer:
                    (length,) = struct.unpack_from("=I", answer)
                    yield family, (host, int.from_bytes(answer[20:22], "big"))
                    answer = answer[length:]


def attack_ports() -> None:
    """Connect to each TCP port that listens, as long as it does."""
    count, held = Counter[str](), list[socket.socket]()
    while is_wanted(count):
        for family, address in listening():
            knock(family, address, count, held)
        del held[:-900]
        time.sleep(0.0002)


def attack_files(folder: Path) -> None:
    """Connect to each Unix socket that appears, and open the files of the run."""
    count, held = Counter[str](), list[socket.socket]()
    while is_wanted(count):
        for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
            for name in line.split()[7:]:
                knock(socket.AF_UNIX, name.replace("@", "\0"), count, held)
                knock(socket.AF_UNIX, str(folder / "attempts/001" / os.path.basename(name)), count, held)
        del held[:-900]
        for path in (folder, folder / "config.yaml", folder / "identity", folder / "attempts/001/key"):
            with suppress(OSError):
                os.close(os.open(path, os.O_RDONLY))
                count["REACHED"] += 1
        time.sleep(0.02)


def is_wanted(count: Counter[str]) -> bool:
    """Return whether standard input is still open; print what happened how often if it is not."""
    with suppress(BlockingIOError):
        if not os.read(0, 1):
            print(json.dumps(count), flush=True)
            return False
    return True


def knock(family: int, target: tuple[str, int] | str, count: Counter[str], held: list[socket.socket]) -> None:
    """Connect silently, two hundred times, with noise, with the number of a gloo pair, or with it and gone at once."""
    kind = RANDOM.choice(("silent", "flood", "noise", "number", "number", "gone", "gone"))
    number = bytes([RANDOM.randrange(3), *bytes(7)])
    data = {"noise": RANDOM.randbytes(200), "number": number, "gone": number}
    for _ in range(200 if kind == "flood" else 3):
        sock = socket.socket(family)
        sock.settimeout(0.2)
        held.append(sock)
        try:
            sock.connect(target)
        except OSError as error:
            count[type(error).__name__] += 1
            return
        count["REACHED" if family == socket.AF_UNIX else kind] += 1
        with suppress(OSError):
            sock.sendall(data.get(kind, b""))
        if kind == "gone":
            held.pop().close()


def start(name: str, folder: Path) -> None:
    """Run a trainer and the attacker in this process's network namespace, and print what happened."""
    subprocess.run(("ip", "link", "set", "lo", "up"), check=True)
    attackers = []
    for kind in ("ports", "files"):
        command = (sys.executable, __file__, kind, str(folder / "runs" / name / "attacked"))
        attackers.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    config, *overrides = RUNS[name]
    overrides += ["launch.private_network=false", f"runs_dir={folder / 'runs'}", f"experiment={name}", "name=attacked"]
    with (folder / "output.txt").open("w") as output:
        hpcdist = (sys.executable, "-m", "hpcdist", "run", config, *overrides)
        code = subprocess.run(hpcdist, stdout=output, stderr=output, check=False, timeout=600).returncode
    counts = Counter[str]()
    for attacker in attackers:
        counts.update(json.loads(attacker.communicate()[0]))
    run = RunDir(folder / "runs" / name / "attacked")
    logs = "".join(path.read_text() for path in run.path.glob("attempts/*/rank-*.log"))
    counts.update(restarts=run.read_state().restarts, recreated=logs.count("is created again"))
    print(json.dumps({"code": code, **counts}))


def main(num_starts: int) -> int:
    """Return 1 if the attacker has stopped or reached a run."""
    if os.geteuid() != 0:
        sys.exit("needs root: the attacker is another user, and each run has a network namespace")
    failed = 0
    for number in range(num_starts):
        for name in RUNS:
            folder = Path(tempfile.mkdtemp(prefix=f"attack-{name}-", dir="/var/tmp"))
            folder.chmod(0o755)
            begin = time.monotonic()
            command = ("unshare", "--net", sys.executable, __file__, "start", name, str(folder))
            found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
            bad = bool(found["code"] or found["restarts"] or found.get("REACHED"))
            failed += bad
            print(
                f"{number + 1} {name} {time.monotonic() - begin:.0f} s {'FAILED' if bad else 'finished'} {found}",
                folder if bad else "",
                flush=True,
            )
            if not bad:
                subprocess.run(("rm", "-r", str(folder)), check=True)
    print(f"{failed} of {num_starts * len(RUNS)} starts were stopped, or a Unix socket or file of theirs was reached")
    return int(bool(failed))


if __name__ == "__main__":
    if sys.argv[1] in ("ports", "files"):
        os.set_blocking(0, False)
        os.setgroups([])
        os.setgid(ATTACKER)
        os.setuid(ATTACKER)
        attack_ports() if sys.argv[1] == "ports" else attack_files(Path(sys.argv[2]))
    elif sys.argv[1] == "start":
        start(sys.argv[2], Path(sys.argv[3]))
    else:
        sys.exit(main(int(sys.argv[1])))
