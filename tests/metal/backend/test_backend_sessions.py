"""Tests of `tests/engine` on the Metal backend, simulated: sessions, stored states, batches.

The kernels of few rows give a row the same bits in any company, so that with them alone (`matrix_prefill`
switched off) all of it holds as on the CPU: warm equals cold, bit for bit. With those of many rows a row's
bits depend on whether it came in a piece of more than eight, and warm is near cold.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from backend_support import EXACT
from oracles.result import TOLERANCES
from oracles.shapes import SHAPES

ENGINE_TESTS = Path(__file__).resolve().parents[2] / "engine"
MODULES = ("engine_support", "test_session", "test_session_programs", "test_scheduler", "test_persistence")
FEW_ROWS = {"backend": "metal", "ablate": ("matrix_prefill",)}


@pytest.fixture(scope="module")
def suite(metal_lily: ModuleType) -> Iterator[dict[str, ModuleType]]:
    """Modules of `tests/engine` by name, of their own: on this package, their engines on this backend."""
    others = {name: sys.modules.pop(name) for name in MODULES if name in sys.modules}
    sys.path.insert(0, str(ENGINE_TESTS))
    found = {name: importlib.import_module(name) for name in MODULES}
    found["engine_support"].DEFAULTS |= FEW_ROWS
    yield found
    sys.path.remove(str(ENGINE_TESTS))
    for name in MODULES:
        del sys.modules[name]
    sys.modules.update(others)


@pytest.fixture(autouse=True)
def fast(loaded_simulator: Any) -> None:
    """Kernels without the checker."""
    loaded_simulator.configure(checks=False)


@pytest.fixture(scope="module")
def folder(tiny: Callable[..., Path]) -> Path:
    return tiny("moe_tied", "mlx-4bit-g64", dtype="bfloat16")


@pytest.fixture(scope="module")
def engines(suite: dict[str, ModuleType], loaded_simulator: Any, folder: Path) -> Iterator[dict[str, Any]]:
    """The engines that the tests ask for by name."""
    loaded_simulator.configure(checks=False)
    load = suite["engine_support"].load
    with (
        load(folder) as engine,
        load(folder, snapshot_interval=16) as dense,
        load(folder, cache_bytes=0) as plain,
    ):
        yield {"engine": engine, "dense": dense, "plain": plain}


CASES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "test_session": [
        ("test_a_session_holds_its_tokens", {}),
        ("test_an_answer_goes_on_where_the_last_one_ended", {}),
        ("test_rewind_goes_back_to_any_point", {"interval": 16}),
        ("test_truncate_counts_from_the_end", {}),
        ("test_forks_go_their_own_ways", {}),
        ("test_conversations_keep_messages", {}),
        ("test_a_session_that_answers_is_busy", {}),
        ("test_closing_a_session_ends_its_answer", {}),
        ("test_a_cancelled_answer_leaves_what_was_said", {"after": 0}),
        ("test_a_cancelled_answer_leaves_what_was_said", {"after": 5}),
        ("test_b21_an_exact_repeat_costs_one_step_and_gives_the_same", {}),
        ("test_b22_warm_is_cold_for_every_split", {"split": 15}),
        ("test_b22_warm_is_cold_for_every_split", {"split": 64}),
        ("test_b23_truncating_and_regenerating", {}),
        ("test_the_next_turn_costs_only_what_is_new", {}),
        ("test_two_conversations_share_their_system_prompt", {}),
        ("test_a_second_session_with_the_same_content_costs_one_step", {}),
        ("test_live_sessions_lend_what_the_store_had_no_room_for", {}),
    ],
    "test_scheduler": [
        ("test_each_request_gets_what_it_gets_alone", {}),
        ("test_b26_rows_of_unequal_length_equal_their_solo_runs", {}),
        ("test_choices_share_each_pass", {}),
    ],
    "test_persistence": [
        ("test_what_is_loaded_needs_no_computation", {}),
        ("test_saving_does_not_change_the_session", {}),
        ("test_loading_replaces_what_a_session_held", {}),
    ],
}


@pytest.mark.parametrize(
    ("module", "name", "values"),
    [
        pytest.param(module, name, values, id="-".join([name[5:], *map(str, values.values())]))
        for module, cases in CASES.items()
        for name, values in cases
    ],
)
def test_as_on_the_cpu(
    suite: dict[str, ModuleType],
    engines: dict[str, Any],
    folder: Path,
    tmp_path: Path,
    module: str,
    name: str,
    values: dict[str, Any],
) -> None:
    for engine in engines.values():
        engine._runtime.store.clear()
    function = getattr(suite[module], name)
    at_hand = {**engines, "folder": folder, "tmp_path": tmp_path, **values}
    function(**{parameter: at_hand[parameter] for parameter in inspect.signature(function).parameters})


@pytest.mark.parametrize(
    ("shape", "options", "tolerance"),
    [
        ("moe_tied", FEW_ROWS, 0.0),
        ("gdn_ratio3", FEW_ROWS, 0.0),
        ("moe_tied", {"backend": "metal", **EXACT}, TOLERANCES["logits"]),
    ],
    ids=["moe", "dense", "many_rows"],
)
def test_random_programs_equal_cold_runs(
    suite: dict[str, ModuleType],
    tiny: Callable[..., Path],
    tmp_path: Path,
    shape: str,
    options: dict[str, Any],
    tolerance: float,
) -> None:
    folder = tiny(SHAPES[shape], "mlx-4bit-g64", dtype="bfloat16")
    load = suite["engine_support"].load
    with (
        load(folder, snapshot_interval=24, **options) as engine,
        load(folder, cache_bytes=0, **options) as cold,
    ):
        suite["test_session_programs"].run_programs(
            engine, cold, tmp_path / "session", programs=6, steps=25, limit=110, tolerance=tolerance
        )
