"""Fenced code blocks of the documentation, and the paths, modules and keys that its pages name."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block: its language, the words after it (`test`, `slurm`, `profile`, `file=NAME`), and its text."""

    page: Path
    language: str
    words: tuple[str, ...]
    text: str

    @property
    def file(self) -> str:
        """Name of the file that the page asks the reader to save this block as; empty for other blocks."""
        named = [word.removeprefix("file=") for word in self.words if word.startswith("file=")]
        return named[0] if named else ""

    @property
    def commands(self) -> list[str]:
        """The commands of a console block, without prompt and comment."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [re.split(r"\s+#\s", line[2:])[0].strip() for line in lines if line.startswith("$ ")]


@cache
def pages() -> tuple[Path, ...]:
    """Return all Markdown pages for users and developers."""
    names = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "SKILL.md", "benchmarks/RESULTS.md")
    others = ("docker/README.md", "slurm/README.md", "slurm/containers.md", "slurm/devcluster/README.md")
    return (*(ROOT / name for name in (*names, *others)), *sorted((ROOT / "docs").rglob("*.md")))


@cache
def blocks(page: Path) -> tuple[Block, ...]:
    """Return the fenced blocks of a page."""
    return tuple(
        Block(page=page, language=language, words=tuple(words.split()), text=text)
        for language, words, text in _FENCE.findall(page.read_text())
    )
