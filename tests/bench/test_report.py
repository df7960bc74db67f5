"""Saved results and the page made of them, and the commands that measure the rest."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path

import pytest

from lily_py.bench import plot, records, tables
from lily_py.bench.ablate import ABLATIONS, AblateResult
from lily_py.bench.arms import ArmResult
from lily_py.bench.cli import main
from lily_py.bench.concurrency import ConcurrencyResult
from lily_py.bench.limits import TokenCost
from lily_py.bench.report import describe_rounds, write_report
from lily_py.bench.roofline import Roofline
from lily_py.bench.rows import RowsResult
from lily_py.bench.run import RunResult
from lily_py.bench.speculation import SpeculationResult
from lily_py.bench.start import StartResult
from lily_py.bench.workload import Measured, Spread, Workload
from lily_py.errors import InvalidArgumentError

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None,
    reason="needs matplotlib: pip install 'lily-py[bench]'",
)


def comparison() -> RunResult:
    """lily and llama.cpp at two settings, two contexts, three rounds."""

    def rounds(prefill: float, decode: float, digest: bool) -> list[Measured]:
        return [
            Measured(
                {128: prefill * factor, 512: prefill * factor},
                {128: decode * factor, 512: decode * factor / 2},
                {128: "d1", 512: "d2"} if digest else {},
                {"memory": {"resident": 2_500_000_000}},
            )
            for factor in ((1.0, 0.9, 1.1) if digest else (1.0, 1.1, 0.9))
        ]

    arms = [
        ArmResult("lily", "", rounds(600, 80, True), [0.0, 0.1, 0.25]),
        ArmResult("llama.cpp", "Q4_0:repack=1:fa=1:ub=512", rounds(250, 40, False), [None] * 3),
        ArmResult("llama.cpp", "Q4_K_M:repack=0:fa=1:ub=512", rounds(400, 30, False), [None] * 3),
    ]
    roofline = Roofline(
        [2],
        {1 << 30: {2: Spread(40e9, 39e9, 41e9, 5)}},
        {"vpdpwssd-512": {2: Spread(480e9, 470e9, 490e9, 5)}},
        {"vpdpwssd-512": "int16 products, int32 sums"},
    )
    return RunResult(
        "35b-a3b-slice4",
        2_466_000_000,
        Workload("35b-a3b-slice4", (128, 512), 64, 2),
        arms,
        {"llama.cpp Q4_0:repack=0:fa=0:ub=512": Measured({512: 111.0}, {512: 22.0})},
        ["mlx-lm: not measured: no package mlx"],
        TokenCost(400_000_000, 0, 0, 200_000_000),
        roofline,
        "vpdpwssd-512",
    )


def test_the_table_sets_lily_against_each_peers_fastest_setting_and_the_limit() -> None:
    lines = [
        [cell.strip() for cell in line.split("|")]
        for line in tables.comparison_table(comparison()).split("\n")
    ]
    assert lines[0] == ["figure", "context", "lily", "llama.cpp", "lily / llama.cpp", "limit", "lily / limit"]
    # 480 Gop/s over 0.4 Gop allow 1,200 tokens a second, 40 GB/s over 0.4 GB allow 100.
    assert lines[2] == [
        "prefill, tok/s", "128", "600 [540..660]", "400 [360..440] Q4_K_M:repack=0:fa=1:ub=512",
        "1.50x [1.23..1.83]",
        "1,200", "50%",
    ]  # fmt: skip
    assert lines[4] == [
        "decode, tok/s", "128", "80.0 [72.0..88.0]", "40.0 [36.0..44.0] Q4_0:repack=1:fa=1:ub=512",
        "2.00x [1.64..2.44]",
        "100", "80%",
    ]  # fmt: skip
    assert lines[5][-1] == "40%"


def test_csv_has_a_line_for_each_figure_of_each_round(tmp_path: Path) -> None:
    path = records.write_csv(comparison(), tmp_path / "run.csv")
    rows = list(csv.DictReader(path.open()))
    assert len(rows) == 3 * 3 * 2 * 2  # arms, rounds, phases, contexts
    lily = [
        float(row["tokens_per_second"])
        for row in rows
        if (row["program"], row["phase"], row["context"]) == ("lily", "decode", "128")
    ]
    assert lily == [80.0, 72.0, 88.0]


@needs_matplotlib
def test_one_picture_shows_lily_the_peers_and_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import matplotlib.pyplot
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(matplotlib.pyplot, "close", drawn.append)
    path = plot.plot_run(comparison(), tmp_path / "run.png")
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    assert path.stat().st_size > 10_000
    (figure,) = drawn
    for panel, lily, peer, limit in zip(
        figure.axes, ([600, 600], [80, 40]), ([400, 400], [40, 20]), ([1200, 1200], [100, 100]), strict=True
    ):
        lines = {
            line.get_linestyle(): list(line.get_ydata()) for line in panel.lines if len(line.get_ydata())
        }
        curves = [container.lines[0].get_ydata().tolist() for container in panel.containers]
        assert curves == [lily, peer]
        assert lines["--"] == pytest.approx(limit)
        labels = [text.get_text() for text in panel.get_legend().get_texts()]
        assert any(label.startswith("limit") for label in labels)
        assert {"lily", "llama.cpp, fastest setting"} <= set(labels)


def all_results() -> list[records.Result]:
    spread = Spread(2.0, 1.0, 3.0, 5)
    arms = {
        "": ArmResult("lily", "", [Measured({128: 100.0}, {128: 30.0})], [None]),
        "integer_dot": ArmResult("lily", "without integer_dot", [Measured({128: 25.0}, {128: 20.0})], [None]),
    }
    run = comparison()
    assert run.roofline is not None
    return [
        run.roofline,
        run,
        RowsResult("tiny", 128, 2, {1: spread, 4: Spread(3.0, 2.0, 4.0, 5)}, {1: spread, 4: spread}),
        ConcurrencyResult("tiny", 128, 64, 2, {1: 100.0, 4: 250.0}, {1: 1.0, 4: 3.9}),
        AblateResult("tiny", Workload("tiny", (128,), 8, 2), arms),
        StartResult(
            "demo", 1_000_000, 16, 1, {"load": spread}, {"resident": 5e7}, {"llama.cpp Q4_0": spread}, []
        ),
    ]


@needs_matplotlib
def test_the_page_is_made_from_the_saved_files_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, page = tmp_path / "results", tmp_path / "docs" / "performance.md"
    for result in all_results():
        records.save(result, folder, "lily bench run somewhere")
    assert main(["report", str(folder), "--out", str(page)]) == 0
    text = page.read_text()
    assert str(tmp_path) not in text
    assert "`lily bench report results`" in text
    for expected in (
        "## Limits of the machine",
        "## 35b-a3b-slice4 beside llama.cpp, 2 threads, context 128, 512",
        "lily generated the same tokens in every round.",
        "Other processes kept up to 0.25 cores busy meanwhile.",
        "- mlx-lm: not measured: no package mlx",
        tables.comparison_table(comparison()),
        "llama.cpp Q4_0:repack=0:fa=0:ub=512 (trial)",
        "## tiny: several rows in one pass, 2 threads",
        "## tiny: what each optimisation is worth",
        "## demo: from nothing to the first token",
        "lily bench run somewhere",
    ):
        assert expected in text, expected
    picture = page.parent / text.split("![Tokens per second against context](")[1].split(")")[0]
    assert picture.is_file()
    assert str(page) in capsys.readouterr().out.splitlines()
    page.unlink()
    assert main(["report", str(folder), "--out", str(page)]) == 0
    assert page.read_text() == text


def test_saved_results_are_read_back_as_they_were(tmp_path: Path) -> None:
    for number, result in enumerate(all_results()):
        path = records.save(result, tmp_path, "lily bench", name=f"result-{number}")[0]
        record = records.load(path)
        assert record.result == result
        assert record.command == "lily bench"
        assert record.machine["cores"] >= 1


def test_the_page_says_when_tokens_changed() -> None:
    result = comparison()
    result.arms[0].rounds[1].digests[128] = "other"
    assert "**lily generated different tokens in different rounds.**" in describe_rounds(result)
    assert "lily generated the same tokens in every round." in describe_rounds(comparison())


def test_files_that_hold_no_result_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="holds no benchmark results"):
        records.load_folder(tmp_path)
    (tmp_path / "x.json").write_text('{"kind": "weather"}')
    with pytest.raises(InvalidArgumentError, match=r"x\.json: isn't a benchmark result"):
        records.load_folder(tmp_path)


def test_rows_tell_the_cost_of_more_rows_relative_to_one(
    synthetic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--counts", "1,3", "--context", "8", "--repeats", "2", "--threads", "1"]
    assert main(["rows", str(synthetic), *arguments, "--save", str(tmp_path)]) == 0
    result = records.load(tmp_path / "rows-tiny-1-threads.json").result
    assert isinstance(result, RowsResult)
    assert result.sequences.keys() == result.tokens.keys() == {1, 3}
    assert all(spread.count == 2 and spread.median > 0 for spread in result.sequences.values())
    printed = capsys.readouterr().out
    relative = result.sequences[3].median / result.sequences[1].median
    assert f"{relative:.2f}" in printed
    assert f"{relative / 3:.2f}" in printed


def test_concurrent_requests_are_measured_with_the_rows_they_share(
    synthetic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--counts", "1,3", "--context", "8", "--decode", "12", "--repeats", "2", "--threads", "1"]
    assert main(["concurrent", str(synthetic), *arguments, "--save", str(tmp_path)]) == 0
    result = records.load(tmp_path / "concurrent-tiny-1-threads.json").result
    assert isinstance(result, ConcurrencyResult)
    assert result.rows_per_pass[1] == 1
    assert 1 <= result.rows_per_pass[3] <= 3
    assert min(result.tokens_per_second.values()) > 0
    assert f"{result.tokens_per_second[3] / 3:.1f}" in capsys.readouterr().out


def test_drafts_are_measured_on_texts_that_repeat_and_on_others(
    synthetic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--context", "60", "--decode", "120", "--repeats", "2", "--threads", "1"]
    assert main(["speculation", str(synthetic), *arguments, "--save", str(tmp_path)]) == 0
    record = records.load(tmp_path / "speculation-tiny-1-threads.json")
    result = record.result
    assert isinstance(result, SpeculationResult)
    copy, edited, chance, fresh = result.texts.values()
    assert 80 < copy.accepted <= copy.drafted
    assert copy.accepted > edited.accepted > chance.accepted
    assert fresh.drafted == fresh.accepted == 0
    # A pass for each token that wasn't an accepted draft, the first one apart.
    assert [text.passes + text.accepted for text in result.texts.values()] == [120] * 4
    assert copy.ratio.count == 2
    assert copy.ratio.low > 0
    assert str(copy.ratio) in capsys.readouterr().out
    page = tmp_path / "page.md"
    write_report([record], page, "again", tmp_path)
    assert str(copy.ratio) in page.read_text()


def test_ablation_measures_everything_on_and_each_optimisation_off(
    synthetic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--contexts", "8", "--decode", "2", "--rounds", "1", "--threads", "1"]
    assert main(["ablate", str(synthetic), *arguments, "--only", "integer_dot", "--save", str(tmp_path)]) == 0
    result = records.load(tmp_path / "ablate-tiny-1-threads.json").result
    assert isinstance(result, AblateResult)
    assert [arm.name for arm in result.arms.values()] == ["lily", "lily without integer_dot"]
    effect = result.effect("integer_dot", "decode", 8)
    whole, less = (arm.spread("decode", 8) for arm in result.arms.values())
    assert whole is not None
    assert less is not None
    assert effect == whole.median / less.median
    assert f"{effect:.2f}x" in capsys.readouterr().out
    assert main(["ablate", str(synthetic), "--only", "magic"]) == 1
    assert f"'magic' isn't known; choose from {', '.join(ABLATIONS)}" in capsys.readouterr().err


def test_an_instruction_set_is_compared_with_the_arm_that_lacks_the_better_ones() -> None:
    arms = {
        name: ArmResult("lily", name, [Measured({8: rate}, {})], [None])
        for name, rate in (("", 90.0), ("avx512vnni", 60.0), ("avxvnni", 40.0), ("avx2", 20.0))
    }
    result = AblateResult("tiny", Workload("tiny", (8,), 1, 1), arms)
    assert result.effect("avx512vnni", "prefill", 8) == 1.5
    assert result.effect("avxvnni", "prefill", 8) == 1.5
    assert result.effect("avx2", "prefill", 8) == 2.0


def test_start_measures_a_fresh_process_and_its_memory(synthetic: Path, tmp_path: Path) -> None:
    arguments = ["--prompt", "4", "--rounds", "1", "--threads", "1", "--save", str(tmp_path)]
    assert main(["start", str(synthetic), *arguments]) == 0
    result = records.load(tmp_path / "start-tiny-1-threads.json").result
    assert isinstance(result, StartResult)
    steps = {step: spread.median for step, spread in result.seconds.items()}
    assert steps["first token"] == pytest.approx(steps["imports"] + steps["load"] + steps["prompt"])
    assert min(steps.values()) > 0
    assert steps["first token"] < steps["process"]
    assert result.weight_bytes < result.memory["resident"] < result.weight_bytes + 600_000_000


def test_commands_are_shown_without_this_machines_folders(synthetic: Path, tmp_path: Path) -> None:
    arguments = [
        "rows",
        str(synthetic),
        "--counts",
        "1",
        "--context",
        "4",
        "--repeats",
        "1",
        "--threads",
        "1",
    ]
    assert main([*arguments, "--save", str(tmp_path), "--name", "mine"]) == 0
    assert records.load(tmp_path / "mine.json").command == (
        "lily bench rows tiny --counts 1 --context 4 --repeats 1 --threads 1"
    )


def test_make_checkpoint_and_its_errors_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "made"
    assert main(["make-checkpoint", "--shape", "tiny-dense", str(folder)]) == 0
    assert capsys.readouterr().out.startswith(f"{folder}: 2.")
    assert main(["make-checkpoint", "--shape", "tiny-dense", str(folder)]) == 1
    assert "pass --force to replace it" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main(["run", str(folder), "--contexts", "128,many"])
    assert stopped.value.code == 2
    assert "'128,many' isn't a list of numbers" in capsys.readouterr().err
