"""Trees of drafted tokens from two sources: what followed the text's last words before, and an assistant model.

An assistant fills a static tree of ranks: a node is the token of some rank among the assistant's most likely ones.
Which nodes are in it follows from the measured rate at which a rank is accepted, best products first, as Sequoia
(arXiv 2402.12374) orders them.
"""

from __future__ import annotations

import heapq
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from weightstream.adapters.generation import tree
from weightstream.adapters.generation.tree import Path, Tree
from weightstream.adapters.hf import private
from weightstream.adapters.steps.croppable_cache import croppable
from weightstream.adapters.steps.decode_steps import options_of
from weightstream.adapters.steps.graph_runner import GraphRunner, run_step
from weightstream.adapters.steps.host_values import on_device

NGRAM = 3  # words of the text's end that are looked up, at most
_MOST_MATCHES = 64  # that are read in a round: a text that repeats itself has thousands, and all say the same
_FIRST_RATE, _SECOND_RATE, _DECAY = 0.7, 0.12, 0.5  # of ranks 0, 1, and from each to the next, before any was measured
_PRIOR_VISITS = 16  # measured nodes that weigh as much as these
_ROUNDS_OF_A_TREE = 16  # before the rates may choose another one
_MOST_RANKS = 32
_FEWEST_ROWS = 8  # of an assistant's pass


class Start(NamedTuple):
    """The prompt, as a draft sees it."""

    ids: torch.Tensor
    mask: torch.Tensor | None
    """Of shape (1, tokens); None: no token of the prompt is padding."""
    positions: torch.Tensor
    max_length: int

    @classmethod
    def of(cls, ids: torch.Tensor, device: torch.device, model_kwargs: Mapping[str, Any], max_length: int) -> Start:
        """The prompt of a call of `generate`, from the arguments of its first forward."""
        ids, mask, positions = ids.to(device), model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
        if positions is None:
            positions = torch.arange(ids.shape[1], device=device)[None]
        positions = positions.to(device).reshape(-1, ids.shape[1])[:1]  # some models have several, which text has equal
        return cls(ids, mask if mask is None else mask.to(device), positions, max_length)

    def position_at(self, index: int) -> torch.Tensor:
        """The position of the text's token with this index, from the end of the prompt on."""
        return self.positions[0, -1] + (index + 1 - self.ids.shape[1])

    def seen(self, num_positions: int) -> torch.Tensor:
        """The positions of a cache that attention may see, of shape (positions,): all but the prompt's padding."""
        found = torch.ones(num_positions, dtype=torch.bool, device=self.ids.device)
        if self.mask is not None:
            found[: self.mask.shape[1]] = self.mask[0].bool()
        return found


class Drafts(Protocol):
    """A source of trees for one text."""

    num_drafted: int
    """Nodes of the last tree that are in use, without its root."""

    def start(self, start: Start) -> None:
        """Read the prompt."""

    def draft(self, new: Sequence[int]) -> Tree:
        """The tree to verify next. `new` are the tokens of the text since the last call."""

    def ranks(self, path: Path) -> torch.Tensor:
        """What `learn` needs to know about a path; on the device, since a round waits for it once."""

    def learn(self, nodes: Sequence[int], ranks: Sequence[int]) -> None:
        """Count how good the last tree was. `nodes`: the accepted ones."""


# -- prompt lookup ---------------------------------------------------------------------------------------------------


class LookupTrees:
    """Tries of what followed the text's last words before: the longest match first, of these the newest."""

    num_drafted = 0

    def __init__(self, num_nodes: int, max_depth: int, ngram: int = NGRAM) -> None:
        self._num_nodes = num_nodes
        self._max_depth = max_depth
        self._ngram = ngram
        self._text: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}  # of words: where the text went on after them
        self._device = torch.device("cpu")

    def start(self, start: Start) -> None:
        self._device = start.ids.device
        self._extend(start.ids[0].tolist())

    def draft(self, new: Sequence[int]) -> Tree:
        self._extend(new)
        tokens, parents = self._trie()
        self.num_drafted = len(tokens) - 1
        unused = range(len(tokens), self._num_nodes + 1)
        both = on_device([[*tokens, *[0] * len(unused)], [*parents, *unused]], self._device)
        return tree.tree(both[0], both[1], self._max_depth)

    def ranks(self, path: Path) -> torch.Tensor:
        return path.nodes[:0]

    def learn(self, nodes: Sequence[int], ranks: Sequence[int]) -> None:
        pass

    def _extend(self, new: Sequence[int]) -> None:
        for token in new:
            self._text.append(token)
            for length in range(1, min(self._ngram, len(self._text)) + 1):
                self._ends.setdefault(tuple(self._text[-length:]), []).append(len(self._text))

    def _trie(self) -> tuple[list[int], list[int]]:
        """Tokens and parents of the nodes."""
        tokens, parents = [self._text[-1]], [0]
        children: dict[tuple[int, int], int] = {}
        for end in self._matches():
            node = 0
            for token in self._text[end : end + self._max_depth]:
                if (child := children.get((node, token))) is None:
                    if len(tokens) > self._num_nodes:
                        return tokens, parents
                    child = children[node, token] = len(tokens)
                    tokens.append(token)
                    parents.append(node)
                node = child
        return tokens, parents

    def _matches(self) -> Iterator[int]:
        found: set[int] = set()
        for length in range(min(self._ngram, len(self._text)), 0, -1):
            for end in reversed(self._ends[tuple(self._text[-length:])][:-1]):  # the last is the end of the text
                if end not in found:
                    found.add(end)
                    yield end
                if len(found) == _MOST_MATCHES:
                    return


# -- a static tree of ranks ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class RankRates:
    """How often the token of a rank was accepted, at nodes that were reached."""

    num_ranks: int
    visits: int = 0
    hits: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.hits = [0] * self.num_ranks

    def count(self, rank: int) -> None:
        """Count a node. A rank of `num_ranks` or more: none of its tokens was accepted."""
        self.visits += 1
        if rank < self.num_ranks:
            self.hits[rank] += 1

    def rates(self) -> list[float]:
        """Of each rank, from counts and a prior."""
        priors = [_FIRST_RATE, *(_SECOND_RATE * _DECAY**rank for rank in range(self.num_ranks - 1))]
        return [
            (prior * _PRIOR_VISITS + hits) / (_PRIOR_VISITS + self.visits)
            for prior, hits in zip(priors, self.hits, strict=False)
        ]


RankPath = tuple[int, ...]  # a node: the ranks on the way to it


def rank_tree(rates: Sequence[float], num_nodes: int, max_depth: int, most_inner: int) -> list[RankPath]:
    """The `num_nodes` nodes that are most likely accepted, level by level, without the root.

    A level has at most `most_inner` nodes with children. There are fewer nodes where depth and ranks allow no more.
    """
    best: list[tuple[float, RankPath]] = [(-rates[0], (0,))]
    chosen: list[RankPath] = []
    inner: dict[int, set[RankPath]] = {}
    while best and len(chosen) < num_nodes:
        worth, node = heapq.heappop(best)
        parents = inner.setdefault(len(node) - 1, set())
        if node[:-1] not in parents and len(parents) == most_inner:
            continue
        parents.add(node[:-1])
        chosen.append(node)
        rank = node[-1]
        if rank + 1 < len(rates):
            heapq.heappush(best, (worth / rates[rank] * rates[rank + 1], (*node[:-1], rank + 1)))
        if len(node) < max_depth:
            heapq.heappush(best, (worth * rates[0], (*node, 0)))
    return sorted(chosen, key=lambda node: (len(node), node))


class _Level(NamedTuple):
    """Nodes of one depth that have children, and how an assistant runs them."""

    nodes: torch.Tensor
    """(rows,): the nodes, filled up with the root."""
    num: int
    ancestors: torch.Tensor
    """(rows, nodes of the tree), bool: by the place of their keys after the text's."""
    first: int
    """The place of the first node's key."""


class _Children(NamedTuple):
    """Nodes of one depth, and where their tokens are: the assistant's best tokens at a node, by rank."""

    nodes: torch.Tensor
    parents: torch.Tensor
    ranks: torch.Tensor


class _StaticTree:
    """A tree of ranks on a device, with the passes of an assistant that find its tokens."""

    def __init__(
        self, nodes: list[RankPath], num_nodes: int, max_depth: int, num_rows: int, device: torch.device
    ) -> None:
        self.nodes = nodes
        index: dict[RankPath, int] = {(): 0} | {node: number + 1 for number, node in enumerate(nodes)}
        parents = [0, *(index[node[:-1]] for node in nodes), *range(len(nodes) + 1, num_nodes + 1)]
        self.inner = {index[node[:-1]] for node in nodes}
        tokens = torch.zeros(num_nodes + 1, dtype=torch.long, device=device)
        self.tree = tree.tree(tokens, on_device(parents, device), max_depth)
        by_depth = [[node for node in nodes if len(node) == depth] for depth in range(1, max_depth + 1)]
        self.children = [
            _Children(
                *(
                    on_device(each, device)
                    for each in (
                        [index[node] for node in level],
                        [index[node[:-1]] for node in level],
                        [node[-1] for node in level],
                    )
                )
            )
            for level in by_depth
            if level
        ]
        self.levels: list[_Level] = []
        places: dict[RankPath, int] = {}
        key_depths: list[int] = []
        for level in by_depth:
            run = [node for node in level if index[node] in self.inner]
            if not run:
                break
            first = len(places)
            places |= {node: first + number for number, node in enumerate(run)}
            ancestors = [[False] * num_nodes for _ in range(num_rows)]
            for row, node in enumerate(run):
                for depth in range(1, len(node) + 1):
                    ancestors[row][places[node[:depth]]] = True
            rows = [*(index[node] for node in run), *[0] * (num_rows - len(run))]
            key_depths += [len(node) - 1 for node in run]
            self.levels.append(_Level(on_device(rows, device), len(run), on_device(ancestors, device), first))
        filled = key_depths + [0] * (num_nodes - len(key_depths))
        self.key_depths = on_device(filled, device)  # of the nodes that have keys: tokens after the text


class AssistantTrees:
    """Static trees of ranks with the tokens of an assistant, which runs once a level.

    All its passes have the same shapes: the new tokens of the text in one, then the nodes of a level that have
    children, filled up to `num_rows`. Its cache keeps the text. The keys of nodes are overwritten in the next round.
    """

    num_drafted = 0

    def __init__(
        self, assistant: Any, num_nodes: int, max_depth: int, num_words: int, runner: GraphRunner | None = None
    ) -> None:
        self._assistant = assistant
        self._num_nodes = num_nodes
        self._max_depth = max_depth
        self._num_words = num_words
        self._runner = runner
        self._rates = RankRates(min(num_nodes, num_words, _MOST_RANKS))
        self._num_rows = max(max_depth + 1, _FEWEST_ROWS, num_nodes // 4)
        self._num_rounds = 0
        self._static: _StaticTree | None = None
        self._length = 0  # of the text in the cache
        self._num_cached = 0  # with the rows of the last pass

    def start(self, start: Start) -> None:
        ids, model = start.ids, self._assistant
        self._device = ids.device
        # the text, its new tokens, and the keys of the nodes with what fills up the last pass
        num = tree.cache_length(start.max_length + self._num_nodes + 2 * self._num_rows)
        self._cache = croppable(model, num, 0).cache
        self._pass = tree.NodePass(model, self._cache, start.seen(num), self._forward)
        self._offset, self._last = start.position_at(0), start.position_at(start.max_length - 1)
        model(
            input_ids=ids,
            attention_mask=start.mask,
            position_ids=start.positions,
            **options_of(inspect.signature(model.forward).parameters),
            **{private.cache_argument(): self._cache},
        )
        self._length = self._num_cached = ids.shape[1]
        rows = torch.arange(self._num_rows, device=self._device)
        self._in_order = rows[:, None] >= rows  # each new token of the text sees those before it
        self._rows = rows

    def draft(self, new: Sequence[int]) -> Tree:
        static = self._tree()
        tokens = static.tree.tokens.clone()
        tops = tokens.new_full((len(tokens), self._rates.num_ranks), -1)
        text = on_device([*new, *[0] * (self._num_rows - len(new))], self._device)
        tokens[0], tops[0] = text[len(new) - 1], self._read(text, len(new))
        for depth, children in enumerate(static.children):
            if depth:
                level = static.levels[depth - 1]
                depths = static.tree.depths[level.nodes] - 1  # the root is in the cache as a token of the text
                best = self._best(tokens[level.nodes], depths, level.ancestors, static.key_depths, level.first)
                tops[level.nodes[: level.num]] = best[: level.num]
            tokens[children.nodes] = tops[children.parents, children.ranks]
        self._tops = tops
        self.num_drafted = len(static.nodes)
        return static.tree._replace(tokens=tokens)

    def ranks(self, path: Path) -> torch.Tensor:
        hits = self._tops[path.nodes] == path.tokens[:, None]
        return torch.where(hits.any(1), hits.int().argmax(1), self._rates.num_ranks)

    def learn(self, nodes: Sequence[int], ranks: Sequence[int]) -> None:
        assert self._static is not None
        for node, rank in zip(nodes, ranks, strict=False):
            if node in self._static.inner:  # else the assistant was not asked there
                self._rates.count(rank)

    def _tree(self) -> _StaticTree:
        """The tree of this round."""
        is_due = self._num_rounds % _ROUNDS_OF_A_TREE == 0
        self._num_rounds += 1
        if is_due:
            nodes = rank_tree(self._rates.rates(), self._num_nodes, self._max_depth, self._num_rows)
            if self._static is None or self._static.nodes != nodes:
                self._static = _StaticTree(nodes, self._num_nodes, self._max_depth, self._num_rows, self._device)
        assert self._static is not None
        return self._static

    def _read(self, text: torch.Tensor, num_new: int) -> torch.Tensor:
        """Put the first ones of these tokens into the cache. Returns the best tokens after them."""
        best = self._best(text, self._rows, self._in_order, self._rows, 0)
        self._length += num_new
        return best[num_new - 1]

    def _best(
        self,
        tokens: torch.Tensor,
        depths: torch.Tensor,
        ancestors: torch.Tensor,
        key_depths: torch.Tensor,
        first: int,
    ) -> torch.Tensor:
        """The most likely tokens after each of these, of shape (rows, ranks). The keys of the first `first` ancestors
        lie after the text's already."""
        self._cache.crop(self._length + first - self._num_cached)
        self._num_cached = self._length + first + self._num_rows
        positions = (depths + (self._offset + self._length)).clamp(max=self._last)
        logits = self._pass.logits(tokens, positions, self._length, ancestors, depths, key_depths)
        return logits[:, : self._num_words].topk(self._rates.num_ranks).indices

    def _forward(self, **kwargs: Any) -> Any:
        return run_step(self._runner, self._assistant, (), kwargs, may_capture=True)
