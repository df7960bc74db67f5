"""Comparisons: what lily's process measures, how peers are tried and chosen, what is said of missing ones."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracles.reference import Reference

from lily_py.bench import llama_cpp, run
from lily_py.bench.arms import Arm, ArmResult, run_rounds
from lily_py.bench.cli import main
from lily_py.bench.llama_cpp import Setting
from lily_py.bench.process import ArmError, Finished, run_process
from lily_py.bench.run import RunOptions, RunResult, run_comparison
from lily_py.bench.workload import Measured, Spread, Workload, digest_of, prompt_ids
from lily_py.errors import InvalidArgumentError

LLAMA_BENCH = """\
#!{python}
# Answers as llama-bench does; its rates tell the settings apart.
import json, sys
arguments = [argument for argument in sys.argv[1:] if argument != "--no-warmup"]
options = dict(zip(arguments[0::2], arguments[1::2]))
q4_0 = "Q4_0" in options["-m"]
repack, attention = options["--repack"] == "1", options["-fa"] == "on"
def rate(prompt):
    if prompt:
        return 1000 if (q4_0, repack, attention) == (False, False, True) else 500
    return 300 if (q4_0, repack, attention) == (True, True, False) else 100
tests = []
if options["-n"] == "0":
    tests = [dict(n_prompt=int(c), n_gen=0, n_depth=0, avg_ts=rate(True)) for c in options["-p"].split(",")]
else:
    tests = [dict(n_prompt=0, n_gen=int(options["-n"]), n_depth=int(c), avg_ts=rate(False))
             for c in options["-d"].split(",")]
print(json.dumps(tests))
"""


@pytest.fixture
def fake_llama(tmp_path: Path, synthetic: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with GGUF files of the synthetic checkpoint, and a llama-bench with known answers."""
    programs = tmp_path / "bin"
    programs.mkdir()
    program = programs / "llama-bench"
    program.write_text(LLAMA_BENCH.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv(llama_cpp.BINARIES, str(programs))
    files = tmp_path / "gguf"
    files.mkdir()
    for file_type in llama_cpp.FILE_TYPES:
        (files / f"{synthetic.name}-{file_type}.gguf").write_bytes(b"GGUF")
    return files


def work(folder: Path, **changes: Any) -> Workload:
    return replace(Workload(str(folder), contexts=(8, 16), decode=4, threads=1), **changes)


def test_lily_generates_the_greedy_continuation_in_every_round(synthetic: Path) -> None:
    result = run_comparison(work(synthetic), RunOptions(rounds=2, limits=False))
    (arm,) = result.arms
    assert len(arm.rounds) == 2
    assert all(rate > 0 for measured in arm.rounds for rate in measured.prefill.values())
    assert all(rate > 0 for measured in arm.rounds for rate in measured.decode.values())
    reference = Reference(synthetic)
    for context in (8, 16):
        ids = prompt_ids(context, 4096).tolist()
        for _ in range(5):  # the first token and four more
            ids.append(int(np.argmax(reference.forward(ids).logits[-1])))
        assert result.digests()[context] == {digest_of(ids[context:])}


def test_every_setting_of_llama_cpp_is_tried_and_the_fastest_of_each_phase_kept(
    synthetic: Path, fake_llama: Path
) -> None:
    options = RunOptions(peers=("llama.cpp",), rounds=1, gguf_folder=fake_llama, limits=False)
    result = run_comparison(work(synthetic), options)
    assert len(result.trials) == 8  # two file types, repacking and flash attention on and off
    for context in (8, 16):
        prefill = result.best("llama.cpp", "prefill", context)
        decode = result.best("llama.cpp", "decode", context)
        assert prefill == (Spread(1000, 1000, 1000, 1), "Q4_K_M:repack=0:fa=1:ub=512")
        assert decode == (Spread(300, 300, 300, 1), "Q4_0:repack=1:fa=0:ub=512")


def test_given_settings_are_measured_without_trials(synthetic: Path, fake_llama: Path) -> None:
    settings = (Setting.parse("Q4_0:repack=0"), Setting.parse("Q4_K_M:fa=0:ub=2048"))
    options = RunOptions(
        peers=("llama.cpp",), rounds=1, llama_settings=settings, gguf_folder=fake_llama, limits=False
    )
    result = run_comparison(work(synthetic), options)
    assert [arm.setting for arm in result.arms] == [
        "", "Q4_0:repack=0:fa=1:ub=512", "Q4_K_M:repack=1:fa=0:ub=2048",
    ]  # fmt: skip
    assert result.trials == {}


def test_long_prompts_are_tried_with_larger_batches_too() -> None:
    assert {setting.batch for setting in llama_cpp.candidate_settings((128, 512))} == {512}
    assert {setting.batch for setting in llama_cpp.candidate_settings((128, 2048))} == {512, 2048}


def test_a_missing_peer_is_said(
    synthetic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(llama_cpp.BINARIES, str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    arguments = ["run", str(synthetic), "--contexts", "8", "--decode", "2", "--rounds", "1", "--no-limits"]
    assert main([*arguments, "--peers", "llama.cpp,mlx-lm"]) == 0
    output = capsys.readouterr().out
    assert "llama.cpp: not measured: no llama-bench in the folder that LILY_LLAMA_BIN names" in output
    assert "mlx-lm: not measured: no package mlx or mlx_lm; pip install 'lily-py[bench]'" in output


def test_a_peer_that_would_take_too_long_is_said(synthetic: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(dtype: str, workload: Workload, *, priority: bool) -> Any:
        rate = 4.0 if dtype == "f32" else 0.5
        contexts = workload.contexts
        finished = Finished("", 1.0, None)
        return Measured(dict.fromkeys(contexts, rate), dict.fromkeys(contexts, rate)), finished

    monkeypatch.setattr(run.mlx_lm, "run_dtype", slow)
    monkeypatch.setattr(run.mlx_lm, "missing_reason", lambda: None)
    options = RunOptions(peers=("mlx-lm",), rounds=1, peer_budget=3.5, limits=False)
    result = run_comparison(work(synthetic), options)
    assert result.notes == [
        "mlx-lm: context 16 not measured: about 5 s a round at the rates of the trial, over the budget of 4 s"
    ]
    assert [arm.name for arm in result.arms] == ["lily", "mlx-lm f32"]


def test_mlx_lm_runs_the_same_prompt_and_generates_the_same_tokens(
    synthetic: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        run.mlx_lm, "DTYPES", ("f32",)
    )  # the other one takes seconds a token on some machines
    options = RunOptions(peers=("mlx-lm",), rounds=1, limits=False)
    result = run_comparison(work(synthetic, contexts=(16,)), options)
    lily, peer = result.arms
    assert peer.name == "mlx-lm f32"
    assert peer.rounds[0].digests == lily.rounds[0].digests
    assert result.best("mlx-lm", "decode", 16) is not None


def test_the_order_of_the_arms_turns_around_from_round_to_round() -> None:
    order: list[str] = []

    def arm(name: str) -> tuple[Arm, ArmResult]:
        def measure(workload: Workload) -> Any:
            order.append(name)
            return Measured(), []

        return Arm(name, "", (8,), measure), ArmResult(name, "")

    run_rounds([arm("a"), arm("b"), arm("c")], Workload("x", (8,), 1, 1), 3)
    assert "".join(order) == "abc" + "cba" + "abc"


def test_medians_are_of_rounds_and_ranges_are_shown() -> None:
    arm = ArmResult("lily", "", [Measured(decode={8: rate}) for rate in (10.0, 30.0, 20.0)])
    assert arm.spread("decode", 8) == Spread(20.0, 10.0, 30.0, 3)
    assert str(arm.spread("decode", 8)) == "20.0 [10.0..30.0]"
    assert arm.spread("prefill", 8) is None


def test_tokens_that_change_between_rounds_are_an_error(
    synthetic: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds = [Measured({8: 1.0}, {8: 1.0}, {8: digest}) for digest in ("aa", "bb")]
    result = RunResult(
        "tiny", 1, work(synthetic, contexts=(8,)), [ArmResult("lily", "", rounds, [None, None])]
    )
    monkeypatch.setattr("lily_py.bench.cli.run_comparison", lambda *arguments: result)
    assert main(["run", str(synthetic)]) == 1
    assert "different tokens in different rounds, at context 8" in capsys.readouterr().err


def test_unusable_requests_are_refused(synthetic: Path) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"peer 'ollama' isn't known; choose from llama.cpp, mlx-lm"
    ):
        run_comparison(work(synthetic), RunOptions(peers=("ollama",)))
    with pytest.raises(InvalidArgumentError, match="rounds must be positive, got 0"):
        run_comparison(work(synthetic), RunOptions(rounds=0))
    with pytest.raises(InvalidArgumentError, match="more than the 262144 positions"):
        run_comparison(work(synthetic, contexts=(262_144,)), RunOptions())
    with pytest.raises(InvalidArgumentError, match="'Q4_0:repack=2' isn't of the form"):
        Setting.parse("Q4_0:repack=2")


def test_a_process_that_fails_is_quoted() -> None:
    with pytest.raises(ArmError, match=r"failed with status 3: it broke"):
        run_process([sys.executable, "-c", "import sys; print('it broke', file=sys.stderr); sys.exit(3)"])
    with pytest.raises(ArmError, match="can't be started"):
        run_process(["/nowhere/llama-bench"])


def test_results_survive_json(synthetic: Path, fake_llama: Path) -> None:
    setting = Setting("Q4_0")
    options = RunOptions(
        peers=("llama.cpp",), rounds=1, llama_settings=(setting,), gguf_folder=fake_llama, limits=False
    )
    result = run_comparison(work(synthetic), options)
    again = RunResult.from_json(json.loads(json.dumps(result.as_json())))
    assert again == replace(result, workload=replace(result.workload, checkpoint="tiny"))


def test_a_gguf_file_older_than_the_weights_is_made_again(
    synthetic_dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def export(checkpoint: Any, path: Path, kind: str) -> None:
        made.append(path)
        path.write_bytes(b"GGUF")

    monkeypatch.setattr(llama_cpp, "export_gguf", export)
    path = llama_cpp.ensure_gguf(str(synthetic_dense), "Q4_0", folder=tmp_path)
    assert path == tmp_path / "tiny-dense-Q4_0.gguf"
    llama_cpp.ensure_gguf(str(synthetic_dense), "Q4_0", folder=tmp_path)
    assert len(made) == 1
    os.utime(path, (1, 1))
    llama_cpp.ensure_gguf(str(synthetic_dense), "Q4_0", folder=tmp_path)
    assert len(made) == 2


def test_files_made_for_the_demo_model_dont_land_in_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert llama_cpp.gguf_path("demo", "Q4_0") == tmp_path / "lily" / "gguf" / "demo-Q4_0.gguf"
