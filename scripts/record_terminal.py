"""Record the README's terminal session as an SVG: python scripts/record_terminal.py SVG

Runs real commands on a dev cluster, which it creates and removes; root only. `make recording` calls it.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

BIN = Path(sys.executable).parent
STATE = Path("/var/lib/hpcdist-devcluster")
COLUMNS = 112
#: Maximum number of lines per command; longer outputs keep their first and last lines.
MAX_LINES = 14
RUN = "digits"
SHOWN = (
    "hpcdist devcluster up --nodes 2",
    f"hpcdist submit ddp_digits --cluster devcluster name={RUN}",
    f"hpcdist status {RUN}",
    f"hpcdist follow {RUN}",
)


def execute(command: str, folder: Path, env: dict[str, str]) -> list[str]:
    """Run a command and return the lines of its output; a failure ends the recording."""
    # A file, not a pipe: the background shipper of `submit` keeps the stream open after the command has ended.
    with tempfile.TemporaryFile("w+") as output:
        code = subprocess.run(
            shlex.split(command), cwd=folder, env=env, stdout=output, stderr=output, check=False
        ).returncode
        output.seek(0)
        text = output.read()
    if code:
        sys.exit(f"{command} failed with exit code {code}:\n{text}")
    return text.replace(f"{folder}/", "").rstrip().splitlines()


def shortened(lines: list[str]) -> list[str]:
    if len(lines) <= MAX_LINES:
        return lines
    half = MAX_LINES // 2
    return [*lines[:half], "…", *lines[-half:]]


def record(target: Path) -> None:
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    if STATE.exists():
        sys.exit(f"{STATE} exists: run `hpcdist devcluster down` first")
    # Not in /tmp or /var/tmp: `submit` refuses folders that each machine of a cluster has for itself.
    with tempfile.TemporaryDirectory(dir=STATE.parent, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        env = {
            **os.environ,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "SLURM_CONF": str(STATE / "conf/slurm.conf"),
            "HPCDIST_RUNS_DIR": str(folder / "runs"),
            "COLUMNS": str(COLUMNS),
        }
        try:
            for command in SHOWN:
                console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
                for line in shortened(execute(command, folder, env)):
                    console.print(Text.from_ansi(line), overflow="ellipsis", no_wrap=True)
                console.print()
        finally:
            subprocess.run(["hpcdist", "devcluster", "down", "--yes"], env=env, check=False, capture_output=True)
    console.save_svg(str(target), title="hpcdist on a dev cluster")


if __name__ == "__main__":
    record(Path(sys.argv[1]))
