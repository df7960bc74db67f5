"""lily's extension with the Metal backend, for Linux on the simulator, in a copy of the Python package.

    package = build_package()     # build/metalsim/package
    sys.path.insert(0, str(package))
    import lily                   # lily.Engine.load(path, backend="metal")

The C++ sources and the kernel texts are those of a Mac. The CPU backend has its portable kernels only.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from pathlib import Path

from . import build, paths
from .objects import compile_objects, locked, write_changed
from .toolchain import zig

CSRC = paths.REPOSITORY / "csrc"
METAL = paths.REPOSITORY / "metal"
SOURCE_FOLDERS = (
    "base", "weights", "state", "graph", "backend", "backend/cpu", "backend/metal", "runtime", "bench",
    "bindings",
)  # fmt: skip
DEFINES = ("LILY_METAL", "METALCPP_SYMBOL_VISIBILITY_HIDDEN")
# As in CMakeLists.txt: every build gives the same bits.
FLAGS = ("-I", str(CSRC), "-Wall", "-Wextra", "-ffp-contract=off", "-fvisibility=hidden")
_KERNEL_FLAGS = ("-O2", "-fno-math-errno", "-fno-trapping-math")
_PACKAGES = ("lily", "lily_py")


def sources() -> list[Path]:
    """C++ files of the extension, the embedded kernels included, the CPU kernels not."""
    return [
        *(source for folder in SOURCE_FOLDERS for source in sorted((CSRC / folder).glob("*.cpp"))),
        embedded_kernels(),
    ]


def cpu_kernels() -> list[Path]:
    """C++ files of the CPU kernels, which are compiled with `kernel_flags`."""
    return sorted((CSRC / "backend" / "cpu" / "kernels").glob("*.cpp"))


def kernel_flags(instruction_set: str) -> list[str]:
    """Further flags of the CPU kernels for one instruction set."""
    return [f"-DLILY_ISA={instruction_set}", f'-DLILY_ISA_NAME="{instruction_set}"', *_KERNEL_FLAGS]


def embedded_kernels() -> Path:
    """The C++ file that holds metal/*.metal, written anew if one changed."""
    path = CSRC / "backend" / "metal" / "embed_kernels.py"
    spec = importlib.util.spec_from_file_location("embed_kernels", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    output = paths.build_directory() / "generated" / "embedded_kernels.cpp"
    write_changed(output, module.embed(METAL))
    return output


def _link_package(folder: Path, source: Path) -> None:
    """Make `folder` hold links to the entries of a Python package, its own extension apart."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {
        entry.name: entry
        for entry in source.iterdir()
        if not entry.name.startswith(("_core.", "__pycache__"))
    }
    wanted["_core.pyi"] = source / "_core.pyi"
    for link in folder.iterdir():
        if link.is_symlink() and wanted.get(link.name) != link.readlink():
            link.unlink()
    for name, entry in wanted.items():
        if entry.exists() and not (folder / name).is_symlink():
            (folder / name).symlink_to(entry)


def build_package(nanobind: Path | None = None) -> Path:
    """Build what changed; returns the folder for sys.path. Raises CompileError.

    `nanobind` is the folder of its Python package; the installed one by default.
    """
    if nanobind is None:
        spec = importlib.util.find_spec("nanobind")
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(f"nanobind is not installed for {sys.executable}")
        nanobind = Path(spec.origin).parent
    package = paths.build_directory() / "package"
    with locked(package.with_name("package.lock")):
        for name in _PACKAGES:
            _link_package(package / name, paths.REPOSITORY / "src" / name)
    flags = [*build.host_flags(), *FLAGS, *kernel_flags("generic")]
    objects = paths.build_directory() / "extension"
    kernels = compile_objects([str(zig()), "c++"], flags, cpu_kernels(), objects)
    build.build_extension(
        sources(),
        package / "lily_py" / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}",
        nanobind=nanobind,
        python_include=Path(sysconfig.get_paths()["include"]),
        options=[*FLAGS, "-O1", *(f"-D{define}" for define in DEFINES)],
        objects=kernels,
    )
    return package
