"""Synthetic checkpoints, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from lily_py.bench.synthetic import make_checkpoint


@pytest.fixture(scope="session")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a mixture-of-experts checkpoint, 17 MB."""
    return make_checkpoint("tiny", tmp_path_factory.mktemp("synthetic") / "tiny", progress=False)


@pytest.fixture(scope="session")
def synthetic_dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a dense checkpoint that shares embedding and output head."""
    return make_checkpoint("tiny-dense", tmp_path_factory.mktemp("synthetic") / "tiny-dense", progress=False)
