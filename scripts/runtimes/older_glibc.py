"""Let a program that was linked against glibc 2.38 start with an older glibc: older_glibc.py PROGRAM...

Only for programs that need no symbols of version 2.38 but `__isoc23_strto*`, as Debian sid's apptainer does. The
symbols are renamed in place to `strto*`, the tail of the same string, and required of version 2.34 instead of 2.38.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NEW, OLD = b"GLIBC_2.38", b"GLIBC_2.34"
PREFIX = b"__isoc23_"
#: Types of ELF sections.
DYNSYM, VERNEED, VERSYM = 11, 0x6FFFFFFE, 0x6FFFFFFF
#: Symbol version of symbols without one.
ANY_VERSION = 1


@dataclass(frozen=True)
class Need:
    """A version that the program requires of a library."""

    at: int  #: offset in the file
    index: int
    name: int  #: offset in the string table


class Program:
    """A 64-bit little-endian ELF file in memory."""

    def __init__(self, data: bytearray) -> None:
        self.data = data
        (table,) = struct.unpack_from("<Q", data, 0x28)
        size, count = struct.unpack_from("<HH", data, 0x3A)
        sections = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * size) for i in range(count)]
        by_type = {section[1]: section for section in sections}
        self.num_symbols = by_type[DYNSYM][5] // 24
        self.symbols, self.versions, self.needs_at = (by_type[kind][4] for kind in (DYNSYM, VERSYM, VERNEED))
        self.strings = sections[by_type[DYNSYM][6]][4]

    def text(self, offset: int) -> bytes:
        start = self.strings + offset
        return bytes(self.data[start : self.data.index(0, start)])

    def needs(self) -> Iterator[Need]:
        """Yield the versions that the program requires of all libraries."""
        library = self.needs_at
        while True:
            _, count, _, first, following = struct.unpack_from("<HHIII", self.data, library)
            at = library + first
            for _ in range(count):
                _, _, index, name, step = struct.unpack_from("<IHHII", self.data, at)
                yield Need(at, index, name)
                at += step
            if not following:
                return
            library += following

    def rename(self, index: int) -> None:
        """Rename the symbols of a version. Raises SystemExit if one is not of `__isoc23_*`."""
        for number in range(self.num_symbols):
            symbol, version = self.symbols + 24 * number, self.versions + 2 * number
            if struct.unpack_from("<H", self.data, version)[0] & 0x7FFF != index:
                continue
            (name,) = struct.unpack_from("<I", self.data, symbol)
            if not self.text(name).startswith(PREFIX):
                raise SystemExit(f"{self.text(name).decode()} exists in no glibc before 2.38")
            struct.pack_into("<I", self.data, symbol, name + len(PREFIX))
            struct.pack_into("<H", self.data, version, ANY_VERSION)


def elf_hash(name: bytes) -> int:
    """Return the hash of a name in ELF's tables."""
    value = 0
    for byte in name:
        value = (value << 4) + byte
        high = value & 0xF0000000
        value = (value ^ (high >> 24)) & ~high & 0xFFFFFFFF
    return value


def patch(path: Path) -> None:
    """Change a program in place; a program without the requirement stays as it is."""
    program = Program(bytearray(path.read_bytes()))
    needs = {program.text(need.name): need for need in program.needs()}
    if (new := needs.get(NEW)) is None:
        return
    program.rename(new.index)
    struct.pack_into("<I", program.data, new.at, elf_hash(OLD))
    struct.pack_into("<I", program.data, new.at + 8, needs[OLD].name)
    path.write_bytes(program.data)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        patch(Path(argument))
