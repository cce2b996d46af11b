"""The life cycle: layers are taken one by one while a model is built, weights change until `post_init`, and then
stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from fixtures_structure import Block
from models import floats, randomise
from repeats import thinned
from weightstream import OffloadConfig
from weightstream.api.offloaders import (
    BaseOffloader,
    BudgetOffloader,
    NoopOffloader,
    PrefetchOffloader,
    UVAOffloader,
    create_offloader,
    get_offloader,
    set_offloader,
)
from weightstream.errors import ConfigError, OffloadError, PlanError
from weightstream.runtime.devices.cpu import CpuBackend
from weightstream.settings.config import PrefetchOffloadConfig, UVAOffloadConfig
from wrapped import Limit

NUM_LAYERS = 8


class Layer(Block):
    """A block with a buffer, which the classic settings never offload."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.empty(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.factor


def layers(num: int = NUM_LAYERS) -> Iterator[nn.Module]:
    for index in range(num):
        yield randomise(Layer(), index)


def run(modules: list[nn.Module], seed: int, width: int = 32, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = floats(seed, 3, width).to(dtype)
    with torch.no_grad():
        for module in modules:
            x = module(x)
    return x.clone()


def assert_steps_equal(modules: list[nn.Module], plain: list[nn.Module], num_steps: int = 6) -> None:
    """Run so often that the ring wraps."""
    for seed in range(num_steps):
        assert torch.equal(run(modules, seed), run(plain, seed))


def streamed_names(offloader: Any) -> set[str]:
    plan = offloader.streamer.plan
    return {name for unit in range(len(plan.manifest.units)) for name in plan.streamed(unit)}


def test_a_layer_is_taken_before_the_next_is_built() -> None:
    log: list[str] = []

    class Logged(PrefetchOffloader):
        def _selected(self, layer: int, module: nn.Module, prefix: str) -> Iterator[nn.Parameter]:
            log.append(f"take {layer}")
            yield from super()._selected(layer, module, prefix)

    def build() -> Iterator[nn.Module]:
        for index in range(3):
            log.append(f"build {index}")
            yield Layer()

    Logged(1, 1, 1).wrap_modules(build())
    assert log == ["build 0", "take 0", "build 1", "take 1", "build 2", "take 2"]


@pytest.mark.parametrize(
    ("group_size", "num_in_group", "wanted"),
    [(8, 2, [6, 7, 14, 15]), (1, 1, list(range(16))), (4, 1, [3, 7, 11, 15]), (5, 5, list(range(16))), (16, 1, [15])],
)
def test_the_last_layers_of_each_group_stream(group_size: int, num_in_group: int, wanted: list[int]) -> None:
    built, plain = list(layers(16)), list(layers(16))
    offloader = PrefetchOffloader(group_size, num_in_group, 2)
    assert offloader.wrap_modules(iter(built)) == built
    offloader.post_init()
    parts = ("up.weight", "up.bias", "down.weight", "down.bias")
    assert streamed_names(offloader) == {f"{layer}.{part}" for layer in wanted for part in parts}
    assert_steps_equal(built, plain)


@pytest.mark.parametrize("step", [1, 2, 3, 8, 20])
def test_the_ring_holds_as_many_layers_as_the_prefetch_step(step: int) -> None:
    built = PrefetchOffloader(1, 1, step)
    modules = built.wrap_modules(layers())
    built.post_init()
    assert built.streamer is not None
    plan = built.streamer.plan
    assert plan.ring_nbytes == min(step, NUM_LAYERS) * plan.extents[0].nbytes
    assert_steps_equal(modules, list(layers()))
    stats = built.streamer.stats()
    assert stats.unplanned_fills == 0
    assert (stats.fills == NUM_LAYERS) == (step >= NUM_LAYERS)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((2, 3, 1), "offload_num_in_group = 3 > offload_group_size = 2"),
        ((2, 1, 0), "offload_prefetch_step = 0 < 1"),
        ((2, 1, 1, None, "gpu"), "mode = 'gpu': there is only 'cpu'"),
        ((0, 1, 1), "offload_group_size = 0"),
    ],
)
def test_wrong_arguments_are_reported_with_their_values(arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        PrefetchOffloader(*arguments)


def replace(layer: Any) -> None:
    layer.up.weight = nn.Parameter(layer.up.weight.detach() * 2)


def transpose(layer: Any) -> None:
    layer.up.weight.data = layer.up.weight.data.t().contiguous().t()


def recreate(layer: Any) -> None:
    weight = layer.up.weight.detach().double().float().to(torch.bfloat16)
    layer.up.weight = nn.Parameter(weight.float(), requires_grad=False)
    layer.extra = nn.Parameter(weight[:3])


def change_dtype(layer: Any) -> None:
    layer.to(torch.float64)
    layer.forward = lambda x: Layer.forward(layer, x.double()).float()


def quantise(layer: Any) -> None:
    weight = layer.up.weight.detach()
    del layer.up.weight
    layer.up.register_parameter("q", nn.Parameter((weight * 100).to(torch.int8), requires_grad=False))
    layer.up.scale = nn.Parameter(torch.full((64, 1), 0.01))
    up = layer.up
    up.forward = lambda x: nn.functional.linear(x, up.q.to(x.dtype) * up.scale, up.bias)


def delete(layer: Any) -> None:
    layer.down.bias = None


def load(layer: Any) -> None:
    for index, parameter in enumerate(layer.parameters()):
        parameter.data.copy_(floats(index, *parameter.shape))


CHANGES = (replace, transpose, recreate, change_dtype, quantise, delete, load)


@pytest.mark.parametrize(
    ("change", "kind"), thinned(CHANGES, [lambda: PrefetchOffloader(2, 1, 2), lambda: UVAOffloader(60_000)])
)
def test_weights_may_change_until_post_init(change: Callable[[Any], None], kind: Callable[[], Any]) -> None:
    offloader, plain = kind(), list(layers())
    modules = offloader.wrap_modules(layers())
    for module in (*modules, *plain):
        change(module)
    if isinstance(offloader, UVAOffloader):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("weightstream.inputs.builder.logger.warning", lambda *args: None)
            offloader.post_init()
    else:
        offloader.post_init()
    assert streamed_names(offloader)
    assert_steps_equal(modules, plain)


def test_weights_have_fixed_addresses_from_post_init_on() -> None:
    offloader = PrefetchOffloader(2, 1, 2)
    modules = offloader.wrap_modules(layers())
    offloader.post_init()
    addresses = [p.data_ptr() for module in modules for p in module.parameters()]
    for seed in range(3):
        run(modules, seed)
        assert [p.data_ptr() for module in modules for p in module.parameters()] == addresses


@pytest.mark.parametrize("pattern", ["up", "up.weight", "weight"])
def test_offload_params_choose_by_name_segment(pattern: str) -> None:
    offloader = PrefetchOffloader(2, 1, 1, {pattern})
    modules = offloader.wrap_modules(layers())
    offloader.post_init()
    names = streamed_names(offloader)
    assert names
    assert all(f".{pattern}." in f".{name}." for name in names)
    assert_steps_equal(modules, list(layers()))


def test_a_pattern_without_a_match_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    offloader = PrefetchOffloader(2, 1, 1, {"up", "experts"})
    offloader.wrap_modules(layers())
    offloader.post_init()
    assert [r.getMessage() for r in caplog.records if "experts" in r.getMessage()] == [
        "pattern 'experts' matches no parameter of the model: it selects nothing"
    ]


def test_weights_shared_by_layers_stay() -> None:
    def tied() -> list[Any]:
        found: list[Any] = list(layers())
        found[3].up.weight = found[1].up.weight
        return found

    offloader = PrefetchOffloader(2, 1, 2)
    modules = offloader.wrap_modules(tied())
    offloader.post_init()
    names = streamed_names(offloader)
    assert "3.down.weight" in names
    assert not {"1.up.weight", "3.up.weight"} & names
    assert not any("factor" in name for name in names)
    assert_steps_equal(modules, tied())


def test_calls_in_a_wrong_order_are_refused() -> None:
    offloader = PrefetchOffloader(2, 1, 1)
    offloader.sync_prev_onload()
    offloader.join_after_forward()
    offloader.wrap_modules(layers())
    offloader.post_init()
    with pytest.raises(OffloadError, match="called before"):
        offloader.post_init()
    with pytest.raises(OffloadError, match="have a plan already"):
        offloader.wrap_modules(layers())


def test_sync_before_each_step_changes_nothing() -> None:
    offloader = PrefetchOffloader(1, 1, 2)
    modules = offloader.wrap_modules(layers())
    offloader.post_init()
    plain = list(layers())
    for seed in range(4):
        offloader.sync_prev_onload()
        assert torch.equal(run(modules, seed), run(plain, seed))
        offloader.join_after_forward()


def test_out_of_memory_leaves_the_layers_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightstream.runtime.devices.opening.CpuBackend", lambda: Limit(CpuBackend(), 4096))
    offloader = PrefetchOffloader(1, 1, 2)
    modules = offloader.wrap_modules(layers())
    before = [(p, p.data_ptr()) for module in modules for p in module.parameters()]
    with pytest.raises(torch.OutOfMemoryError) as failure:
        offloader.post_init()
    assert "the model is as it was" in "".join(failure.value.__notes__)
    assert all(p.data_ptr() == address for p, address in before)
    assert_steps_equal(modules, list(layers()), num_steps=1)
    monkeypatch.undo()
    offloader.post_init()
    assert_steps_equal(modules, list(layers()))


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({}, NoopOffloader),
        ({"prefetch": PrefetchOffloadConfig(offload_group_size=2)}, PrefetchOffloader),
        ({"uva": UVAOffloadConfig(cpu_offload_gb=0.5)}, UVAOffloader),
        ({"prefetch": PrefetchOffloadConfig(offload_group_size=2), "pin_memory": False}, PrefetchOffloader),
        ({"uva": UVAOffloadConfig(cpu_offload_gb=0.5), "use_uva": False}, UVAOffloader),
        ({"device_budget": "6GiB"}, BudgetOffloader),
        ({"device_budget": "40%", "codec": "compressed"}, BudgetOffloader),
        ({"max_memory": {0: "6GiB"}}, BudgetOffloader),
        ({"max_memory": {"cpu": "6GiB"}}, NoopOffloader),
    ],
)
def test_create_offloader_passes_every_setting(settings: dict[str, Any], kind: type[BaseOffloader]) -> None:
    config = OffloadConfig(**settings)
    offloader = create_offloader(config)
    assert type(offloader) is kind
    assert getattr(offloader, "config", config) is config


def test_uva_takes_parameters_in_order_and_streams_if_the_host_is_the_device(
    caplog: pytest.LogCaptureFixture,
) -> None:
    offloader = UVAOffloader(20_000)
    modules = offloader.wrap_modules(layers())
    offloader.post_init()
    assert streamed_names(offloader) == {"0.up.weight", "0.up.bias", "0.down.weight", "0.down.bias", "1.up.weight"}
    assert [r.getMessage() for r in caplog.records if "stream through a ring" in r.getMessage()]
    assert_steps_equal(modules, list(layers()))


def test_the_offloader_of_the_process() -> None:
    assert type(get_offloader()) is NoopOffloader
    offloader = PrefetchOffloader(1, 1, 1)
    set_offloader(offloader)
    try:
        assert get_offloader() is offloader
    finally:
        set_offloader(None)
    assert type(get_offloader()) is NoopOffloader


def test_noop_changes_nothing() -> None:
    offloader, built = NoopOffloader(), list(layers(2))
    assert offloader.wrap_modules(iter(built)) == built
    offloader.sync_prev_onload()
    offloader.post_init()
    offloader.join_after_forward()
    assert_steps_equal(built, list(layers(2)), num_steps=1)


# -- budgets, and units finer than layers ------------------------------------------------------------------------


class Peeking(Block):
    """A layer that calls its child, and also reads a weight of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.up.weight.sum()


def peeking(num: int = NUM_LAYERS) -> Iterator[nn.Module]:
    for index in range(num):
        yield randomise(Peeking(), index)


def names(offloader: Any) -> list[str]:
    plan = offloader.streamer.plan
    return [plan.manifest.units[unit].name for unit in plan.manifest.order if plan.opens(unit)]


def step_of(modules: list[nn.Module]) -> Callable[[], None]:
    """A step that returns no bytes of memory."""

    def step() -> None:
        run(modules, 0)

    return step


def nbytes(modules: list[nn.Module]) -> int:
    return sum(p.nbytes for module in modules for p in module.parameters())


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("is_watched", [False, True])
def test_a_budget_is_kept(share: float, is_watched: bool) -> None:
    plain = list(layers())
    budget = int(share * nbytes(plain))
    offloader = BudgetOffloader(budget, codec="none")
    modules = offloader.wrap_modules(layers())
    offloader.post_init(step_of(modules) if is_watched else None)
    assert offloader.streamer is not None
    assert 0 < offloader.streamer.stats().held_nbytes["device"] <= budget
    assert_steps_equal(modules, plain)
    assert offloader.streamer.stats().unplanned_fills == 0


def test_units_are_layers_unless_a_step_is_watched() -> None:
    plain = list(layers())
    largest = max(p.nbytes for module in plain for p in module.parameters())
    # less than a layer and the weights that always stay
    budget = nbytes(plain) // NUM_LAYERS // 2 + largest // 2 + 1024
    whole = BudgetOffloader(budget, codec="none")
    whole.wrap_modules(layers())
    with pytest.raises(PlanError):
        whole.post_init()
    finer = BudgetOffloader(budget, codec="none")
    modules = finer.wrap_modules(layers())
    finer.post_init(step_of(modules))
    assert any("." in name for name in names(finer))
    assert_steps_equal(modules, plain)


def test_compiled_layers_have_units_of_single_matrices() -> None:
    offloader = PrefetchOffloader(1, 1, 2)
    modules = offloader.wrap_modules(layers())
    offloader.post_init(step_of(modules), is_compiled=True)
    assert set(names(offloader)) == {f"{layer}.{part}" for layer in range(NUM_LAYERS) for part in ("up", "down")}
    assert offloader.streamer is not None
    assert offloader.streamer.plan.ring_nbytes <= 2 * nbytes([modules[0]]) + 4096
    assert_steps_equal(modules, list(layers()))
    assert offloader.streamer.stats().unplanned_fills == 0


def test_the_order_of_a_step_is_learned() -> None:
    offloader = BudgetOffloader(nbytes(list(layers())) // 2, codec="none")
    modules = offloader.wrap_modules(layers())
    offloader.post_init(step_of(modules[::-1]))
    numbers = [int(name.partition(".")[0]) for name in names(offloader)]
    assert numbers == sorted(numbers, reverse=True)
    assert offloader.streamer is not None
    plain, before = list(layers()), offloader.streamer.stats().unplanned_fills
    for seed in range(4):
        assert torch.equal(run(modules[::-1], seed), run(plain[::-1], seed))
    assert offloader.streamer.stats().unplanned_fills == before


@pytest.mark.parametrize("is_compiled", [False, True])
def test_layers_stay_whole_if_weights_are_read_outside_of_finer_units(
    is_compiled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Such weights stay on the device if the budget has room for them; otherwise they are in one unit with their
    reader."""
    plain = list(peeking())
    room = sum(module.up.weight.nbytes for module in plain)  # type: ignore[union-attr]
    for budget in (nbytes(plain) // 3, room + nbytes(plain) // 3):
        offloader = BudgetOffloader(budget, codec="none")
        modules = offloader.wrap_modules(peeking())
        offloader.post_init(step_of(modules), is_compiled=is_compiled)
        assert_steps_equal(modules, plain)
        assert offloader.streamer is not None
        held = {alias for alias in offloader.streamer.plan.resident if alias.endswith("up.weight")}
        is_whole = not any("." in name for name in names(offloader))
        assert is_whole or len(held) == NUM_LAYERS
    assert any("each layer is one" in record.getMessage() for record in caplog.records) == is_compiled


def test_the_memory_that_a_step_leaves_free_is_used() -> None:
    plain = list(layers())
    offloader = BudgetOffloader(nbytes(plain) // 4, codec="none")
    modules = offloader.wrap_modules(layers())
    runs = []

    def step() -> int:
        runs.append(run(modules, 0))
        return nbytes(plain) // 2

    offloader.post_init(step)
    assert offloader.streamer is not None
    plan = offloader.streamer.plan
    assert nbytes(plain) // 4 < plan.device_nbytes <= nbytes(plain) // 2
    assert all(torch.equal(found, run(plain, 0)) for found in runs)
    assert_steps_equal(modules, plain)


@pytest.mark.parametrize("too_little", [0, -1 << 30])
def test_a_second_attempt_has_the_settings_of_the_first(too_little: int) -> None:
    """A budget that a step returns is not the user's, and replaces any budget of the user."""
    plain, returned = list(layers()), [too_little, nbytes(list(layers())) // 2]
    offloader = BudgetOffloader()
    offloader.config = before = OffloadConfig(max_memory={0: 2 * nbytes(plain)}, codec="none")
    modules = offloader.wrap_modules(layers())

    def step() -> int:
        run(modules, 0)
        return returned[0]

    with pytest.raises(PlanError, match=r"budget 1B .*largest unit, '0\.(up|down)'"):  # not the layer, which needs more
        offloader.post_init(step)
    assert_steps_equal(modules, plain, num_steps=1)
    del returned[0]
    offloader.post_init(step)
    assert offloader.config is before
    assert offloader.streamer is not None
    assert offloader.streamer.plan.budget == returned[0]
    assert_steps_equal(modules, plain)


def test_a_failing_step_leaves_the_layers_unchanged() -> None:
    offloader = BudgetOffloader(nbytes(list(layers())) // 2, codec="none")
    modules = offloader.wrap_modules(layers())

    def step() -> None:
        run(modules, 0)
        raise ValueError("of this test")

    with pytest.raises(ValueError, match="of this test"):
        offloader.post_init(step)
    assert offloader.streamer is None
    assert_steps_equal(modules, list(layers()), num_steps=1)
    offloader.post_init(step_of(modules))
    assert_steps_equal(modules, list(layers()))


def test_a_step_that_fails_is_not_tried_with_another_plan() -> None:
    """The error may be that of another rank, which takes part in no more steps."""
    offloader = BudgetOffloader(nbytes(list(peeking())) // 2, codec="none")
    modules, steps = offloader.wrap_modules(peeking()), []

    def step() -> int:
        run(modules, 0)
        steps.append(len(steps))
        if len(steps) == 2:
            raise PlanError("rank 1 refused")
        return nbytes(modules) // 2

    with pytest.raises(PlanError, match="rank 1 refused"):
        offloader.post_init(step, is_compiled=True)
    assert steps == [0, 1]
    assert_steps_equal(modules, list(peeking()), num_steps=1)


def test_layers_of_a_draft_are_given_back() -> None:
    offloader = PrefetchOffloader(1, 1, 2)
    modules, draft = offloader.wrap_modules(layers(4)), offloader.wrap_modules(layers(2))
    offloader.give_back(["4", "5"])
    offloader.post_init()
    assert {name.partition(".")[0] for name in streamed_names(offloader)} == {"0", "1", "2", "3"}
    for _ in range(2):
        assert torch.equal(run([*modules, *draft], 1), run([*layers(4), *layers(2)], 1))


def test_towers_are_selected_by_their_prefix(caplog: pytest.LogCaptureFixture) -> None:
    tower = nn.Sequential(*layers(3))
    offloader = UVAOffloader(1 << 20, {"visual"})
    assert offloader.supports_tower_offload
    assert not PrefetchOffloader(1, 1, 1).supports_tower_offload
    modules = offloader.wrap_modules(layers(2))
    assert offloader.wrap_modules(iter([tower]), prefix="model.visual") == [tower]
    offloader.post_init()
    found = streamed_names(offloader)
    assert found
    assert all(name.startswith("model.visual.") for name in found)
    plain = nn.Sequential(*layers(3))
    for seed in range(3):
        with torch.no_grad():
            assert torch.equal(tower(floats(seed, 3, 32)), plain(floats(seed, 3, 32)))
        assert torch.equal(run(modules, seed), run(list(layers(2)), seed))


class Partial(Block):
    """A layer that a profiling step leaves before its end. The rest reads a child's weight without calling the
    child."""

    is_profiling = False

    def __init__(self, width: int = 32) -> None:
        super().__init__(width)
        self.conv = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x if Partial.is_profiling else x @ self.conv.weight


def partial(num: int = NUM_LAYERS) -> Iterator[nn.Module]:
    for index in range(num):
        yield randomise(Partial(), index)


Profile = Callable[..., None]


@pytest.fixture
def profile(monkeypatch: pytest.MonkeyPatch) -> Profile:
    """Run layers as a profiling step does."""

    def profile(modules: list[nn.Module], *inputs: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Partial, "is_profiling", True)
            run(modules, 0, *inputs)

    return profile


@pytest.mark.few(1)
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("share", [0.2, 0.4, 0.8])
def test_weights_that_a_watched_step_does_not_reach_stay_or_share_a_unit_with_their_reader(
    is_compiled: bool, share: float, profile: Profile
) -> None:
    plain = list(partial())
    assert isinstance(plain[0], Partial)
    kept = NUM_LAYERS * plain[0].conv.weight.nbytes
    for budget in (int(share * nbytes(plain)), int(share * nbytes(plain)) + kept):
        offloader = BudgetOffloader(budget, codec="none")
        modules = offloader.wrap_modules(partial())

        offloader.post_init(lambda modules=modules: profile(modules), is_compiled=is_compiled)
        assert_steps_equal(modules, plain)
        assert not any(name.endswith("conv") for name in names(offloader))


@pytest.mark.few(1)
@pytest.mark.parametrize(("first", "kind", "is_compiled"), thinned([0.5, 0.8, 2.0], [peeking, partial], [False, True]))
def test_units_that_open_only_with_the_budget_of_a_step_are_watched_too(
    first: float, kind: Callable[[], Iterator[nn.Module]], is_compiled: bool, profile: Profile
) -> None:
    plain, chosen = list(kind()), []
    for share in (0.25, 0.4, 0.6, 0.7, 0.8):
        offloader = BudgetOffloader(int(first * nbytes(plain)), codec="none")
        modules = offloader.wrap_modules(kind())
        room = int(share * nbytes(plain))

        def step(modules: list[nn.Module] = modules, room: int = room) -> int:
            profile(modules)
            return room

        offloader.post_init(step, is_compiled=is_compiled)
        assert offloader.streamer is not None
        assert offloader.streamer.plan.device_nbytes <= room
        assert_steps_equal(modules, plain)
        chosen.append(any("." in name for name in names(offloader)))
    assert chosen[-1] or not is_compiled  # the weights that must stay fit


@pytest.mark.few(1)
@pytest.mark.parametrize("share", [0.7, 0.95, 1.2])
def test_compressed_weights_that_a_watched_step_does_not_reach_become_plain(share: float, profile: Profile) -> None:
    """Even those that stay: they are decoded only when the module that owns them runs."""

    def wide() -> Iterator[nn.Module]:
        for index in range(NUM_LAYERS):
            layer = Partial(64)
            for seed, parameter in enumerate(layer.parameters()):
                parameter.data = 0.02 * floats(8 * index + seed, *parameter.shape)
            yield layer.bfloat16()

    like = 64, torch.bfloat16
    plain = list(wide())
    offloader = BudgetOffloader(int(share * nbytes(plain)), codec="compressed")
    modules = offloader.wrap_modules(wide())
    offloader.post_init(lambda: profile(modules, *like), is_compiled=True)
    assert offloader.streamer is not None
    codes = offloader.streamer.plan.manifest.codes
    assert codes
    assert not any("conv" in alias for alias in codes)
    for seed in range(4):
        assert torch.equal(run(modules, seed, *like), run(plain, seed, *like))


def test_weights_viewed_by_another_tensor_of_the_layer_are_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mamba's `conv_weights` is such a view. From a GPU `.cpu()` makes a copy, and the view would keep the old
    memory."""

    class Viewing(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("view", self.up.weight.detach().view(-1), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.view.sum()

    plain, offloader = [Viewing() for _ in range(4)], PrefetchOffloader(1, 1, 1)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "cpu", torch.Tensor.clone)
        modules = offloader.wrap_modules(Viewing() for _ in range(4))
    for index, pair in enumerate(zip(modules, plain, strict=True)):
        for layer in pair:
            for seed, parameter in enumerate(layer.parameters()):
                parameter.data.copy_(floats(10 * index + seed, *parameter.shape))
    offloader.post_init()
    assert_steps_equal(modules, plain)
    assert streamed_names(offloader)


def test_the_memory_that_a_step_leaves_free_may_need_finer_units() -> None:
    """Another step shows their reads and their order."""
    plain = list(layers())
    offloader, runs = BudgetOffloader(nbytes(plain) // 2, codec="none"), []
    modules = offloader.wrap_modules(layers())

    def step() -> int:
        runs.append(run(modules[::-1], 0))
        return nbytes(plain) // 8

    offloader.post_init(step)
    assert len(runs) == 2
    assert any("." in name for name in names(offloader))
    numbers = [int(name.partition(".")[0]) for name in names(offloader)]
    assert numbers == sorted(numbers, reverse=True)
    assert_steps_equal(modules, plain)


def test_towers_with_one_name() -> None:
    """The name selects both, and no module is put into another."""
    towers: list[Any] = [nn.Sequential(*layers(2)) for _ in range(2)]
    children = [name for name, _ in towers[0].named_modules()]
    offloader = UVAOffloader(1 << 20, {"visual"})
    offloader.wrap_modules(iter(towers), prefix="visual")
    offloader.post_init()
    assert len(streamed_names(offloader)) == 2 * len(list(towers[0].parameters()))
    plain = nn.Sequential(*layers(2))
    for tower in towers:
        assert [name for name, _ in tower.named_modules()] == children
        with torch.no_grad():
            assert torch.equal(tower(floats(1, 3, 32)), plain(floats(1, 3, 32)))


@pytest.mark.parametrize("prefixes", [("visual", "visual.0"), ("visual.merger", "visual")])
def test_towers_with_nested_names(prefixes: tuple[str, str]) -> None:
    """No module replaces another, and the weights of both stream."""
    towers: list[Any] = [nn.Sequential(*layers(2)) for _ in range(2)]
    children, offloader = dict(towers[0].named_children()), UVAOffloader(1 << 20)
    for tower, prefix in zip(towers, prefixes, strict=True):
        offloader.wrap_modules(iter([tower]), prefix=prefix)
    offloader.post_init()
    assert len(streamed_names(offloader)) == 2 * len(list(towers[0].parameters()))
    assert dict(towers[0].named_children()) == children


def test_the_planned_step_is_used() -> None:
    """Its rows are work for the device. In CUDA graphs the host has no work."""

    def plan_of(rows: int, **options: bool) -> Any:
        offloader = BudgetOffloader(nbytes(list(layers())) // 2, codec="none", tokens=rows)
        offloader.wrap_modules(layers())
        offloader.post_init(**options)
        assert offloader.streamer is not None
        return offloader.streamer

    one, many, in_graphs = plan_of(1), plan_of(1 << 16), plan_of(1, in_graphs=True)
    assert many.plan.step_s > 2 * one.plan.step_s
    profiles = [s._installed.replanning.inputs.planners[0].machine.profile for s in (one, in_graphs)]
    assert profiles[1] == profiles[0].without_host()
    assert profiles[1] != profiles[0]


def test_two_engines_of_one_process() -> None:
    """Compiled code of one engine does not find the streamer of the other."""
    plain = list(layers(4))
    built = []
    for _ in range(2):
        offloader = PrefetchOffloader(1, 1, 2)
        modules = offloader.wrap_modules(layers(4))
        offloader.post_init()
        step = torch.compile(nn.Sequential(*modules), backend="aot_eager", fullgraph=True)
        built.append((offloader, modules, step))
    with torch.no_grad():
        for seed in range(3):
            for offloader, _, step in built:
                assert torch.equal(step(floats(seed, 3, 32)), run(plain, seed))
                assert offloader.streamer.stats().steps == seed + 1


class Entered(Block):
    """A block that its model enters by another method, and which reads a weight of a child that is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(32, 32, bias=False)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return Block.forward(self, x) @ self.mix.weight


@pytest.mark.parametrize("has_room", [True, False])
def test_layers_that_are_not_entered_by_forward_are_cut_into_matrices(has_room: bool) -> None:
    def build() -> list[nn.Module]:
        return [randomise(Entered(), index) for index in range(NUM_LAYERS)]

    def enter(modules: list[nn.Module], seed: int) -> torch.Tensor:
        x = floats(seed, 3, 32)
        with torch.no_grad():
            for module in modules:
                x = module.enter(x)  # type: ignore[operator]
        return x

    offloader = PrefetchOffloader(1, 1, 2) if has_room else BudgetOffloader(24 << 10, codec="none")
    modules, plain = offloader.wrap_modules(build()), build()

    def step() -> None:
        enter(modules, 0)

    if not has_room:  # for the matrices that are read without a call, 32 KiB
        with pytest.raises(PlanError, match="read outside of their modules"):
            offloader.post_init(step)
        assert torch.equal(enter(modules, 1), enter(plain, 1))
        return
    offloader.post_init(step)
    before = offloader.streamer.stats()  # type: ignore[union-attr]
    for seed in range(6):
        assert torch.equal(enter(modules, seed), enter(plain, seed))
    assert not any("mix" in name for name in streamed_names(offloader))
    stats = offloader.streamer.stats()  # type: ignore[union-attr]
    assert stats.fills - before.fills >= 6 * NUM_LAYERS
    assert stats.unplanned_fills == before.unplanned_fills
