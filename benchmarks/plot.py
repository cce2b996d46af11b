"""Draws the figures of the documentation, and prints its tables, from the rows of the last commit in `results/`.

python benchmarks/plot.py [folder of the rows]
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib
from rows import RESULTS, read

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

OURS, PEER, PLAIN, LINE, LATER = "#2f6f9f", "#b9b2a6", "#7d8a6a", "#c05020", "#8a5a9f"
STAGES = {"device_s": ("device starts", PEER), "load_s": ("load", OURS), "first_s": ("first step", PLAIN)}
GIB = 2**30
SIMULATED = {  # ms by GPUs: two layers in each ring, independent links of 55.4 GB/s, compressed to 0.67
    "none": {1: 252, 2: 126, 4: 63, 8: 31.5},
    "auto": {1: 167, 2: 84, 4: 42, 8: 21},
}
CODECS = {"2-bit": "dense", "3-bit": "small", "4-bit": "fast"}  # by their names in older rows
COLUMNS = (
    *("bits_per_weight", "decode_tbps", "encode_gbps", "reference_tbps", "x_copy", "times_faster", "x_resident_turns"),
    *("x_floor", "x_copies", "x_resident", "x_limit", "ring_gib", "buffer_gib", "peak_gib", "graphs"),
    *("device_s", "load_s", "first_s", "total_s", "seconds", "read_gbps", "x_direct", "x_predicted"),
    *("x_host", "x_file", "x_arena", "used_share", "anon_peak_growth_gib", "equal"),
    *("step_ms_32", "first_ms", "start_s", "anon_peak_gib", "anon_gib", "device_gib"),
    *("sum_gbps", "hop_ms", "token_ms", "x_predicted_token", "eager_token_ms", "x_predicted_eager_token"),
    *("predicted_ms", "refined_ms", "x_refined", "bound_ms", "x_bound", "link_gbps", "host_ms"),
)
Row = dict[str, Any]


def decoder(rows: list[Row], folder: Path) -> None:
    """Step time of each system as bars, and the link floor as a line; longer bars are cut and labelled."""
    floor = _floor(rows)
    shown = [row for row in rows if row["system"] != "link floor"][::-1]
    end = 2.0 * floor
    figure, axes = plt.subplots(figsize=(8.6, 0.27 * len(shown) + 1.1), layout="constrained")
    bars = axes.barh(_names(shown), [min(row["ms"]["p50"], end) for row in shown], color=_colors(shown))
    labels = [f"{row['ms']['p50']:.1f} ms, {row['peak_gib']:.2f} GiB" for row in shown]
    axes.bar_label(bars, labels, padding=3, fontsize=7)
    axes.axvline(floor, color=LINE, linewidth=1, label=f"link floor, all layers: {floor:.1f} ms")
    axes.set_xlim(0, 1.28 * end)
    axes.set_xlabel("step time, ms (p50), and peak GPU memory", fontsize=8)
    axes.legend(loc="lower right", fontsize=8)
    _finish(axes, f"8B-shape decoder, one token, batch 1, {rows[-1]['gpu']}")
    figure.savefig(folder / "decoder.png", dpi=130)


def prefill(rows: list[Row], folder: Path) -> None:
    """Time over the resident model's, and peak memory, side by side."""
    shown = [row for row in rows if "peak_gib" in row][::-1]
    figure, (left, right) = plt.subplots(
        1, 2, sharey=True, figsize=(8.6, 0.34 * len(shown) + 1.1), layout="constrained"
    )
    ratios = [row["x_resident"] for row in shown]
    left.bar_label(
        left.barh(_names(shown), ratios, color=_colors(shown)), [f"{r:.3f}" for r in ratios], padding=3, fontsize=7
    )
    left.axvline(1, color=LINE, linewidth=1)
    left.set_xlim(0, 1.2 * max(ratios))
    left.set_xlabel("time, x resident", fontsize=8)
    peaks = [row["peak_gib"] for row in shown]
    right.bar_label(
        right.barh(_names(shown), peaks, color=_colors(shown)), [f"{p:.2f}" for p in peaks], padding=3, fontsize=7
    )
    right.set_xlim(0, 1.2 * max(peaks) or 1)
    right.set_xlabel("peak GPU memory, GiB", fontsize=8)
    _finish(left, f"8B-shape decoder, {rows[-1]['tokens']:,} tokens, {rows[-1]['gpu']}")
    _finish(right, "")
    figure.savefig(folder / "prefill.png", dpi=130)


def classic(rows: list[Row], folder: Path) -> None:
    """Step time over max(compute, copies), by the number of tokens."""
    figure, axes = plt.subplots(figsize=(8.6, 3.2), layout="constrained")
    shown = [row for row in rows if "x_limit" in row]
    for index, system in enumerate(dict.fromkeys(row["system"] for row in shown)):
        points = sorted((row["tokens"], row["x_limit"]) for row in shown if row["system"] == system)
        style = ("-", "--", "-.", ":")[index % 4]
        axes.plot(*zip(*points, strict=True), style, marker="o", markersize=3, label=system)
    axes.axhline(1.02, color=LINE, linewidth=1, label="2 % over the limit")
    axes.set_xscale("log", base=2)
    ticks = sorted({row["tokens"] for row in shown})
    axes.set_xticks(ticks, [f"{n:,}" for n in ticks], fontsize=8)
    axes.set_xlabel("tokens in a step", fontsize=8)
    axes.set_ylabel("step, x max(compute, copies)", fontsize=8)
    axes.legend(fontsize=7)
    _finish(axes, f"a quarter and a half of the layers offloaded, {rows[-1]['gpu']}")
    figure.savefig(folder / "classic.png", dpi=130)


def start(rows: list[Row], folder: Path) -> None:
    """Seconds to the end of the first step, stacked by phase, and the anonymous memory."""
    shown = [row for row in rows if "first_s" in row and "load_s" in row and row["system"] != "libraries alone"][::-1]
    figure, axes = plt.subplots(figsize=(8.6, 0.3 * len(shown) + 1.2), layout="constrained")
    ends = [0.0] * len(shown)
    for part, (name, color) in STAGES.items():
        bars = axes.barh(_names(shown), [row[part] for row in shown], left=ends, color=color, label=name)
        ends = [end + row[part] for end, row in zip(ends, shown, strict=True)]
    axes.bar_label(
        bars, [f"{row['total_s']:.2f} s, {row['anon_peak_growth_gib']:.1f} GiB" for row in shown], padding=3, fontsize=7
    )
    axes.set_xlim(0, 1.25 * max(ends))
    axes.set_xlabel("seconds from the call to the end of the first step, and anonymous host memory", fontsize=8)
    axes.legend(fontsize=8)
    _finish(axes, f"loading {rows[-1]['nbytes'] / 1e9:.1f} GB, {rows[-1]['gpu']}")
    figure.savefig(folder / "start.png", dpi=130)


def disk(rows: list[Row], folder: Path) -> None:
    """Disk reads of each system in GB/s, and the rate of direct reads as a line with its p20 to p80."""
    floor = next(row["read_gbps"] for row in rows if row["system"] == "direct reads")
    shown = [row for row in rows if "x_direct" in row][::-1]
    figure, axes = plt.subplots(figsize=(8.6, 0.34 * len(shown) + 1.2), layout="constrained")
    bars = axes.barh(_names(shown), [row["read_gbps"] for row in shown], color=_colors(shown))
    labels = [
        f"{row['read_gbps']:.2f} GB/s, {row['x_direct']:.2f} x, {row['ms']['p50'] / 1e3:.2f} s a step" for row in shown
    ]
    axes.bar_label(bars, labels, padding=3, fontsize=7)
    axes.axvspan(floor["p20"], floor["p80"], color=LINE, alpha=0.2, linewidth=0)
    axes.axvline(floor["p50"], color=LINE, linewidth=1, label=f"direct reads: {floor['p50']:.2f} GB/s")
    axes.set_xlim(0, 1.5 * max(floor["p80"], *(row["read_gbps"] for row in shown)))
    axes.set_xlabel("read from disk, GB/s", fontsize=8)
    axes.legend(loc="lower right", fontsize=8)
    _finish(axes, f"a model of {rows[-1]['nbytes'] / 1e9:.1f} GB, most of it or all on disk, {rows[-1]['gpu']}")
    figure.savefig(folder / "disk.png", dpi=130)


def cells(rows: list[Row], folder: Path) -> None:
    """Measured over predicted, before any step and after the first timed steps; and over the bound of any plan."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.6, 3.6), layout="constrained")
    shown = [row for row in rows if "classic (" not in row["system"]]
    for key, color, label in (("predicted_ms", PEER, "from the profile and shapes"), ("refined_ms", OURS, "refined")):
        found = [row for row in shown if row.get(key)]
        ratios = [row["ms"]["p50"] / row[key] for row in found]
        left.scatter([row["ms"]["p50"] for row in found], ratios, s=14, color=color, label=label)
    left.axhspan(0.9, 1.1, color=PEER, alpha=0.15, label="10 %")
    left.set_xscale("log")
    left.set_xlabel("measured step, ms", fontsize=8)
    left.set_ylabel("measured / predicted", fontsize=8)
    for workload, marker in (("decode, batch 1", "o"), ("decode, batch 32", "s"), ("prefill of 8192", "^")):
        found = [row for row in shown if row["workload"] == workload and row.get("x_bound")]
        found = [row for row in found if "decode" in workload or row["planned_for"] == workload]
        right.scatter(
            *([row["percent"] for row in found], [row["x_bound"] for row in found]), s=16, marker=marker, label=workload
        )
    right.axhline(1.03, color=LINE, linewidth=1, label="1.03")
    right.set_xlabel("device budget, % of the weights", fontsize=8)
    right.set_ylabel("step / max(resident, copies), in plans for it", fontsize=8)
    for axes in (left, right):
        axes.legend(fontsize=7)
        _finish(axes, "8B and 32B shapes" if axes is left else str(rows[-1]["gpu"]))
    figure.savefig(folder / "cells.png", dpi=130)


def coded(rows: list[Row], folder: Path) -> None:
    """Step time over device memory, raw, compressed and of FlexTensor, with link floors; and the codecs' rates."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.6, 3.6), layout="constrained")
    steps = [
        row for row in rows if row.get("tokens") == 1 and "70B" not in row["system"] and "CUDA" not in row["system"]
    ]
    shown = {
        "FlexTensor": ([row for row in steps if row["system"].startswith("FlexTensor")], "s", PLAIN),
        "uncompressed": ([row for row in steps if "codec none" in row["system"]], "^", LATER),
        "compressed": ([row for row in steps if row.get("coded_share", 1) < 1], "o", OURS),
    }
    most = max(row["taken_nbytes"] for row in steps if not row["system"].startswith("resident")) / GIB
    share = next((row["coded_share"] for row in shown["compressed"][0]), 1.0)
    run = max(row["time"] for row in shown["compressed"][0])  # rows of FlexTensor may be older
    floor = next(row for row in _all_rows(folder / "coded.jsonl", "link floor") if row["time"] == run)
    for name, part, color in (("uncompressed", 1.0, LATER), ("compressed", share, OURS)):
        taken = [most * index / 100 for index in range(101)]
        copies = [max(0.0, floor["nbytes"] * part - t * GIB) / floor["gbps"] / 1e6 for t in taken]
        left.plot(taken, copies, "--", linewidth=1, color=color, label=f"PCIe, {name}")
    for name, (found, marker, color) in shown.items():
        points = sorted((row["taken_nbytes"] / GIB, row["ms"]["p50"]) for row in found)
        left.plot(*zip(*points, strict=True), marker, markersize=5, color=color, label=name) if points else None
    left.axhline(floor["ms"]["p50"], color=LINE, linewidth=1, label=f"PCIe, all: {floor['ms']['p50']:.1f} ms")
    left.set_ylim(0, 1.5 * floor["ms"]["p50"])
    left.set_xlabel("device memory taken, GiB", fontsize=8)
    left.set_ylabel("step, ms (p50)", fontsize=8)
    left.legend(fontsize=7, loc="upper right", ncols=2)
    _finish(left, f"8B-shape decoder, one token, {rows[-1]['gpu']}")
    if (path := folder / "codec.jsonl").exists():
        _rates(right, read(path))
    figure.savefig(folder / "coded.png", dpi=200)


def vllm(rows: list[Row], folder: Path) -> None:
    """A decode step inside of vLLM as bars, with the device memory of the whole model."""
    shown = [row for row in rows if row["model"] == "8b" and row["mode"] == "default" and "ms" in row]
    shown = [row for row in shown if row["tp"] == row["pp"] == 1 and not row["quantization"]]
    shown = list({row["system"]: row for row in shown}.values())[::-1]  # the latest
    figure, axes = plt.subplots(figsize=(8.6, 0.3 * len(shown) + 1.1), layout="constrained")
    bars = axes.barh(_names(shown), [row["ms"]["p50"] for row in shown], color=_colors(shown))
    labels = [f"{row['ms']['p50']:.1f} ms, {row['device_gib']:.1f} GiB" for row in shown]
    axes.bar_label(bars, labels, padding=3, fontsize=7)
    axes.set_xlim(0, 1.25 * max(row["ms"]["p50"] for row in shown))
    axes.set_xlabel("decode step, ms (p50, batch 1), and device memory of the model without KV cache", fontsize=8)
    versions = " and ".join(sorted({row["vllm"] for row in shown}))
    _finish(axes, f"vLLM {versions}, compiled and in CUDA graphs, 8B shape, {rows[-1]['gpu']}")
    figure.savefig(folder / "vllm.png", dpi=130)


def codec(rows: list[Row], folder: Path) -> None:
    """Only a table: `coded` draws the rates."""


def models(rows: list[Row], folder: Path) -> None:
    """Seconds per step of FLUX over device memory, with the bound of any schedule; other systems as levels."""
    latest = {row["system"]: row for row in rows if row["model"] == "flux" and "profiled" not in row}
    shown = list(latest.values())
    if not shown:
        return
    figure, axes = plt.subplots(figsize=(8.6, 3.6), layout="constrained")
    ours = sorted((row for row in shown if "budget_nbytes" in row), key=lambda row: row["budget_nbytes"])
    budgets = [row["budget_nbytes"] / GIB for row in ours]
    axes.plot(budgets, [row["bound_ms"] / 1e3 for row in ours], "--", linewidth=1, color=LINE, label="bound")
    axes.plot(budgets, [row["ms"]["p50"] / 1e3 for row in ours], "o-", markersize=5, color=OURS, label="weightstream")
    for row, marker in zip((row for row in shown if row not in ours), "s^v<", strict=False):
        color, seconds, taken = _colors([row])[0], row["ms"]["p50"] / 1e3, row["taken_nbytes"] / GIB
        label = f"{row['system'].replace(', flux', '')}: {seconds:.3f} s, {taken:.2f} GiB"
        axes.plot(taken, seconds, marker, markersize=5, color=color, label=label)
        axes.axhline(seconds, color=color, linewidth=0.7)
    axes.set_ylim(0, 1.25 * max(row["ms"]["p50"] for row in shown) / 1e3)
    axes.set_xlabel("device budget, GiB; of the others, device memory taken", fontsize=8)
    axes.set_ylabel("step, s (p50)", fontsize=8)
    axes.legend(fontsize=7)
    _finish(axes, f"FLUX.1-dev's transformer, 1024 x 1024, {rows[-1]['gpu']}")
    figure.savefig(folder / "models.png", dpi=130)


def gpus(rows: list[Row], folder: Path) -> None:
    """The 8B shape over one, two and four GPUs, all layers streamed, compared with the simulation."""
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for codec, color in (("none", PLAIN), ("auto", OURS)):
        label = "uncompressed" if codec == "none" else "compressed"
        axes.plot(*zip(*SIMULATED[codec].items(), strict=True), color=color, linewidth=1, label=f"{label}, simulated")
        for gpu, marker in (("NVIDIA H200", "o"), ("NVIDIA H100 80GB HBM3", "^")):
            pattern = re.compile(rf"8b, striped, ((?:0\.90\+?)+) GiB, codec {codec}")
            found = [(pattern.fullmatch(row["system"]), row) for row in rows if row["gpu"] == gpu]
            points = [(match[1].count("+") + 1, row["ms"]["p50"]) for match, row in found if match]
            axes.scatter(*zip(*points, strict=True), color=color, marker=marker, s=18, label=f"{label}, {gpu[7:11]}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.yaxis.set_major_formatter("{x:.0f}")
    axes.set_xlabel("GPUs, 0.9 GiB of each", fontsize=8)
    axes.set_ylabel("step, ms (p50)", fontsize=8)
    axes.legend(fontsize=7)
    _finish(axes, "8B's shape, one token, striped; simulated: 55.4 GB/s on every link")
    figure.savefig(folder / "gpus.png", dpi=130)


def _rates(axes: Axes, rows: list[Row]) -> None:
    """The rate of decoding, compared with a copy from device memory to device memory."""
    shown = rows[::-1]
    names = [" ".join(CODECS.get(word, word) for word in name.split()) for name in _names(shown)]
    bars = axes.barh(names, [row["decode_tbps"]["p50"] for row in shown], color=OURS)
    labels = [f"{row['decode_tbps']['p50']:.2f} TB/s, {row['bits_per_weight']:.2f} bits" for row in shown]
    axes.bar_label(bars, labels, label_type="center", color="white", fontsize=7)
    copy = statistics.median(row["copy_tbps"] for row in rows)
    axes.axvline(copy, color=LINE, linewidth=1)
    axes.set_xlim(0, 1.05 * max(copy, *(row["decode_tbps"]["p50"] for row in shown)))
    axes.set_xlabel(f"decoded bytes, TB/s; line: a copy on the device, {copy:.2f}", fontsize=8)
    _finish(axes, "rate of the decoding kernels")
    axes.tick_params(axis="y", labelsize=7)


def markdown(rows: list[Row]) -> str:
    """The rows as a table in Markdown, without the columns that no row has."""
    shown = [column for column in COLUMNS if any(column in row for row in rows)]
    lines = [f"| system | tokens | ms, p20 / p50 / p80 | {' | '.join(shown)} |", "|---|" + "---|" * (len(shown) + 2)]
    for row in rows:
        ms = " / ".join(f"{row['ms'][p]:.2f}" for p in ("p20", "p50", "p80") if p in row.get("ms", ()))
        cells = (row.get(column, "") for column in shown)
        texts = (str(cell.get("p50", "") if isinstance(cell, dict) else cell) for cell in cells)
        lines.append(f"| {row['system']} | {row.get('tokens', '')} | {ms} | {' | '.join(texts)} |")
    return "\n".join(lines)


def _all_rows(path: Path, system: str) -> list[Row]:
    return [row for row in map(json.loads, path.read_text().splitlines()) if row["system"] == system]


def _floor(rows: list[Row]) -> float:
    return next(row["ms"]["p50"] for row in rows if row["system"] == "link floor")


def _names(rows: list[Row]) -> list[str]:
    return [row["system"] for row in rows]


def _colors(rows: list[Row]) -> list[str]:
    first = {"weightstream": OURS, "resident": PLAIN}
    return [first.get(row["system"].split(",")[0], PEER) for row in rows]


def _finish(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=9, loc="left")
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    for draw in (decoder, prefill, classic, start, disk, cells, codec, coded, models, vllm, gpus):
        if (path := folder / f"{draw.__name__}.jsonl").exists():
            alone = draw in (cells, coded, models, vllm, gpus)  # may be measured one by one
            found = read(path, last_commit=not alone)
            draw(found, folder)
            print(f"{draw.__name__}, commit {found[-1]['commit']}\n\n{markdown(found)}\n")
