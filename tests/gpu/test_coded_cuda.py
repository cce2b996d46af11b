"""Compressed weights on a GPU: the plain model's bits in every mode, the bytes of the plan, and the fallbacks."""

from __future__ import annotations

import copy
import gc
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from test_compiled import OPTIONS, SCOPES, compiled, counters
from torch import nn
from typer.testing import CliRunner

import weightstream
from coded_rig import cast, exact
from models import TEXT
from stack import Block, Stack, Taught, assert_equal, captured, floats, nbytes, slow, taught
from weightstream.cli import app
from weightstream.codec import coding
from weightstream.errors import CheckpointError, OffloadError
from weightstream.runtime.ring.binding import Binding
from weightstream.store import pack

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

__all__ = ["counters"]  # a fixture

MIB = 1 << 20
SMALL: dict[str, Any] = {"depth": 5, "width": 512, "dtype": torch.bfloat16}
PLANS: dict[str, dict[str, Any]] = {
    "streams": SMALL | {"share": 0.35, "codec": "compressed"},
    "in part": SMALL | {"share": 0.7, "codec": "compressed"},
    "resident": SMALL | {"share": 2.0, "codec": "compressed"},
    "half": SMALL | {"share": 0.4, "codec": "compressed", "dtype": torch.float16},
    "float32 is not coded": SMALL | {"share": 0.4, "codec": "compressed", "dtype": torch.float32},
}
LARGE: dict[str, Any] = {"depth": 8, "width": 2048, "dtype": torch.bfloat16, "codec": "auto"}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Clear cached facts about a device, since a test may have faked them."""
    yield
    forget()


def forget() -> None:
    coding._available.cache_clear()
    coding._trial.cache_clear()


def assert_codes(model: Taught, plan: dict[str, Any]) -> None:
    codes = model.streamer.plan.manifest.codes
    assert bool(codes) is (plan["dtype"] is not torch.float32)
    assert (model.streamer.plan.step_nbytes > 0) is (plan["share"] < 1)


@pytest.mark.parametrize("name", PLANS)
def test_every_mode_gives_the_plain_bits(name: str) -> None:
    with taught(**PLANS[name]) as model:
        assert_codes(model, PLANS[name])
        model.assert_equal()
        with model.streamer.step():
            model.assert_equal()
        graphs = [model.captured(num) for num in range(2)]
        for graph in (*graphs, *graphs):
            model.assert_equal(graph, rounds=4)
            model.assert_equal(rounds=1)
        with model.streamer.step():
            for graph in graphs:
                model.assert_equal(graph, rounds=4)


@pytest.mark.alone
@pytest.mark.usefixtures("own_profile")
@pytest.mark.parametrize("share", [0.2, 0.45, 0.78])
def test_the_planner_compresses_if_the_link_is_the_bottleneck(share: float) -> None:
    with taught(**LARGE, share=share) as model:
        plan = model.streamer.plan
        assert plan.manifest.codes
        assert plan.device_nbytes <= share * nbytes(model.stack)
        model.assert_equal()
        moved = model.streamer.stats().filled_nbytes
        model.stack(model.inputs[0])
        assert model.streamer.stats().filled_nbytes - moved == plan.step_nbytes
        model.assert_equal(model.captured(), rounds=5)


def test_the_planner_does_not_compress_a_model_that_fits() -> None:
    with taught(**SMALL, share=1.1) as model:
        assert not model.streamer.plan.manifest.codes
        assert model.streamer.plan.buffer_nbytes == 0
        model.assert_equal()


@pytest.mark.alone
@pytest.mark.usefixtures("own_profile")
@pytest.mark.usefixtures("nothing_foreseen")  # a traced call hides the streamed bytes in its work, and would be faster
def test_only_compressed_residents_fit() -> None:
    with taught(
        **LARGE | {"codec": "compressed"}, share=0.95
    ) as model:  # with little to stream, streaming may be as fast
        plan = model.streamer.plan
        assert plan.manifest.codes
        assert plan.ring_nbytes == plan.step_nbytes == 0
        model.assert_equal()
        step = model.captured()
        model.assert_equal(step, rounds=10)
        with model.streamer.step():
            model.assert_equal(step, rounds=3)
            model.assert_equal(rounds=1)
        assert model.streamer.stats().fills == 0


@pytest.mark.parametrize("name", ["streams", "in part", "resident"])
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.usefixtures("counters")
def test_compiled_steps_equal_the_plain_model_compiled_alike(
    scope: Literal["model", "blocks"], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with taught(**PLANS[name]) as model:
        assert_codes(model, PLANS[name])
        compiled(model, scope)
        model.assert_equal()
        with model.streamer.step():
            model.assert_equal()
        model.assert_equal(model.captured(), rounds=5)
        model.assert_equal()
        assert not [record for record in caplog.records if "eager and not compiled" in record.message]
        assert OPTIONS["fullgraph"]


@pytest.mark.parametrize("name", ["streams", "resident"])
def test_pieces_of_a_step_and_two_streams(name: str) -> None:
    with taught(**PLANS[name]) as model:
        x = model.inputs[0].clone()
        pieces: list[tuple[torch.cuda.CUDAGraph, torch.Tensor]] = []
        for blocks in (model.stack.blocks[:2], model.stack.blocks[2:]):
            graph, y = torch.cuda.CUDAGraph(), pieces[-1][1] if pieces else x
            with model.streamer.capture(graph):
                for block in blocks:
                    y = block(y)
            pieces.append((graph, y))

        def step(value: torch.Tensor) -> torch.Tensor:
            x.copy_(value)
            with model.streamer.step():
                for graph, _ in pieces:
                    model.streamer.replay(graph)
            return pieces[-1][1].clone()

        model.assert_equal(step, rounds=5)
        streams = [torch.cuda.Stream() for _ in range(2)]
        torch.cuda.synchronize()
        for turn in range(20):  # one step on each alternately; only the streamer orders their use of the buffer
            with torch.cuda.stream(streams[turn % 2]):
                got = model.stack(model.inputs[turn % 4])
            torch.cuda.current_stream().wait_stream(streams[turn % 2])
            assert torch.equal(got, model.want[turn % 4])
        ahead = []
        for turn in range(20):
            with torch.cuda.stream(streams[turn % 2]):
                ahead.append(model.stack(model.inputs[turn % 4]))
        torch.cuda.synchronize()
        assert all(torch.equal(got, model.want[turn % 4]) for turn, got in enumerate(ahead))


@pytest.mark.alone
@pytest.mark.parametrize("origin", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["streams", "in part", "resident"])
def test_the_device_holds_the_bytes_of_the_plan(name: str, origin: str) -> None:
    facts = {key: value for key, value in PLANS[name].items() if key in ("depth", "width")}
    with torch.device("cuda"):
        plain = Stack(**facts).eval().to(torch.bfloat16)
    stack = copy.deepcopy(plain).to(origin)
    identities = {key: id(parameter) for key, parameter in stack.named_parameters()}
    inputs = floats(plain)
    with torch.no_grad():
        want = [plain(x) for x in inputs]
        coding.available(torch.device("cuda", torch.cuda.current_device()), "bfloat16")  # its trial allocates once
        warm = copy.deepcopy(plain)  # and so do libraries
        with weightstream.offload(warm, device="cuda", device_budget=1 << 30, codec=PLANS[name]["codec"]):
            warm(inputs[0])
        del warm
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated() - (nbytes(stack) if origin == "cuda" else 0)
        budget = int(PLANS[name]["share"] * nbytes(stack))
        streamer = weightstream.offload(stack, device="cuda", device_budget=budget, codec=PLANS[name]["codec"])
        gc.collect()
        assert streamer.plan.manifest.codes
        held = torch.cuda.memory_allocated() - before
        assert streamer.plan.device_nbytes <= held + 4096
        rounded = 2 * MIB if origin == "cpu" else MIB * len(streamer.plan.manifest.codes)
        assert held <= streamer.plan.device_nbytes + rounded
        torch.cuda.reset_peak_memory_stats()
        assert_equal(stack, inputs, want)
        gc.collect()
        assert torch.cuda.memory_allocated() - before <= streamer.plan.device_nbytes + rounded
        assert torch.cuda.max_memory_allocated() - before <= streamer.plan.device_nbytes + rounded + 2 * MIB
        streamer.remove()
        gc.collect()
        left = torch.cuda.memory_allocated() - before
        rounded = MIB * len(identities)  # the allocator's rounding of each allocation that goes back to the device
        assert left <= (nbytes(stack) + rounded if origin == "cuda" else 0) + MIB
        for (key, mine), theirs in zip(stack.named_parameters(), plain.parameters(), strict=True):
            assert id(mine) == identities[key]
            assert type(mine) is nn.Parameter
            assert (mine.device.type, mine.stride()) == (origin, theirs.stride())
            assert torch.equal(mine.cuda(), theirs)
        assert_equal(stack.cuda(), inputs, want, rounds=1)


@pytest.mark.parametrize("name", ["streams", "resident"])
def test_updates_between_steps_and_launches(name: str) -> None:
    with taught(**PLANS[name]) as model:
        codes = model.streamer.plan.manifest.codes
        step = model.captured()
        model.assert_equal(step)
        for module in (model.stack, model.plain):  # uncompressed weights keep their place, so graphs see the update
            module.get_parameter("blocks.0.norm.bias").add_(0.25)
        assert "blocks.0.norm.bias" not in codes
        for want, x in zip(model.want, model.inputs, strict=True):
            want.copy_(model.plain(x))
        model.assert_equal()
        model.assert_equal(model.captured())
        for weight in ("blocks.1.up.weight", "blocks.4.down.weight"):
            assert weight in codes
            step = model.captured() if weight == "blocks.1.up.weight" else step
            for module in (model.stack, model.plain):
                module.get_parameter(weight).mul_(0.5)
            for want, x in zip(model.want, model.inputs, strict=True):
                want.copy_(model.plain(x))
            with pytest.raises(OffloadError, match="capture it again"):
                step(model.inputs[0])
            model.assert_equal()
            with model.streamer.step():
                model.assert_equal()
            with pytest.raises(OffloadError, match="again"):
                model.captured()
            model.assert_equal()
            assert torch.equal(model.stack.get_parameter(weight).cuda(), model.plain.get_parameter(weight))
        held = model.streamer.stats().held_nbytes
        assert held["device"] <= model.streamer.plan.device_nbytes


def test_reads_between_and_inside_steps() -> None:
    with taught(**PLANS["streams"]) as model:
        seen: list[float] = []
        model.stack.blocks[2].register_forward_pre_hook(
            lambda module, args: seen.append(model.stack.blocks[4].up.weight.float().max().item())
        )
        assert torch.equal(model.stack.blocks[0].up.weight.cuda(), model.plain.blocks[0].up.weight)
        model.assert_equal(rounds=1)
        expected = model.plain.blocks[4].up.weight.float().max().item()
        assert seen == [expected] * len(seen)
        assert seen
        state = model.stack.state_dict()
        assert all(torch.equal(state[key].cuda(), value) for key, value in model.plain.state_dict().items())


# -- delays ------------------------------------------------------------------------------------------------------------

MOST_CYCLES = 400_000
ROUNDS = 100  # of four steps


@pytest.mark.parametrize("name", ["streams", "in part"])
@pytest.mark.parametrize("fixed", [False, True], ids=["eager", "fixed"])
def test_under_delays_and_poison(fixed: bool, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch, most_cycles=MOST_CYCLES)
    with taught(**PLANS[name]) as model, model.streamer.step() if fixed else nullcontext():
        assert_codes(model, PLANS[name])
        model.assert_equal(rounds=ROUNDS)


@pytest.mark.parametrize("name", ["streams", "in part"])
def test_graphs_under_delays_and_poison(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch, most_cycles=MOST_CYCLES)
    with taught(**PLANS[name]) as model:
        launch(model)


def launch(model: Taught, num_graphs: int = 15) -> None:
    for _ in range(num_graphs):
        step = model.captured()
        with model.streamer.step():
            model.assert_equal(step, rounds=ROUNDS // num_graphs)
            model.assert_equal(rounds=1)


class Early(Binding):
    """At fixed addresses, weights are decoded before the wait for their fill."""

    done = False

    def hold(self, unit: int) -> None:
        self.decode(unit)
        self.done = True
        super().hold(unit)

    def decode(self, unit: int) -> None:
        if not self.done:
            super().decode(unit)
        self.done = False


def test_decoding_before_the_fill_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch, most_cycles=MOST_CYCLES)
    monkeypatch.setattr("weightstream.runtime.streamer.active_plan.Binding", Early)
    with taught(**PLANS["streams"]) as model:
        model.assert_equal(rounds=5)
        with pytest.raises(AssertionError), model.streamer.step():
            model.assert_equal(rounds=ROUNDS)


# -- generation, tables, experts ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def generation() -> Any:
    pytest.importorskip("transformers")
    import test_captured_generation

    return test_captured_generation


@pytest.mark.parametrize(
    ("codec", "share"), [("compressed", 0.45), ("compressed", 0.7), ("compressed", 4.0), ("auto", 0.3)]
)
@pytest.mark.parametrize("name", ["llama", "moe"])
def test_captured_generation(name: str, codec: str, share: float, generation: Any) -> None:
    import transformers

    wide = {**TEXT, "hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**wide)
    if name == "moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
        config = transformers.Qwen3MoeConfig(**wide, **experts, head_dim=64)
    plain, model = generation.build(config).cuda(), generation.build(config)
    budget = int(share * sum(p.nbytes for p in model.parameters()))
    with weightstream.offload(model, device="cuda", device_budget=budget, codec=codec) as streamer:
        assert codec == "auto" or streamer.plan.manifest.codes
        for call, shape in enumerate(((5, 1), (9, 3), (5, 1))):
            ids = generation.prompt(*shape)
            want = plain.generate(ids, **generation.options(), **generation.STATIC)
            got, decoding = generation.captured(model, ids)
            assert torch.equal(got, want)
            assert decoding.replays == 22 - (not call), decoding  # the first call learns for one step
        with torch.no_grad():
            for one in (plain, model):
                one.model.layers[1].self_attn.q_proj.weight.mul_(1.5)
        ids = generation.prompt(7)
        want = plain.generate(ids, **generation.options(), **generation.STATIC)
        got, decoding = generation.captured(model, ids)
        assert torch.equal(got, want), decoding


class Language(nn.Module):
    """A table of which a step reads a few rows, blocks, and a head that may be tied to it."""

    def __init__(self, tied: bool, width: int = 512) -> None:
        super().__init__()
        self.embed = nn.Embedding(4096, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(5))
        self.head = nn.Linear(width, 4096, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("settings", [{}, {"zero_copy_params": {"embed"}}], ids=["unasked", "named"])
def test_a_zero_copy_table_next_to_compressed_weights(tied: bool, settings: dict[str, Any]) -> None:
    with torch.device("cuda"):
        plain = Language(tied).eval().to(torch.bfloat16)
    model = copy.deepcopy(plain).cpu()
    inputs = [torch.randint(0, 4096, (2, 5), device="cuda") for _ in range(4)]
    with torch.no_grad():
        want = [plain(x) for x in inputs]
        budget = int(0.4 * nbytes(model))
        with weightstream.offload(
            model, device="cuda", device_budget=budget, codec="compressed", **settings
        ) as streamer:
            plan = streamer.plan
            assert plan.manifest.codes
            assert not plan.mapped & plan.manifest.codes.keys()
            if settings:
                assert "embed.weight" in plan.mapped
            assert_equal(model, inputs, want)
            assert_equal(model, inputs, want)
            if not tied or settings:
                assert_equal(captured(streamer, model, inputs[0]), inputs, want, rounds=5)
        assert (model.head.weight is model.embed.weight) == tied
        assert_equal(model.cuda(), inputs, want, rounds=1)


class Odd(nn.Module):
    """An odd number of weights, views of one storage, float8, and a layout that is not dense."""

    def __init__(self) -> None:
        super().__init__()
        both = torch.randn(2 * 512, 512) / 25
        self.flat = nn.Parameter(torch.randn(65537) / 25)
        self.upper, self.lower = nn.Parameter(both[:512]), nn.Parameter(both[512:])
        self.narrow = nn.Parameter((torch.randn(512, 513) / 25).to(torch.float8_e4m3fn), requires_grad=False)
        self.transposed = nn.Parameter((torch.randn(512, 300) / 25).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = x @ self.upper + torch.tanh(x) @ self.lower.t()
        inner = inner + (inner @ self.narrow.to(x.dtype))[:, 1:] * self.flat[-512:] * self.flat[:512]
        return x + (inner @ self.transposed.t()) @ self.transposed


class Odds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Odd() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("share", [0.5, 2.0])
def test_odd_tensors(share: float) -> None:
    model, plain = cast(Odds().eval(), torch.bfloat16), cast(Odds().eval(), torch.bfloat16)
    before = exact(model)
    for parameter in plain.parameters():
        placed = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="cuda")
        parameter.data = placed.copy_(parameter.data)
    inputs = [torch.randn(3, 512, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    with torch.no_grad():
        want = [plain(x) for x in inputs]
        budget = int(share * nbytes(model))
        with weightstream.offload(model, device="cuda", device_budget=budget, codec="compressed") as streamer:
            kinds = {t.dtype for t in streamer.plan.manifest.tensors() if t.is_coded}
            assert kinds == {"bfloat16", "float8_e4m3fn"}
            assert_equal(model, inputs, want)
            assert_equal(captured(streamer, model, inputs[0]), inputs, want)
    assert without_places(exact(model)) == without_places(before)  # two halves of one storage are separate afterwards


def without_places(facts: dict[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
    return {name: (*fact[:-2], fact[-1]) for name, fact in facts.items()}


# -- packs, damage, and devices without kernels ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`plain` and `coded` in one folder: a small Llama."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=320,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "plain")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack, "_LEAST_CODED", 8192)
        result = CliRunner().invoke(
            app, ["pack", str(folder / "plain"), str(folder / "coded"), "--codec", "compressed"]
        )
    assert result.exit_code == 0, result.output
    return folder


def reference(checkpoint: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint / "plain", dtype="auto").eval().cuda()


IDS = [torch.arange(3, 3 + length)[None] for length in (5, 9, 7)]


@contextmanager
def loaded(path: Path, codec: str, share: float, **options: Any) -> Iterator[Any]:
    nbytes_of_all = sum(file.stat().st_size for file in (path.parent / "plain").glob("*.safetensors"))
    model = weightstream.from_pretrained(
        path, device="cuda", device_budget=int(share * nbytes_of_all), codec=codec, progress=False, **options
    )
    try:
        yield model
    finally:
        model.weightstream.remove()


@torch.no_grad()
def assert_logits_equal(model: Any, plain: Any) -> None:
    for ids in IDS * 2:
        assert torch.equal(model(ids.cuda()).logits, plain(ids.cuda()).logits)


SETTINGS: list[tuple[str, dict[str, Any]]] = [
    *((kind, settings) for kind in ("plain", "coded") for settings in ({}, {"pin_memory": False})),
    ("coded", {"host_budget": "1MiB"}),
]


@pytest.mark.parametrize(("kind", "settings"), SETTINGS)
@pytest.mark.parametrize("share", [0.55, 4.0])
def test_from_pretrained(kind: str, share: float, settings: dict[str, Any], checkpoint: Path) -> None:
    plain = reference(checkpoint)
    with loaded(checkpoint / kind, "compressed", share, **settings) as model:
        plan = model.weightstream.plan
        assert plan.manifest.codes
        assert (plan.step_nbytes > 0) is (share < 1)
        assert_logits_equal(model, plain)
        got = weightstream.generate(model, IDS[0].cuda(), max_new_tokens=8, do_sample=False, pad_token_id=0)
        want = plain.generate(
            IDS[0].cuda(),
            max_new_tokens=8,
            do_sample=False,
            pad_token_id=0,
            cache_implementation="static",
            disable_compile=True,
        )
        assert torch.equal(got, want)
        with torch.no_grad():
            for one in (model, plain):
                one.model.layers[2].mlp.up_proj.weight.mul_(1.5)
        assert_logits_equal(model, plain)


@pytest.mark.parametrize("share", [0.55, 4.0])
def test_a_damaged_pack_gives_other_weights_and_no_error_of_the_device(
    share: float, checkpoint: Path, tmp_path: Path
) -> None:
    shutil.copytree(checkpoint / "plain", tmp_path / "plain")
    plain = reference(checkpoint)
    whole = next((checkpoint / "coded").glob("*.safetensors")).read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for turn, damage in enumerate((bytes([255]), bytes([0]), bytes([170, 3]), None)):
        folder = tmp_path / f"damaged {turn}"
        shutil.copytree(checkpoint / "coded", folder)
        generator = torch.Generator().manual_seed(turn)
        body = len(whole) - header
        noise = torch.randint(0, 256, (body,), dtype=torch.uint8, generator=generator).numpy().tobytes()
        spoiled = noise if damage is None else (damage * body)[:body]
        next(folder.glob("*.safetensors")).write_bytes(whole[:header] + spoiled)
        with pytest.raises(CheckpointError, match="checksum"), loaded(folder, "compressed", share):
            pass
        with loaded(folder, "compressed", share, verify_checksums=False) as model, torch.no_grad():
            assert model.weightstream.plan.manifest.codes
            logits = [model(ids.cuda()).logits for ids in IDS]
            torch.cuda.synchronize()
            assert not torch.equal(logits[0], plain(IDS[0].cuda()).logits)
            again = [model(ids.cuda()).logits for ids in IDS]
            bits = torch.int16
            assert all(torch.equal(a.view(bits), b.view(bits)) for a, b in zip(again, logits, strict=True))
        torch.cuda.synchronize()  # would report an access out of bounds


def missing_triton(patch: pytest.MonkeyPatch) -> None:
    import builtins

    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        fromlist = args[2] if len(args) > 2 else kwargs.get("fromlist") or ()
        if name.endswith("triton_codec") or "triton_codec" in (fromlist or ()):
            raise ImportError("No module named 'triton'")
        return real(name, *args, **kwargs)

    patch.setattr(builtins, "__import__", refuse)


def old_gpu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(coding, "why_not", lambda *_, **__: "its kernels do not run here (it is old)")


WITHOUT = {"no Triton": missing_triton, "an old GPU": old_gpu}


@pytest.mark.parametrize("why", WITHOUT)
@pytest.mark.parametrize("codec", ["auto", "compressed"])
@pytest.mark.parametrize("kind", ["a model", "plain", "coded"])
def test_without_kernels_weights_move_uncompressed(
    kind: str, codec: str, why: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="weightstream")
    forget()
    WITHOUT[why](monkeypatch)
    if kind == "a model":
        with taught(**SMALL, share=0.4, codec=codec) as model:
            assert not model.streamer.plan.manifest.codes
            model.assert_equal()
            model.assert_equal(model.captured())
    else:
        plain = reference(checkpoint)
        with loaded(checkpoint / kind, codec, 0.7) as model:
            assert not model.weightstream.plan.manifest.codes
            assert_logits_equal(model, plain)
    monkeypatch.undo()
    messages = [r.getMessage() for r in caplog.records if "are not compressed" in r.getMessage()]
    assert len(messages) == 1, [r.getMessage() for r in caplog.records]


def test_codec_none_never_compresses(checkpoint: Path) -> None:
    plain = reference(checkpoint)
    for kind in ("plain", "coded"):
        with loaded(checkpoint / kind, "none", 0.7) as model:
            assert not model.weightstream.plan.manifest.codes
            assert_logits_equal(model, plain)
    with taught(**LARGE | {"codec": "none"}, share=0.4) as model:
        assert not model.streamer.plan.manifest.codes
        model.assert_equal()


# -- life cycle --------------------------------------------------------------------------------------------------------


@pytest.mark.alone
def test_memory_is_released_and_stays_flat() -> None:
    held = []
    for _ in range(3):
        for name in ("streams", "resident"):
            with taught(**PLANS[name]) as model:
                model.assert_equal()
                model.assert_equal(model.captured())
        del model
        gc.collect()
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    assert held[1] == held[2]


def test_nested_units_at_fixed_addresses_are_refused() -> None:
    class Around(nn.Module):
        def __init__(self, inner: list[nn.Module]) -> None:
            super().__init__()
            self.up, self.down = (nn.Parameter(torch.randn(512, 512) / 32) for _ in range(2))
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(x @ self.up)
            for inner in self.inner:
                x = inner(x)
            return x @ self.down

    class Frame(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([first := Around([]), Around([first]), Around([])])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    plain = Frame().eval().to(torch.bfloat16).cuda()
    model = copy.deepcopy(plain).cpu()
    x = torch.randn(3, 512, device="cuda", dtype=torch.bfloat16)
    with (
        torch.no_grad(),
        weightstream.offload(model, device="cuda", device_budget=1 << 30, codec="compressed") as streamer,
    ):
        want = plain(x)
        for _ in range(3):
            assert torch.equal(model(x), want)
        with pytest.raises(OffloadError, match="inside of another"):
            captured(streamer, model, x)
        assert torch.equal(model(x), want)
