"""Packed experts give the bits of the stacks that the library unpacks: resident, streaming whole, and in slots."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

import weightstream
from coded_rig import code_all
from expert_rig import Selected, caches, counts, experts_of, generated, held, plan_of, prompt, same, selected
from models import model_nbytes
from packed_rig import CASES, ODD, both, packed_modules
from streaming import striped
from unpack_launches import launches_from_now
from weightstream.adapters.hf import packed_matrices
from weightstream.adapters.hf.packed_formats import PackedFormat, packed_leaves, packed_stacks
from weightstream.adapters.hf.packed_matrices import PackedMatrices
from weightstream.codec import unpack_kernels, unpacking
from weightstream.plan.plan import Plan
from weightstream.runtime.experts.row_stream import RowStream
from weightstream.runtime.ring import opening

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.usefixtures("nothing_foreseen")]

__all__ = ["code_all", "selected"]

IMPLEMENTATIONS = ("batched_mm", "grouped_mm", "eager")
formats = pytest.mark.parametrize("name", CASES)


def assert_equal(model: torch.nn.Module, plain: torch.nn.Module, *lengths: int) -> None:
    for length in lengths or (3, 5, 9):
        assert same(generated(model, prompt(length), 6), generated(plain, prompt(length), 6)), length


@pytest.mark.few(3)
@formats
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("share", [0.3, 2.0])
def test_without_a_cache(name: str, implementation: str, share: float, selected: Selected) -> None:
    model, plain = both(name, implementation)
    with weightstream.offload(model, device="cpu", device_budget=int(share * model_nbytes(model)), codec="none"):
        assert_equal(model, plain)
    assert_equal(model, plain, 4)


@pytest.mark.few(3)
@formats
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[:2])
@pytest.mark.parametrize(("num_slots", "shared"), [(2, False), (4, False), (8, False), (4, True), (8, True)])
def test_rows_from_slots(name: str, implementation: str, num_slots: int, shared: bool, selected: Selected) -> None:
    model, plain = both(name, implementation)
    with held(model, "cached", num_slots, shared=shared) as streamer:
        for cache in caches(streamer):  # what no fetch has written is not to be read
            for stack in cache._stacks:
                stack.memory.fill_(255)
        assert_equal(model, plain)
        if not (shared and implementation == "grouped_mm"):  # else its rows pass the slots
            assert counts(streamer)[1] > 0
            assert set(selected.ways) == ({"select"} if implementation == "batched_mm" else {"place"})
        for each in (model, plain):
            each.set_experts_implementation("batched_mm")
        assert_equal(model, plain, 4)


@pytest.mark.few(2)
@formats
def test_only_picked_rows_are_unpacked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = both(name)
    unpacked: list[int] = []
    plain_unpacked = PackedFormat.unpacked

    def spied(self: PackedFormat, rows: tuple[torch.Tensor, ...], dtype: torch.dtype) -> torch.Tensor:
        unpacked.append(len(rows[0]))
        return plain_unpacked(self, rows, dtype)

    monkeypatch.setattr(PackedFormat, "unpacked", spied)
    ids, half = prompt(1), model_nbytes(model) // 2
    with held(model, "cached"):
        assert torch.equal(model(ids).logits, plain(ids).logits)
    with weightstream.offload(model, device="cpu", device_budget=half, codec="none"):
        assert torch.equal(model(ids).logits, plain(ids).logits)
    assert set(unpacked) == {2}, "a token names two experts"


@pytest.mark.stress
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")  # of Triton's interpreter
@pytest.mark.few(1)
@formats
@pytest.mark.parametrize("form", ["cached", "on the device"])
def test_rows_are_unpacked_by_a_kernel(name: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From slots, and in waves. A token's rows of both stacks take one launch. Trials are tested with the kernels."""
    model, plain = both(name)
    trials: list[str] = []
    launches = launches_from_now(monkeypatch)
    monkeypatch.setattr(packed_matrices, "KERNELS_ON", "cpu")
    monkeypatch.setattr(packed_matrices, "_EQUAL", {})
    monkeypatch.setattr(packed_matrices, "WAVE_NBYTES", 5 * 8192)
    monkeypatch.setattr(unpack_kernels, "MXFP4_SHAPE", {"TILES": 16, "GROUPS": 4, "num_warps": 2})
    monkeypatch.setattr(unpack_kernels, "UNPACK_SHAPE", {"ROWS": 32, "WORDS": 16, "STEPS": 4, "num_warps": 4})
    monkeypatch.setattr(unpacking, "unpacks_equally", lambda kernel, *_: trials.append(kernel) or True)
    monkeypatch.setattr(PackedFormat, "unpacked", lambda *_: pytest.fail("the library's function ran"))
    room = 4 * model_nbytes(model)
    with (
        held(model, "cached")
        if form == "cached"
        else weightstream.offload(model, device="cpu", device_budget=room, codec="none")
    ):
        for implementation in ("batched_mm", "grouped_mm"):
            for each in (model, plain):
                each.set_experts_implementation(implementation)
            launches.clear()
            assert torch.equal(model(prompt(1)).logits, plain(prompt(1)).logits)
            if implementation == "batched_mm":
                assert launches == [2] * len(packed_modules(model))
    assert set(trials) == {CASES[name].format.kernel}
    assert len(trials) == 2, "one for each stack"


@pytest.mark.few(2)
@formats
@pytest.mark.parametrize("num", [1, 3])
def test_groups_are_multiplied_in_waves(name: str, num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = both(name, "grouped_mm")
    matrix = max(experts_of(plain)[0].gate_up_proj[0].nbytes, experts_of(plain)[0].down_proj[0].nbytes)
    monkeypatch.setattr(packed_matrices, "WAVE_NBYTES", num * matrix)
    with (
        weightstream.offload(model, device="cpu", device_budget=model_nbytes(model) // 2, codec="none"),
        torch.no_grad(),
    ):
        for length in (1, 2, 7, 40):
            ids = prompt(length)
            assert torch.equal(model(ids).logits, plain(ids).logits), length


@pytest.mark.few(3)
@formats
@pytest.mark.parametrize("num", [1, 3, 100])
def test_prompts_pass_the_slots_in_waves(name: str, num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy of a whole stack, and no slot is touched."""
    model, plain = both(name, "grouped_mm")
    matrix = max(experts_of(plain)[0].gate_up_proj[0].nbytes, experts_of(plain)[0].down_proj[0].nbytes)
    monkeypatch.setattr(packed_matrices, "WAVE_NBYTES", num * matrix)
    sizes: list[int] = []
    plain_copied = RowStream.copied

    def spied(self: RowStream, rows: Sequence[int], memory: torch.Tensor) -> Any:
        memory.fill_(255)  # what is not copied is not read
        sizes.append(len(rows))
        return plain_copied(self, rows, memory)

    monkeypatch.setattr(RowStream, "copied", spied)
    monkeypatch.setattr(opening, "copy_function", lambda *_: pytest.fail)
    with held(model, "cached") as streamer, torch.no_grad():
        for length in (1, 17, 2, 40):
            assert torch.equal(model(prompt(length)).logits, plain(prompt(length)).logits), length
            if length > 2:
                assert 0 < max(sizes) <= 2 * num  # matrices of one stack are half as large
            found = counts(streamer)
            assert torch.equal(model(prompt(60)).logits, plain(prompt(60)).logits)
            assert counts(streamer) == found


def small_waves(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two matrices a wave: in this buffer there is room for more than one."""
    monkeypatch.setattr(packed_matrices, "WAVE_NBYTES", 2 * experts_of(plain)[0].gate_up_proj[0].nbytes)


@pytest.mark.few(2)
@formats
@pytest.mark.parametrize("attention", ["plain", "compressed"])
@pytest.mark.usefixtures("code_all")
def test_waves_of_the_next_layer_come_during_attention(
    name: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless attention needs the buffer, too. No row is copied twice. A step that fails in attention is
    followed by right ones."""
    model, plain = both(name, "grouped_mm")
    small_waves(plain, monkeypatch)
    room = 4 * model_nbytes(model) + (1 << 20)
    num_begun, fails, copied = list[int](), list[int](), list[tuple[RowStream, int]]()
    plain_copied = RowStream.copied

    def counted(self: RowStream, rows: Sequence[int], memory: torch.Tensor) -> Any:
        copied.extend((self, row) for row in rows)
        return plain_copied(self, rows, memory)

    monkeypatch.setattr(RowStream, "copied", counted)
    codec = "none" if attention == "plain" else "compressed"
    with weightstream.offload(model, device="cpu", device_budget=room, codec=codec) as streamer, torch.no_grad():
        codes = {name: code for name, code in streamer.plan.manifest.codes.items() if ".self_attn." in name}
        assert bool(codes) is (attention == "compressed")
        streamer.switch(plan_of(streamer, "cached", 4, codes))
        model(prompt(1))  # units learn which unit follows
        streams = streamer._binding.waves

        def spy(*_: Any) -> None:
            num_begun.append(len(streams._begun))
            if fails and len(num_begun) == fails[0]:
                raise ZeroDivisionError

        for layer in model.model.layers:
            layer.self_attn.register_forward_pre_hook(spy)
        for length in (40, 30, 1, 40):
            copied.clear()
            assert torch.equal(model(prompt(length)).logits, plain(prompt(length)).logits), length
            assert not streams._begun
            assert len(copied) == len(set(copied)), "rows were copied twice"
            assert bool(copied) is (length > 1)
            assert (max(num_begun) > 0) is (attention == "plain" and length > 1)
            num_begun.clear()
        fails.append(3)
        with pytest.raises(ZeroDivisionError):
            model(prompt(40))
        assert not streams._begun
        fails.clear()
        assert torch.equal(model(prompt(40)).logits, plain(prompt(40)).logits)


class Resolving:
    """Stands in for a graph of decode steps: its launch changes slots, without any call of the library."""

    def __init__(self, streamer: weightstream.Streamer) -> None:
        self._caches = caches(streamer)
        self._turn = 0

    def replay(self) -> None:
        self._turn += 1
        for cache in self._caches:
            cache.resolve(torch.tensor([(self._turn * 3 + index) % 8 for index in range(4)]))


@pytest.mark.few(1)
@formats
def test_a_graph_may_change_slots_between_two_prompts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All in one `step()`."""
    model, plain = both(name, "grouped_mm")
    small_waves(plain, monkeypatch)
    with held(model, "cached", 4) as streamer, torch.no_grad():
        model(prompt(1))
        graph = Resolving(streamer)
        monkeypatch.setattr(streamer._backend, "capture", lambda *_, **__: nullcontext())
        with streamer.capture(graph):
            pass
        with streamer.step():
            for length in (40, 30, 41):
                streamer.replay(graph)
                assert torch.equal(model(prompt(length)).logits, plain(prompt(length)).logits), length
            assert streamer._binding.waves._slots
            with streamer.capture(graph):
                assert not streamer._binding.waves._slots, "what is dropped in a capture may have to wait for copies"


@pytest.mark.few(3)
@pytest.mark.parametrize("ids", [[-1, 0], [3, -8, 7, 3], [2, 5, 6], [], [8], [-9]], ids=str)
def test_any_ids_pass_the_slots(ids: list[int]) -> None:
    """As for a tensor: negative ones count from the end, some twice, or none at all."""
    model, plain = both("block float8", "grouped_mm")
    with held(model, "cached") as streamer, torch.no_grad():
        assert torch.equal(model(prompt(1)).logits, plain(prompt(1)).logits)
        module, stack = packed_modules(model)[0], experts_of(plain)[0].down_proj
        (unit, *_) = (unit for unit in streamer._binding.units if unit.rows is not None)
        unit.rows.forget()
        unit.rows.cache.resolve(torch.tensor([6, 1]))
        packed = packed_stacks(module)["down_proj"]
        stream = unit.rows.stream([id(leaf) for leaf in packed_leaves(module, packed)])
        index = torch.tensor(ids, dtype=torch.int64)
        if any(not -8 <= row < 8 for row in ids):
            with pytest.raises(IndexError):
                PackedMatrices(packed, stream)[index]
        else:
            assert torch.equal(PackedMatrices(packed, stream)[index], stack[index])


def update(model: Any, plain: Any, name: str, part: int) -> None:
    """Reverse the order of rows of a leaf of each layer, by an update in place."""
    for ours, theirs in zip(packed_modules(model), experts_of(plain), strict=True):
        packed_format = CASES[name].format
        leaves = [getattr(ours, "down_proj" + suffix) for suffix in packed_format.suffixes]
        with torch.no_grad():
            leaves[part].view(torch.uint8).copy_(leaves[part].view(torch.uint8).flip(0))
        theirs.down_proj.data = packed_format.unpacked(tuple(leaf.detach().clone() for leaf in leaves), torch.bfloat16)


@pytest.mark.few(2)
@formats
@pytest.mark.parametrize("part", [0, 1])
def test_an_update_of_a_leaf_reaches_the_slots(name: str, part: int) -> None:
    model, plain = both(name)
    with held(model, "cached", 8):
        assert_equal(model, plain, 3)
        update(model, plain, name, part)
        assert_equal(model, plain, 3)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ODD)
def test_rows_of_scales_that_are_no_whole_words(name: str) -> None:
    """They have slots as all others, in steps and prompts, before and after an update, and without offloading."""
    model, plain = both(name)
    with held(model, "cached") as streamer:
        num_leaves = sum(len(list(module.parameters(recurse=False))) for module in packed_modules(model))
        assert len(streamer.plan.cached) == num_leaves
        for implementation in ("batched_mm", "grouped_mm"):
            for each in (model, plain):
                each.set_experts_implementation(implementation)
            assert_equal(model, plain, 3, 40)
        assert counts(streamer)[1] > 0
        update(model, plain, name, 1)
        assert_equal(model, plain, 3, 40)
    assert_equal(model, plain, 3, 40)


@pytest.mark.few(1)
@formats
@pytest.mark.parametrize("num_slots", [3, 8])
def test_whole_stacks_overwrite_slots(name: str, num_slots: int) -> None:
    """Where the buffer lies in slots, their rows are fetched again after a step that reads whole stacks."""
    model, plain = both(name)
    with held(model, "cached", num_slots, shared=True) as streamer:
        for implementation in ("batched_mm", "eager", "batched_mm", "grouped_mm", "batched_mm", "eager", "batched_mm"):
            for each in (model, plain):
                each.set_experts_implementation(implementation)
            for length in (1, 9, 1, 1):
                assert torch.equal(model(prompt(length)).logits, plain(prompt(length)).logits), implementation
        before = counts(streamer)
        assert torch.equal(model(prompt(1)).logits, plain(prompt(1)).logits)
        assert counts(streamer)[1] == before[1], "all rows of the last token were there"
        held_nbytes, plan = streamer.stats().held_nbytes, streamer.plan
        assert plan.shared_nbytes > 0
        assert held_nbytes["device"] == plan.device_nbytes, "bytes of the buffer that are slots count once"


@pytest.mark.few(1)
@formats
@pytest.mark.parametrize("num", [2, 3])
def test_over_several_devices(name: str, num: int) -> None:
    """Experts follow their layer."""
    model, plain = both(name)
    with striped(model, num, (2, 3, 4, 6, 8, 12), device="cpu") as stripes:
        assert len(stripes.parts) == num
        for length in (1, 5):
            assert torch.equal(model(prompt(length)).logits, plain(prompt(length)).logits)
    assert torch.equal(model(prompt(4)).logits, plain(prompt(4)).logits)


@pytest.mark.few(1)
@formats
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("share", [0.5, 4.0])
def test_gradients(name: str, implementation: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all weights on the device, and where packed experts stream and are unpacked again in the backward pass."""
    model, plain = both(name, implementation)
    monkeypatch.setattr(packed_matrices, "WAVE_NBYTES", 2 * 8192)
    streamer = weightstream.offload(model, device="cpu", device_budget=int(share * model_nbytes(model)), codec="none")
    for each in (model, plain):
        each.train()  # in evaluation mode, single rows of cached experts are read, which are not there any more
    for _ in range(2):
        found, wanted = (gradient_of_embeddings(each) for each in (model, plain))
        assert torch.equal(found, wanted)
    streamer.remove()


def gradient_of_embeddings(model: Any) -> torch.Tensor:
    model.requires_grad_(False)
    states = model.get_input_embeddings()(prompt(40)).clone().requires_grad_(True)
    model(inputs_embeds=states).logits.float().square().mean().backward()
    assert states.grad is not None
    return states.grad


@pytest.mark.few(2)
@formats
@pytest.mark.parametrize("form", ["whole", "cached"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(name: str, form: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its dtype may be another than that of the matrices, with which it does not mix in one operator."""
    model, plain = both(name, "grouped_mm")
    monkeypatch.setattr(packed_matrices, "WAVE_NBYTES", 2 * 8192)
    half = model_nbytes(model) // 2
    with ExitStack() as inside:
        if form == "cached":
            inside.enter_context(held(model, "cached"))
        else:
            inside.enter_context(weightstream.offload(model, device="cpu", device_budget=half, codec="none"))
        inside.enter_context(torch.autocast("cpu", dtype))
        for length in (1, 40):
            assert torch.equal(model(prompt(length)).logits, plain(prompt(length)).logits)


@pytest.mark.few(1)
@formats
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[:2])
def test_compressed(name: str, implementation: str) -> None:
    """A format may have leaves that are not compressed: they are on the device, whole."""
    model, plain = both(name, implementation)
    with held(model, "coded"):
        assert_equal(model, plain, 1, 3, 40)


@pytest.mark.few(2)
@formats
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[:2])
@pytest.mark.parametrize("left", ["_proj", "gate_up_proj", "down_proj"])
def test_a_part_of_the_leaves_is_cached(name: str, implementation: str, left: str) -> None:
    """The scales of all stacks, or one stack, stay on the device."""
    model, plain = both(name, implementation)
    suffix = CASES[name].format.suffixes[1] if left == "_proj" else ""
    with held(model, "cached") as streamer:
        manifest = streamer.plan.manifest
        cached = frozenset(alias for alias in streamer.plan.cached if left + suffix not in alias)
        assert 0 < len(cached) < len(streamer.plan.cached)
        rest = manifest.without(cached)
        plan = Plan.build(rest, frozenset(rest.aliases), 0)
        slots = {"num_slots": 4, "slots_nbytes": streamer.plan.slots_nbytes}
        streamer.switch(replace(plan, manifest=manifest, cached=cached, **slots))
        for length in (1, 2, 5, 40):
            assert torch.equal(model(prompt(length)).logits, plain(prompt(length)).logits), length
        assert counts(streamer)[1] > 0


# what the compiler itself says of code that it was told to leave out
compiled = pytest.mark.filterwarnings("ignore:.*(functools.lru_cache|skipping cudagraphs).*:UserWarning")


@compiled
@pytest.mark.few(1)
@formats
@pytest.mark.parametrize("scope", [pytest.param("model", marks=pytest.mark.stress), "blocks"])
@pytest.mark.parametrize("form", ["whole", "cached"])
def test_compiled(name: str, scope: Any, form: str) -> None:
    """Experts run eager inside of compiled code, and cached ones read single rows."""
    model, plain = both(name)
    half = model_nbytes(model) // 2
    with (
        held(model, "cached", 8)
        if form == "cached"
        else weightstream.offload(model, device="cpu", device_budget=half, codec="none")
    ) as streamer:
        model(prompt(5))
        streamer.compile(scope, backend="aot_eager", dynamic=False)
        for length in (1, 1):
            assert torch.equal(model(prompt(length)).logits, plain(prompt(length)).logits)
        assert form == "whole" or counts(streamer)[0] > 0


@compiled
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.stress
@formats
@pytest.mark.parametrize("scope", ["model", "blocks"])
@pytest.mark.parametrize("form", ["resident", "cached"])
def test_compiled_by_inductor(name: str, scope: Any, form: str) -> None:
    """As the plain model whose experts are left out of the compiled code. Elsewhere fused kernels round less often than
    eager ones, so bits depend on where the compiled code is cut."""
    model, plain = both(name)
    for experts in experts_of(plain):
        experts.forward = torch.compiler.disable(experts.forward)
    run: Any = torch.compile(plain, dynamic=False) if scope == "model" else plain
    for block in plain.model.layers if scope == "blocks" else ():
        block.compile(dynamic=False)
    with torch.no_grad():
        wanted = [run(prompt(length)).logits for length in (5, 1, 1)]
    torch._dynamo.reset()  # the other model has the same code, and a code is compiled at most eight times
    room = 4 * model_nbytes(model)
    with (
        (
            held(model, "cached", 8)
            if form == "cached"
            else weightstream.offload(model, device="cpu", device_budget=room, codec="none")
        ) as streamer,
        torch.no_grad(),
    ):
        model(prompt(5))
        streamer.compile(scope, dynamic=False)
        for length, logits in zip((5, 1, 1), wanted, strict=True):
            assert torch.equal(model(prompt(length)).logits, logits), length


class Twice(torch.nn.Module):
    def forward(self, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.repeat(1, 2)


def parametrise(module: torch.nn.Module, leaf: str) -> None:
    torch.nn.utils.parametrize.register_parametrization(module, leaf, Twice(), unsafe=True)


@pytest.mark.few(2)
@formats
@pytest.mark.parametrize("change", [parametrise, delattr])
@pytest.mark.parametrize("part", [0, 1])
def test_leaves_that_are_replaced_are_named(name: str, change: Any, part: int) -> None:
    """peft parametrises stacks that are `target_parameters` of LoRA. Before offloading and after it."""
    model, _ = both(name)
    leaf, half = "down_proj" + CASES[name].format.suffixes[part], model_nbytes(model) // 2
    with weightstream.offload(model, device="cpu", device_budget=half, codec="none"):
        change(packed_modules(model)[1], leaf)
        with pytest.raises(weightstream.UnsupportedError, match=f"{leaf} is no longer a parameter of .*LoRA"):
            model(prompt(3))
    with pytest.raises(weightstream.UnsupportedError, match=f"{leaf} is no longer a parameter of .*LoRA"):
        weightstream.offload(model, device="cpu", device_budget=half, codec="none")
