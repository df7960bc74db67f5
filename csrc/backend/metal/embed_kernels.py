"""Writes the .metal files, includes put in their place, as a C++ source that defines embedded_kernels().

A Mac compiles kernels from text without a file system: every `#include "..."` is replaced by the file once.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"\s*$')
DELIMITER = "metal_source"
TENSORS = re.compile(r"^\s*#include <MetalPerformancePrimitives/", re.MULTILINE)


def flatten(path: Path, root: Path, seen: set[Path] | None = None) -> str:
    """Text of a kernel file with its headers (relative to `root`) in place; #line keeps messages true."""
    seen = set() if seen is None else seen
    seen.add(path)
    name, lines = path.relative_to(root).as_posix(), []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        include = INCLUDE.match(line)
        if include is None:
            lines.append("" if line.strip() == "#pragma once" else line)
            continue
        header = root / include.group(1)
        if header in seen:
            lines.append("")
            continue
        lines += [
            f'#line 1 "{include.group(1)}"',
            flatten(header, root, seen),
            f'#line {number + 1} "{name}"',
        ]
    return "\n".join(lines)


def embed(root: Path) -> str:
    """C++ source with all .metal files under a folder. Raises ValueError for a file that can't be quoted."""
    files = sorted(root.rglob("*.metal"))
    entries = []
    for path in files:
        text = flatten(path, root)
        if f"){DELIMITER}" in text:
            raise ValueError(f"{path} contains ){DELIMITER}")
        language = "metal_4_0" if TENSORS.search(text) else "metal_3_1"
        quoted = f'R"{DELIMITER}({text}\n){DELIMITER}"'
        entries.append(f'    {{"{path.stem}", {quoted}, Language::{language}}},\n')
    return (
        '#include "backend/metal/kernel_library.h"\n\n'
        '#pragma clang diagnostic ignored "-Woverlength-strings"\n\n'
        "namespace lily::metal {\n\n"
        "std::span<const KernelSource> embedded_kernels() {\n"
        "    static constexpr KernelSource sources[] = {\n"
        f"{''.join(entries)}"
        "    };\n"
        "    return sources;\n"
        "}\n\n"
        "}  // namespace lily::metal\n"
    )


def main() -> None:
    """Command line: the folder of kernels, and the file to write, which is touched only if it changes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    text = embed(arguments.root)
    if not arguments.output.exists() or arguments.output.read_text() != text:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
