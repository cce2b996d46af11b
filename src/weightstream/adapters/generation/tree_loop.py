"""The loop of `generate` with trees of drafted tokens, which transformers calls when it has prepared all that it needs.

A round drafts a tree, verifies it in one pass, follows the chosen tokens and compacts the cache, all on the device.
Then the host waits once, for the accepted tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from weightstream.adapters.generation import tree
from weightstream.adapters.generation.drafts import DraftCounts
from weightstream.adapters.generation.speculation import Draft, SpeculationReport
from weightstream.adapters.generation.tree import NodePass, Path, Tree
from weightstream.adapters.generation.tree_drafts import NGRAM, AssistantTrees, Drafts, LookupTrees, Start
from weightstream.adapters.hf import private
from weightstream.adapters.steps.croppable_cache import croppable, is_croppable
from weightstream.adapters.steps.decode_steps import cache_in
from weightstream.adapters.steps.graph_runner import GraphRunner, run_step
from weightstream.errors import UnsupportedError

DRAFTS = ("assistant_model", "prompt_lookup_num_tokens")  # settings of `generate` that choose the draft of a tree
_OUTPUTS = ("output_attentions", "output_hidden_states")
_INPUTS = ("inputs_embeds", "token_type_ids")
# processors of transformers that keep no state and accept any text: they may be called past the end of a path
_STATELESS = frozenset(
    "MinLength MinNewTokensLength Temperature RepetitionPenalty TopP TopK TopH MinP Typical Epsilon Eta "  # noqa: SIM905
    "ExponentialDecayLengthPenalty NoRepeatNGram SequenceBias NoBadWords ForcedBOSToken ForcedEOSToken InfNanRemove "
    "LogitNormalization SuppressTokensAtBegin SuppressTokens".split()
)


def check(num_nodes: int, draft: Draft | None, bits: str | None) -> None:
    """Refuse settings that no tree can have.

    Raises:
        UnsupportedError: for a draft that makes no trees, for none, and for `bits="token"`.
    """
    if num_nodes < 1:
        raise UnsupportedError(f"tree_nodes is {num_nodes}, and a tree needs 1 or more")
    if draft is None or draft.kind not in ("prompt lookup", "assistant"):
        given = "no draft was given" if draft is None else f"{draft.kind} drafts no trees"
        raise UnsupportedError(f"tree_nodes: {given}; give {' or '.join(DRAFTS)}, or leave tree_nodes out")
    if bits == "token":
        raise UnsupportedError(
            'bits="token": the keys of a tree lie at other places than those of one token at a time, so that attention '
            "adds them in another order; without tree_nodes, passes can have these bits"
        )


def why_no_trees(model: Any, draft: Draft, setting: Callable[[str], Any]) -> str | None:
    """Reason against trees for this call, or None; `generate` may still run it in transformers' way."""
    if (reason := tree.why_no_tree(model, "the model")) is not None:
        return reason
    if chosen := [name for name in _OUTPUTS if setting(name)]:
        return f"{chosen[0]}: they are not kept for the nodes of a tree"
    if given := [name for name in _INPUTS if setting(name) is not None]:
        return f"{given[0]}: the nodes of a tree have token ids only"
    if setting("stop_strings") is not None:
        return "stop_strings: transformers passes the tokenizer to its own loops only"
    return None if draft.kind == "prompt lookup" else _unsuited_assistant(model, setting("assistant_model"), setting)


def _unsuited_assistant(model: Any, assistant: Any, setting: Callable[[str], Any]) -> str | None:
    if (reason := tree.why_no_tree(assistant, "the assistant")) is not None:
        return reason
    if setting("assistant_tokenizer") is not None or _num_words(assistant) != _num_words(model):
        return "the assistant has other tokens than the model"
    if assistant.device != model.device:
        return f"the assistant is on {assistant.device}, and the model on {model.device}"
    return None


def _num_words(model: Any) -> int:
    return int(model.config.get_text_config(decoder=True).vocab_size)


class TreeSteps:
    """The forwards of one `generate` with trees: passes of `width` nodes, the root included."""

    def __init__(
        self,
        model: Any,
        draft: Draft,
        num_nodes: int,
        runner: GraphRunner | None,
        setting: Callable[[str], Any],
        assistant_runner: GraphRunner | None = None,
    ) -> None:
        self.width = num_nodes + 1
        self.counts = DraftCounts()
        self._model = model
        self._kind = draft.kind
        self._max_depth = min(draft.num, num_nodes)
        self._runner = runner
        self._assistant = setting("assistant_model") if draft.kind == "assistant" else None
        self._streamer = setting("streamer")  # transformers does not pass it to the loops of others
        self._drafts: Drafts
        if draft.kind == "prompt lookup":
            ngram = setting("max_matching_ngram_size") or NGRAM
            self._drafts = LookupTrees(num_nodes, self._max_depth, ngram)
        else:
            self._drafts = AssistantTrees(
                self._assistant, num_nodes, self._max_depth, _num_words(model), assistant_runner
            )

    def report(self) -> SpeculationReport:
        return SpeculationReport(
            draft=f"a tree of {'prompt lookup' if self._kind == 'prompt lookup' else 'an assistant'}",
            width=self.width,
            passes=self.counts.passes,
            tokens_per_pass=self.counts.tokens_per_pass,
            acceptance=self.counts.acceptance,
            bits="rows",
            rows="at once",
        )

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, the model's `generate` makes a cache that can be cropped, with room for the nodes of a pass."""

        def put_cache(config: Any, model_kwargs: dict[str, Any], mode: Any, batch: int, length: int) -> None:
            made = croppable(self._model, tree.cache_length(length + self.width), 0)
            model_kwargs[private.cache_argument()] = made.cache

        with private.generating(self._model, put_cache=put_cache):
            yield

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options of `generate` with this loop."""
        return {name: value for name, value in options.items() if name != "assistant_model"} | {
            "custom_generate": self.loop
        }

    def owns(self, kwargs: dict[str, Any]) -> bool:
        """Whether a forward verifies a tree."""
        ids = kwargs.get("input_ids")
        return ids is not None and ids.shape[-1] == self.width and is_croppable(cache_in(kwargs))

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any, *, may_capture: bool) -> Any:
        """The output of a pass that verifies a tree. `may_capture`: it may run in a graph."""
        return run_step(self._runner, forward, args, kwargs, may_capture=may_capture)

    def loop(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        """For `generate(custom_generate=…)`: called when all is prepared; returns what `generate` returns."""
        cache = model_kwargs[private.cache_argument()]
        text = _Text(input_ids, stopping_criteria, generation_config, self._streamer)
        start = Start.of(input_ids, model.device, model_kwargs, text.max_length)
        rule = _Rule(logits_processor, bool(generation_config.do_sample))
        verify = tree.NodePass(model, cache, start.seen(cache.layers[0].max_cache_len))
        logits = private.prefill(model, input_ids, generation_config, model_kwargs).logits[0, -1:]
        choose = _Choice(rule, text.ids, logits)
        path = tree.accepted_path(tree.root_only(logits.device), 0, choose, waits=False)
        new = text.take(path, path.tokens.tolist(), choose)
        if not text.is_done:
            self._drafts.start(start)
        while not text.is_done:
            nodes = self._drafts.draft(new)
            new = self._round(text, rule, cache, verify, nodes, start)
        return text.result(cache)

    def _round(self, text: _Text, rule: _Rule, cache: Any, verify: NodePass, nodes: Tree, start: Start) -> list[int]:
        """Verify a tree. Returns the new tokens of the text."""
        length, depth = text.num_tokens - 1, self._max_depth
        positions = (nodes.depths + start.position_at(length)).clamp(max=start.position_at(start.max_length - 1))
        logits = verify.logits(nodes.tokens, positions, length, nodes.ancestors, nodes.depths, nodes.depths)
        choose = _Choice(rule, text.ids, logits)
        path = tree.accepted_path(nodes, depth, choose, waits=rule.waits)
        tree.keep_path(cache.layers, length, path.nodes)
        ranks = self._drafts.ranks(path)
        values = torch.cat([path.num_accepted, path.nodes, path.tokens, ranks]).tolist()  # the host waits here
        num = values[0] + 1
        on_path, tokens, on_ranks = values[1 : 1 + num], values[2 + depth : 2 + depth + num], values[3 + 2 * depth :]
        self._drafts.learn(on_path, on_ranks[:num])
        new = text.take(path, tokens, choose)
        cache.crop(len(new) - self.width)
        self.counts.passes += 1
        self.counts.drafted += self._drafts.num_drafted
        self.counts.accepted += len(new) - 1
        self.counts.matched += len(new) - 1
        return new


class _Rule(NamedTuple):
    """How tokens are chosen."""

    processors: Any
    draws: bool

    @property
    def waits(self) -> bool:
        """Whether a processor may only see accepted tokens, so that the host has to wait for each."""
        return not all(_is_stateless(each) for each in self.processors)


def _is_stateless(processor: Any) -> bool:
    kind = type(processor)
    name = kind.__name__.removesuffix("LogitsWarper").removesuffix("LogitsProcessor")
    return kind.__module__ == "transformers.generation.logits_process" and name in _STATELESS


class _Choice:
    """Chooses the tokens of a path one after the other, as transformers' loop does with one token a pass."""

    def __init__(self, rule: _Rule, ids: torch.Tensor, logits: torch.Tensor) -> None:
        self._rule = rule
        self._ids = ids
        self._logits = logits
        self._best = None if rule.draws or rule.processors else logits.argmax(-1)
        self._scores: list[torch.Tensor] = []
        self._random = torch if ids.device.type == "cpu" else torch.get_device_module(ids.device)
        self._states: list[torch.Tensor] = []  # random states before each draw

    def __call__(self, node: torch.Tensor) -> torch.Tensor:
        if self._best is not None:
            return self._best.index_select(0, node)
        scores = self.logits(node)
        if self._rule.processors:
            scores = self._rule.processors(self._ids, scores)
            self._scores.append(scores)
        token = self._draw(scores) if self._rule.draws else scores.argmax(-1)
        self._ids = torch.cat([self._ids, token[None]], 1)
        return token.to(node.device)

    def logits(self, node: torch.Tensor) -> torch.Tensor:
        """The logits of a node, as transformers returns them: (1, words)."""
        return self._logits.index_select(0, node).to(self._ids.device, torch.float32, copy=True)

    def scores(self, number: int, node: torch.Tensor) -> torch.Tensor:
        """The processed logits of the node with this number on the path."""
        return self._scores[number] if self._scores else self.logits(node)

    def _draw(self, scores: torch.Tensor) -> torch.Tensor:
        self._states.append(self._random.get_rng_state())
        return draw(scores.softmax(-1))

    def take_back(self, num_kept: int) -> None:
        """Leave the random state as it was after this number of tokens: later draws must not depend on the draft."""
        if num_kept < len(self._states):
            self._random.set_rng_state(self._states[num_kept])


def draw(probabilities: torch.Tensor) -> torch.Tensor:
    """The tokens that `torch.multinomial` draws from (rows, words). It would wait for the device to check its input."""
    return torch.div(probabilities, torch.empty_like(probabilities).exponential_()).argmax(-1)


class _Text:
    """The text so far, and what transformers' loops return with it."""

    def __init__(self, ids: torch.Tensor, criteria: Any, config: Any, streamer: Any) -> None:
        from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

        self.ids = ids
        self.is_done = False
        self._config = config
        self._streamer = streamer
        lengths = [each.max_length for each in criteria if type(each) is MaxLengthCriteria]
        self.max_length = min([config.max_length, *lengths])
        ends = [each.eos_token_id.tolist() for each in criteria if type(each) is EosTokenCriteria]
        self._ends = frozenset(token for each in ends for token in each)
        # each is asked after each token, as with one token a pass
        self._others = type(criteria)(
            each for each in criteria if type(each) not in (EosTokenCriteria, MaxLengthCriteria)
        )
        with_more = config.return_dict_in_generate
        self._scores: tuple[torch.Tensor, ...] | None = () if with_more and config.output_scores else None
        self._logits: tuple[torch.Tensor, ...] | None = () if with_more and config.output_logits else None

    @property
    def num_tokens(self) -> int:
        return self.ids.shape[1]

    def take(self, path: Path, tokens: list[int], choice: _Choice) -> list[int]:
        """Append the tokens up to the end of the text. Returns those that were appended."""
        before, num = self.num_tokens, 0
        ids = torch.cat([self.ids, path.tokens[None, : len(tokens)].to(self.ids.device)], 1)
        while num < len(tokens) and not self.is_done:
            if self._scores is not None:
                self._scores += (choice.scores(num, path.nodes[num : num + 1]),)
            if self._logits is not None:
                self._logits += (choice.logits(path.nodes[num : num + 1]),)
            num += 1
            self.ids = ids[:, : before + num]
            self.is_done = self._ends_here(tokens[num - 1])
            if self._streamer is not None:
                self._streamer.put(torch.tensor(tokens[num - 1 : num]))
        choice.take_back(num)
        return tokens[:num]

    def _ends_here(self, token: int) -> bool:
        if self.num_tokens >= self.max_length or token in self._ends:
            return True
        return bool(self._others) and bool(self._others(self.ids, self._scores))

    def result(self, cache: Any) -> Any:
        from transformers.generation.utils import GenerateDecoderOnlyOutput

        if self._streamer is not None:
            self._streamer.end()
        if not self._config.return_dict_in_generate:
            return self.ids
        return GenerateDecoderOnlyOutput(
            sequences=self.ids, scores=self._scores, logits=self._logits, **{private.cache_argument(): cache}
        )
