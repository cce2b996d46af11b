"""A model over several devices: the bits of one device, the device of each block, and the copies between devices."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import streaming
import weightstream
from models import BLOCKLESS, MODELS, Model, assert_same, model_nbytes, weights
from streaming import plain, run
from weightstream import ConfigError, OffloadConfig, OffloadError, PlanError, StoreError, UnsupportedError
from weightstream.api import multi_gpu
from weightstream.api.multi_gpu import Stripes, stripe
from weightstream.inputs.builder import CallerFacts, OffloadBuilder
from weightstream.inputs.device_split import blocks_sharing_memory
from weightstream.measure import multi_gpu_links
from weightstream.plan import multi_device
from weightstream.runtime.devices.cpu import CpuBackend
from weightstream.runtime.streamer.activation_transfer import DeviceCrossing, crossing
from weightstream.runtime.tensors.pytree import tensors_in
from wrapped import Delay, Fault, Poison


def striped(model: Model, num: int, **settings: Any) -> Stripes:
    return streaming.striped(model.module, num, (2, 3, 4, 5, 6, 8, 12, 20), device="cpu", **settings)


def fail_at_the_second(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """The weights of the second device cannot be moved."""
    attach, calls = OffloadBuilder.attach, []

    def failing(self: OffloadBuilder, *args: Any, **kwargs: Any) -> Any:
        calls.append(self)
        if len(calls) == 2:
            raise error
        return attach(self, *args, **kwargs)

    monkeypatch.setattr(OffloadBuilder, "attach", failing)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "num"),
    [
        pytest.param(name, num, marks=[pytest.mark.stress] * ((i + num) % 5 > 0))
        for i, name in enumerate(n for n in MODELS if n not in BLOCKLESS)
        for num in (2, 3)
    ],
)
def test_outputs_equal_those_of_one_device(name: str, num: int) -> None:
    model, reference = MODELS[name](), plain(name, "cpu")
    with striped(model, num) as stripes:
        assert 1 <= len(stripes.parts) <= num
        for seed in range(4):
            assert_same(run(model, "cpu", seed), run(reference, "cpu", seed))
        assert all(part.stats().steps == 4 for part in stripes.parts.values())
    for key, tensor in weights(reference.module).items():
        assert torch.equal(weights(model.module)[key], tensor), key
    assert_same(run(model, "cpu", 9), run(reference, "cpu", 9))


def test_blocks_that_share_a_tensor_are_found() -> None:
    blocks = [nn.Linear(2, 2) for _ in range(4)]
    blocks[3].weight = blocks[1].weight
    model = nn.ModuleList(blocks)
    assert blocks_sharing_memory(model, blocks) == [0, 1, 2, 1]
    model.weight = blocks[2].weight
    assert blocks_sharing_memory(model, blocks) == [0, 1, None, 1]


class Holder(nn.Module):
    def __init__(self, *parameters: nn.Parameter) -> None:
        super().__init__()
        self.parameters_of_others = nn.ParameterList(parameters)


@pytest.mark.parametrize(
    ("held", "outside", "leaders"),
    [
        (["a", "b", "ab"], "", [0, 0, 0]),
        (["a", "ab", "b"], "", [0, 0, 0]),
        (["ab", "c", "bd", "dc", "e"], "", [0, 0, 0, 0, 4]),
        (["a", "ab", "c"], "b", [None, None, 2]),
        (["a", "b", "ab", "c"], "a", [None, None, None, 3]),
        (["", "a", "a"], "", [0, 1, 1]),
    ],
)
def test_blocks_that_share_memory_through_others_are_on_one_device(
    held: list[str], outside: str, leaders: list[int | None]
) -> None:
    by_name = {name: nn.Parameter(torch.randn(4)) for name in "abcde"}
    model = nn.Module()
    model.blocks = nn.ModuleList(Holder(*(by_name[name] for name in names)) for names in held)
    model.outside = Holder(*(by_name[name] for name in outside))
    assert blocks_sharing_memory(model, list(model.blocks)) == leaders


class Elsewhere(DeviceCrossing):
    """A crossing whose copies stay on the same device, and are recognised by their memory."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), torch.device("cpu"))
        self.num_copied: list[int] = []
        self.memories: dict[int, torch.Tensor] = {}

    def goes(self, tensor: torch.Tensor) -> bool:
        return not self.comes(tensor)

    def comes(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self.memories

    def there_now(self, tensor: torch.Tensor) -> torch.Tensor:
        self.memories[tensor.untyped_storage()._cdata] = tensor
        return tensor

    def copied(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        self.num_copied.append(tensor.numel())
        made = tensor.clone()
        return self.there_now(made) if self.goes(tensor) else made


def crossed(way: DeviceCrossing, forward: Any) -> Any:
    run = crossing(way)
    return lambda *args, **kwargs: run(forward, args, kwargs)


def as_there(way: Elsewhere, forward: Any) -> Any:
    """A block on the other device: its output, and everything that it leaves in its arguments, must be copied back."""

    def block(*args: Any, **kwargs: Any) -> Any:
        assert all(way.comes(tensor) for tensor in tensors_in((args, kwargs)))
        output = forward(*args, **kwargs)
        for tensor in tensors_in((args, kwargs, output)):
            way.there_now(tensor)
        return output

    return crossed(way, block)


class Noted(dict[str, torch.Tensor]):
    """A dict that counts."""

    seen = 0


def twice_written(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.add_(1)
    b.mul_(3)
    return a + b


def appended(a: list[torch.Tensor], m: Any) -> Any:
    a.append(a[0] + 1)
    return m


def noted(kv: Noted) -> Noted:
    kv.seen += 3
    kv["a"] = kv.pop("a") + 1
    kv["c"] = kv["b"] * 2
    return kv


def writes_and_raises(a: torch.Tensor) -> None:
    a.add_(5)
    raise KeyError("in the block")


X = torch.arange(6.0)
CALLS: dict[str, tuple[Any, Any]] = {  # the operations of a block, and arguments for it that are new in every call
    "one tensor twice": (twice_written, lambda: [(x := X.clone()), x]),
    "views that overlap": (twice_written, lambda: [(x := X.clone())[:4], x[2:]]),
    "a view of all": (lambda a, b: (a.add_(1), b)[1], lambda: [(x := X.clone()), x[:2]]),
    "rows and columns": (
        lambda a, b: (a.zero_(), b * 1)[1],
        lambda: [(x := X.clone().view(2, 3)).t()[1:], x[:, 1:]],
    ),
    "views that do not": (lambda a, b: (a.add_(1), b)[1], lambda: [(x := X.clone())[:2], x[2:]]),
    "one list twice": (appended, lambda: [(x := [X.clone()]), x]),
    "a list inside of a dict": (lambda a, m: appended(a, m)["l"], lambda: [(x := [X.clone()]), {"l": x}]),
    "attributes beside items": (noted, lambda: [Noted(a=X.clone(), b=X.clone() + 1)]),
    "an output twice": (lambda a: ((y := a + 1), y, [y]), lambda: [X.clone()]),
    "a view of an argument": (lambda a: a[1:3], lambda: [X.clone()]),
    "an argument": (lambda a: a, lambda: [X.clone()]),
    "a named tuple": (lambda a: a.values * 2, lambda: [torch.sort(X.clone())]),
    "an error": (writes_and_raises, lambda: [X.clone()]),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_arguments_are_shared_as_on_one_device(name: str, inference: bool) -> None:
    """Twice, since copies are kept. Afterwards, written results must be visible in arguments that share their
    memory."""
    block, arguments = CALLS[name]
    way = Elsewhere()
    call = as_there(way, block)
    with torch.no_grad(), torch.inference_mode(inference):
        for _ in range(2):
            ours, theirs = arguments(), arguments()
            found, wanted = _outcome(call, ours), _outcome(block, theirs)
            for value in (found, wanted):
                for tensor in tensors_in(value):
                    tensor.add_(7)
            _assert_alike((found, ours), (wanted, theirs))
            assert all(way.goes(tensor) for tensor in tensors_in((found, ours)))


def _outcome(call: Any, args: list[Any]) -> Any:
    try:
        return call(*args)
    except KeyError as error:
        return str(error)


def _assert_alike(found: Any, wanted: Any) -> None:
    ours, theirs = list(tensors_in(found)), list(tensors_in(wanted))
    assert len(ours) == len(theirs)
    assert all(map(torch.equal, ours, theirs))
    same = [[a is b for b in ours] for a in ours]
    assert same == [[a is b for b in theirs] for a in theirs]
    if isinstance(wanted, Noted):
        assert (list(found), found.seen) == (list(wanted), wanted.seen)
    elif isinstance(wanted, tuple | list):
        assert len(found) == len(wanted)
        for a, b in zip(found, wanted, strict=True):
            _assert_alike(a, b)


@pytest.mark.parametrize("inference", [False, True])
def test_shared_arguments_are_copied_once_and_writes_come_back(inference: bool) -> None:
    way = Elsewhere()

    def block(x: torch.Tensor, *, mask: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert all(map(way.comes, (x, mask, cache)))
        cache.add_(1)
        return way.there_now(x + mask), cache

    call = crossed(way, block)
    with torch.inference_mode(inference):
        mask, cache = torch.ones(3), torch.zeros(5)
        for step in range(3):
            x = torch.full((3,), float(step))
            y, same = call(x, mask=mask, cache=cache)
            assert way.goes(y)
            assert same is cache
            assert torch.equal(y, x + 1)
            assert torch.equal(cache, torch.full((5,), step + 1.0))
        assert way.num_copied.count(5) == 3, "it was copied again after a write"
        assert way.num_copied.count(3) == (9 if inference else 7), "without versions each is copied again"
        mask.add_(1)
        assert torch.equal(call(torch.zeros(3), mask=mask, cache=cache)[0], torch.full((3,), 2.0))


@dataclasses.dataclass
class State:
    hidden: torch.Tensor
    others: list[torch.Tensor]
    named: dict[str, torch.Tensor]
    text: str = ""


def test_containers_that_a_block_writes_to() -> None:
    way = Elsewhere()

    def block(state: State) -> State:
        assert all(map(way.comes, (state.hidden, *state.others, *state.named.values())))
        state.others.append(way.there_now(state.hidden + 1))
        state.named["new"] = way.there_now(state.hidden + 2)
        del state.named["old"]
        state.text = "ran"
        return state

    hidden, kept = torch.zeros(2), torch.ones(4)
    state = State(hidden=hidden, others=[kept], named={"old": torch.ones(1), "kept": kept})
    others, named = state.others, state.named
    found = crossed(way, block)(state)
    assert found is state
    assert state.hidden is hidden
    assert state.others is others
    assert state.named is named
    assert others[0] is kept
    assert torch.equal(others[1], torch.ones(2))
    assert list(named) == ["kept", "new"]
    assert named["kept"] is kept
    assert torch.equal(named["new"], torch.full((2,), 2.0))
    assert state.text == "ran"
    assert all(map(way.goes, (*others, *named.values())))


def test_a_copy_of_the_model_is_plain() -> None:
    model, reference = MODELS["Stack"](), plain("Stack", "cpu")
    with striped(model, 2):
        run(model, "cpu", 0)
        copied = Model(module=copy.deepcopy(model.module), inputs=model.inputs)
        assert copied.module.weightstream is None
    model.module.zero_grad()
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.zero_()
    assert_same(run(copied, "cpu", 3), run(reference, "cpu", 3))


def test_it_generates_like_the_plain_model() -> None:
    model, reference = MODELS["llama"]().module, plain("llama", "cpu").module
    ids = torch.arange(1, 9).view(1, 8)
    with striped(Model(module=model, inputs=MODELS["llama"]().inputs), 2):
        found = weightstream.generate(model, ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(found, reference.generate(ids, max_new_tokens=8, do_sample=False))


def test_impossible_models_are_refused() -> None:
    with pytest.raises(ConfigError, match="no repeated blocks"):
        striped(MODELS["NoModuleList"](), 2)
    model = MODELS["Stack"]()
    with striped(model, 2) as stripes:
        with pytest.raises(OffloadError, match="already offloaded"):
            striped(model, 2)
        with pytest.raises(OffloadError, match="move a model"):
            model.module.to(torch.float64)
        stripes.remove()
        stripes.remove()
    with pytest.raises(PlanError):
        weightstream.offload(model.module, device="cpu", device_budget={0: 1, 1: 1})
    assert "forward" not in vars(model.module)
    assert not any("forward" in vars(module) for module in model.module.modules())


class Failing(nn.Module):
    """Makes the chosen block raise."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.fails_at = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x if index != self.fails_at else x[:, :3])
        return x


@torch.no_grad()
@pytest.mark.parametrize("fails_at", [0, 3])
def test_a_failing_step(fails_at: int) -> None:
    torch.manual_seed(1)
    model = Failing()
    x, reference = torch.randn(2, 16), copy.deepcopy(model)
    with striped(Model(module=model, inputs=lambda _: {"x": x}), 2) as stripes:
        for _ in range(2):
            model.fails_at = fails_at
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                model(x)
            model.fails_at = -1
            assert torch.equal(model(x), reference(x))
        assert not stripes.parts["cpu:0"].stats().unplanned_fills > 12
    assert torch.equal(model(x), reference(x))


def test_its_reports(tmp_path: Path) -> None:
    model = MODELS["Stack"]()
    with striped(model, 2) as stripes:
        with stripes.trace() as trace:
            for seed in range(3):
                run(model, "cpu", seed)
        found, parts = stripes.stats(), [part.stats() for part in stripes.parts.values()]
        assert found.steps == 3
        assert found.filled_nbytes == sum(part.filled_nbytes for part in parts)
        assert found.held_nbytes["device"] == sum(part.held_nbytes["device"] for part in parts)
        assert found.model_nbytes == stripes.plan.decoded_nbytes
        assert found.predicted_step_s == stripes.plan.step_s > 0
        assert {span.device for span in trace.spans} == {"cpu:0", "cpu:1"}
        trace.save(tmp_path / "trace.json")
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        rows = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
        assert rows == {f"cpu:{k} {row}" for k in range(2) for row in ("host", "compute", "copy")}
        with pytest.raises(OffloadError, match="several devices cannot be compiled"):
            stripes.compile()
        with pytest.raises(UnsupportedError, match="the CPU"), stripes.capture(None):
            pass
        with pytest.raises(OffloadError, match="no graph of this streamer"):
            stripes.replay(stripes)


def test_the_host_budget_is_divided() -> None:
    model = MODELS["Stack"]()
    nbytes = model_nbytes(model.module)
    few = {0: nbytes // 4, 1: nbytes // 4}
    with pytest.raises(PlanError, match="host_budget"):
        weightstream.offload(model.module, device="cpu", device_budget=few, host_budget=nbytes // 16)
    with striped(model, 2, host_budget=nbytes) as stripes:
        budgets = [part._installed.replanning.inputs.planners[0]._host_budget for part in stripes.parts.values()]
        assert nbytes - 2 <= sum(budgets) <= nbytes


def test_settings_for_one_device() -> None:
    model = MODELS["Stack"]().module
    budgets = {0: 1 << 30, 1: 1 << 30}
    with pytest.raises(ConfigError, match="leave out device"):
        weightstream.offload(model, device="cuda:1", device_budget=budgets)
    with pytest.raises(ConfigError, match="for one GPU"):
        weightstream.offload(model, device="cpu", gpus=2, offload_group_size=2)
    with pytest.raises(ConfigError, match="a budget for each"):
        weightstream.offload(model, device="cpu", device_budget={})
    with pytest.raises(ConfigError, match="same memory"):
        weightstream.offload(model, device="cpu", max_memory=budgets, device_budget=5)
    assert not hasattr(model, "weightstream")


def test_from_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    plain_model = MODELS["llama"]().module
    plain_model.save_pretrained(tmp_path)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    ids = torch.arange(1, 9).view(1, 8)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    budget = model_nbytes(plain_model) // 3
    for devices in ({"device_map": "auto", "device_budget": budget}, {"device_budget": {0: budget, 1: budget}}):
        model = weightstream.from_pretrained(tmp_path, device="cpu", progress=False, **devices)
        assert isinstance(model.weightstream, Stripes)
        assert len(model.weightstream.parts) == 2
        assert model.hf_device_map[""] == torch.device("cpu")
        assert "model.layers.1" in model.hf_device_map
        assert torch.equal(model(ids).logits, reference(ids).logits)
        planned = weightstream.plan_model(tmp_path, gpu="H200", gpus=2, device_budget=budget, codec="none")
        assert planned.decoded_nbytes == model.weightstream.plan.decoded_nbytes
        model.weightstream.remove()
        assert not hasattr(model, "hf_device_map")
        assert torch.equal(model(ids).logits, reference(ids).logits)
    with pytest.raises(Exception, match="device_map"):
        weightstream.from_pretrained(tmp_path, device="cpu", device_map={"": 0})


def test_late_copies_and_poisoned_rings() -> None:
    """The copies of one device come late, then those of the other. A read that is too early sees NaN."""
    model, reference = MODELS["Stack"](), plain("Stack", "cpu")
    nbytes = model_nbytes(model.module)
    config = OffloadConfig(max_memory={0: nbytes // 4, 1: nbytes // 5}, codec="none")
    backends = [Poison(Delay(CpuBackend(), seed, most_s)) for seed, most_s in ((1, 0.002), (2, 0.0005))]
    with stripe(model.module, backends, config, CallerFacts()) as stripes:
        assert all(part.plan.step_nbytes for part in stripes.parts.values())
        for seed in range(70):
            assert_same(run(model, "cpu", seed % 5), run(reference, "cpu", seed % 5))


def test_a_failing_copy_on_one_device() -> None:
    model, reference = MODELS["Stack"](), plain("Stack", "cpu")
    nbytes = model_nbytes(model.module)
    failing: list[int] = []
    backends = [CpuBackend(), Fault(CpuBackend(), lambda _: bool(failing and failing.pop()))]
    config = OffloadConfig(max_memory={0: nbytes // 4, 1: nbytes // 4}, codec="none")
    with stripe(model.module, backends, config, CallerFacts()) as stripes:
        assert_same(run(model, "cpu", 0), run(reference, "cpu", 0))
        for _ in range(3):
            failing.append(1)
            with pytest.raises(StoreError):
                [run(model, "cpu", seed) for seed in range(3)]
            for seed in range(3):
                assert_same(run(model, "cpu", seed), run(reference, "cpu", seed))
        assert stripes.parts["cpu:1"].stats().fills > 0
    assert_same(run(model, "cpu", 1), run(reference, "cpu", 1))


def test_nothing_is_left_if_a_part_has_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second device cannot work with its budget, or fails while its weights move."""
    model, reference = MODELS["Stack"](), plain("Stack", "cpu")
    nbytes = model_nbytes(model.module)
    before = {name: tensor.data_ptr() for name, tensor in weights(model.module).items()}

    def assert_plain() -> None:
        assert {name: tensor.data_ptr() for name, tensor in weights(model.module).items()} == before
        assert not any({"forward", "_apply", "weightstream"} & vars(module).keys() for module in model.module.modules())

    with pytest.raises(PlanError):
        weightstream.offload(model.module, device="cpu", device_budget={0: nbytes // 3, 1: 64})
    assert_plain()
    fail_at_the_second(monkeypatch, StoreError("no more"))
    with pytest.raises(StoreError, match="no more"):
        striped(model, 2)
    assert_plain()
    with striped(model, 2):
        assert_same(run(model, "cpu", 1), run(reference, "cpu", 1))


def test_links_have_their_concurrent_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    model, reference = MODELS["Stack"](), plain("Stack", "cpu")
    with striped(model, 2) as stripes:
        alone = [part._installed.replanning.inputs for part in stripes.parts.values()]
        nbytes = stripes.plan.plans["cpu:0"].step_nbytes
    monkeypatch.setattr(multi_gpu, "_rates", lambda _: [1e3, math.inf])
    with striped(model, 2) as stripes:
        assert_same(run(model, "cpu", 1), run(reference, "cpu", 1))
        found = [part._installed.replanning.inputs for part in stripes.parts.values()]
        rates = [{p.machine.profile.link_bytes_per_s for p in inputs.planners} for inputs in found]
        assert rates == [{1e3}, {alone[1].planners[0].machine.profile.link_bytes_per_s}]
        assert stripes.plan.plans["cpu:0"].step_nbytes < nbytes, "a slow link has fewer bytes to copy"


def test_links_are_measured_concurrently(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Once per process. If one of them fails, the others do not wait for it."""
    multi_gpu_links.rates_together.cache_clear()
    devices = (torch.device("cpu"),) * 2
    found = multi_gpu_links.rates_together(devices)
    assert len(found) == 2
    assert min(found) > 1e6
    made: list[CpuBackend] = []

    def failing(_: torch.device) -> CpuBackend:
        made.append(backend := CpuBackend())
        if len(made) == 2:
            backend.alloc = no_memory
        return backend

    def no_memory(nbytes: int) -> torch.Tensor:
        raise RuntimeError(f"no {nbytes} bytes")

    monkeypatch.setattr(multi_gpu_links, "private_backend", failing)
    assert multi_gpu_links.rates_together(devices) == found
    multi_gpu_links.rates_together.cache_clear()
    assert multi_gpu_links.rates_together(devices) == ()
    assert "as fast as alone" in caplog.text
    multi_gpu_links.rates_together.cache_clear()


@pytest.mark.few(1)
@torch.no_grad()
@pytest.mark.parametrize("has_example", [False, True])
@pytest.mark.parametrize("codec", ["none", "compressed"])
def test_neighbours_together(
    has_example: bool, codec: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The faster distribution is chosen. Its predicted time, from before the blocks are moved, is that of the new
    plans. Weights that the builders of the other distribution held are not reported as held by the user."""
    monkeypatch.setattr(multi_device, "_WORTH", 1e9)
    tried, fastest = [], multi_device.fastest_deal

    def noted(deals: Any, places: Any) -> Any:
        best, planned = fastest(deals, places)
        tried.append((best, multi_device.predicted_lanes({name: lane for name, (_, lane) in planned.items()}, places)))
        return best, planned

    monkeypatch.setattr(multi_device, "fastest_deal", noted)
    torch.manual_seed(4)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64)) for _ in range(12))).bfloat16()
    x = torch.randn(2, 64).bfloat16()
    want, places = model(x), [tensor.data_ptr() for tensor in model.parameters()]
    budget = model_nbytes(model) // 3
    settings: dict[str, Any] = {"device_budget": {0: budget, 1: budget}, "codec": codec}
    with weightstream.offload(model, device="cpu", example_inputs=x if has_example else None, **settings) as stripes:
        owned = [{unit.name.split(".")[0] for unit in part.plan.manifest.units} for part in stripes.parts.values()]
        assert owned == [set(map(str, range(6))), set(map(str, range(6, 12)))]
        [(best, plan)] = tried
        assert best == 1
        assert plan.step_s == stripes.plan.step_s
        assert [p.manifest for p in plan.every] == [p.manifest for p in stripes.plan.every]
        for _ in range(3):
            assert torch.equal(model(x), want)
    assert [tensor.data_ptr() for tensor in model.parameters()] == places
    assert "outside of the model" not in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_gpus_that_the_machine_lacks_are_not_simulated() -> None:
    """Only device="cpu" runs the parts on the CPU, as these tests do."""
    with pytest.raises(ConfigError, match=r"gpus=2: .* sees no CUDA GPU"):
        weightstream.offload(MODELS["llama"]().module, gpus=2)
    with pytest.raises(ConfigError, match=r"max_memory for 2 GPUs: .* sees no CUDA GPU"):
        weightstream.offload(MODELS["llama"]().module, device_budget={0: "1MiB", 1: "1MiB"})


class Deeper(nn.Module):
    """Calls itself, on half of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x: torch.Tensor, depth: int = 0) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return torch.cat([x, self(x[:1], depth - 1)]) if depth else x


@torch.no_grad()
def test_a_model_that_calls_itself() -> None:
    torch.manual_seed(2)
    model, x = Deeper(), torch.randn(3, 16)
    want = model(x, 2)
    with striped(Model(module=model, inputs=lambda _: {"x": x}), 2):
        for _ in range(3):
            assert torch.equal(model(x, 2), want)


@torch.no_grad()
def test_a_forked_process_is_refused() -> None:
    model = MODELS["Stack"]()
    with striped(model, 2):
        run(model, "cpu", 0)
        if not (child := os.fork()):
            try:
                run(model, "cpu", 0)
            except OffloadError as error:
                os._exit(7 if "forked" in str(error) else 8)
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@torch.no_grad()
def test_it_is_removed_while_other_threads_compute() -> None:
    model, reference = MODELS["Stack"](), plain("Stack", "cpu")
    wanted = run(reference, "cpu", 1)
    stripes = striped(model, 2)
    run(model, "cpu", 1)
    with ThreadPoolExecutor(4) as pool:
        steps = [pool.submit(run, model, "cpu", 1) for _ in range(30)]
        stripes.remove()
        for step in steps:
            assert_same(step.result(), wanted)
    assert_same(run(model, "cpu", 1), wanted)


def test_weights_in_a_folder_outlive_their_loader(tmp_path: Path) -> None:
    """Both devices keep most of their weights on disk."""
    model, reference = MODELS["Stack"](), plain("Stack", "cpu")
    nbytes = model_nbytes(model.module)
    settings = {
        "offload_folder": tmp_path,
        "host_budget": nbytes // 8,
        "device_budget": {0: nbytes // 4, 1: nbytes // 4},
    }
    with weightstream.offload(model.module, device="cpu", **settings) as stripes:
        assert all(part.plan.disk for part in stripes.parts.values())
        for seed in range(4):
            assert_same(run(model, "cpu", seed), run(reference, "cpu", seed))
    assert_same(run(model, "cpu", 5), run(reference, "cpu", 5))
    assert not list(tmp_path.iterdir())


def test_a_failing_part_does_not_remove_the_folder_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, reference = MODELS["Stack"](), plain("Stack", "cpu")
    nbytes = model_nbytes(model.module)
    fail_at_the_second(monkeypatch, MemoryError("no more"))
    settings = {
        "offload_folder": tmp_path,
        "host_budget": nbytes // 8,
        "device_budget": {0: nbytes // 4, 1: nbytes // 4},
    }
    with pytest.raises(MemoryError, match="no more"):
        weightstream.offload(model.module, device="cpu", **settings)
    assert_same(run(model, "cpu", 5), run(reference, "cpu", 5))
    assert not list(tmp_path.iterdir())


@torch.no_grad()
def test_a_users_forward_is_kept() -> None:
    """A function on a block, and a wrapper that is added later and stays."""
    torch.manual_seed(3)
    model, x = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6))), torch.randn(2, 16)
    for block in model:
        block.forward = lambda y, weight=block.weight: torch.tanh(y @ weight.t())
    want = model(x)
    with striped(Model(module=model, inputs=lambda _: {"input": x}), 2) as stripes:
        assert torch.equal(model(x), want)
        copied = copy.deepcopy(model)
        assert torch.equal(copied(x), want)
        ways = stripes._crossings
    assert torch.equal(model(x), want)
    assert not any(way.is_open for way in ways)
