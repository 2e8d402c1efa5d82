"""Replaces podman in tests: each container is a process in a new session, which outlives the caller.

The folder `$FAKE_PODMAN` has the arguments of each `run` in `NAME.args` and the process id of each container in
`NAME.pid`.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

FOLDER = Path(os.environ["FAKE_PODMAN"])


def value_of(words: list[str], flag: str) -> str:
    return next((word.removeprefix(flag) for word in words if word.startswith(flag)), "")


def is_running(name: str) -> bool:
    path = FOLDER / f"{name}.pid"
    with suppress(OSError, ValueError):
        return "State:\tZ" not in Path(f"/proc/{int(path.read_text())}/status").read_text()
    return False


def run(words: list[str]) -> int:
    name = value_of(words, "--name=") or "unnamed"
    if "IMAGE" not in words:
        print("Error: image not known", file=sys.stderr)
        return 125
    (FOLDER / f"{name}.args").write_text("\n".join(words))
    with open(os.devnull, "wb") as nowhere:
        command = words[words.index("IMAGE") + 1 :]
        container = subprocess.Popen(command, start_new_session=True, stdout=nowhere, stderr=nowhere)
    partial = FOLDER / f"{name}.pid.partial"
    partial.write_text(str(container.pid))
    partial.rename(FOLDER / f"{name}.pid")
    code = container.wait()
    return 128 - code if code < 0 else code


def main(words: list[str]) -> int:
    verb, *rest = words
    if verb == "run":
        return run(rest)
    if verb == "attach":
        (FOLDER / "attached").touch()
        while is_running(rest[-1]):
            time.sleep(0.02)
        return 0
    if verb == "ps":
        wanted = next(word for word in rest if word.startswith(("name=^", "label=")))
        names = [path.stem for path in FOLDER.glob("*.pid") if "--all" in rest or is_running(path.stem)]
        if wanted.startswith("label="):
            names = [name for name in names if f"--{wanted}" in (FOLDER / f"{name}.args").read_text().splitlines()]
        else:
            names = [name for name in names if name == wanted.removeprefix("name=^").removesuffix("$")]
        print("\n".join(names), end="")
        return 0
    for name in rest:  # kill, rm
        with suppress(OSError):
            os.kill(int((FOLDER / f"{name}.pid").read_text()), signal.SIGKILL)
        if verb == "rm":
            (FOLDER / f"{name}.pid").unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
