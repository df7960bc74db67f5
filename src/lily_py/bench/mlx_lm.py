"""mlx-lm as a peer, on its CPU device."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict

from lily_py.bench.process import Finished, run_worker
from lily_py.bench.workload import Measured, Workload

DTYPES = ("bf16", "f32")
"""As published, and with all floating-point tensors cast: the faster one on x86."""


def missing_reason() -> str | None:
    """Say why mlx-lm can't be measured here, or None if it can."""
    missing = [name for name in ("mlx", "mlx_lm") if importlib.util.find_spec(name) is None]
    return f"no package {' or '.join(missing)}; pip install 'lily-py[bench]'" if missing else None


def run_dtype(dtype: str, workload: Workload, *, priority: bool = False) -> tuple[Measured, Finished]:
    """Measure mlx-lm with one type of activations in a fresh process; it uses as many threads as it likes.

    Raises:
        ArmError: it failed.
    """
    request = {"workload": asdict(workload), "dtype": dtype}
    values, finished = run_worker("lily_py.bench.mlx_worker", request, priority=priority)
    return Measured.from_json(values), finished
