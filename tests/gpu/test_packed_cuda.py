"""Packed experts on a GPU: rows unpacked from slots, in captured generation, and prompts in waves, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import float8_mixture

import weightstream
from expert_rig import caches, counts, experts_of, held, plan_of
from models import model_nbytes
from packed_rig import CASES, Pair, both, packed_modules
from stream_rig import NUM_ROWS, buffer_of, host_stacks, streams_of, with_slots
from unpack_launches import launches_from_now
from weightstream.adapters.hf import packed_matrices
from weightstream.adapters.hf.packed_formats import PackedFormat
from weightstream.runtime.devices.cuda import CudaBackend
from weightstream.runtime.experts.row_stream import RowStream

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

NEW = 12
formats = pytest.mark.parametrize("name", CASES)


def pair(name: str, implementation: str | None = None) -> Pair:
    """The packed model in host memory, and the plain one on the GPU; each with the implementations of `generate`."""
    if name == "int4":
        pytest.importorskip("compressed_tensors")
    made = both(name, implementation or "grouped_mm")
    # what the CPU has unpacked is what the GPU would unpack: products of two floats, rounded once
    return Pair(made.packed, made.plain.cuda())


def prompt(length: int, batch: int = 1) -> torch.Tensor:
    return torch.randint(3, 120, (batch, length), generator=torch.Generator().manual_seed(length)).cuda()


def generated(model: Any, ids: torch.Tensor, replays: int = 1) -> list[torch.Tensor]:
    """Tokens, and the logits of each, of captured generation."""
    reports: list[Any] = []
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    output = weightstream.generate(
        model, ids, on_decoding=reports.append, output_logits=True, return_dict_in_generate=True, **options
    )
    assert reports[0].replays >= replays, reports
    return [output.sequences.cpu(), *(logits.cpu() for logits in output.logits)]


def assert_same(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    assert all(torch.isfinite(each).all() for each in wanted)
    different = [index for index, (a, b) in enumerate(zip(found, wanted, strict=True)) if not torch.equal(a, b)]
    assert not different, different


@formats
@pytest.mark.parametrize("num_slots", [2, 4, 8])
@pytest.mark.parametrize("ahead", [0, 2])
def test_captured_generation_from_slots(name: str, num_slots: int, ahead: int) -> None:
    model, plain = pair(name)
    lengths = (5, 21)
    wanted = [generated(plain, prompt(length)) for length in lengths]
    with held(model, "cached", num_slots, device="cuda", ahead=ahead) as streamer:
        for cache in caches(streamer):
            for stack in cache._stacks:
                stack.memory.fill_(255)  # what no fetch has written is not to be read
        for length, each in zip(lengths, wanted, strict=True):
            assert_same(generated(model, prompt(length)), each)
        assert min(counts(streamer)) > 0


@formats
@pytest.mark.parametrize("share", [0.4, 2.0])
@pytest.mark.parametrize("batch", [1, 3])
def test_captured_generation_without_a_cache(name: str, share: float, batch: int) -> None:
    model, plain = pair(name)
    wanted = generated(plain, prompt(7, batch))
    with weightstream.offload(model, device_budget=int(share * model_nbytes(model)), codec="none"):
        assert_same(generated(model, prompt(7, batch)), wanted)


@formats
def test_batches_of_more_ids_than_there_are_slots(name: str) -> None:
    model, plain = pair(name)
    wanted = generated(plain, prompt(7, 3))
    with held(model, "cached", 4, device="cuda"):
        assert_same(generated(model, prompt(7, 3)), wanted)


@formats
@pytest.mark.parametrize("num", [1, 3, 100])
@pytest.mark.parametrize("form", ["cached", "on the device"])
def test_prompts_in_waves(name: str, num: int, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of groups in waves have the bits of one call, also while their rows are copied, over poison."""
    model, plain = pair(name)
    matrix = max(experts_of(plain)[0].gate_up_proj[0].nbytes, experts_of(plain)[0].down_proj[0].nbytes)
    monkeypatch.setattr(packed_matrices, "WAVE_NBYTES", num * matrix)
    monkeypatch.setattr(packed_matrices, "_EQUAL", {})
    num_waves: list[int] = []
    plain_copied = RowStream.copied

    def spied(self: RowStream, rows: Sequence[int], memory: torch.Tensor) -> Any:
        memory.fill_(255)
        num_waves.append(len(rows))
        return plain_copied(self, rows, memory)

    monkeypatch.setattr(RowStream, "copied", spied)
    room = 4 * model_nbytes(model)
    with (
        held(model, "cached", 4, device="cuda")
        if form == "cached"
        else weightstream.offload(model, device_budget=room, codec="none")
    ):
        for length in (1, 40, 7, 300, 2):
            with torch.no_grad():
                assert torch.equal(model(prompt(length)).logits, plain(prompt(length)).logits), length
    assert bool(num_waves) is (form == "cached")
    results = {type(case).__name__: equal for case, equal in packed_matrices._EQUAL.items()}
    assert results["_Unpacking"] is True
    assert all(packed_matrices._EQUAL.values()), packed_matrices._EQUAL


@formats
def test_the_library_unpacks_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its function runs in the trial of a kernel only, which some graphs could not hold."""
    model, plain = pair(name)
    wanted = generated(plain, prompt(9))
    with held(model, "cached", 4, device="cuda"):
        assert_same(generated(model, prompt(9)), wanted)
        monkeypatch.setattr(PackedFormat, "unpacked", lambda *_: pytest.fail("the library's function ran"))
        assert_same(generated(model, prompt(9)), wanted)


@formats
@pytest.mark.parametrize("form", ["cached", "on the device"])
@pytest.mark.parametrize("is_inference", [False, True])
def test_a_token_takes_one_launch_for_both_stacks(
    name: str, form: str, is_inference: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In inference mode only from slots: else ids could be written to in between."""
    model, plain = pair(name, "batched_mm")
    room = 4 * model_nbytes(model)
    with (
        held(model, "cached", 4, device="cuda")
        if form == "cached"
        else weightstream.offload(model, device_budget=room, codec="none"),
        torch.inference_mode() if is_inference else torch.no_grad(),
    ):
        model(prompt(1))  # with trials
        launches = launches_from_now(monkeypatch)
        for length in (1, 2, 1):
            launches.clear()
            assert torch.equal(model(prompt(length)).logits, plain(prompt(length)).logits)
            is_together = form == "cached" or not is_inference
            assert launches == ([2] if is_together else [1, 1]) * len(packed_modules(model))


@formats
def test_updates_reach_the_slots(name: str) -> None:
    model, plain = pair(name)
    packing = CASES[name].format
    with held(model, "cached", 8, device="cuda"):
        assert_same(generated(model, prompt(5)), generated(plain, prompt(5)))
        for ours, theirs in zip(packed_modules(model), experts_of(plain), strict=True):
            leaves = [ours._parameters["down_proj" + suffix] for suffix in packing.suffixes]
            with torch.no_grad():
                leaves[0].copy_(leaves[0].clone().flip(0))
            now = tuple(leaf.detach().clone().cpu() for leaf in leaves)
            theirs.down_proj.data = packing.unpacked(now, torch.bfloat16).cuda()
        assert_same(generated(model, prompt(5)), generated(plain, prompt(5)))


@formats
@pytest.mark.parametrize("scope", ["model", "blocks"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*functools.lru_cache:UserWarning")
def test_compiled_code_reads_rows_from_slots(name: str, scope: Any) -> None:
    """As the plain model whose experts are left out of the compiled code."""
    model, plain = pair(name, "batched_mm")
    for experts in experts_of(plain):
        experts.forward = torch.compiler.disable(experts.forward)
    torch._dynamo.reset()
    run: Any = torch.compile(plain, dynamic=False) if scope == "model" else plain
    for block in plain.model.layers if scope == "blocks" else ():
        block.compile(dynamic=False)
    with torch.no_grad(), held(model, "cached", 4, device="cuda") as streamer:
        wanted = [run(prompt(length)).logits for length in (5, 1, 1)]
        model(prompt(5))
        streamer.compile(scope, dynamic=False)
        for length, logits in zip((5, 1, 1), wanted, strict=True):
            assert torch.equal(model(prompt(length)).logits, logits), length
        assert min(counts(streamer)) > 0
    torch._dynamo.reset()


@pytest.mark.parametrize("skipped", [2, 3])
def test_rows_are_fetched_from_any_address_of_a_file(skipped: int, tmp_path: Path) -> None:
    """Other libraries write files in which weights follow scales of 1 or 2 bytes, or a header of any length."""
    float8_mixture("qwen3", "ue8m0", tmp_path)
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = data[8:end].rstrip()
    header += b" " * (-(len(header) - skipped) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[end:])
    options = {"experts_implementation": "grouped_mm"}
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=transformers.FineGrainedFP8Config(dequantize=True), device_map="cuda", **options
    )
    model = weightstream.from_pretrained(tmp_path, device_budget=4 * len(data) + (1 << 20), codec="none", **options)
    streamer = model.weightstream
    streamer.switch(plan_of(streamer, "cached", 4))
    for cache in caches(streamer):
        pieces = [piece for stack in cache._stacks for piece in stack.pieces]
        assert any(row.data_ptr() % 8 for piece in pieces for row in piece.rows)
    for length in (5, 40):
        assert_same(generated(model, prompt(length)), generated(plain, prompt(length)))
    assert min(counts(streamer)) > 0
    streamer.remove()


@formats
@pytest.mark.parametrize("num", [1, 2])
def test_waves_of_the_next_layer_come_during_attention(name: str, num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over poison, with a slow device, and with rows that come from their slots; also after a step that failed."""
    model, plain = pair(name)
    monkeypatch.setattr(packed_matrices, "WAVE_NBYTES", num * experts_of(plain)[0].gate_up_proj[0].nbytes)
    plain_copied, num_begun, fails = RowStream.copied, list[int](), list[bool]()

    def spied(self: RowStream, rows: Sequence[int], memory: torch.Tensor) -> Any:
        memory.fill_(255)
        return plain_copied(self, rows, memory)

    monkeypatch.setattr(RowStream, "copied", spied)
    with held(model, "cached", 4, device="cuda") as streamer:
        assert_same(generated(model, prompt(5)), generated(plain, prompt(5)))  # rows have slots now
        streams = streamer._binding.waves

        def spy(*_: Any) -> None:
            num_begun.append(len(streams._begun))
            torch.cuda._sleep(2_000_000)
            if fails and len(num_begun) == 3:
                raise ZeroDivisionError

        hooks = [layer.self_attn.register_forward_pre_hook(spy) for layer in model.model.layers]
        for length in (300, 40, 1, 300):  # few experts are read for 40 tokens: nothing comes ahead then
            with torch.no_grad():
                assert torch.equal(model(prompt(length)).logits, plain(prompt(length)).logits), length
            assert (max(num_begun) > 0) is (length > 1) or length == 40
            num_begun.clear()
        fails.append(True)
        with torch.no_grad(), pytest.raises(ZeroDivisionError):
            model(prompt(300))
        for hook in hooks:
            hook.remove()
        assert_same(generated(model, prompt(40)), generated(plain, prompt(40)))


@pytest.mark.parametrize("slotted", [(), (0, 3, 4, 11)])
def test_a_stream_of_rows_orders_copies_and_readers(slotted: tuple[int, ...]) -> None:
    """Slow readers on the compute stream see their wave, and none that was copied over it; copies of the next stream
    begin before it is read."""
    backend = CudaBackend(torch.device("cuda", torch.cuda.current_device()))
    kept: list[torch.Tensor] = []

    def take(memory: torch.Tensor) -> torch.Tensor:
        kept.append(memory.pin_memory())
        view = backend.device_view(kept[-1])
        assert view is not None
        return view

    stacks = host_stacks(take)
    cache = with_slots(stacks, slotted, "cuda") if slotted else None
    buffer = buffer_of(backend, 3)
    streams = streams_of(stacks, buffer, 3, cache)
    generator = torch.Generator().manual_seed(3)
    for turn in range(20):
        found: list[tuple[Sequence[int], list[torch.Tensor]]] = []
        for stream in streams:
            rows = torch.randperm(NUM_ROWS, generator=generator)[: NUM_ROWS - turn % 3]
            waves = stream.cut(rows.sort().values.tolist(), 3 + turn % 2)
            for wave, leaves in zip(waves, stream.bring(waves), strict=True):
                torch.cuda._sleep(200_000)
                found.append((wave.rows, [leaf[list(wave.places)] for leaf in leaves]))
        buffer.drop()
        buffer.memory.fill_(255)
        for of_wave, copies in found:
            for stack, copy in zip(stacks, copies, strict=True):
                wanted = stack.values[list(of_wave)]
                assert torch.equal(copy.cpu().view(torch.uint8), wanted.view(torch.uint8))
    backend.close()
