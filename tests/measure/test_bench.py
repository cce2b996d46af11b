"""`weightstream bench` on a tiny checkpoint: its comparisons, the agreement of row and table, and its refusals."""

from __future__ import annotations

import importlib
import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from models import MODELS, TEXT
from weightstream import __version__
from weightstream.adapters.steps.decode_steps import _NUM_TURNS, DecodeSteps, cache_in
from weightstream.cli import app, terminal
from weightstream.measure import bench as timing
from weightstream.measure import comparison
from weightstream.plan.manifest import Workload
from weightstream.runtime.devices.cpu import CpuBackend

transformers = pytest.importorskip("transformers")

bench = importlib.import_module("weightstream.cli.bench")  # in the package the command has this name
CPU = torch.device("cpu")
BUDGET = "512KiB"  # of a model of about 1 MiB
SHORT = ("--seconds", "0.05", "--context", "12")
STEP = ("--batch", "2", "--tokens", "3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-llama")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**TEXT | {"num_hidden_layers": 6}, num_key_value_heads=2)
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


def run(model: Path, *flags: object, budget: str = BUDGET) -> Result:
    arguments = ["bench", str(model), "--device", "cpu", "--device-budget", budget, *SHORT, *map(str, flags)]
    return CliRunner().invoke(app, arguments)


@pytest.fixture(scope="module")
def done(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """One run, for all tests that only read its output and its row."""
    out = tmp_path_factory.mktemp("done") / "rows.jsonl"
    return run(folder, *STEP, "--out", out), out


def rows_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def system(row: dict[str, Any], name: str) -> dict[str, Any]:
    return next(system for system in row["systems"] if system["name"] == name)


def cells(result: Result, name: str) -> list[str]:
    """A row of the table."""
    line = next(line for line in result.stdout.splitlines() if line.startswith(f"│ {name}"))
    return [cell.strip() for cell in line.strip("│").split("│")]


def refused(result: Result) -> str:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    # without the progress of long work
    said = [line for line in result.stderr.splitlines() if not line.startswith("weightstream: ")]
    assert said[0].startswith("error: ") or "Usage" in result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr


# -- output -------------------------------------------------------------------------------------------------------


def test_the_row_is_complete(folder: Path, done: tuple[Result, Path]) -> None:
    result, out = done
    assert result.exit_code == 0, result.output
    (row,) = rows_of(out)
    assert row["model"] == str(folder)
    assert row["device"] == "cpu"
    assert (row["torch"], row["weightstream"]) == (torch.__version__, __version__)
    assert row["workload"] == {"batch": 2, "tokens": 3, "context": 12, "trains": False}
    assert {"time", "command", "processor", "cores", "driver", "python", "cuda", "transformers"} <= row.keys()
    assert row["equal"] is True
    assert row["first_difference"] is row["skipped"] is None
    assert row["limit"] in ("compute", "link", "disk")
    assert row["predicted_s"] > 0
    assert 0 < row["device_nbytes"] <= 512 * 1024 < row["resident_nbytes"] + row["host_nbytes"] + row["disk_nbytes"]
    assert [found["name"] for found in row["systems"]] == ["raw link floor", "offloaded", "resident"]


def test_the_numbers_agree(done: tuple[Result, Path]) -> None:
    (row,) = rows_of(done[1])
    floor, offloaded, resident = row["systems"]
    for found in row["systems"]:
        assert 0 < found["p20_s"] <= found["p50_s"] <= found["p80_s"]
        assert found["num_steps"] >= 5
        assert found["x_floor"] == found["p50_s"] / floor["p50_s"]
        assert found["x_resident"] == found["p50_s"] / resident["p50_s"]
    assert row["step_nbytes"] > 0
    assert row["link_bytes_per_s"] == row["step_nbytes"] / floor["p50_s"]
    total = row["resident_nbytes"] + row["host_nbytes"] + row["disk_nbytes"]
    assert row["whole_floor_s"] == total / row["link_bytes_per_s"]
    assert floor["tokens_per_s"] is floor["weights_nbytes"] is None
    assert offloaded["tokens_per_s"] == 2 * 3 / offloaded["p50_s"]
    assert offloaded["weights_nbytes"] <= 512 * 1024
    assert resident["weights_nbytes"] == total


def test_the_table_equals_the_row(done: tuple[Result, Path]) -> None:
    result, out = done
    (row,) = rows_of(out)
    for found in row["systems"]:
        name, p20, p50, p80, x_floor, x_resident, rate, memory = cells(result, found["name"])
        assert [p20, p50, p80] == [f"{1e3 * found[key]:,.2f}" for key in ("p20_s", "p50_s", "p80_s")]
        assert [x_floor, x_resident] == [f"{found[key]:.3f}" for key in ("x_floor", "x_resident")]
        assert rate == (f"{found['tokens_per_s']:,.1f}" if name != "raw link floor" else "")
        assert memory == (f"{found['weights_nbytes'] / 2**20:.2f}" if name != "raw link floor" else "")
    lines = dict(line.strip().split(": ", 1) for line in result.stdout.splitlines() if ": " in line)
    assert lines["step"] == "batch 2, tokens 3, context 12"
    assert lines["plan"] == row["plan"]
    expected = terminal.prediction_text(row["predicted_s"], system(row, "offloaded")["p50_s"], is_rough=row["is_rough"])
    assert lines["predicted"].startswith(" ".join(expected.split()))
    assert lines["limit"].startswith(row["limit"])
    assert f"{row['link_bytes_per_s'] / 1e9:.1f} GB/s" in lines["link"]
    assert lines["equal"].startswith("yes, 4 outputs")


def test_json_is_only_the_row(folder: Path, tmp_path: Path) -> None:
    result = run(folder, "--json", "--out", tmp_path / "rows.jsonl")
    assert [json.loads(result.stdout)] == rows_of(tmp_path / "rows.jsonl")


def test_rows_are_appended(folder: Path, done: tuple[Result, Path], tmp_path: Path) -> None:
    shutil.copy(done[1], tmp_path / "rows.jsonl")
    run(folder, *STEP, "--out", tmp_path / "rows.jsonl")
    first, second = rows_of(tmp_path / "rows.jsonl")
    assert first.keys() == second.keys()
    assert system(first, "offloaded")["p50_s"] != system(second, "offloaded")["p50_s"]


def test_plain_text_of_100_columns(done: tuple[Result, Path]) -> None:
    result, _ = done
    assert "\x1b" not in result.output
    assert max(map(len, result.stdout.splitlines())) <= 100


def made_up(name: str, p50_s: float) -> dict[str, Any]:
    found = {"name": name, "p20_s": 0.9 * p50_s, "p50_s": p50_s, "p80_s": 1.1 * p50_s, "num_steps": 9}
    found |= {"x_floor": p50_s / 119.9, "x_resident": p50_s / 1.25, "tokens_per_s": 32 / p50_s}
    return found | {"weights_nbytes": 2**39, "peak_nbytes": 2**40}


TIMES = ("p20_s", "p50_s", "p80_s")
SYSTEMS = [made_up("raw link floor", 119.9), made_up("offloaded", 123.45678), made_up("resident", 31.25)]


def test_large_numbers_of_a_gpu_fit_too(capsys: pytest.CaptureFixture[str]) -> None:
    bench.print_systems(SYSTEMS)
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 100
    assert "…" not in shown
    row = next(line for line in lines if "offloaded" in line)
    assert "│ 111,111.10 │ 123,456.78 │ 135,802.46 │" in row
    assert row.split("│")[-2].strip() == "1024.00"


@pytest.mark.parametrize(("width", "lost"), [(60, {"x floor", "p20 ms", "p80 ms"}), (80, set()), (100, set())])
def test_a_narrow_table_drops_the_least_important_columns(
    width: int, lost: set[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    bench.print_systems(
        [found | {key: 1e-4 * found[key] for key in TIMES} | {"peak_nbytes": 2**36} for found in SYSTEMS]
    )
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert sum("│ offloaded " in line for line in lines) == 1
    heads = zip(*(line.strip("┃").split("┃") for line in lines if line.startswith("┃")), strict=True)
    shown = {" ".join(" ".join(head).split()).replace(" /", "/") for head in heads}
    assert {"system", "p20 ms", "p50 ms", "p80 ms", "x floor", "x resident", "tokens/s", "device GiB"} - shown == lost


def test_its_phases_are_named(done: tuple[Result, Path]) -> None:
    said = [line.removeprefix("weightstream: ") for line in done[0].stderr.splitlines() if "still" not in line]
    fill = "filling a cache of 9 positions"
    phases = [fill, "timing the offloaded model", "timing the link alone"]
    phases += ["moving all weights to the device", f"{fill}, with all weights on the device"]
    phases += ["timing the resident model"]
    assert said[-len(phases) :] == phases


@pytest.mark.parametrize("positions", [2048, 100])
def test_a_cpu_fills_a_short_cache_unless_told_otherwise(folder: Path, positions: int, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(folder, tmp_path / "model"))
    facts = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(facts | {"max_position_embeddings": positions}))
    arguments = ["bench", str(copied), "--device", "cpu", "--device-budget", BUDGET, "--seconds", "0.05", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["workload"]["context"] == min(512, positions)


def test_everything_fits(folder: Path, tmp_path: Path) -> None:
    result = run(folder, "--out", tmp_path / "rows.jsonl", budget="64MiB")
    assert result.exit_code == 0, result.output
    (row,) = rows_of(tmp_path / "rows.jsonl")
    assert [found["name"] for found in row["systems"]] == ["offloaded", "resident"]
    assert system(row, "offloaded")["x_floor"] is None
    assert row["link_bytes_per_s"] > 0
    assert "everything fits" in result.stdout


# -- comparisons --------------------------------------------------------------------------------------------------


@pytest.mark.stress
def test_a_difference_is_reported(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = comparison._resident

    def tampered(model: Any, *args: Any) -> Any:
        model.model.layers[2].mlp.up_proj.weight.data[3, 5] += 1
        return plain(model, *args)

    monkeypatch.setattr(comparison, "_resident", tampered)
    result = run(folder, "--out", tmp_path / "rows.jsonl")
    assert result.exit_code == 1
    assert "equal: NO: output 1 of 4 differs between offloaded and resident" in result.stdout
    (row,) = rows_of(tmp_path / "rows.jsonl")
    assert row["equal"] is False
    assert row["first_difference"] == 1


def test_a_model_that_differs_from_itself_counts_as_equal(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = comparison._resident

    def restless(model: Any, *args: Any) -> Any:
        calls = itertools.count(1)
        model.lm_head.register_forward_hook(lambda _, __, output: output + next(calls))
        return plain(model, *args)

    monkeypatch.setattr(comparison, "_resident", restless)
    result = run(folder, "--out", tmp_path / "rows.jsonl")
    assert result.exit_code == 0, result.output
    assert "equal: not known: the model itself is not reproducible here" in result.stdout
    (row,) = rows_of(tmp_path / "rows.jsonl")
    assert row["equal"] is row["first_difference"] is None
    assert row["reproducible"] is False


def test_a_later_difference() -> None:
    ours = [torch.zeros(3) for _ in range(4)]
    theirs = [*ours[:2], torch.tensor([0.0, -0.0, 1e-30]), ours[3]]
    assert comparison.first_difference(ours, ours, torch.equal) is None
    assert comparison.first_difference(ours, theirs, torch.equal) == 3


def test_no_memory_for_the_resident_model(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightstream.store.limits.available_nbytes", lambda: 4096)
    result = run(folder, "--out", tmp_path / "rows.jsonl")
    assert result.exit_code == 0, result.output
    assert "resident: left out: " in result.stdout
    assert "> 4.0KiB free on cpu" in result.stdout
    assert "equal: not compared" in result.stdout
    (row,) = rows_of(tmp_path / "rows.jsonl")
    assert [found["name"] for found in row["systems"]] == ["raw link floor", "offloaded"]
    assert row["equal"] is None
    assert row["skipped"] in result.stdout.replace("\n", " ").replace("           ", "")


def test_the_floor_copies_the_streamed_bytes_of_a_step(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    plain = timing.copies_s
    monkeypatch.setattr(timing, "copies_s", lambda backend, s, seconds: sizes.extend(s) or plain(backend, s, seconds))
    run(folder, "--out", tmp_path / "rows.jsonl")
    assert sum(sizes) == rows_of(tmp_path / "rows.jsonl")[0]["step_nbytes"]
    assert len(sizes) > 4


def test_copies_are_made_in_every_round() -> None:
    backend = CpuBackend()
    copied: list[int] = []
    plain = backend.copy
    backend.copy = lambda copies: copied.extend(c.dst.numel() for c in copies) or plain(copies)  # type: ignore[method-assign]
    seconds = timing.copies_s(backend, [100, 300, 200], 0.01)
    backend.close()
    assert copied[:3] == [100, 300, 200]
    assert len(copied) == 3 * (len(seconds) + 4)  # two to find the number of repeats, two to settle
    assert all(s > 0 for s in seconds)


# -- the steps ----------------------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral"])
def test_every_step_has_other_tokens_and_is_repeated(name: str) -> None:
    steps = DecodeSteps(MODELS[name]().module, Workload(batch=2, tokens=2, context=30), CPU)
    first = [steps() for _ in range(_NUM_TURNS)]
    assert first[0].shape == (2, 128)
    assert not any(torch.equal(first[0], other) for other in first[1:])
    for output in first[:3]:
        assert torch.equal(steps(), output), "another step did not change the cache"


def test_a_step_is_a_forward_on_the_cache_of_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["llama"]().module
    calls: list[tuple[torch.Size, int]] = []

    def look(_: Any, args: Any, kwargs: Any) -> None:
        cache = cache_in(kwargs)
        calls.append((kwargs["input_ids"].shape, 0 if cache is None else cache.get_seq_length()))

    model.register_forward_pre_hook(look, with_kwargs=True)
    steps = DecodeSteps(model, Workload(batch=3, tokens=2, context=11), CPU)
    for _ in range(2):
        steps()
    assert calls == [((3, 9), 0), ((3, 2), 9), ((3, 2), 9)]


def test_a_prompt_step_has_no_cache() -> None:
    model, inputs = MODELS["llama"]().module, []
    steps = DecodeSteps(model, Workload(batch=1, tokens=9, context=9), CPU)
    model.register_forward_pre_hook(lambda _, args, kwargs: inputs.append(kwargs["input_ids"]), with_kwargs=True)
    output = steps()
    assert [ids.shape for ids in inputs] == [(1, 9)]
    assert torch.equal(output, model(input_ids=inputs[0], logits_to_keep=1).logits[:, -1])


# -- the figure ---------------------------------------------------------------------------------------------------


@pytest.mark.stress
def test_the_figure_is_a_picture(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    image = pytest.importorskip("PIL.Image")
    compare = comparison.compare

    def made_up(*args: Any) -> Any:  # a bar of a step of nearly no time would be invisible
        plan, row = compare(*args)
        return plan, row | {"systems": SYSTEMS, "predicted_s": 120}

    monkeypatch.setattr(comparison, "compare", made_up)
    result = run(folder, "--plot", tmp_path / "a.png")
    assert result.exit_code == 0, result.output
    with image.open(tmp_path / "a.png") as picture:
        assert picture.format == "PNG"
        pixels = picture.convert("RGB")
    counts = {color: num for num, color in pixels.getcolors(maxcolors=1 << 20)}
    assert counts[(255, 255, 255)] > 0.3 * pixels.width * pixels.height  # white, not transparent
    for name, color in bench._COLORS.items():
        assert counts.get(tuple(bytes.fromhex(color[1:])), 0) > 100, f"no bar of {name}"
    assert counts.get(tuple(bytes.fromhex(bench._PREDICTED[1:])), 0) > 20


def test_no_matplotlib(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'weightstream[plot]'" in refused(run(folder, "--plot", tmp_path / "a.png"))


@pytest.mark.parametrize("name", ["no-such-folder/a.png", "a.nothing"])
def test_a_figure_that_cannot_be_written_is_refused_before_the_model_is_loaded(tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    assert "file that can be written" in refused(run(tmp_path / "no-model", "--plot", tmp_path / name))


# -- refusals -----------------------------------------------------------------------------------------------------


def test_an_unwritable_row_file_is_reported_first(folder: Path, tmp_path: Path) -> None:
    message = refused(run(tmp_path / "no-model", "--out", tmp_path / "no-such-folder" / "rows.jsonl"))
    assert "no-such-folder" in message
    assert "name a file that can be written" in message


def test_a_budget_that_is_too_small(folder: Path) -> None:
    assert "< resident" in refused(run(folder, budget="1KiB"))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--device-bugdet", BUDGET), "--device-budget"),
        (("--tokens", 0), "--tokens"),
        (("--seconds", 0), "--seconds"),
        (("--device", "warp"), "warp"),
    ],
)
def test_a_wrong_option(folder: Path, flags: tuple[object, ...], expected: str) -> None:
    assert expected in refused(run(folder, *flags))


def test_no_transformers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("weightstream.adapters.hf.load")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install 'weightstream[transformers]'" in refused(run(folder))


def test_not_a_language_model(tmp_path: Path) -> None:
    torch.manual_seed(3)
    MODELS["t5"]().module.save_pretrained(tmp_path)
    assert "bench times language models" in refused(run(tmp_path))


def test_help_lists_the_comparisons() -> None:
    ran = subprocess.run([sys.executable, "-m", "weightstream", "bench", "--help"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    shown = " ".join(ran.stdout.replace("│", " ").split())
    for text in ("raw link floor", "offloaded", "resident", "--batch", "bit by bit", "exits with 1"):
        assert text in shown
