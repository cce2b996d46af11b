"""Draws the figures of the README from the rows of the last run in `results/`.

python benchmarks/plot.py
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"


def decoder() -> None:
    """Step time of each system as bars, and the link floor as a line."""
    rows = [json.loads(line) for line in (RESULTS / "decoder.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["commit"] == rows[-1]["commit"]]
    floor = next(row["ms"]["p50"] for row in rows if row["system"] == "link floor")
    shown = [row for row in rows if row["system"] != "link floor"][::-1]
    figure, axes = plt.subplots(figsize=(8, 0.45 * len(shown) + 1.2), layout="constrained")
    bars = axes.barh([row["system"] for row in shown], [row["ms"]["p50"] for row in shown], color="#4878a8")
    labels = [
        f"{row['ms']['p50']:.1f} ms" + (f", {row['peak_gib']:.2f} GiB" if "peak_gib" in row else "") for row in shown
    ]
    axes.bar_label(bars, labels, padding=3)
    axes.axvline(floor, color="#c05020", linewidth=1, label=f"link floor, all layers: {floor:.1f} ms")
    axes.set_xlim(0, 1.25 * max(row["ms"]["p50"] for row in shown))
    axes.set_xlabel("step time, ms (p50); GPU memory at the peak")
    axes.set_title(f"8B-shape decoder, one token, batch 1, {rows[-1]['gpu']}", fontsize=10)
    axes.legend(loc="upper right", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(RESULTS / "decoder.png", dpi=130)


if __name__ == "__main__":
    decoder()
