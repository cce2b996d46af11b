"""Hit rates of expert caches, as measured on the routing of real models. Knows no plan.

All are of caches that evict the least recently used row first, at batch 1. Figures are by the authors of the pages that
are named, unless they say "replayed": then a published trace of routing went through such a cache, layer by layer.
"""

from __future__ import annotations

from itertools import pairwise
from math import log2
from typing import NamedTuple

# Between the 0.66 and 0.89 below. GLM-5.2 has 0.74 (github.com/JustVugg/colibri/pull/204).
_UNMEASURED_RECALL = 0.75


class HitCurve(NamedTuple):
    """The hit rates of one model, by the size of the cache.

    Attributes:
        name: the model.
        num_rows: rows of a stack: the experts of a layer.
        per_token: rows that a token uses.
        points: share of the rows that have slots -> hit rate; both rise.
        recall: share of a token's rows that the router of a layer predicts from the input of the layer before.
    """

    name: str
    num_rows: int
    per_token: int
    points: tuple[tuple[float, float], ...]
    recall: float = _UNMEASURED_RECALL

    def at(self, share: float) -> float:
        """The hit rate with slots for this share of the rows, by linear interpolation."""
        for (x0, y0), (x1, y1) in pairwise(((0.0, 0.0), *self.points, (1.0, 1.0))):
            if share <= x1:
                return y0 + (y1 - y0) * (share - x0) / (x1 - x0)
        return 1.0


# If two models have the same numbers of rows, `curve_of` finds the first.
CURVES = (
    # arXiv 2312.17238, figure 2, read off by eye
    HitCurve("Mixtral-8x7B", 8, 2, ((0.25, 0.40), (0.5, 0.67), (0.75, 0.87))),
    # github.com/JustVugg/colibri/pull/1092: 16 slots of 64
    HitCurve("OLMoE-1B-7B", 64, 8, ((0.25, 0.514),)),
    # Hits: github.com/kekzl/imp/pull/1374, whose slots hold one of the three matrices of an expert each. Recall:
    # docs/expert-prediction.md in github.com/Helldez/BigMoeOnEdge, and pull/9 there.
    HitCurve("Qwen3-30B-A3B", 128, 8, ((0.0625, 0.366), (0.19, 0.741), (0.38, 0.894), (0.635, 0.962)), 0.89),
    # Hits: github.com/jundot/omlx/pull/2595, the prompt included. Recall: github.com/Helldez/BigMoeOnEdge/pull/9.
    HitCurve("gemma-4-26B-A4B", 128, 8, ((0.125, 0.45), (0.25, 0.67), (0.5, 0.89)), 0.66),
    # In docs/bench-data of github.com/Helldez/BigMoeOnEdge. First point: 2026-07-20-cache-replay, measured. The others:
    # the trace of 2026-07-15, in which a token uses only 2 experts, replayed: 52, 66, 80 and 89 %. With 4 they are
    # estimated to be 5, 4, 2 and -1 points less, as the traces of Qwen3 and Gemma differ between 3 and 6 experts.
    HitCurve("gpt-oss-120b", 128, 4, ((0.034, 0.27), (0.0625, 0.47), (0.125, 0.62), (0.25, 0.78), (0.5, 0.90))),
    # First point: the rows of the token before, docs/expert-prediction.md in github.com/Helldez/BigMoeOnEdge, as is the
    # recall. The others, of a cache that all layers share: docs/bench-data/2026-07-21-pinned-dense-ab, and
    # 2026-07-24-desktop-qwen36, there.
    HitCurve("Qwen3.6-35B-A3B", 256, 8, ((0.031, 0.354), (0.161, 0.678), (0.269, 0.835), (0.383, 0.890)), 0.81),
    # First and last point: github.com/kekzl/imp/pull/2061, with slots as above; a cache of 12 or 24 % has 62 or 79 %
    # there. The others: github.com/ggml-org/llama.cpp/pull/27861.
    HitCurve("Qwen3.8-Flash-Next", 512, 10, ((0.06, 0.435), (0.125, 0.67), (0.25, 0.81), (0.333, 0.85))),
)


def curve_of(num_rows: int, per_token: float) -> HitCurve:
    """The curve of the model with the most similar routing.

    Hit rates depend on the share of the rows that a token uses, and less on their number.
    """

    def distance(curve: HitCurve) -> float:
        rows = log2(curve.num_rows / num_rows)
        return abs(log2(curve.per_token / per_token) - rows) + abs(rows) / 2

    return min(CURVES, key=distance)
