"""Experts whose rows are picked give the plain model's bits: compressed on the device, compressed in the ring, or
cached."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import weightstream
from expert_rig import (
    CONFIGS,
    FORMS,
    NUM_EXPERTS,
    NUM_LAYERS,
    NUM_PICKING,
    TOP_K,
    Selected,
    built,
    caches,
    counts,
    experts_of,
    generated,
    held,
    plan_of,
    prompt,
    same,
    selected,
)
from models import model_nbytes
from repeats import thinned
from weightstream.adapters.modules import moe as adapter
from weightstream.errors import StoreError
from weightstream.inputs import builder
from weightstream.plan.plan import Plan
from weightstream.runtime.devices.backend import Backend
from weightstream.runtime.experts.slot_cache import Lru, SlotCache
from weightstream.runtime.ring import opening
from weightstream.runtime.ring.binding import Binding
from weightstream.runtime.streamer.active_plan import Installation
from weightstream.runtime.weights.decompression import BufferedUnit, PlanMemory
from weightstream.store.pages import PageCache

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.usefixtures("nothing_foreseen"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # peft reads it
]

__all__ = ["selected"]

forms = pytest.mark.parametrize("form", FORMS)
MOST = 4  # slots: two tokens of two experts


def from_files(folder: Path, codec: str = "none") -> tuple[Any, Any]:
    """A mixture from a checkpoint that stores experts one by one: the streamed model, and the plain one."""
    options = {"experts_implementation": "batched_mm", "dtype": torch.bfloat16}
    built().save_pretrained(folder, max_shard_size="200KB")
    model = weightstream.from_pretrained(
        folder, device="cpu", device_budget=1 << 30, codec=codec, progress=False, **options
    )
    return model, transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def assert_equal(model: Any, plain: Any, *lengths: int, num: int = 4) -> None:
    for length in lengths or (2, 12):
        assert same(generated(model, prompt(length), num), generated(plain, prompt(length), num))


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "form"), thinned(CONFIGS, FORMS))
def test_tokens_and_logits_are_equal(name: str, form: str, selected: Selected) -> None:
    model, plain = built(name), built(name)
    num = NUM_PICKING.get(name, NUM_LAYERS)
    with held(model, form, MOST) as streamer:
        assert_equal(model, plain, 2, 12, num=8)
        assert len(selected) >= 2 * 7 * num  # each token, except possibly the first
        if form == "cached":
            assert len(caches(streamer)) == num
            assert min(counts(streamer)) > 0
            assert streamer.plan.step_nbytes == 0
    assert_equal(model, plain, 2)


@pytest.mark.few(1)
@forms
def test_few_tokens_select_more_are_placed_and_long_prompts_read_whole_stacks(form: str, selected: Selected) -> None:
    model, plain = built(), built()
    most = MOST if form == "cached" else NUM_EXPERTS  # ids
    with held(model, form, MOST), torch.no_grad():
        model(prompt(1))  # watched
        before = 0
        for num in (1, 2, 3, 3, MOST, 3, NUM_EXPERTS, NUM_EXPERTS, NUM_EXPERTS + 1, NUM_EXPERTS, 1):
            num_ids = num * TOP_K
            way = "select" if num_ids <= most else "place" if num_ids <= 2 * NUM_EXPERTS else ""
            if form == "cached" and num_ids > max(most, before):
                way = ""  # a prompt does not change the slots
            before = num_ids
            selected.clear()
            selected.ways.clear()
            assert torch.equal(model(prompt(num)).logits, plain(prompt(num)).logits)
            assert selected == ([num_ids] * NUM_LAYERS if way else [])
            assert selected.ways == ([way] * NUM_LAYERS if way else [])


CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "a batch": lambda: {"ids": prompt(3, 3)},
    "beams": lambda: {"ids": prompt(3), "num_beams": 3},
    "prompt lookup": lambda: {"ids": prompt(4).repeat(1, 3), "prompt_lookup_num_tokens": 2},
    "an assistant": lambda: {"ids": prompt(4), "assistant_model": built("mixtral")},
}


@pytest.mark.few(1)
@pytest.mark.parametrize(("call", "form"), thinned(CALLS, FORMS))
def test_other_ways_to_generate(call: str, form: str, selected: Selected) -> None:
    model, plain = built(), built()
    with held(model, form, 6) as streamer:
        assert same(generated(model, **CALLS[call]()), generated(plain, **CALLS[call]()))
        assert len(selected) > NUM_LAYERS
        assert max(selected) > TOP_K
        if form == "cached":
            assert min(counts(streamer)) > 0


@pytest.mark.few(1)
@pytest.mark.parametrize(("implementation", "form"), thinned(["eager", "grouped_mm"], FORMS))
def test_other_implementations(implementation: str, form: str, selected: Selected) -> None:
    """Loops over experts may read all; grouped products read the experts that are used."""
    model, plain = built("qwen3_moe", implementation), built("qwen3_moe", implementation)
    with held(model, form, MOST):
        assert_equal(model, plain, 2, 5, 12)
        assert set(selected.ways) == ({"place"} if implementation == "grouped_mm" else set())
        for each in (model, plain):
            each.set_experts_implementation("batched_mm")
        assert_equal(model, plain)
        assert "select" in selected.ways


@pytest.mark.few(1)
@forms
def test_rows_that_are_not_whole_tiles_are_picked_where_they_are_not_compressed(form: str, selected: Selected) -> None:
    model, plain = (built("qwen3_moe", moe_intermediate_size=80) for _ in range(2))
    with held(model, form) as streamer:
        assert_equal(model, plain)
        assert bool(selected) is (form == "cached")
        assert len(caches(streamer)) == (NUM_LAYERS if form == "cached" else 0)


@pytest.mark.few(1)
@forms
def test_steps_at_fixed_addresses(form: str, selected: Selected) -> None:
    model, plain = built(), built()
    with held(model, form, MOST) as streamer, torch.no_grad():
        model(prompt(1))
        with streamer.step():
            for num in (1, 2, 12, 2):
                assert torch.equal(model(prompt(num)).logits, plain(prompt(num)).logits)
        assert selected == [num * TOP_K for num in (1, 1, 2, 2) for _ in range(NUM_LAYERS)]
        assert torch.equal(model(prompt(2)).logits, plain(prompt(2)).logits)


@pytest.mark.few(1)
@forms
@torch.no_grad()
def test_experts_called_on_their_own(form: str, selected: Selected) -> None:
    """Outside of a step, by keyword, with ids of another dtype, and without ids."""
    model, plain = built(), built()
    generator = torch.Generator().manual_seed(4)
    x, weights = (
        torch.randn(2, 64, generator=generator).bfloat16(),
        torch.rand(2, TOP_K, generator=generator).bfloat16(),
    )
    ids = torch.tensor([[5, 1], [1, 0]])
    with held(model, form, MOST):
        ours, theirs = (experts_of(each)[1] for each in (model, plain))
        for types in (torch.int64, torch.int32):
            assert torch.equal(ours(x, ids.to(types), weights), theirs(x, ids.to(types), weights))
        named = {"hidden_states": x, "top_k_index": ids, "top_k_weights": weights}
        assert torch.equal(ours(**named), theirs(**named))
        assert ours(x[:0], ids[:0], weights[:0]).shape == (0, 64)
        assert selected == [4, 4, 4, 0]


# -- changes by users --------------------------------------------------------------------------------------------------


def doubled(model: Any) -> None:
    experts_of(model)[1].down_proj.mul_(2)


def one_row(model: Any) -> None:
    for experts in experts_of(model):
        for row in range(0, 8, 2):
            experts.gate_up_proj[row].copy_(experts.gate_up_proj[row + 1])


def loaded(model: Any) -> None:
    model.load_state_dict({key: value * 1.5 for key, value in model.state_dict().items()})


def assigned(model: Any) -> None:
    for experts in experts_of(model):
        experts.gate_up_proj.data = experts.gate_up_proj.detach().flip(0).contiguous()


def written_past_versions(model: Any) -> None:
    experts_of(model)[0].down_proj.data.mul_(-1)


def filled_with_numpy(model: Any) -> None:
    experts_of(model)[2].down_proj.data.view(torch.int16).numpy()[:, ::2] ^= -32768  # signs


UPDATES = (doubled, one_row, loaded, assigned, written_past_versions, filled_with_numpy)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("update", "form"), [*product(UPDATES, ["cached"]), *thinned(UPDATES, [form for form in FORMS if form != "cached"])]
)
def test_updates_between_steps_are_seen(update: Callable[[Any], None], form: str, selected: Selected) -> None:
    model, plain = built(), built()
    before = generated(plain, prompt(2), 6)
    with held(model, form) as streamer:
        assert same(generated(model, prompt(2), 6), before)
        with torch.no_grad():
            update(model)
            update(plain)
        selected.clear()
        assert_equal(model, plain)
        assert not same(generated(plain, prompt(2), 6), before)
        if form == "cached":
            assert selected
            assert min(counts(streamer)) > 0
    assert_equal(model, plain)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.few(1)
@forms
def test_the_saved_model_is_the_plain_one(form: str, tmp_path: Path) -> None:
    model, plain = built(), built()
    with held(model, form):
        assert_equal(model, plain)
        state, wanted = model.state_dict(), plain.state_dict()
        assert state.keys() == wanted.keys()
        assert all(torch.equal(state[key], wanted[key]) for key in wanted)
        for each, folder in ((model, "ours"), (plain, "theirs")):
            each.save_pretrained(tmp_path / folder)
        ours, theirs = ((tmp_path / folder / "model.safetensors").read_bytes() for folder in ("ours", "theirs"))
        assert ours == theirs
        assert_equal(model, plain)


def test_a_prompt_does_not_change_the_slots(selected: Selected) -> None:
    """More ids than slots use them only after a call with as many ids: in a batch, whose prompt has more."""
    model, plain = built(), built()

    def steps(length: int, batch: int = 1) -> list[str]:
        selected.ways.clear()
        ids = prompt(length, batch)
        assert same(generated(model, ids, 3), generated(plain, ids, 3))
        return selected.ways

    with held(model, "cached") as streamer:
        assert steps(6) == ["select"] * 2 * NUM_LAYERS
        before = counts(streamer)
        steps(6)
        found, fetched = (after - less for after, less in zip(counts(streamer), before, strict=True))
        assert found + fetched == 2 * NUM_LAYERS * TOP_K
        assert steps(2, batch=4) == ["place"] * 2 * NUM_LAYERS


class Turns:
    """Records when the decoder of a unit is built, and when the unit is decoded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, int]] = []
        self.fails: set[int] = set()
        find, decode = opening.unit_decoder, Binding.decode

        def found(unit: BufferedUnit, aliases: Collection[str]) -> Any:
            self.events.append(("found", unit.index))
            if unit.index in self.fails:
                raise torch.OutOfMemoryError("no room for tables")
            return find(unit, aliases)

        def decoded(binding: Binding, index: int) -> None:
            self.events.append(("turn", index))
            decode(binding, index)

        monkeypatch.setattr(opening, "unit_decoder", found)
        monkeypatch.setattr(Binding, "decode", decoded)

    def late(self) -> list[int]:
        """Units whose decoder was built only when they were decoded, in order. Each decoder is built once."""
        units = list(dict.fromkeys(index for what, index in self.events if what == "turn"))
        assert len(units) >= NUM_LAYERS
        assert all(self.events.count(("found", index)) == 1 for index in units)
        return [u for u in units if self.events.index(("found", u)) > self.events.index(("turn", u))]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe"])
@forms
def test_the_decoder_of_a_unit_is_built_before_its_turn(form: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is built while the device computes the previous unit, which would otherwise idle in a first prompt, in
    order."""
    model, plain, ids, turns = built(name), built(name), prompt(64), Turns(monkeypatch)
    with held(model, form) as streamer, torch.no_grad():
        coded = [unit.index for unit in streamer._binding.units if unit.coded]
        turns.events.clear()
        for _ in range(2):
            assert torch.equal(model(ids).logits, plain(ids).logits)
        assert {index for what, index in turns.events if what == "turn"} <= set(coded)
        assert len(turns.late()) == 1


@pytest.mark.few(1)
@forms
def test_an_update_and_an_error_of_another_unit_affect_no_other_decoder(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain, ids, turns = built(), built(), prompt(64), Turns(monkeypatch)
    with held(model, form), torch.no_grad():
        turns.events.clear()
        for each in (model, plain):  # before any decoder is built: the update changes that of this unit
            experts_of(each)[1].down_proj.data[0] *= -1
        assert torch.equal(model(ids).logits, plain(ids).logits)
        assert len(turns.late()) == 1
    last = [index for what, index in turns.events if what == "turn"][-1]
    turns.events.clear()
    turns.fails.add(last)
    model, plain = built(), built()
    with held(model, form), torch.no_grad():
        with pytest.raises(torch.OutOfMemoryError):
            model(ids)
        assert [what for what, index in turns.events if index == last] == ["found", "turn", "found"], (
            "the error is raised when the unit opens"
        )
        turns.fails.clear()
        assert torch.equal(model(ids).logits, plain(ids).logits)


@pytest.mark.usefixtures("no_loading_bars")
@pytest.mark.parametrize("comes", [True, False])
def test_decoders_that_wait_for_pages_are_not_built_early(
    comes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let, looks = threading.Event(), Installation.without_cache
    monkeypatch.setattr(
        builder, "pinned", lambda *args: (None, PageCache(lambda memory: let.wait(30) and None, lambda memory: None))
    )
    monkeypatch.setattr(Installation, "without_cache", lambda self: let.set() or looks(self))  # at the end of the step
    model, plain = from_files(tmp_path)
    ids, turns = prompt(64), Turns(monkeypatch)
    with model.weightstream as streamer, torch.no_grad():
        streamer.switch(plan_of(streamer, "cached", MOST))
        if comes:
            let.set()
            streamer._homes._pages._thread.join(30)
        assert torch.equal(model(ids).logits, plain(ids).logits)
        assert len(turns.late()) == (1 if comes else NUM_LAYERS)
        let.set()


@pytest.mark.few(1)
@forms
def test_a_users_forward_is_not_bypassed(form: str, selected: Selected) -> None:
    model, plain = built(), built()

    def negated(experts: Any) -> Callable[..., torch.Tensor]:
        forward = experts.forward
        return lambda *args, **kwargs: -forward(*args, **kwargs)

    experts_of(model)[0].forward, experts_of(plain)[0].forward = (negated(experts_of(m)[0]) for m in (model, plain))
    with held(model, form):
        assert_equal(model, plain)
        assert selected
        assert len(selected) % (NUM_LAYERS - 1) == 0
    assert not same(generated(model, prompt(2)), generated(built(), prompt(2)))


@pytest.mark.few(1)
@forms
def test_hooks_on_experts_run(form: str, selected: Selected) -> None:
    model, plain = built(), built()
    for each in (model, plain):
        experts_of(each)[1].register_forward_hook(lambda module, args, output: output * 1.25)
        experts_of(each)[2].register_forward_pre_hook(lambda module, args: (args[0] * 0.5, *args[1:]))
    with held(model, form):
        assert_equal(model, plain)
        assert selected


def test_two_models_take_turns(selected: Selected) -> None:
    models, plain = [built(), built("mixtral")], [built(), built("mixtral")]
    with held(models[0], "cached"), held(models[1], "coded"):
        for length in (1, 9, 2):
            for model, other in zip(models, plain, strict=True):
                assert_equal(model, other, length, num=4)
    assert selected


@pytest.fixture
def peft(caplog: pytest.LogCaptureFixture) -> Any:
    return pytest.importorskip("peft")


def adapted(peft: Any, model: Any, **targets: Any) -> Any:
    """A model with adapters of random weights, so that they change its output."""
    found = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_dropout=0.0, **targets)).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    return found


TARGETS: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "both stacks": {
        "target_modules": [],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
    "one stack": {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]},
}


@pytest.mark.few(1)
@pytest.mark.parametrize(("form", "name"), thinned(FORMS, TARGETS, every=3))
def test_adapters(form: str, name: str, peft: Any, selected: Selected) -> None:
    """Stacks that an adapter computes are not picked. Those of a model with an adapter only in its attention are."""
    targets = TARGETS[name]
    model, plain = built(), adapted(peft, built(), **targets)
    with held(model, form):
        assert_equal(model, built())
        model = adapted(peft, model, **targets)
        selected.clear()
        assert_equal(model, plain)
        assert bool(selected) is ("target_parameters" not in targets)
        with model.disable_adapter(), plain.disable_adapter():
            assert_equal(model, plain)
    assert not same(generated(plain, prompt(2)), generated(built(), prompt(2)))


@pytest.mark.few(1)
@pytest.mark.parametrize("codec", ["none", "compressed"])
@pytest.mark.usefixtures("no_loading_bars")
def test_a_cache_of_experts_stored_one_by_one(
    codec: str, tmp_path: Path, selected: Selected, caplog: pytest.LogCaptureFixture
) -> None:
    model, plain = from_files(tmp_path / "model", codec)
    with model.weightstream as streamer:
        streamer.switch(plan_of(streamer, "cached" if codec == "none" else "coded, streams", MOST))
        assert_equal(model, plain)
        assert bool(selected) is (codec == "compressed")  # a CPU fetches no rows from files: its plan has no cache
        assert not streamer.plan.cached
        (fetches,) = {planner.machine.fetches_rows for planner in streamer._installed.replanning.inputs.planners}
        assert fetches is (codec == "compressed")
        lines = [record.message for record in caplog.records if "without a cache" in record.message]
        assert len(lines) == (codec == "none")
        assert all("rows of model.layers.0.mlp.experts.down_proj cannot be fetched" in text for text in lines), lines
        with torch.no_grad():
            for each in (model, plain):
                experts_of(each)[0].gate_up_proj.mul_(1 if codec == "compressed" else -1)
        assert_equal(model, plain)


@pytest.mark.usefixtures("no_loading_bars")
def test_a_cache_does_not_wait_for_pages_and_ends_if_they_cannot_be_pinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    let = threading.Event()

    def pin(memory: torch.Tensor) -> None:
        let.wait(30)
        raise StoreError("memlock is 64 KiB.")

    monkeypatch.setattr(builder, "pinned", lambda *args: (None, PageCache(pin, lambda memory: None)))
    model, plain = from_files(tmp_path)
    with model.weightstream as streamer:
        streamer.switch(plan_of(streamer, "cached", MOST))
        assert streamer.plan.cached
        assert not let.is_set()
        let.set()
        assert_equal(model, plain)
        assert not streamer.plan.cached
        assert len([record for record in caplog.records if "without a cache" in record.message]) == 1


class Negates:
    """A hook that changes a stack in every call from the fourth on."""

    def __init__(self, stack: torch.Tensor) -> None:
        self._stack, self._calls = stack, 0

    def __call__(self, *_: object) -> None:
        self._calls += 1
        if self._calls > 3:
            self._stack.mul_(-100)


@pytest.mark.few(1)
@forms
def test_an_update_inside_a_step_is_seen(form: str) -> None:
    """An earlier layer changes the experts of a later one."""
    model, plain = built(), built()
    for each in (model, plain):
        each.model.layers[0].register_forward_pre_hook(Negates(experts_of(each)[2].down_proj))
    with held(model, form):
        assert_equal(model, plain, 1, 2, 1)
    assert not same(generated(plain, prompt(1), 6), generated(built(), prompt(1), 6))


def test_the_cpu_chooses_no_cache() -> None:  # on the CPU, transformers decodes with whole stacks
    model = built("qwen3_moe", num_experts=32, num_hidden_layers=6)
    with weightstream.offload(
        model, device="cpu", device_budget=int(0.5 * model_nbytes(model)), codec="none"
    ) as streamer:
        assert not streamer.plan.cached


# -- errors that the tests detect --------------------------------------------------------------------------------------


@pytest.mark.few(1)
@forms
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_uninitialised_memory_is_not_read(name: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ring, the buffer and slots begin as NaN."""
    allocate, allocated = PlanMemory.allocate, list[PlanMemory]()

    def filled(plan: Plan, backend: Backend) -> PlanMemory:
        allocated.append(PlanMemory(*(part.fill_(255) for part in allocate(plan, backend))))
        return allocated[-1]

    monkeypatch.setattr(PlanMemory, "allocate", filled)
    model, plain = built(name), built(name)
    with held(model, form):
        assert allocated
        assert_equal(model, plain, 1, 2, 12)


def of_the_same_step(table: Lru, rows: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Like `Lru.resolve`, but each missed row takes the stalest slot, even if this step uses it."""
    slots, missed = [], []
    for row in rows:
        if row not in table._owners:
            slot = min(range(len(table._owners)), key=lambda s: (s != 1, table._stamps[s]))
            table._owners[slot] = row
            missed.append((row, slot))
        slots.append(table._owners.index(row))
        table._stamps[slots[-1]] = table._step
    table._step += 1
    return slots, missed


def test_evicting_a_row_of_the_same_step_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = built(), built()
    monkeypatch.setattr(Lru, "resolve", of_the_same_step)
    with held(model, "cached", MOST):
        assert not same(generated(model, prompt(2)), generated(plain, prompt(2)))


def test_a_missing_fetch_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = built(), built()
    resolve = Lru.resolve

    def skipping(table: Lru, rows: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
        slots, missed = resolve(table, rows)
        return slots, missed[1:]

    with held(model, "cached", MOST):
        monkeypatch.setattr(Lru, "resolve", skipping)
        assert not same(generated(model, prompt(2)), generated(plain, prompt(2)))


def test_stale_slots_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = built(), built()
    with held(model, "cached", 8), torch.no_grad():
        assert_equal(model, plain)
        monkeypatch.setattr(SlotCache, "forget", lambda slots: None)
        for each in (model, plain):
            one_row(each)
        assert not same(generated(model, prompt(2)), generated(plain, prompt(2)))


# -- biases, and grouped products instead of copies --------------------------------------------------------------------


@pytest.mark.stress
def test_a_compressed_bias_is_decoded_whole_besides_rows(selected: Selected) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 1024}
    model, plain = (built("gpt_oss", **sizes) for _ in range(2))
    with weightstream.offload(model, device="cpu", device_budget=model_nbytes(model), codec="compressed") as streamer:
        aliases = streamer.plan.manifest.aliases
        biases = {alias for alias in aliases if alias.endswith("gate_up_proj_bias")}
        sizes_of = streamer._installed.replanning.inputs.planners[0].weights.codes
        codes = streamer.plan.manifest.codes | {a: sizes_of[a] for a in biases}
        streamer.switch(plan_of(streamer, "coded", MOST, codes))
        assert biases <= streamer.plan.manifest.codes.keys()
        assert_equal(model, plain, 2, 5, 12)
        assert {"select", "place"} == set(selected.ways)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The implementations that experts ran in, on a device with grouped products, as some GPUs have. Earlier results
    of the
    trial are cleared."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    found: list[str] = []

    def spied(name: str) -> Callable[..., Any]:
        inner = ALL_EXPERTS_FUNCTIONS._global_mapping[name]

        def spy(*args: Any, **kwargs: Any) -> Any:
            found.append(name)
            return inner(*args, **kwargs)

        return spy

    for name in ("batched_mm", "grouped_mm"):
        monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, name, spied(name))
    monkeypatch.setattr(adapter, "_EQUAL", {})
    monkeypatch.setattr(adapter.cuda, "multiplies_groups", lambda device: True)
    return found


@pytest.mark.few(1)
@forms
@torch.no_grad()
def test_grouped_products_are_used_if_a_trial_gave_the_same_bits(form: str, selected: Selected, ran: list[str]) -> None:
    model, plain = built(), built()
    wanted = {num: plain(prompt(num)).logits for num in (1, 2, 3)}
    with held(model, form, MOST):
        for _ in range(2):  # the first step is watched; it chooses as many
            model(prompt(4))
        ran.clear()
        for num, first in ((3, True), (3, False), (2, True), (2, False), (1, False)):
            state = torch.get_rng_state()
            assert torch.equal(model(prompt(num)).logits, wanted[num])
            assert torch.equal(torch.get_rng_state(), state)
            trial = ["batched_mm", "grouped_mm"] * adapter._ROUNDS if first else []
            assert ran == trial + ["batched_mm" if num == 1 else "grouped_mm"] * NUM_LAYERS
            ran.clear()


def rarely(found: torch.Tensor, call: int) -> None:
    """Flips one bit of one element, in some calls."""
    if call % 7 == 6:
        found.view(torch.int16).flatten()[-1] ^= 1


def raising(_: torch.Tensor, call: int) -> None:
    raise RuntimeError(f"an alignment that call {call} does not take")


def zeros(found: torch.Tensor, _: int) -> None:
    found.zero_()


@pytest.mark.few(2)
@pytest.mark.parametrize(("damage", "form"), thinned([rarely, raising, zeros], FORMS, every=3))
@torch.no_grad()
def test_grouped_products_with_other_bits_are_rejected(
    damage: Callable[..., None], form: str, selected: Selected, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    grouped, calls = ALL_EXPERTS_FUNCTIONS._global_mapping["grouped_mm"], itertools.count()

    def other(*args: Any, **kwargs: Any) -> Any:
        found = grouped(*args, **kwargs)
        damage(found, next(calls))
        return found

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "grouped_mm", other)
    model, plain = built(), built()
    wanted = {num: plain(prompt(num)).logits for num in (2, 6)}
    with held(model, form, MOST):
        model(prompt(1))
        for num, way in ((2, "select"), (6, "place")):
            for _ in range(2):
                assert torch.equal(model(prompt(num)).logits, wanted[num])
            assert set(adapter._EQUAL.values()) == {False}
            assert selected.ways[-1] == way
            ran.clear()
            assert torch.equal(model(prompt(num)).logits, wanted[num])
            assert set(ran) == {"batched_mm"}


@pytest.mark.few(2)
@pytest.mark.parametrize("why", ["a CPU", "float32", "hooks", "zeros"])
@torch.no_grad()
def test_without_a_valid_trial_nothing_is_grouped(
    why: str, selected: Selected, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = built(), built()
    if why == "a CPU":
        monkeypatch.undo()
    for each in (model, plain):
        if why == "float32":
            each.float()
        for module in experts_of(each):
            if why == "hooks":
                module.act_fn.register_forward_hook(lambda *_: None)
            elif why == "zeros":
                module.down_proj.zero_()
    with held(model, "cached", MOST):
        model(prompt(1))
        for _ in range(2):
            assert torch.equal(model(prompt(2)).logits, plain(prompt(2)).logits)
    assert True not in adapter._EQUAL.values()


@pytest.mark.stress
def test_compiled_code_reads_rows_from_slots() -> None:
    """Experts with a cache run eager inside of it: compiled, they would copy whole stacks in each step."""
    model, plain = (built(num_hidden_layers=2) for _ in range(2))
    with held(model, "cached", 8) as streamer, torch.no_grad():
        model(prompt(5))
        streamer.compile("blocks", backend="aot_eager", dynamic=False)
        for _ in range(2):
            assert torch.equal(model(prompt(1)).logits, plain(prompt(1)).logits)
        assert min(counts(streamer)) > 0
