"""The benchmark of several tokens a pass, at a tiny shape: its rows, and its timing of rounds."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("speculation")
    monkeypatch.setattr(module.checkpoint, "TINY", module.checkpoint.TINY | TINY)
    for name, value in {"WIDTHS": (4,), "COMPARED": (4,), "SHORT": 6, "LONG": 10}.items():
        monkeypatch.setattr(module, name, value)
    for name, shape in module.SHAPES.items():
        monkeypatch.setitem(module.SHAPES, name, shape._replace(num_tokens=60))
    yield module
    sys.modules.pop("speculation")


def rows_of(module: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, *args: str) -> list[dict[str, Any]]:
    out = folder / "rows.jsonl"
    common = ["speculation.py", "--smoke", "--folder", str(folder / "model"), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", [*common, *args])
    module.main()
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.stress
def test_all_parts(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = rows_of(bench, tmp_path, monkeypatch)
    timed = [row for row in found if "ms" in row]
    assert len(timed) == 1 + 1 + 2 + 2 + 1 + 1  # plain, a width, drafts, two split ones, resident: plain and a width
    assert all(row["ms"]["p20"] <= row["ms"]["p50"] <= row["ms"]["p80"] for row in timed)
    assert all(0 < row["pass_ms"] < row["ms"]["p80"] and row["round_ms"] > 0 for row in timed)
    assert {row["acceptance"] for row in found if "speculate" in row} == {0.0, 0.6}
    assert [row["equal_resident"] for row in found if "equal_resident" in row] == [True]
    assert not any(row["cudnn_attention"] for row in found)


@pytest.mark.few(1)
@pytest.mark.parametrize(("more", "widths"), [([], [1, 10]), (["--parts", "plain"], [1]), (["--limit", "0"], [1])])
def test_a_model_made_on_the_device(
    more: list[str], widths: list[int], bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, *found = rows_of(bench, tmp_path, monkeypatch, "--shape", "70b", "--budget", "300KiB", *more)
    assert [row["width"] for row in found] == widths
    assert all(row["system"] == "weightstream, 70B shape, 300KiB" for row in found)
    assert "equal" in found[-1] or widths == [1]


def test_rounds_are_those_between_replays(bench: Any) -> None:
    passes = [bench.Pass(float(k), k + 0.25) for k in range(7)]
    times = bench.Run(0.0, None, None, passes, [10, 11, 12, 13, 15, 19, 20]).times()
    assert times.rounds == [1000.0] * 3
    assert times.passes == [250.0] * 3
    assert times.between == [750.0] * 3
    assert times.tokens_s == pytest.approx(7 / 3)
    assert (times + times).tokens_s == times.tokens_s
    assert bench.Run(0.0, None, None, passes, []).times().num_tokens == 3  # plain decoding
    assert times.row(100.0)["round_ms"] == 650.0


def test_a_gpu_without_room_for_all_layers(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, made = bench.weightstream.offload, []

    def offload(model: Any, **settings: Any) -> Any:
        made.append(model)
        if len(made) == 1:
            raise torch.OutOfMemoryError("no room")
        return plain(model, **settings)

    monkeypatch.setattr(bench.weightstream, "offload", offload)
    model = bench.offloaded(bench.checkpoint.TINY, torch.device("cpu"), 300 << 10)
    assert model is made[1]
    model.weightstream.remove()


def test_a_draft_proposes_the_text_of_passes_whose_rows_have_other_bits(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = torch.arange(40)
    rows: list[dict[str, Any]] = []
    made = bench.Bench(None, torch.zeros(1, bench.PROMPT, dtype=torch.long), 40, lambda **row: rows.append(row))
    made.text = [1] * 40
    proposed: list[Any] = []

    def run(num: int, width: int, *, known: Any = None, **_: Any) -> Any:
        proposed.append(known)
        ids = torch.cat([made.ids, text[None, :num]], 1)
        passes = [bench.Pass(float(k), k + 0.25) for k in range(7)]
        return bench.Run(0.0, SimpleNamespace(speculation=None, replays=0, reason=None), ids, passes, list(range(7)))

    monkeypatch.setattr(made, "run", run)
    made.accepted(bench.Drafted(16, 8.0, 9.0, num_texts=2), plain_s=1.0)
    assert proposed == [None, None, text.tolist(), text.tolist()]
    assert (rows[0]["equal"], rows[0]["equal_drafted"]) == (False, True)


@pytest.mark.parametrize("tau", [2.5, 8.0])
def test_passes_keep_tau_tokens(tau: float, bench: Any) -> None:
    text = list(range(500))
    draft = bench.ScriptedDraft(text, 0.0, 15, 0, tau)
    length, kept = bench.PROMPT, []
    for _ in range(20):
        ids, _ = draft.get_candidates(torch.zeros(1, length, dtype=torch.long))
        right = [a == b for a, b in zip(ids[0, length:].tolist(), text[length - bench.PROMPT :], strict=False)]
        kept.append(right.index(False) + 1)
        length += kept[-1]
    assert set(kept) == {int(tau), int(tau + 0.5)}
    assert sum(kept) == 20 * tau


def test_layers_that_start_on_the_host(bench: Any) -> None:
    cpu = torch.device("cpu")
    plain, other = (bench.drawn(bench.checkpoint.TINY, cpu, host_layers) for host_layers in (0, 2))
    ids = torch.arange(5)[None]
    assert torch.equal(plain(ids).logits, other(ids).logits)
    assert plain(ids).logits.isfinite().all()
