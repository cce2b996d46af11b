"""The benchmark of a model that drafts for itself, at a tiny shape."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.stress
def test_rows_of_both_candidates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    out = tmp_path / "rows.jsonl"
    args = ["--smoke", "--folder", tmp_path / "model", "--budget", "900KiB", "--out", out]
    monkeypatch.setattr(sys, "argv", ["self_draft.py", *map(str, args)])
    try:
        importlib.import_module("self_draft").main()
    finally:
        for name in ("self_draft", "speculation", "planes"):
            sys.modules.pop(name, None)
    plain, high, passes, copies = map(json.loads, out.read_text().splitlines())
    assert [row["system"] for row in (plain, high, passes, copies)] == [
        *("plain", "high parts", "4-bit copies, their passes", "4-bit copies")
    ]
    assert high["equal_drafted"] is True
    assert high["tokens_per_pass"] == pytest.approx(high["tau"], rel=0.2)
    assert high["draft_ms"] > 0
    assert copies["left_nbytes"] < 900 << 10
