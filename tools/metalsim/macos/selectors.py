"""Which Objective-C messages the host code sends, and which macOS each needs.

metal-cpp has no availability marks: a message to an object of an older system ends the process. The list in
selectors.txt names the macOS of every selector that may be used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from . import macho

_LIST = Path(__file__).with_name("selectors.txt")
# Mangled names of metal-cpp's selector variables: MTL::Private::Selector::s_kname, NS::..., CA::...
_VARIABLE = re.compile(r"^__ZN(?:2NS|3MTL|2CA)7Private8Selector\d+s_k(\w+)E$")
_DEFINITION = re.compile(r"_(?:NS|MTL|CA)_PRIVATE_DEF_SEL\(\s*(\w+),\s*\"([^\"]+)\"\)")


def known() -> dict[str, str]:
    """Selector -> macOS version, from the list; one in parentheses is guarded by the host at run time."""
    table: dict[str, str] = {}
    for line in _LIST.read_text().splitlines():
        words = line.split("#")[0].split()
        if words:
            table.update(dict.fromkeys(words[1:], words[0]))
    return table


def _accessors(headers: Path) -> dict[str, str]:
    """metal-cpp's variable -> selector."""
    found: dict[str, str] = {}
    for header in [*headers.glob("*/*Private.hpp"), *headers.glob("*/*HeaderBridge.hpp")]:
        found.update(_DEFINITION.findall(header.read_text(errors="replace")))
    return found


def used(objects: Iterable[Path], headers: Path) -> list[str]:
    """Selectors that the object files refer to. The one that defines them all refers to none."""
    accessors = _accessors(headers)
    names: set[str] = set()
    for path in objects:
        for symbol in macho.read(path).undefined:
            match = _VARIABLE.match(symbol.name)
            if match:
                names.add(accessors.get(match.group(1), match.group(1)))
    return sorted(names)


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.strip("()").split("."))


def check(selectors: Sequence[str], target: str) -> list[str]:
    """Messages about selectors that are not on the list, or newer than the target without a guard."""
    table, messages = known(), []
    for selector in selectors:
        version = table.get(selector)
        if version is None:
            messages.append(f"selector '{selector}' is not on the list in {_LIST.name}")
        elif not version.startswith("(") and _parts(version) > _parts(target):
            messages.append(f"selector '{selector}' needs macOS {version}, the target is {target}")
    return messages
