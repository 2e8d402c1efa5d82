"""Which files of a tree are code: outputs and data that lie beside the code are no part of a snapshot.

Files that git tracks are code. Of others, sources are code, and so are small settings, unless their folder contains
outputs and no source. Everything else is data or an output, such as a model or a log.
"""

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from pathlib import Path

#: Endings of sources, which people write.
_SOURCES = """
.py .pyi .pyx .pxd .ipynb .c .cc .cpp .cxx .h .hh .hpp .cu .cuh .cl .f .f90 .rs .go .jl .r .lua .m .java .js .ts
.proto .cmake .mk .sh .bash .zsh .slurm .sbatch
""".split()  # noqa: SIM905
#: Endings of settings and documents, which people and scripts write. A name without an ending is of this kind.
_SETTINGS = """
. .yaml .yml .json .json5 .toml .cfg .ini .conf .gin .jsonnet .libsonnet .properties .xml .in .lock .j2 .jinja .jinja2
.tmpl .template .md .rst .patch .diff
""".split()  # noqa: SIM905
#: Text files that are settings: any other `.txt` may be a log or data.
_SETTINGS_NAMES = ("requirements*.txt", "constraints*.txt", "CMakeLists.txt")
#: Larger settings are data, such as the annotations of a data set.
MAX_SETTINGS_BYTES = 2**20


def code_files(top: Path, files: Iterable[Path], tracked: Collection[Path]) -> list[Path]:
    """Return the files of a tree that are code, in their order. Links are kept: a copy of them has no size.

    Args:
        top: the tree.
        files: existing files or links below `top`.
        tracked: files that are code whatever they are called, such as those that git tracks.
    """
    kept = []
    settings: set[Path] = set()
    with_source = {top}
    with_outputs: set[Path] = set()
    for path in files:
        kind = _kind(path)
        if path in tracked or kind == "source":
            with_source.update(path.parents)
        elif kind == "output":
            with_outputs.update(path.parents)
            continue
        elif kind == "settings":
            settings.add(path)
        kept.append(path)
    only_outputs = with_outputs - with_source
    return [path for path in kept if path not in settings or only_outputs.isdisjoint(path.parents)]


def _kind(path: Path) -> str:
    """Return `source`, `settings`, `link` or `output`."""
    if path.is_symlink():
        return "link"
    ending = path.suffix.lower() or "."
    if ending in _SOURCES:
        return "source"
    is_named = any(fnmatchcase(path.name, pattern) for pattern in _SETTINGS_NAMES)
    if not is_named and ending not in _SETTINGS:
        return "output"
    try:
        is_small = path.stat().st_size <= MAX_SETTINGS_BYTES
    except (FileNotFoundError, NotADirectoryError):  # it has vanished
        is_small = True
    return "settings" if is_small else "output"
