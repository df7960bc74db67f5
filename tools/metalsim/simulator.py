"""The simulator from Python: compile a .metal file, run its kernels on NumPy arrays, read what was found.

    sim = Simulator()
    library = sim.compile(Path("axpy.metal"))
    x, y = sim.buffer(numpy.ones(64, "f4"), "x"), sim.buffer(256, "y")
    with sim.encoder() as encoder:
        encoder.dispatch(library, "axpy", {0: x, 1: y, 2: numpy.uint32(64)}, threads=64, group=64)
    assert not sim.diagnostics()
    y.array("f4")

The same library serves host code in the process, so its counters and diagnostics are read here as well.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .build import build_library, compile_kernels
from .msl.frontend import DEFAULT_LANGUAGE
from .objects import digest, write_changed

SEEDS = (0, 1, 2)
"""Scheduling seeds that tests run: 0 is the natural order, the others shuffle threads and threadgroups."""

_U32x3 = ctypes.c_uint32 * 3
Size = int | Sequence[int]


class _Diagnostic(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_char_p),
        ("kernel", ctypes.c_char_p),
        ("message", ctypes.c_char_p),
        ("where", ctypes.c_char_p),
        ("count", ctypes.c_uint64),
    )


_COUNTERS = (
    "command_buffers",
    "encoders",
    "dispatches",
    "barriers",
    "stages",
    "threads",
    "bytes_read",
    "bytes_written",
    "bytes_loaded",
    "bytes_stored",
    "constant_bytes",
)
_TRAFFIC = ("bytes_read", "bytes_written", "bytes_loaded", "bytes_stored")


class _Counters(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in _COUNTERS)


class _Dispatch(ctypes.Structure):
    _fields_ = (
        ("kernel", ctypes.c_char_p),
        ("groups", _U32x3),
        ("threads", _U32x3),
        ("stage", ctypes.c_uint64),
        *((name, ctypes.c_uint64) for name in _TRAFFIC),
    )


@dataclass(frozen=True)
class Diagnostic:
    """One report of the checker; `where` is file:line of the .metal source or empty."""

    kind: str
    kernel: str
    message: str
    where: str
    count: int


@dataclass(frozen=True)
class Dispatch:
    """One dispatch of the log: geometry, stage, distinct bytes read and written, bytes of all accesses."""

    kernel: str
    groups: tuple[int, int, int]
    threads: tuple[int, int, int]
    stage: int
    bytes_read: int
    bytes_written: int
    bytes_loaded: int
    bytes_stored: int


class KernelError(RuntimeError):
    """A library that can't be loaded or a kernel that it doesn't have."""


def _size(size: Size) -> Any:
    values = (size,) if isinstance(size, int) else tuple(size)
    return _U32x3(*(*values, 1, 1, 1)[:3])


class Buffer:
    """Memory of the simulated GPU, until `free` or the end of this object and of all views of it."""

    def __init__(self, sim: Simulator, length: int, name: str, flags: int) -> None:
        self._sim, self.length, self.name = sim, length, name
        self.handle = sim.api.metalsim_buffer_new(length, name.encode(), flags)
        if not self.handle:
            raise MemoryError(f"no room for {length} bytes in the simulated GPU")
        self.free = weakref.finalize(self, sim.api.metalsim_buffer_free, self.handle)
        """Release it; kernel code that touches it later is reported."""
        self.free.atexit = False

    def array(self, dtype: npt.DTypeLike, shape: Size | None = None) -> npt.NDArray[Any]:
        """A view of the contents."""
        address = self._sim.api.metalsim_buffer_contents(self.handle)
        raw = (ctypes.c_char * self.length).from_address(address)
        raw.owner = self  # type: ignore[attr-defined]
        view: npt.NDArray[Any] = np.frombuffer(memoryview(raw), dtype=dtype)
        return view if shape is None else view.reshape(shape)


class Library:
    """A compiled .metal file."""

    def __init__(self, sim: Simulator, path: Path) -> None:
        self._sim, self.path = sim, path
        self.handle = sim.api.metalsim_library_open(str(path).encode())
        if not self.handle:
            raise KernelError(sim.api.metalsim_last_error().decode())

    @property
    def kernels(self) -> list[str]:
        """Host names of its kernels."""
        count = self._sim.api.metalsim_library_kernel_count(self.handle)
        return [self._sim.api.metalsim_library_kernel_name(self.handle, i).decode() for i in range(count)]

    def threadgroup_memory(self, kernel: str) -> int:
        """Bytes of threadgroup memory that the kernel's variables take."""
        return int(self._sim.api.metalsim_kernel_threadgroup_memory(self.handle, kernel.encode()))

    def max_threads(self, kernel: str) -> int:
        """Largest threadgroup that a dispatch of the kernel may have."""
        return int(self._sim.api.metalsim_kernel_max_threads(self.handle, kernel.encode()))


Argument = Buffer | tuple[Buffer, int] | np.generic | npt.NDArray[Any] | bytes


class Encoder:
    """A compute pass. A concurrent one orders dispatches only by `barrier`."""

    def __init__(self, sim: Simulator, concurrent: bool) -> None:
        self._api = sim.api
        self.handle = sim.api.metalsim_encoder_new(int(concurrent))

    def end(self) -> None:
        """End the pass."""
        self._api.metalsim_encoder_end(self.handle)

    def barrier(self) -> None:
        """`memoryBarrier(scope: .buffers)`."""
        self._api.metalsim_encoder_barrier(self.handle)

    def dispatch(
        self,
        library: Library,
        kernel: str,
        arguments: Mapping[int, Argument],
        *,
        group: Size,
        threads: Size | None = None,
        groups: Size | None = None,
        constants: Mapping[int, np.generic] | None = None,
        threadgroup_memory: Mapping[int, int] | None = None,
    ) -> bool:
        """Run a kernel over `threads` (with smaller groups at the edges) or over whole `groups`.

        Arguments by buffer index: a Buffer, (Buffer, byte offset), or a NumPy scalar, array or bytes given
        by setBytes. False if the dispatch was refused or abandoned; the reason is a diagnostic.
        """
        api, handle = self._api, self.handle
        if not api.metalsim_encoder_pipeline(handle, library.handle, kernel.encode()):
            raise KernelError(f"{library.path.name} has no kernel '{kernel}', only {library.kernels}")
        for index, value in (constants or {}).items():
            data = np.asarray(value).tobytes()
            api.metalsim_encoder_constant(handle, index, data, len(data))
        for index, argument in arguments.items():
            if isinstance(argument, Buffer):
                api.metalsim_encoder_buffer(handle, argument.handle, 0, index)
            elif isinstance(argument, tuple):
                api.metalsim_encoder_buffer(handle, argument[0].handle, argument[1], index)
            else:
                data = argument if isinstance(argument, bytes) else np.asarray(argument).tobytes()
                api.metalsim_encoder_bytes(handle, data, len(data), index)
        for index, length in (threadgroup_memory or {}).items():
            api.metalsim_encoder_threadgroup_memory(handle, length, index)
        grid = threads if threads is not None else groups
        if grid is None:
            raise ValueError("give threads or groups")
        done = api.metalsim_encoder_dispatch(handle, _size(grid), _size(group), int(threads is not None))
        return bool(done)


_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "metalsim_set_seed": (None, (ctypes.c_uint64,)),
    "metalsim_set_checks": (None, (ctypes.c_int,)),
    "metalsim_set_max_threads": (None, (ctypes.c_char_p, ctypes.c_uint32)),
    "metalsim_set_working_set": (None, (ctypes.c_uint64,)),
    "metalsim_set_max_buffer": (None, (ctypes.c_uint64,)),
    "metalsim_set_macos": (None, (ctypes.c_int, ctypes.c_int)),
    "metalsim_set_family": (None, (ctypes.c_char_p, ctypes.c_int)),
    "metalsim_set_wait_timeout": (None, (ctypes.c_double,)),
    "metalsim_diagnostic_count": (ctypes.c_size_t, ()),
    "metalsim_diagnostic_at": (ctypes.c_int, (ctypes.c_size_t, ctypes.POINTER(_Diagnostic))),
    "metalsim_diagnostics_clear": (None, ()),
    "metalsim_counters_get": (None, (ctypes.POINTER(_Counters),)),
    "metalsim_counters_reset": (None, ()),
    "metalsim_dispatch_log": (None, (ctypes.c_int,)),
    "metalsim_dispatch_log_count": (ctypes.c_size_t, ()),
    "metalsim_dispatch_log_at": (ctypes.c_int, (ctypes.c_size_t, ctypes.POINTER(_Dispatch))),
    "metalsim_live_objects": (ctypes.c_long, (ctypes.c_char_p,)),
    "metalsim_allocated_bytes": (ctypes.c_uint64, ()),
    "metalsim_fault": (ctypes.c_int, (ctypes.c_char_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint32)),
    "metalsim_faults_clear": (None, ()),
    "metalsim_library_open": (ctypes.c_void_p, (ctypes.c_char_p,)),
    "metalsim_last_error": (ctypes.c_char_p, ()),
    "metalsim_library_kernel_count": (ctypes.c_size_t, (ctypes.c_void_p,)),
    "metalsim_library_kernel_name": (ctypes.c_char_p, (ctypes.c_void_p, ctypes.c_size_t)),
    "metalsim_kernel_threadgroup_memory": (ctypes.c_uint32, (ctypes.c_void_p, ctypes.c_char_p)),
    "metalsim_kernel_max_threads": (ctypes.c_uint32, (ctypes.c_void_p, ctypes.c_char_p)),
    "metalsim_buffer_new": (ctypes.c_void_p, (ctypes.c_uint64, ctypes.c_char_p, ctypes.c_uint)),
    "metalsim_buffer_contents": (ctypes.c_void_p, (ctypes.c_void_p,)),
    "metalsim_buffer_free": (None, (ctypes.c_void_p,)),
    "metalsim_encoder_new": (ctypes.c_void_p, (ctypes.c_int,)),
    "metalsim_encoder_end": (None, (ctypes.c_void_p,)),
    "metalsim_encoder_pipeline": (ctypes.c_int, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)),
    "metalsim_encoder_constant": (
        None,
        (ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t),
    ),
    "metalsim_encoder_buffer": (
        None,
        (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int),
    ),
    "metalsim_encoder_bytes": (None, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)),
    "metalsim_encoder_threadgroup_memory": (None, (ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int)),
    "metalsim_encoder_barrier": (None, (ctypes.c_void_p,)),
    "metalsim_encoder_dispatch": (ctypes.c_int, (ctypes.c_void_p, _U32x3, _U32x3, ctypes.c_int)),
}


class Simulator:
    """libmetalsim in this process; there is one simulated GPU however many of these are made."""

    def __init__(self) -> None:
        self.api = ctypes.CDLL(str(build_library()))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self.api, name)
            function.restype, function.argtypes = result, arguments
        self.checked = True

    def configure(
        self,
        *,
        seed: int | None = None,
        checks: bool | None = None,
        working_set: int | None = None,
        max_buffer: int | None = None,
        macos: tuple[int, int] | None = None,
        gpu: tuple[str, int] | None = None,
        wait_timeout: float | None = None,
    ) -> None:
        """Set what is given and leave the rest.

        Scheduling seed; whether the checker runs (and kernels are built for it); recommendedMaxWorkingSetSize
        and maxBufferLength in bytes; version of macOS; architecture name and Apple GPU family; seconds until
        a wait of the GPU for an event fails.
        """
        if seed is not None:
            self.api.metalsim_set_seed(seed)
        if checks is not None:
            self.checked = checks
            self.api.metalsim_set_checks(int(checks))
        if working_set is not None:
            self.api.metalsim_set_working_set(working_set)
        if max_buffer is not None:
            self.api.metalsim_set_max_buffer(max_buffer)
        if macos is not None:
            self.api.metalsim_set_macos(*macos)
        if gpu is not None:
            self.api.metalsim_set_family(gpu[0].encode(), gpu[1])
        if wait_timeout is not None:
            self.api.metalsim_set_wait_timeout(wait_timeout)

    def limit_threads(self, limit: int = 1024, kernel: str | None = None) -> None:
        """Lower maxTotalThreadsPerThreadgroup of one kernel or of all (1024 restores)."""
        self.api.metalsim_set_max_threads(kernel.encode() if kernel else None, limit)

    def compile(
        self,
        source: Path | str,
        *,
        define: Sequence[str] = (),
        include: Sequence[Path] = (),
        language: str = DEFAULT_LANGUAGE,
    ) -> Library:
        """Compile a .metal file, or source text; raises SourceError or CompileError with clang's text."""
        if isinstance(source, str):
            path = build_library().parent.parent / "sources" / digest(source) / "program_source.metal"
            write_changed(path, source)
            source = path
        options = {"define": define, "include": include, "language": language}
        return Library(self, compile_kernels(source, checked=self.checked, **options))  # type: ignore[arg-type]

    def buffer(
        self,
        content: npt.NDArray[Any] | int,
        name: str = "buffer",
        *,
        untracked: bool = False,
        track_initialisation: bool = False,
    ) -> Buffer:
        """A buffer with an array's bytes, or of so many bytes (filled with NaN bits)."""
        length = content if isinstance(content, int) else content.nbytes
        buffer = Buffer(self, length, name, int(untracked) | 2 * int(track_initialisation))
        if not isinstance(content, int):
            buffer.array(np.uint8)[:] = np.frombuffer(np.ascontiguousarray(content).tobytes(), np.uint8)
        return buffer

    @contextmanager
    def encoder(self, concurrent: bool = False) -> Iterator[Encoder]:
        """A compute pass that ends with the block."""
        encoder = Encoder(self, concurrent)
        try:
            yield encoder
        finally:
            encoder.end()

    def diagnostics(self) -> list[Diagnostic]:
        """All reports since the last clear."""
        found = []
        entry = _Diagnostic()
        for i in range(self.api.metalsim_diagnostic_count()):
            if self.api.metalsim_diagnostic_at(i, ctypes.byref(entry)):
                texts = [text.decode() for text in (entry.kind, entry.kernel, entry.message, entry.where)]
                found.append(Diagnostic(texts[0], texts[1], texts[2], texts[3], entry.count))
        return found

    def clear_diagnostics(self) -> None:
        """Forget all reports."""
        self.api.metalsim_diagnostics_clear()

    def counters(self) -> dict[str, int]:
        """Counts since the last reset; see metalsim.h."""
        entry = _Counters()
        self.api.metalsim_counters_get(ctypes.byref(entry))
        return {name: int(getattr(entry, name)) for name in _COUNTERS}

    def reset_counters(self) -> None:
        """Set all counts to zero."""
        self.api.metalsim_counters_reset()

    def log_dispatches(self, enabled: bool = True) -> None:
        """Start (or stop) a fresh log of dispatches."""
        self.api.metalsim_dispatch_log(int(enabled))

    def dispatches(self) -> list[Dispatch]:
        """The log, in the order of execution."""
        found = []
        entry = _Dispatch()
        for i in range(self.api.metalsim_dispatch_log_count()):
            if self.api.metalsim_dispatch_log_at(i, ctypes.byref(entry)):
                groups, threads = tuple(entry.groups), tuple(entry.threads)
                traffic = (int(getattr(entry, name)) for name in _TRAFFIC)
                found.append(Dispatch(entry.kernel.decode(), groups, threads, entry.stage, *traffic))
        return found

    def live_objects(self, class_name: str | None = None) -> int:
        """Objective-C objects alive, of one class or of all."""
        return int(self.api.metalsim_live_objects(class_name.encode() if class_name else None))

    def allocated_bytes(self) -> int:
        """Bytes of live buffers."""
        return int(self.api.metalsim_allocated_bytes())

    def inject(self, kind: str, nth: int = 1, *, code: int = 1, repeat: int = 1) -> None:
        """Make the nth event of the kind fail; kinds are listed in metalsim.h."""
        if not self.api.metalsim_fault(kind.encode(), nth, code, repeat):
            raise ValueError(f"unknown kind of fault '{kind}', or nth < 1")

    def clear_faults(self) -> None:
        """Disarm all faults."""
        self.api.metalsim_faults_clear()
