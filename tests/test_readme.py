"""The README, and the page on chats after it, run as they are pasted: block after block, in one folder."""

from __future__ import annotations

import json
import os
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from trained import smollm2
from weightstream.cli import app

transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CHAT = (ROOT / "docs" / "chat.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def blocks(page: str, *kinds: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(page) if kind in kinds]


def shell(line: str) -> None:
    """A command line. Packages are not installed, and the model is the one that `scripts/fetch-smollm2` makes."""
    command, *arguments = shlex.split(line)
    if command == "pip":
        assert arguments[0] == "install"
        return
    if (command, *arguments) == ("hf", "download", MODEL, "--local-dir", "smollm2"):
        Path("smollm2").symlink_to(smollm2())
        return
    assert command == "weightstream"
    ends = {"input": "Hi\n/exit\n"} if "--chat" in arguments else {}
    result = CliRunner().invoke(app, arguments, **ends)
    assert result.exit_code == 0, result.output
    assert result.stdout.strip()


def side(diff: str, mark: str) -> str:
    """The code before ("-") or after ("+") a change."""
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if line[0] in (" ", mark))


@pytest.fixture
def within(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("weightstream.runtime.devices.cuda.is_available", lambda: False)  # plain models run on the CPU
    return tmp_path


@pytest.mark.usefixtures("within")
def test_blocks_run_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    shown = blocks(README, "text")
    for kind, text in BLOCK.findall(README):
        if kind == "console":
            for line in text.splitlines():
                shell(line.removeprefix("$ "))
        elif kind == "diff":
            before, after = dict[str, Any](), dict[str, Any]()
            exec(side(text, "-"), before)
            plain = capsys.readouterr().out
            exec(
                re.sub(r"^model = .*$", r"\g<0>\nprint(model.weightstream)", side(text, "+"), flags=re.MULTILINE), after
            )
            report = capsys.readouterr().out
            assert report.endswith(plain)
            model = after["model"]
            assert model.weightstream.stats().fills > 30
            _compare(shown[0], report)
            model.weightstream.remove()
        else:
            assert kind == "text", f"blocks of {kind} are not run here"


def _compare(want: str, got: str) -> None:
    """The same text, and lines of the same kinds: times and the plan are those of a machine."""
    assert got.splitlines()[-1] == want.splitlines()[-1]
    assert _kinds(got) == _kinds(want)


def _kinds(report: str) -> list[str]:
    """What lines begin with: a label, or all but the numbers of a line without one."""
    return [re.sub(r"\d[\d.]*", "#", line.split(":")[0]) for line in report.splitlines()[:-1]]


@pytest.mark.stress
@pytest.mark.usefixtures("within")
def test_a_chat_runs_as_its_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    Path("smollm2").symlink_to(smollm2())
    for line in blocks(CHAT, "console"):
        shell(line.removeprefix("$ "))
    (script,) = blocks(CHAT, "python")
    found = dict[str, Any]()
    exec(script, found)
    assert "sky" in capsys.readouterr().out
    found["model"].weightstream.remove()


def test_addresses_and_install_lines_are_those_of_the_project() -> None:
    lines = [line for text in blocks(README, "console") for line in text.splitlines() if "pip install" in line]
    requirement = shlex.split(lines[-1])[-1]
    name, extra, url = re.fullmatch(r"(\w+)\[(\w+)\] @ git\+(https://\S+)", requirement).groups()
    assert name == PROJECT["name"]
    assert extra in PROJECT["optional-dependencies"]
    assert url == PROJECT["urls"]["Repository"]
    assert f"\nrepo_url: {url}\n" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_bounds_of_cards_follow_from_the_formula() -> None:
    """tokens/s = PCIe rate / (0.67 x weights - budget), with the low and the high end of the rate."""
    section = README[README.index("### On your card") : README.index("## Command line")]
    share = float(re.search(r"\((0\.\d+) × bytes of the weights - budget\)", section)[1])
    low, high = (int(percent) / 100 for percent in re.search(r"(\d+) to (\d+) % of", section).groups())
    rates = [float(rate) for rate in re.findall(r"([\d.]+) GB/s \(PCIe \d\s+x16\)", section)]
    assert len(rates) == 3
    budget, cells = 0.0, 0
    for row in re.findall(r"^\|(.*)\|$", section, re.MULTILINE)[2:]:
        _, budget_cell, model, *bounds = (cell.strip() for cell in row.split("|"))
        budget = float(budget_cell.split()[0]) if budget_cell else budget
        streamed_gb = (share * float(re.search(r"([\d.]+) GiB", model)[1]) - budget) * 2**30 / 1e9
        for rate, bound in zip(rates, bounds, strict=True):
            if bound:
                for end, shown in zip((low, high), bound.split("–"), strict=True):
                    assert float(shown) == pytest.approx(end * rate / streamed_gb, rel=0.06), row
                    cells += 1
    assert cells == 24


def test_links_stay_inside_of_the_repository_or_go_to_it() -> None:
    for target in re.findall(r'(?:\]\(|src="|srcset=")([^)"]+)', README):
        assert "://" in target or (ROOT / target.partition("#")[0]).exists(), target
    assert os.path.getsize(ROOT / "README.md") < 20_000


MEASURED = {  # by model and GPU memory for weights: the file of rows, and parts of the system's name
    ("Llama-3.1-8B's layers", "0.5"): ("coded", "weightstream, 0.45 GiB, codec auto, CUDA graph"),
    ("Llama-3.1-8B's layers", "2.7"): ("coded", "weightstream, in the memory of 2 %, codec auto, CUDA graph"),
    ("Llama-3.1-8B's layers", "5.6"): ("coded", "weightstream, in the memory of 4 %, codec auto, CUDA graph"),
    ("Llama-3.1-8B's layers", "8.4"): ("coded", "weightstream, in the memory of 6 %, codec auto, CUDA graph"),
    ("Llama-3.1-70B's layers", "80"): ("coded", "weightstream, 80 GiB, codec auto, eager, 70B shape"),
    ("Llama-3.1-70B, two H200s", "40 on each"): ("tensor_parallel", "70b, 40 GiB each, codec auto"),
    ("gpt-oss-120b", "24"): (
        "experts",
        "experts 24GiB, codec auto, recall 0.75, 0 ahead, gpt_oss in mxfp4, ids as gpt-oss",
    ),
    ("Qwen3-30B-A3B", "16"): ("experts", "experts 25, codec auto, typical, batch 1"),
    ("FLUX.1-dev", "2"): ("pipelines", "flux, weightstream, 2 GiB"),
    ("FLUX.1-dev", "6"): ("pipelines", "flux, weightstream, 6 GiB"),
    ("Wan 2.2 (14B)", "4"): ("pipelines", "wan, weightstream, 4 GiB"),
    ("Llama-3.1-70B, LoRA", "8"): ("train", "70b, ours"),
}


def speed(file: str, name: str) -> float:
    """Tokens per second, or seconds, of the last row whose system has a name that begins like this."""
    rows = [json.loads(line) for line in (ROOT / f"benchmarks/results/{file}.jsonl").read_text().splitlines()]
    if file in ("pipelines", "train"):
        rows = [row | {"system": f"{row.get('model', 'flux')}, {row['system']}"} for row in rows]
    rows = [row for row in rows if row["system"].startswith(name) and row["gpu"] == "NVIDIA H200"]
    if file == "train":
        return min(rows, key=lambda row: row["budget_nbytes"])["ms"]["p50"] / 1e3
    if file == "pipelines":  # of several images, if there is such a row: the first one of a process is slower
        rows = [row for row in rows if row.get("codec") == "auto"]
        return ([row for row in rows if row["s"]["p20"] < row["s"]["p80"]] or rows)[-1]["s"]["p50"]
    return 1e3 / rows[-1].get("token_ms", rows[-1]["ms"])["p50"]


def test_measured_speeds_are_those_of_the_rows() -> None:
    section = README[README.index("## What it reaches") : README.index("### Memory")]
    model, found = "", {}
    for row in re.findall(r"^\|(.*)\|$", section, re.MULTILINE)[2:]:
        name, _, memory, _, shown, _ = (cell.strip() for cell in row.split("|"))
        model = name or model
        found[model, memory] = float(shown.split()[0])
    assert found.keys() == MEASURED.keys()
    for key, (file, name) in MEASURED.items():
        assert found[key] == pytest.approx(speed(file, name), rel=0.035), key
