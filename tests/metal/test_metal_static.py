"""Every kernel file, with every instantiation and both types of activations, is Metal 3.1 or 4.0."""

from __future__ import annotations

from typing import Any

import pytest
from metal_reference import METAL, language

from metalsim.msl.frontend import load  # isort: skip
from metalsim.msl.reflection import reflect  # isort: skip
from metalsim.msl.static_check import check  # isort: skip

FILES = sorted(METAL.glob("*.metal"))


@pytest.mark.parametrize("activation", ["bfloat", "float"])
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_file_passes_the_static_check(compiler: Any, file: Any, activation: str) -> None:
    define = [f"LILY_ACTIVATION={activation}"]
    assert check(file, include=[METAL], define=define, language=language(file.stem)) == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_file_states_its_launches_and_has_kernels(compiler: Any, file: Any) -> None:
    head = file.read_text().split("#include")[0]
    assert "Launch" in head
    assert "Bound" in head
    module = load(file, include=[METAL], language=language(file.stem))
    assert module.errors == []
    assert reflect(module)["kernels"]


def test_the_other_form_of_tensor_operations(compiler: Any) -> None:
    file = METAL / "matrix_tensor.metal"
    assert check(file, include=[METAL], define=["LILY_TENSOR_TILES"], language="4.0") == []
