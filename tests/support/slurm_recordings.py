"""Recorded output of Slurm's commands, and fake commands that print it."""

from pathlib import Path

RECORDINGS = Path(__file__).parents[1] / "unit" / "slurm"


def recorded(command: str, section: str = "", *, release: str = "22_05") -> str:
    """Return a section of a command's recorded output, or the whole file."""
    text = (RECORDINGS / f"slurm_{release}" / f"{command}.txt").read_text()
    return text.partition(f"### {section}\n")[2].partition("###")[0] if section else text


class FakeCommands:
    """A folder of scripts; each prints a given output and appends its command line to the file `calls`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, name: str, output: str = "", *, error: str = "", code: int = 0) -> None:
        (self.folder / f"{name}.out").write_text(output)
        (self.folder / f"{name}.err").write_text(error)
        self.add_script(
            name,
            f"while IFS= read -r line; do echo \"$line\"; done < {name}.out\n"
            f"while IFS= read -r line; do echo \"$line\" >&2; done < {name}.err\nexit {code}",
        )  # fmt: skip

    def add_script(self, name: str, lines: str) -> None:
        script = self.folder / name
        script.write_text(f'#!/bin/sh\ncd {self.folder}\necho "{name} $*" >> calls\n{lines}\n')
        script.chmod(0o755)

    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def programs(self) -> list[str]:
        return [line.split()[0] for line in self.calls()]
