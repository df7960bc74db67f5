"""Where things are: the tool's own sources and the build directory."""

from __future__ import annotations

import os
from pathlib import Path

HOME = Path(__file__).resolve().parent
REPOSITORY = HOME.parent.parent

SHIM = HOME / "shim"
RUNTIME = HOME / "runtime"
OBJC = HOME / "objc"
LINUX_STUBS = HOME / "linux"
MACOS = HOME / "macos"


def build_directory() -> Path:
    """`METALSIM_BUILD`, else build/metalsim under the repository (ignored by git)."""
    return Path(os.environ.get("METALSIM_BUILD") or REPOSITORY / "build" / "metalsim")
