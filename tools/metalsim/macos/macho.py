"""Reads what matters of an arm64 Mach-O dynamic library: no Apple tool is on the build machine."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path

_MAGIC = 0xFEEDFACF
_CPU_ARM64 = 0x0100000C
_FILE_TYPES = {1: "object", 6: "dylib", 8: "bundle"}
_SYMTAB, _LOAD_DYLIB, _LOAD_WEAK_DYLIB = 0x2, 0xC, 0x80000018
_BUILD_VERSION, _SIGNATURE = 0x32, 0x1D
_TYPE_MASK, _STAB_MASK, _EXTERNAL = 0x0E, 0xE0, 0x01
_WEAK_REFERENCE = 0x0040
_DYNAMIC_LOOKUP, _SELF = 0xFE, 0x00


class MachOError(ValueError):
    """The file is not what it should be; the text says how."""


@dataclass(frozen=True)
class Undefined:
    """An undefined symbol; `library` is the ordinal of the library that has it, or None for a flat lookup."""

    name: str
    weak: bool
    library: int | None


@dataclass
class MachO:
    """The parsed parts of one file."""

    file_type: str
    minimum_macos: str = ""
    libraries: list[str] = field(default_factory=list)
    undefined: list[Undefined] = field(default_factory=list)
    exported: list[str] = field(default_factory=list)
    is_signed: bool = False


def _version(packed: int) -> str:
    return f"{packed >> 16}.{packed >> 8 & 0xFF}"


def _text(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()


def read(path: Path) -> MachO:
    """Parse a 64-bit arm64 object or dynamic library. Raises MachOError."""
    data = path.read_bytes()
    if len(data) < 32:
        raise MachOError(f"{path.name} is too short for a Mach-O file")
    magic, cpu, _, file_type, command_count = struct.unpack_from("<5I", data)
    if magic != _MAGIC or cpu != _CPU_ARM64:
        raise MachOError(f"{path.name} is not a 64-bit arm64 Mach-O file")
    parsed = MachO(_FILE_TYPES.get(file_type, str(file_type)))
    at = 32
    for _ in range(command_count):
        command, size = struct.unpack_from("<2I", data, at)
        if command == _SYMTAB:
            _symbols(data, at, parsed)
        elif command in (_LOAD_DYLIB, _LOAD_WEAK_DYLIB):
            parsed.libraries.append(_text(data, at + struct.unpack_from("<I", data, at + 8)[0]))
        elif command == _BUILD_VERSION:
            parsed.minimum_macos = _version(struct.unpack_from("<I", data, at + 12)[0])
        elif command == _SIGNATURE:
            parsed.is_signed = True
        at += size
    return parsed


def _symbols(data: bytes, at: int, parsed: MachO) -> None:
    table, count, strings, _ = struct.unpack_from("<4I", data, at + 8)
    for i in range(count):
        name_at, kind, _section, description, _value = struct.unpack_from("<IBBHQ", data, table + 16 * i)
        if kind & _STAB_MASK or not kind & _EXTERNAL:
            continue
        name = _text(data, strings + name_at)
        if kind & _TYPE_MASK:
            parsed.exported.append(name)
            continue
        ordinal = description >> 8
        flat = ordinal in (_DYNAMIC_LOOKUP, _SELF)
        parsed.undefined.append(
            Undefined(name, bool(description & _WEAK_REFERENCE), None if flat else ordinal)
        )
