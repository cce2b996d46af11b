"""Trees of drafted tokens, on the CPU: their parts against plain Python, and whole texts against one token a pass."""

from __future__ import annotations

import copy
import functools
import heapq
import itertools
import logging
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import weightstream
from fake_cuda import FakeCuda
from generating import MODELS
from models import TEXT, randomise

transformers = pytest.importorskip("transformers")

from weightstream.adapters.generation import speculation, tree  # noqa: E402
from weightstream.adapters.generation import tree_loop as loop  # noqa: E402
from weightstream.adapters.generation.decoder import DecodeReport  # noqa: E402
from weightstream.adapters.generation.generation import decode_with, generate  # noqa: E402
from weightstream.adapters.generation.tree_drafts import LookupTrees, RankRates, Start, rank_tree  # noqa: E402
from weightstream.adapters.hf import private  # noqa: E402
from weightstream.adapters.steps.croppable_cache import croppable  # noqa: E402
from weightstream.adapters.steps.graph_runner import GraphRunner  # noqa: E402
from weightstream.errors import UnsupportedError  # noqa: E402

CPU = torch.device("cpu")
NODES = 12
LOOKUP = {"prompt_lookup_num_tokens": 6}


@functools.cache
def build(name: str = "llama", noise: float = 0.0) -> Any:
    """A model of two layers; with noise, another one that says nearly the same."""
    config = MODELS[name]()
    config.num_hidden_layers = 2
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    model = randomise(transformers.AutoModelForCausalLM.from_config(config), seed=11)
    chance = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param += torch.randn(param.shape, generator=chance) * param.std() * noise
    model.generation_config.eos_token_id = None  # texts have no end of their own, and greedy ones no processors
    return model


def prompt(length: int = 9, times: int = 2) -> torch.Tensor:
    """Random words, several times over."""
    return torch.randint(3, 128, (1, length), generator=torch.Generator().manual_seed(length)).repeat(1, times)


def options(num: int = 24, **more: Any) -> dict[str, Any]:
    return {"max_new_tokens": num, "do_sample": False, "pad_token_id": 0} | more


SCORES = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


def grown(
    model: Any, ids: torch.Tensor, cuda: FakeCuda | None = None, nodes: int = NODES, **more: Any
) -> tuple[Any, DecodeReport]:
    """A text from trees, of prompt lookup if the options choose no assistant."""
    more = more if "assistant_model" in more else LOOKUP | more
    recorder = None if cuda is None else cuda.recorder
    return decode_with(model, ids, options(**more), recorder, tree_nodes=nodes)


DRAFTS: dict[str, Callable[[str], dict[str, Any]]] = {
    "lookup": lambda _: LOOKUP,
    "assistant": lambda name: {"assistant_model": build(name, 0.1)},
}
drafted = pytest.mark.parametrize("draft", DRAFTS)

# -- parts against plain Python --------------------------------------------------------------------------------------


def random_tree(chance: random.Random, num: int, num_unused: int, words: int = 4) -> tuple[list[int], list[int]]:
    """Tokens and parents. Children of a node have different tokens."""
    tokens, parents = [chance.randrange(words)], [0]
    while len(tokens) < num:
        parent = chance.randrange(len(tokens))
        free = set(range(words)) - {t for t, p in zip(tokens[1:], parents[1:], strict=True) if p == parent}
        if free:
            parents.append(parent)
            tokens.append(chance.choice(sorted(free)))
    return tokens + [0] * num_unused, parents + list(range(num, num + num_unused))


def way_to(node: int, parents: list[int]) -> list[int]:
    return [node] if parents[node] == node else [*way_to(parents[node], parents), node]


def test_ancestors_depths_and_accepted_paths_of_random_trees() -> None:
    chance = random.Random(0)
    lengths = set()
    for _ in range(60):
        tokens, parents = random_tree(chance, chance.randint(1, 14), chance.randint(0, 3))
        num = len(tokens)
        ways = [way_to(node, parents) for node in range(num)]
        depth = max(map(len, ways)) - 1 + chance.randint(0, 2)
        made = tree.tree(torch.tensor(tokens), torch.tensor(parents), depth)
        assert made.depths.tolist() == [len(way) - 1 for way in ways]
        assert made.ancestors.tolist() == [[node in way for node in range(num)] for way in ways]

        says = [chance.randrange(4) for _ in range(num)]  # of each node, the token after it
        path, found = [0], []
        while True:
            found.append(says[path[-1]])
            after = [node for node in range(1, num) if parents[node] == path[-1] != node and tokens[node] == found[-1]]
            if not after:
                break
            path += after
        for waits in (False, True):
            asked: list[int] = []

            def choose(node: torch.Tensor) -> torch.Tensor:
                asked.append(int(node))  # noqa: B023
                return torch.tensor([says[int(node)]])  # noqa: B023

            got = tree.accepted_path(made, depth, choose, waits=waits)
            assert int(got.num_accepted) == len(path) - 1
            assert got.nodes.tolist()[: len(path)] == path
            assert got.tokens.tolist()[: len(path)] == found
            assert len(got.nodes) == len(got.tokens) == depth + 1
            assert len(asked) == (len(path) if waits else depth + 1)
        lengths.add(len(path))
    assert lengths >= {1, 2, 3}


def test_masks_show_the_text_and_the_ancestors() -> None:
    seen = torch.tensor([False, True, True, True, True, True, True, True])
    mask = tree.mask_of(seen, 3, torch.tensor([[True, False], [True, True]]))
    assert mask.int().tolist() == [[0, 1, 1, 1, 0, 0, 0, 0], [0, 1, 1, 1, 1, 0, 0, 0]]


def test_the_keys_of_the_path_follow_the_text() -> None:
    cache = croppable(build(), 32, 0).cache
    for index in range(2):
        cache.update(torch.randn(1, 2, 20, 16), torch.randn(1, 2, 20, 16), index)
    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    tree.keep_path(cache.layers, 11, torch.tensor([0, 3, 5, 0, 0]))
    for layer, (keys, values) in zip(cache.layers, before, strict=True):
        for now, was in ((layer.keys, keys), (layer.values, values)):
            assert torch.equal(now[:, :, :11], was[:, :, :11])
            assert torch.equal(now[:, :, 11:14], was[:, :, [11, 14, 16]])


def test_the_trie_has_what_followed_the_last_words() -> None:
    text = [1, 2, 3, 4, 5, 9, 2, 3, 6, 7, 8, 3, 0, 0, 1, 2, 3]
    draft = LookupTrees(11, max_depth=3, ngram=2)
    draft.start(Start(torch.tensor([text[:-1]]), None, torch.arange(16)[None], 40))
    made = draft.draft(text[-1:])
    parents = made.parents.tolist()
    ways = [way_to(node, parents) for node in range(1, draft.num_drafted + 1)]
    found = [made.tokens[way].tolist() for way in ways]
    # after "2 3", the newest first; then after "3" alone
    assert found == [[3, 6], [3, 6, 7], [3, 6, 7, 8], [3, 4], [3, 4, 5], [3, 4, 5, 9], [3, 0], [3, 0, 0], [3, 0, 0, 1]]
    assert parents[10:] == [10, 11]
    assert made.depths.tolist()[10:] == [0, 0]
    few = LookupTrees(2, max_depth=3, ngram=2)
    few.start(Start(torch.tensor([text[:-1]]), None, torch.arange(16)[None], 40))
    assert few.draft(text[-1:]).tokens.tolist() == [3, 6, 7]
    new = LookupTrees(2, max_depth=3)
    new.start(Start(torch.tensor([[5]]), None, torch.arange(1)[None], 40))
    assert new.draft([6]).parents.tolist() == [0, 1, 2]
    assert new.num_drafted == 0


@pytest.mark.parametrize("rates", [[0.7, 0.12, 0.06, 0.03], [0.4, 0.35, 0.1], [0.9]])
def test_a_tree_of_ranks_has_the_most_likely_nodes(rates: list[float]) -> None:
    depth, num = 4, 20
    every = [node for d in range(1, depth + 1) for node in itertools.product(range(len(rates)), repeat=d)]
    worth = {node: math.prod(rates[rank] for rank in node) for node in every}
    found = rank_tree(rates, num, depth, most_inner=99)
    assert len(set(found)) == min(num, len(every))
    assert sorted(worth[node] for node in found) == pytest.approx(sorted(heapq.nlargest(num, worth.values())))
    assert all(len(node) == 1 or node[:-1] in found for node in found)
    assert found == sorted(found, key=len)


def test_a_level_of_a_tree_has_no_more_inner_nodes_than_a_pass_has_rows() -> None:
    found = rank_tree([0.3, 0.29, 0.28, 0.27], 60, 4, most_inner=3)
    assert len(found) == 4 + 3 * 4 * 3  # all that the limit leaves
    for depth in range(1, 5):
        assert len({node[:-1] for node in found if len(node) == depth}) <= 3


def test_rates_follow_what_was_counted() -> None:
    rates = RankRates(4)
    before = rates.rates()
    assert before == sorted(before, reverse=True)
    assert sum(before) < 1
    for rank in [1] * 60 + [4] * 40:
        rates.count(rank)
    after = rates.rates()
    assert after[1] > 0.5 > after[0] > after[3] > 0
    deep, wide = (rank_tree(each, 8, 8, 99) for each in ([0.95, 0.01], [0.3, 0.29, 0.28, 0.27]))
    assert max(map(len, deep)) == 8 > max(map(len, wide))


def test_a_draw_is_that_of_multinomial() -> None:
    for seed in range(50):
        probabilities = torch.randn(1, 40, generator=torch.Generator().manual_seed(seed)).mul(3).softmax(-1)
        torch.manual_seed(seed)
        want, state = torch.multinomial(probabilities, 1)[0], torch.get_rng_state()
        torch.manual_seed(seed)
        assert torch.equal(loop.draw(probabilities), want)
        assert torch.equal(torch.get_rng_state(), state)


# -- texts -----------------------------------------------------------------------------------------------------------


@contextmanager
def seen_passes(model: Any, width: int = NODES + 1) -> Iterator[list[torch.Tensor]]:
    """The logits of each pass that verifies a tree."""
    passes: list[torch.Tensor] = []

    def see(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if kwargs["input_ids"].shape[1] == width and kwargs["attention_mask"] is not None:
            passes.append(output.logits[0].float())

    handle = model.register_forward_hook(see, with_kwargs=True)
    try:
        yield passes
    finally:
        handle.remove()


@drafted
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3-moe"])
def test_tokens_are_the_argmax_of_their_own_pass(name: str, draft: str) -> None:
    model, ids = build(name), prompt()
    with seen_passes(model) as passes:
        got, report = grown(model, ids, **SCORES, **DRAFTS[draft](name))
    new = got.sequences[0, ids.shape[1] :]
    logits = torch.cat(got.logits)
    assert report.speculation.passes == len(passes) < 15
    assert torch.equal(logits.argmax(-1), new)
    assert torch.equal(torch.cat(got.scores).argmax(-1), new)
    rows = torch.cat(passes)
    assert all(bool((rows == row).all(1).any()) for row in logits[1:])  # each is a row of a pass, bit for bit
    dense = model(got.sequences).logits[0, ids.shape[1] - 1 : -1]  # positions, masks and kept keys are right
    torch.testing.assert_close(logits, dense.detach(), atol=2e-4, rtol=1e-3)
    assert torch.equal(got.sequences, model.generate(ids, **options()))


@drafted
def test_the_cache_that_is_returned_holds_the_text(draft: str) -> None:
    model, ids = build(), prompt()
    got, _ = grown(model, ids, **SCORES, **DRAFTS[draft]("llama"))
    want = model.generate(ids, **options(), **SCORES)
    name = private.cache_argument()
    for ours, theirs in zip(got[name].layers, want[name].layers, strict=True):
        assert int(ours.get_seq_length()) == theirs.get_seq_length() == got.sequences.shape[1] - 1
        kept = ours.keys[:, :, : theirs.get_seq_length()]
        torch.testing.assert_close(kept, theirs.keys, atol=1e-4, rtol=1e-3)


@drafted
@pytest.mark.parametrize("sampled", [False, True])
def test_captured_equals_eager(draft: str, sampled: bool) -> None:
    model, more = build(), {"do_sample": sampled, "temperature": 0.3 if sampled else None}
    found = []
    for cuda in (None, FakeCuda()):
        torch.manual_seed(3)
        got, report = grown(model, prompt(), cuda, **SCORES, **more, **DRAFTS[draft]("llama"))
        found.append((got.sequences, torch.stack(got.logits), torch.get_rng_state()))
        if cuda is not None:
            assert report.reason is None
            assert report.replays == cuda.replays == report.speculation.passes - 1 > 0
            assert len(cuda.graphs) == 1
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.few(2)
@drafted
@pytest.mark.parametrize("name", ["gemma2", "qwen3-moe"])
def test_an_offloaded_model_has_the_logits_of_a_resident_one(name: str, draft: str) -> None:
    model, more = build(name), DRAFTS[draft](name)
    want, resident = grown(model, prompt(), **SCORES, **more)
    for share in (2.4, 1.7, 1.2):
        other = copy.deepcopy(model)
        budget = int(sum(param.nbytes for param in other.parameters()) / share)
        with weightstream.offload(other, device="cpu", device_budget=budget) as streamer:
            for _ in range(2):
                got, report = grown(other, prompt(), **SCORES, **more)
                assert torch.equal(got.sequences, want.sequences)
                assert torch.equal(torch.stack(got.logits), torch.stack(want.logits))
                assert report.speculation == resident.speculation
            assert streamer.stats().steps >= 2 * resident.speculation.passes


def test_an_assistant_may_be_captured() -> None:
    model, ids, assistant = build(), prompt(), build(noise=0.1)
    want, eager = grown(model, ids, assistant_model=assistant)
    cuda = FakeCuda()
    setting = {"assistant_model": assistant}.get
    runner = GraphRunner(cuda.recorder, CPU, None)
    steps = loop.TreeSteps(model, speculation.Draft("assistant", 20), NODES, None, setting, runner)
    with torch.no_grad(), steps.installed():
        got = model.generate(ids, **steps.options(options(**setting.__self__)))
    assert torch.equal(got, want)
    assert steps.report() == eager.speculation
    assert runner.reason is None
    assert cuda.replays == runner.num_steps - 1 > steps.counts.passes  # all its passes have the same shapes
    assert len(cuda.graphs) == 1


def test_a_tree_may_be_a_chain() -> None:
    """With as many nodes as levels, and rates near 1, a node has one child."""
    model, ids = build(), prompt()
    chains, _ = decode_with(model, ids, options(**LOOKUP), None)
    for more in (LOOKUP, {"assistant_model": copy.deepcopy(model)}):
        got, report = grown(model, ids, nodes=6, **more)
        assert torch.equal(got, chains)
        assert report.speculation.tokens_per_pass > 1.5
    assert report.speculation.acceptance > 0.5  # of the model's own best tokens


def test_more_depth_than_nodes_and_more_nodes_than_depth() -> None:
    model, ids = build(), prompt()
    want = model.generate(ids, **options())
    for nodes, num in ((1, 9), (2, 1), (40, 2), (17, 30)):
        got, report = grown(model, ids, nodes=nodes, prompt_lookup_num_tokens=num)
        assert torch.equal(got, want)
        assert report.speculation.width == nodes + 1
        assistant = build(noise=0.1)
        assistant.generation_config.num_assistant_tokens, before = num, assistant.generation_config.num_assistant_tokens
        got, report = grown(model, ids, nodes=nodes, assistant_model=assistant)
        assistant.generation_config.num_assistant_tokens = before
        assert torch.equal(got, want)


@pytest.mark.parametrize("length", [1, NODES + 1])
def test_short_prompts_and_prompts_as_wide_as_a_pass(length: int) -> None:
    model, ids = build(), prompt(length, 1)
    for draft in DRAFTS.values():
        got, _ = grown(model, ids, FakeCuda(), **draft("llama"))
        assert torch.equal(got, model.generate(ids, **options()))


@drafted
def test_padding_on_the_left_is_not_seen(draft: str) -> None:
    model, ids = build(), prompt()
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    want = model.generate(ids, attention_mask=mask, **options())
    got, report = grown(model, ids, attention_mask=mask, **DRAFTS[draft]("llama"))
    assert torch.equal(got, want)
    assert not torch.equal(want, model.generate(ids, **options()))
    assert report.speculation.tokens_per_pass > 1.2


def test_eager_attention_takes_the_mask_too() -> None:
    model = copy.deepcopy(build())
    model.set_attn_implementation("eager")
    got, report = grown(model, prompt())
    assert torch.equal(got, model.generate(prompt(), **options()))
    assert report.speculation.tokens_per_pass > 1.2


class Waits(TorchFunctionMode):
    """Counts values that the host reads, and those that it would copy to a device from pageable memory."""

    num = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        self.num += name in ("tolist", "item", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero")
        self.num += name == "new_tensor" or (name in ("tensor", "as_tensor") and bool((kwargs or {}).get("device")))
        if name == "__setitem__" and not isinstance(args[2], torch.Tensor):  # one element is copied, more are filled
            self.num += args[0][args[1]].dim() == 0
        return func(*args, **(kwargs or {}))


@pytest.mark.few(1)
@drafted
@pytest.mark.parametrize("more", [{}, {"do_sample": True, "repetition_penalty": 1.1}], ids=["greedy", "sampled"])
def test_the_host_waits_once_a_round(draft: str, more: dict[str, Any]) -> None:
    others = set()
    for num in (12, 20, 40):  # more than 16 rounds: an assistant's tree is made anew
        with Waits() as waits:
            _, report = grown(build(), prompt(), num=num, **more, **DRAFTS[draft]("llama"))
        others.add(waits.num - report.speculation.passes)
    assert len(others) == 1, "waits before and after the rounds"


# -- ends, streamers and criteria ------------------------------------------------------------------------------------


def passes_of(model: Any, ids: torch.Tensor, **more: Any) -> tuple[torch.Tensor, list[list[int]]]:
    """A text, and the new tokens of each pass."""
    took: list[list[int]] = []
    plain = loop.TreeSteps._round

    def round_of(*args: Any) -> list[int]:
        took.append(plain(*args))
        return took[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.TreeSteps, "_round", round_of)
        got, _ = grown(model, ids, **more)
    first = int(got[0, ids.shape[1]])
    assert got[0].tolist() == [*ids[0].tolist(), first, *itertools.chain(*took)]
    return got, [[first], *took]


def test_a_streamer_gets_token_after_token() -> None:
    took: list[list[int]] = []

    class Seen:
        def put(self, value: torch.Tensor) -> None:
            took.append(value.flatten().tolist())

        def end(self) -> None:
            took.append([])

    ids = prompt()
    got, report = grown(build(), ids, streamer=Seen())
    assert took == [ids[0].tolist(), *([token] for token in got[0, ids.shape[1] :].tolist()), []]
    assert report.speculation.passes < 20


@pytest.mark.parametrize("sampled", [False, True])
def test_the_end_of_a_text_inside_an_accepted_path(sampled: bool) -> None:
    model, ids = build(), prompt()
    more = {"do_sample": sampled, "temperature": 0.3 if sampled else None}
    more["assistant_model"] = build(noise=0.02)
    torch.manual_seed(1)
    _, took = passes_of(model, ids, **more)
    index, inside = next(
        (index, token)
        for index, new in enumerate(took)
        for token in new[:-1]
        if token not in itertools.chain(*took[:index])
    )
    ends = {"eos_token_id": [inside, 127]}
    torch.manual_seed(1)
    want = model.generate(ids, **options(**more | ends | {"assistant_model": None}), **SCORES)
    state = torch.get_rng_state()
    torch.manual_seed(1)
    got, report = grown(model, ids, **more | ends, **SCORES)
    assert torch.equal(got.sequences, want.sequences)
    assert int(got.sequences[0, -1]) == inside
    assert len(got.logits) == len(got.scores) == got.sequences.shape[1] - 18
    assert torch.equal(torch.get_rng_state(), state), "draws of tokens that are not in the text"
    assert report.speculation.passes == index
    assert report.speculation.tokens_per_pass == 1 + (got.sequences.shape[1] - 18 - 1 - index) / index
    for layer in got[private.cache_argument()].layers:
        assert int(layer.get_seq_length()) == got.sequences.shape[1] - 1


@drafted
@pytest.mark.parametrize("num", [1, 2, 3, 5])
def test_fewer_new_tokens_than_the_depth(draft: str, num: int) -> None:
    model, ids = build("gpt2"), prompt(29, 3)[:, : 64 - num]  # up to the model's last position
    got, report = grown(model, ids, num=num, **DRAFTS[draft]("gpt2"))
    assert torch.equal(got, model.generate(ids, **options(num)))
    assert got.shape[1] == 64
    assert report.speculation.passes <= num - 1


def test_criteria_see_each_token() -> None:
    model, ids = build(), prompt()
    lengths: list[int] = []

    def look(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        lengths.append(ids.shape[1])
        assert len(scores) == ids.shape[1] - 18
        return torch.tensor([ids.shape[1] >= 31])

    criteria = transformers.StoppingCriteriaList([look])
    got, _ = grown(model, ids, stopping_criteria=criteria, **SCORES)
    assert lengths == list(range(19, 32))
    assert torch.equal(got.sequences, model.generate(ids, **options())[:, :31])


# -- processors and sampling -----------------------------------------------------------------------------------------


@drafted
@pytest.mark.parametrize(
    "more",
    [
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"do_sample": True, "temperature": 0.3, "top_k": 20, "top_p": 0.95},
        {"do_sample": True, "temperature": 0.5, "repetition_penalty": 1.2, "min_p": 0.05},
    ],
    ids=lambda more: " ".join(more),
)
def test_processors_and_draws_are_those_of_one_token_a_pass(draft: str, more: dict[str, Any]) -> None:
    model, ids = build(), prompt()
    torch.manual_seed(4)
    want, state = model.generate(ids, **options(**more), **SCORES), torch.get_rng_state
    after = state()
    torch.manual_seed(4)
    got, report = grown(model, ids, **more, **SCORES, **DRAFTS[draft]("llama"))
    assert torch.equal(got.sequences, want.sequences)
    assert torch.equal(state(), after)
    assert report.speculation.passes < 23 or draft == "lookup"  # of a text that repeats nothing
    torch.testing.assert_close(torch.stack(got.scores), torch.stack(want.scores), atol=1e-2, rtol=1e-3)


def test_a_processor_of_the_caller_sees_accepted_texts_only() -> None:
    model, ids = build(), prompt()

    class Sees(transformers.LogitsProcessor):
        def __init__(self) -> None:
            self.texts: list[list[int]] = []

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self.texts.append(input_ids[0].tolist())
            return scores.roll(1, -1)

    sees = Sees()
    more = {"logits_processor": transformers.LogitsProcessorList([sees])}
    got, report = grown(model, ids, assistant_model=build(noise=0.1), nodes=30, **more)
    text = got[0].tolist()
    assert sees.texts == [text[:length] for length in range(18, len(text))]
    assert torch.equal(got, model.generate(ids, **options(**more)))
    allowed = [3, 5, 7, 11]
    more = {"prefix_allowed_tokens_fn": lambda _, ids: allowed[: 1 + len(ids) % 4]}
    got, report = grown(model, ids, **more)
    assert torch.equal(got, model.generate(ids, **options(**more)))
    assert report.speculation.tokens_per_pass > 1.5


WORDS, TEMPERATURE = 32, 0.6


@functools.cache
def small() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(vocab_size=WORDS, max_position_embeddings=2048, pad_token_id=0, **sizes)
    model = randomise(transformers.LlamaForCausalLM(config), 3)
    model.generation_config.eos_token_id = None
    return model


def chi_square(monkeypatch: pytest.MonkeyPatch, seed: int, num: int = 800) -> tuple[float, int]:
    """Pearson's statistic of a sampled text against the model's own distribution, and its number of cells.

    A cell is the rank of a token among the model's tokens, and whether it was drafted at its place.
    """
    drafted: list[tuple[int, list[int], list[int]]] = []
    model, plain = small(), LookupTrees.draft

    def draft(self: LookupTrees, new: Any) -> tree.Tree:
        made = plain(self, new)
        drafted.append((len(self._text), made.tokens.tolist(), made.parents.tolist()))
        return made

    torch.manual_seed(seed)
    ids = torch.randint(1, WORDS, (1, 12))
    with monkeypatch.context() as patch:
        patch.setattr(LookupTrees, "draft", draft)
        more = options(num, do_sample=True, top_k=0, temperature=TEMPERATURE, max_matching_ngram_size=1)
        text, report = decode_with(model, ids, more | {"prompt_lookup_num_tokens": 3}, None, tree_nodes=10)
    assert report.speculation.tokens_per_pass > 1.2
    with torch.no_grad():
        logits = model(text).logits[0].double() / TEMPERATURE
    chances, new = logits.softmax(-1), text[0].tolist()
    observed, expected = torch.zeros(2, 6), torch.zeros(2, 6, dtype=torch.double)
    for at, tokens, parents in drafted:
        node: int | None = 0
        while node is not None and at < len(new):
            children = {tokens[each]: each for each in range(1, len(tokens)) if parents[each] == node != each}
            for rank, token in enumerate(chances[at - 1].argsort(descending=True).tolist()):
                cell = int(token in children), min(rank, 5)
                expected[cell] += chances[at - 1, token]
                observed[cell] += float(token == new[at])
            node, at = children.get(new[at]), at + 1
    assert observed.sum() == num - 1  # the first is from the prompt's pass
    assert expected.min() > 4
    return float(((observed - expected) ** 2 / expected).sum()), observed.numel()


@pytest.mark.stress
def test_sampled_text_has_the_distribution_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    found, cells = chi_square(monkeypatch, seed=1)
    assert found < 31.3, "11 degrees of freedom, p = 0.001"
    assert cells == 12

    def twice(nodes: Any, depth: int, choose: Any, *, waits: bool) -> Any:
        """A token that was not drafted is drawn once more: what other rules would accept."""

        def again(node: torch.Tensor) -> torch.Tensor:
            token = choose(node)
            return token if bool((nodes.tokens[1:] == token).any()) else choose(node)

        return plain(nodes, depth, again, waits=waits)

    plain = tree.accepted_path
    monkeypatch.setattr(tree, "accepted_path", twice)
    found, _ = chi_square(monkeypatch, seed=1)
    assert found > 31.3, "the negative control"


# -- what is refused, or runs without trees ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "more", "words"),
    [
        (0, LOOKUP, "tree_nodes is 0"),
        (8, {}, "no draft was given; give assistant_model or prompt_lookup_num_tokens"),
        (8, {"use_mtp": True}, "mtp drafts no trees"),
        (8, LOOKUP | {"bits": "token"}, "adds them in another order"),
    ],
)
def test_settings_that_no_tree_has_are_refused(nodes: int, more: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        generate(build(), prompt(), tree_nodes=nodes, **options(), **more)


@drafted
@pytest.mark.parametrize(("name", "attention"), [("mistral", "sdpa"), ("mistral", "eager"), ("gemma2", "eager")])
def test_windows_that_are_shorter_than_the_text(name: str, draft: str, attention: str) -> None:
    model, ids = copy.deepcopy(build(name)), prompt()
    model.set_attn_implementation(attention)
    more = DRAFTS[draft](name)
    got, report = grown(model, ids, FakeCuda(), **SCORES, **more)
    assert report.replays
    assert torch.equal(got.sequences, model.generate(ids, **options()))
    with torch.no_grad():
        dense = model(got.sequences).logits[0, ids.shape[1] - 1 : -1]
    torch.testing.assert_close(torch.cat(got.logits), dense, atol=2e-4, rtol=1e-3)
    short = prompt(3)
    assert torch.equal(grown(model, short, num=6, **more)[0], model.generate(short, **options(6)))


def test_windows_of_other_kinds_are_refused() -> None:
    model = build("gemma2")
    assert tree.windows_of(model, 12) == {"": None}
    assert tree.windows_of(model, 13) == {"full_attention": None, "sliding_attention": 12}
    assert tree.windows_of(build("mistral"), 13) == {"": 12}
    sizes = {"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 8, "num_local_experts": 2}
    sizes |= {"num_hidden_layers": 2, "head_dim": 16, "intermediate_size_mlp": 64}
    other = transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**{**TEXT, **sizes}))
    assert tree.windows_of(other, 8) == {"": None}
    with pytest.raises(UnsupportedError, match="layers of Llama4ForCausalLM see 8 of the cache's 64 positions"):
        grown(other, prompt())


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"output_hidden_states": True}, "output_hidden_states: they are not kept"),
        ({"output_attentions": True}, "output_attentions: they are not kept"),
        ({"cache_implementation": "dynamic"}, "cache_implementation was given"),
    ],
)
def test_other_settings_run_as_transformers_runs_them(more: dict[str, Any], reason: str) -> None:
    got, report = grown(build(), prompt(), **more)
    assert torch.equal(got, build().generate(prompt(), **options(**LOOKUP | more)))
    assert str(report.reason).startswith(reason)
    assert report.speculation is None


def test_other_models_and_assistants_run_without_trees() -> None:
    ids = prompt()
    flex = randomise(transformers.LlamaForCausalLM(MODELS["llama"]()), 11)
    flex.config._attn_implementation = "flex_attention"
    found = loop.why_no_trees(flex, speculation.Draft("prompt lookup", 3), {}.get)
    assert found == "the model: flex_attention attention does not take the mask of a tree"
    other = transformers.LlamaForCausalLM(transformers.LlamaConfig(**MODELS["llama"]().to_dict() | {"vocab_size": 99}))
    found = loop.why_no_trees(build(), speculation.Draft("assistant", 3), {"assistant_model": other}.get)
    assert found == "the assistant has other tokens than the model"
    with pytest.raises(ValueError, match="different tokenizers"):
        grown(build(), ids, assistant_model=other)


def test_a_report_says_how_it_went(caplog: pytest.LogCaptureFixture) -> None:
    found: list[DecodeReport] = []
    with caplog.at_level(logging.INFO, "weightstream"):
        generate(build(), prompt(), tree_nodes=NODES, on_decoding=found.append, **options(do_sample=True), **LOOKUP)
    assert not caplog.records  # most nodes of a tree are never accepted, at any temperature
    (report,) = found
    assert report.speculation.draft == "a tree of prompt lookup"
    assert report.speculation.width == NODES + 1
    assert report.speculation.bits == "rows"


# -- a trained model ---------------------------------------------------------------------------------------------------

SMOLLM = Path("~/.cache/weightstream/smollm2-135m-instruct").expanduser()
CODE = '''Rename the variable `total` to `amount` in this Python code and print the whole code again.

def total_price(items, tax_rate):
    """Return the total price of all items with tax."""
    total = 0.0
    for item in items:
        price = item["price"]
        count = item["count"]
        total = total + price * count
    total = total * (1 + tax_rate)
    return round(total, 2)
'''


@pytest.mark.stress
@pytest.mark.skipif(not SMOLLM.exists(), reason="scripts/demo makes this model")
def test_a_trained_model_takes_few_passes() -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(SMOLLM)
    model = transformers.AutoModelForCausalLM.from_pretrained(SMOLLM, dtype=torch.float32).eval()
    chat = [{"role": "user", "content": CODE}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    found: list[DecodeReport] = []
    more = {"max_new_tokens": 60, "do_sample": False}
    got = generate(model, **ids, tree_nodes=32, prompt_lookup_num_tokens=10, on_decoding=found.append, **more)
    want = model.generate(**ids, **more)
    assert torch.equal(got, want)
    num = got.shape[1] - ids["input_ids"].shape[1]
    assert num > 30
    assert found[0].speculation.passes + 1 <= 0.6 * num
