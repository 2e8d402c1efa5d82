"""A PostgreSQL server of the tests, in a folder of its own and with a Unix socket instead of a port."""

import os
import pwd
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest

from hpcdist.supervisor.children import Guard

REQUIRE = "HPCDIST_REQUIRE_POSTGRESQL"
"""If set to 1, tests that need PostgreSQL fail instead of being skipped on machines without it."""
START_S = 120.0


@dataclass(frozen=True)
class PostgresCluster:
    """A running PostgreSQL server.

    All its users need their password. `folder` holds its socket, and belongs to the user that the server runs as.
    """

    folder: Path
    binaries: Path  #: folder of PostgreSQL's programs
    password: str  #: of the superuser `postgres`
    port: int = 5432  #: part of the socket's name, and the TCP port if the server listens on 127.0.0.1

    def create_database(self, name: str = "mlflow") -> str:
        """Create a database, and a user of the same name who owns it. Returns its URI, which holds the password."""
        password = secrets.token_urlsafe(16)
        self.sql(f"create user \"{name}\" password '{password}'")
        self.sql(f'create database "{name}" owner "{name}"')
        return f"postgresql+psycopg2://{name}:{password}@/{name}?host={quote(str(self.folder), safe='')}"

    def sql(self, statement: str, database: str = "postgres") -> str:
        """Run a statement as the superuser. Returns its rows, one line each, with columns separated by `|`."""
        command = [
            str(self.binaries / "psql"),
            "-h",
            str(self.folder),
            "-p",
            str(self.port),
            "-U",
            "postgres",
            "-d",
            database,
        ]
        done = subprocess.run(
            [*command, "-X", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-c", statement],
            env={**os.environ, "PGPASSWORD": self.password},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


def find_binaries() -> Path:
    """Return the folder with the programs of the newest PostgreSQL; without one, skip the test or fail it."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: float(path.parts[-3]))
    if not found:
        reason = "PostgreSQL is not installed: sudo apt-get install postgresql (or scripts/test_packages.sh)"
        if os.environ.get(REQUIRE) == "1":
            pytest.fail(f"{REQUIRE}=1, but {reason}")
        pytest.skip(reason)
    return found[-1].parent


@contextmanager
def postgres_cluster(*, tcp_port: int | None = None) -> Iterator[PostgresCluster]:
    """Start PostgreSQL in a new folder; end it and remove the folder after the block, or if this process is killed.

    PostgreSQL refuses to run as root: as root, it runs as the user `postgres` of Debian's package.

    Args:
        tcp_port: port on 127.0.0.1 to listen on in addition to the socket.
    """
    binaries = find_binaries()
    # Not a folder of pytest, which other users cannot enter, and whose path may be too long for a socket.
    folder = Path("/var/tmp", f"hpcdist-pg-{secrets.token_hex(4)}")
    folder.mkdir(mode=0o700)
    cluster = PostgresCluster(folder, binaries, secrets.token_urlsafe(16), tcp_port or 5432)
    as_user: list[str] = []
    guard = Guard()
    try:
        password = folder / "password"
        password.write_text(cluster.password)
        password.chmod(0o600)
        if os.geteuid() == 0:
            user = pwd.getpwnam("postgres")
            as_user = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
            for path in (folder, password):
                os.chown(path, user.pw_uid, user.pw_gid)
        init = [f"{binaries}/initdb", "-D", f"{folder}/data", "--username=postgres", f"--pwfile={password}"]
        subprocess.run(
            [*as_user, *init, "--auth=scram-sha-256", "--encoding=UTF8", "--locale=C.UTF-8", "--no-sync"],
            cwd=folder,
            check=True,
            capture_output=True,
        )
        options: dict[str, int | str | Path] = {
            "listen_addresses": "127.0.0.1" if tcp_port else "",
            "port": cluster.port,
            "fsync": "off",
        }
        options |= {"unix_socket_directories": folder}
        settings = [word for key, value in options.items() for word in ("-c", f"{key}={value}")]
        server = guard.start(
            [*as_user, f"{binaries}/postgres", "-D", f"{folder}/data", *settings],
            env=os.environ,
            cwd=folder,
            output=folder / "log",
        )
        try:
            _wait_until_ready(cluster, server)
            yield cluster
        finally:
            server.send_signal(signal.SIGQUIT)  # without a checkpoint of its data, which is removed
            server.wait(60)
            guard.forget(server.pid)
    finally:
        guard.close()
        shutil.rmtree(folder)


def _wait_until_ready(cluster: PostgresCluster, server: subprocess.Popen[bytes]) -> None:
    probe = [str(cluster.binaries / "pg_isready"), "-q", "-h", str(cluster.folder), "-p", str(cluster.port)]
    until = time.monotonic() + START_S
    while subprocess.run(probe, check=False).returncode != 0:
        log = (cluster.folder / "log").read_text(errors="replace")
        assert server.poll() is None, f"PostgreSQL ended with code {server.returncode}\n{log}"
        assert time.monotonic() < until, f"PostgreSQL does not answer after {START_S:g} s\n{log}"
        time.sleep(0.05)
