"""Draws the chart of the README, for light and for dark pages: tokens per second over GPU memory, next to peers.

python benchmarks/chart.py [rows.jsonl] [folder of the figures]

All bars are from one run: of those that measured peers at the most sizes of memory, the last
(`BENCH=coded scripts/gpu bench`).
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

RESULTS = Path(__file__).parent / "results"  # not from rows.py, which needs torch
GIB = 2**30
Row = dict[str, Any]

SERIES = {  # by the beginning and a part of the name of a system
    "accelerate": ("accelerate", ""),
    "diffusers": ("diffusers", ""),
    "FlexTensor": ("FlexTensor", ""),
    "weightstream, uncompressed": ("weightstream", "codec none"),
    "weightstream": ("weightstream", "codec auto"),
}
PEERS = ("accelerate", "diffusers", "FlexTensor")
SMALL_GIB = 1.0  # memory up to here is one group: a few layers, or parts of one
WIDTH, HEIGHT = 820, 330
LEFT, RIGHT, TOP, BOTTOM = 16, 804, 92, 250
GAP = 4


class Theme(NamedTuple):
    """Colours that keep a contrast of 4.5 on the page, as texts, or of 3, as bars."""

    text: str
    faint: str
    rule: str
    bars: dict[str, str]


THEMES = {
    "light": Theme(
        text="#1f2328",
        faint="#59636e",
        rule="#d1d9e0",
        bars=dict(zip(SERIES, ("#8c959f", "#7d6f9c", "#b26a3c", "#74a3cf", "#0a5cad"), strict=True)),
    ),
    "dark": Theme(
        text="#f0f6fc",
        faint="#9198a1",
        rule="#3d444d",
        bars=dict(zip(SERIES, ("#767e88", "#9a8cc0", "#c98a5e", "#3f6e9c", "#58a6ff"), strict=True)),
    ),
}


class Bar(NamedTuple):
    """The fastest row of a series among those of about the same memory."""

    series: str
    tokens_per_s: float


def run_with_peers(rows: list[Row]) -> list[Row]:
    """The steps of one token of the 8B shape in that run."""
    runs: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.get("tokens") == 1 and "ms" in row and "70B" not in row["system"]:
            runs[row["time"]].append(row)
    return max(runs.values(), key=lambda run: (len(grouped(run)), run[0]["time"]))


def grouped(rows: list[Row]) -> dict[str, list[Bar]]:
    """Bars by GPU memory, in the order of `SERIES`. A group without a peer is left out.

    A row that was measured in a peer's memory, and takes a little less of it, is in that peer's group.
    """
    sizes: dict[str, dict[str, float]] = defaultdict(dict)
    for row in sorted(rows, key=lambda row: float(row["taken_nbytes"])):
        name = next((name for name, (start, part) in SERIES.items() if _is(row, start, part)), None)
        if name is not None:
            bars = sizes[_memory(row.get("than_taken_nbytes", row["taken_nbytes"]) / GIB)]
            bars[name] = max(bars.get(name, 0.0), 1e3 / row["ms"]["p50"])
    shown = {size: [Bar(name, bars[name]) for name in SERIES if name in bars] for size, bars in sizes.items()}
    return {size: bars for size, bars in shown.items() if any(bar.series in PEERS for bar in bars)}


def drawn(rows: list[Row], theme: Theme) -> str:
    """The chart as SVG."""
    groups = grouped(rows)
    num_bars = sum(map(len, groups.values()))
    spacing = 40 + 60 * (len(groups) < 4)
    width = (RIGHT - LEFT - spacing * len(groups)) / num_bars
    most = max(bar.tokens_per_s for bars in groups.values() for bar in bars)
    parts = [_text(LEFT, 24, "Tokens per second, batch 1", size=17, fill=theme.text, weight=600)]
    parts += [_text(LEFT, 44, _subtitle(rows), size=12.5, fill=theme.faint)]
    parts += _legend(groups, theme)
    x = LEFT + spacing / 2
    for size, bars in groups.items():
        start = x
        for bar in bars:
            parts += _bar(bar, x, width, most, theme)
            x += width
        parts.append(_text((start + x) / 2, BOTTOM + 20, size, size=13, fill=theme.text, anchor="middle"))
        x += spacing
    parts.append(f'<path d="M{LEFT} {BOTTOM}.5H{RIGHT}" stroke="{theme.rule}"/>')
    parts.append(
        _text((LEFT + RIGHT) / 2, BOTTOM + 40, "GPU memory for weights", size=12.5, fill=theme.faint, anchor="middle")
    )
    parts += [_text(LEFT, HEIGHT - 12, _footer(rows), size=11.5, fill=theme.faint)]
    label = escape(_label(groups), {'"': "&quot;"})
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}"'
    font = "-apple-system,BlinkMacSystemFont,'Segoe UI','Noto Sans',Helvetica,Arial,sans-serif"
    return "\n".join([f'{head} font-family="{font}">', *parts, "</svg>\n"])


def _is(row: Row, start: str, part: str) -> bool:
    return row["system"].startswith(start) and part in row["system"]


def _memory(gib: float) -> str:
    return f"{gib:.1f} GiB" if gib > SMALL_GIB else f"under {SMALL_GIB:g} GiB"


def _subtitle(rows: list[Row]) -> str:
    graphs = [row for row in rows if row["system"] == "resident, CUDA graph"] or rows
    best = 1e3 / min(row["ms"]["p50"] for row in graphs if row["system"].startswith("resident"))
    facts = "Llama-3.1-8B's shape, 13 GiB of bf16 layers; fastest setting of each tool"
    return f"{facts}. All layers in GPU memory: {float(f'{best:.2g}'):.0f}."


def _footer(rows: list[Row]) -> str:
    row = rows[-1]
    versions = [f"{name} {row[name]}" for name in ("accelerate", "diffusers") if _measured(rows, name)]
    versions += [f"FlexTensor {row['flextensor']}"] if _measured(rows, "FlexTensor") else []
    torch = row["torch"].partition("+")[0]
    facts = [f"One {row['gpu']}, PCIe 5 x16", f"torch {torch}", *versions, f"one run, {row['time'][:10]}"]
    return ", ".join(facts)


def _measured(rows: list[Row], peer: str) -> bool:
    return any(row["system"].startswith(peer) for row in rows)


def _label(groups: dict[str, list[Bar]]) -> str:
    texts = [
        f"{size}: " + ", ".join(f"{bar.series} {_number(bar.tokens_per_s)}" for bar in bars)
        for size, bars in groups.items()
    ]
    return "Tokens per second. " + ". ".join(texts)


def _legend(groups: dict[str, list[Bar]], theme: Theme) -> list[str]:
    shown = {bar.series for bars in groups.values() for bar in bars}
    parts, x = [], float(LEFT)
    for name in (name for name in SERIES if name in shown):
        parts.append(f'<rect x="{x:.1f}" y="58" width="11" height="11" rx="2" fill="{theme.bars[name]}"/>')
        parts.append(_text(x + 17, 68, name, size=12.5, fill=theme.text))
        x += 42 + 7 * len(name)
    return parts


def _bar(bar: Bar, x: float, width: float, most: float, theme: Theme) -> list[str]:
    height = max(2.0, (BOTTOM - TOP) * bar.tokens_per_s / most)
    is_ours = bar.series == "weightstream"
    shape = f'<rect x="{x:.1f}" y="{BOTTOM - height:.1f}" width="{width - GAP:.1f}" height="{height:.1f}" rx="2"'
    label = _text(
        x + (width - GAP) / 2,
        BOTTOM - height - 6,
        _number(bar.tokens_per_s),
        size=13,
        fill=theme.text if is_ours else theme.faint,
        anchor="middle",
        weight=700 if is_ours else 400,
    )
    return [f'{shape} fill="{theme.bars[bar.series]}"/>', label]


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 20 else f"{value:.1f}"


def _text(x: float, y: float, text: str, *, size: float, fill: str, anchor: str = "start", weight: int = 400) -> str:
    style = f'font-size="{size:g}" fill="{fill}" text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


if __name__ == "__main__":
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS / "coded.jsonl"
    folder = Path(sys.argv[2]) if len(sys.argv) > 2 else RESULTS
    run = run_with_peers([json.loads(line) for line in source.read_text().splitlines()])
    for name, theme in THEMES.items():
        (folder / f"tokens-{name}.svg").write_text(drawn(run, theme))
    print(_label(grouped(run)))
    print(_footer(run))
