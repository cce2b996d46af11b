"""Weights that are not plain parameters: wrapper subclasses, parameters that hold more tensors, plain attributes."""

from __future__ import annotations

import copy
import gc
import io
import logging
import pickle
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map_only

import weightstream
from models import assert_same
from weightstream.errors import OffloadError, UnsupportedError
from weightstream.runtime.streamer.forward_patch import refuse_moves
from weightstream.runtime.tensors.leaves import Role, Shell, leaves

WIDTH, DEPTH = 64, 6


class Int8(torch.Tensor):
    """A matrix of one byte per element, with a scale for each row, as in torchao."""

    def __new__(cls, qdata: torch.Tensor, scale: torch.Tensor) -> Int8:
        return torch.Tensor._make_wrapper_subclass(cls, qdata.shape, dtype=scale.dtype, device=qdata.device)  # type: ignore[attr-defined]

    def __init__(self, qdata: torch.Tensor, scale: torch.Tensor) -> None:
        self.qdata, self.scale = qdata, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["qdata", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: None, size: Any, stride: Any) -> Int8:
        return cls(inner["qdata"], inner["scale"])

    @classmethod
    def of(cls, weight: torch.Tensor) -> Int8:
        scale = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale)

    def plain(self) -> torch.Tensor:
        return self.qdata * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(func(args[0].qdata), func(args[0].scale))
        if func is torch.ops.aten._has_compatible_shallow_copy_type.default:
            return True
        return func(*tree_map_only(cls, cls.plain, args), **(kwargs or {}))


class Packed(nn.Parameter):
    """A parameter of a class of its own, with a state of more tensors, as in bitsandbytes."""

    @classmethod
    def of(cls, weight: torch.Tensor) -> Packed:
        scale = weight.abs().amax(1)
        inner = SimpleNamespace(absmax=torch.full((8,), 0.5), code=torch.linspace(0, 1, 16))
        packed = torch.Tensor._make_subclass(cls, (127 * weight / scale[:, None]).round().to(torch.int8), False)
        state = SimpleNamespace(absmax=scale, state2=inner, shape=tuple(weight.shape), extra={"a": scale + 1})
        packed.quant_state = state
        return packed

    def plain(self) -> torch.Tensor:
        state = self.quant_state
        rows = state.absmax * state.state2.absmax.sum() * state.state2.code[3] * state.extra["a"]
        return self.data.float() * rows[:, None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if func is torch.chunk:  # like Params4bit: chunks have the same class
            return tuple(torch.Tensor._make_subclass(cls, chunk, False) for chunk in result)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Packed:
        made = torch.Tensor._make_subclass(type(self), self.data.clone(), False)
        made.__dict__ = copy.deepcopy(self.__dict__, memo)
        return made

    def __reduce_ex__(self, protocol: int) -> Any:
        return _packed, (self.data.clone(), dict(self.__dict__))


def _packed(data: torch.Tensor, state: dict[str, Any]) -> Packed:
    made = torch.Tensor._make_subclass(Packed, data, False)
    made.__dict__ = state
    return made


class Loaded(nn.Parameter):
    """A parameter with attributes that are not tensors, among them a method of its layer, as in vLLM."""

    def __new__(cls, data: torch.Tensor, **attributes: Any) -> Loaded:
        return super().__new__(cls, data, requires_grad=False)  # type: ignore[call-arg]

    def __init__(self, data: torch.Tensor, *, weight_loader: Callable[..., None]) -> None:
        self.output_dim, self.weight_loader = 0, weight_loader

    def load(self, data: torch.Tensor) -> None:
        self.data.copy_(data)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.make(torch.randn(WIDTH, WIDTH) / 8)

    def make(self, weight: torch.Tensor) -> None:
        raise NotImplementedError

    def plain(self) -> torch.Tensor:
        return self.weight.plain()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(functional.linear(x, self.plain(), self.bias))


class Wrapped(Block):
    def make(self, weight: torch.Tensor) -> None:
        self.weight = nn.Parameter(Int8.of(weight), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(functional.linear(x, self.weight, self.bias))


class Two(Block):
    def make(self, weight: torch.Tensor) -> None:
        self.weight = nn.Parameter(TwoTensor(weight, 2 * weight), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = TwoTensor(x, x) @ (self.weight * 2)
        return torch.tanh(y.a - 3 * y.b + self.bias)


class Nested(Two):
    def make(self, weight: torch.Tensor) -> None:
        inner = TwoTensor(weight, -weight), TwoTensor(weight.sin(), weight.cos())
        self.register_buffer("weight", TwoTensor(*inner))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.weight * 2
        return torch.tanh(functional.linear(x, y.a.a + y.b.a, self.bias) - functional.linear(x, y.a.b + y.b.b))


class Stated(Block):
    def make(self, weight: torch.Tensor) -> None:
        self.weight = Packed.of(weight)
        self.quant_state = self.weight.quant_state


class Classed(Block):
    def make(self, weight: torch.Tensor) -> None:
        self.weight = Loaded(weight, weight_loader=self.load)

    def load(self, parameter: Loaded, data: torch.Tensor) -> None:
        parameter.load(data)

    def plain(self) -> torch.Tensor:
        return self.weight


class Attributes(Block):
    def make(self, weight: torch.Tensor) -> None:
        quantised = Int8.of(weight)
        self.q, self.rest = quantised.qdata, {"scales": [quantised.scale]}
        self.holder = SimpleNamespace(shift=torch.full((WIDTH, WIDTH), 0.25))

    def plain(self) -> torch.Tensor:
        return self.q * self.rest["scales"][0] + self.holder.shift


class Distributed(Block):
    def make(self, weight: torch.Tensor) -> None:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        self.weight = nn.Parameter(DTensor.from_local(weight, mesh, [Shard(0)]), requires_grad=False)

    def plain(self) -> torch.Tensor:
        return self.weight.redistribute(placements=[Replicate()]).to_local()


@pytest.fixture
def fake_group() -> Iterator[None]:
    torch.distributed.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    yield
    torch.distributed.destroy_process_group()


PATHS: dict[type[Block], list[str]] = {
    Wrapped: ["bias", "weight.qdata", "weight.scale"],
    Two: ["bias", "weight.a", "weight.b"],
    Nested: ["bias", "weight.a.a", "weight.a.b", "weight.b.a", "weight.b.b"],
    Stated: [
        *("bias", "weight", "weight.quant_state.absmax", "weight.quant_state.state2.absmax"),
        *("weight.quant_state.state2.code", "weight.quant_state.extra.a"),
    ],
    Classed: ["bias", "weight"],
    Attributes: ["bias", "q", "rest.scales.0", "holder.shift"],
    Distributed: ["bias", "weight._local_tensor"],
}
KINDS = pytest.mark.parametrize("block", PATHS, ids=lambda block: block.__name__)
pytestmark = pytest.mark.usefixtures("fake_group")


def chain(block: type[nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(block() for _ in range(DEPTH))).eval()


def nbytes(model: nn.Module) -> int:
    found = {leaf.tensor.data_ptr(): leaf.tensor.nbytes for m in model.modules() for leaf in leaves(m)}
    found.pop(0, None)  # of tensors without memory
    return sum(found.values())


def places(model: nn.Module) -> list[tuple[int, type, int]]:
    return [(id(leaf.tensor), type(leaf.tensor), leaf.tensor.data_ptr()) for m in model for leaf in leaves(m)]


def offloaded(model: nn.Module, share: float = 0.45) -> weightstream.Streamer:
    total = nbytes(model)
    streamer = weightstream.offload(model, device="cpu", device_budget=int(share * total))
    assert streamer.plan.manifest.nbytes == total
    assert streamer.plan.host_nbytes
    return streamer


def rows(seed: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed))


def steps(model: nn.Module, plain: nn.Module, seeds: range = range(4)) -> None:
    for seed in seeds:
        assert_same([model(rows(seed))], [plain(rows(seed))])


def flat(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[type, torch.Tensor]]:
    """Tensors without their wrappers, and their owners."""
    found: dict[str, tuple[type, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if hasattr(tensor, "__tensor_flatten__"):
            inner = {f"{name}.{key}": value for key, value in vars(tensor).items() if torch.is_tensor(value)}
            found |= {name: (type(tensor), torch.zeros(())), **flat(inner)}
        else:
            found[name] = type(tensor), tensor.detach()
    return found


def assert_same_state(model: nn.Module, plain: nn.Module) -> None:
    ours, theirs = flat(model.state_dict()), flat(plain.state_dict())
    assert [(name, kind) for name, (kind, _) in ours.items()] == [(name, kind) for name, (kind, _) in theirs.items()]
    assert_same([tensor for _, tensor in ours.values()], [tensor for _, tensor in theirs.values()])


@KINDS
def test_the_leaves_of_a_module_are_found_by_path(block: type[Block]) -> None:
    found = list(leaves(block(), "x"))
    unique: dict[int, str] = {}
    for leaf in found:
        unique.setdefault(id(leaf.tensor), leaf.path)
    assert sorted(unique.values()) == sorted(f"x.{path}" for path in PATHS[block])
    assert any(leaf.role is Role.ATTRIBUTE for leaf in found) == (block in (Attributes, Stated))


@pytest.mark.few(2)
@KINDS
def test_steps_are_bitwise_and_everything_is_restored(block: type[Block]) -> None:
    model, plain = chain(block), chain(block)
    objects = places(model)
    with offloaded(model) as streamer:
        steps(model, plain)
        assert streamer.stats().fills > DEPTH
        assert streamer.stats().unplanned_fills == 0
        assert_same_state(model, plain)
        steps(model, plain)
        names = {tensor.name for tensor in streamer.plan.manifest.tensors()}
        assert {f"{i}.{path}" for i in range(DEPTH) for path in PATHS[block]} <= names
    assert [
        (id(leaf.tensor), type(leaf.tensor), leaf.tensor.data_ptr()) for m in model for leaf in leaves(m)
    ] == objects
    assert_same_state(model, plain)
    steps(model, plain)


@pytest.mark.few(2)
@KINDS
def test_an_update_of_any_leaf_between_steps_is_in_the_next(block: type[Block]) -> None:
    model, plain = chain(block), chain(block)
    with offloaded(model), torch.no_grad():
        for index, path in enumerate(PATHS[block]):
            for one in (model, plain):
                tensor = next(leaf.tensor for leaf in leaves(one[index]) if leaf.path == path)
                (tensor.data if index % 2 else tensor).copy_(tensor.flip(0))
            steps(model, plain, range(2))
        assert_same_state(model, plain)
    assert_same_state(model, plain)


@pytest.mark.few(3)
@pytest.mark.parametrize("block", [Wrapped, Two, Nested, Stated, Attributes], ids=lambda block: block.__name__)
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "save"])
def test_copies_are_plain(block: type[Block], way: str) -> None:
    def copied(model: nn.Module) -> nn.Module:
        if way == "deepcopy":
            return copy.deepcopy(model)
        if way == "pickle":
            return pickle.loads(pickle.dumps(model))
        file = io.BytesIO()
        torch.save(model, file)
        return torch.load(io.BytesIO(file.getvalue()), weights_only=False)

    model, plain = chain(block), chain(block)
    with offloaded(model):
        steps(model, plain, range(2))
        twin, expected = copied(model), copied(plain)
        steps(twin, plain, range(2))
        assert_same_state(twin, expected)
        found = [[(leaf.path, type(leaf.tensor)) for m in one for leaf in leaves(m)] for one in (twin, expected)]
        assert found[0] == found[1]
        steps(model, plain, range(2))


def test_a_class_keeps_its_behaviour_in_calls_of_torch() -> None:
    model, plain = chain(Stated), chain(Stated)
    with offloaded(model):
        for _ in range(2):
            ours, theirs = (torch.chunk(one[4].weight, 2) for one in (model, plain))
            assert [type(chunk) for chunk in ours] == [type(chunk) for chunk in theirs] == [Packed, Packed]
            assert_same([chunk.data for chunk in ours], [chunk.data for chunk in theirs])
            assert type(model[4].weight + 1) is type(plain[4].weight + 1)
            steps(model, plain)


def test_a_parameter_made_in_inference_mode_keeps_its_class() -> None:
    with torch.inference_mode():
        model = chain(Stated)
    plain = chain(Stated)
    with offloaded(model):
        steps(model, plain)
    assert_same_state(model, plain)
    assert not any(leaf.tensor.is_inference() for m in model for leaf in leaves(m))


class Elsewhere(torch.Tensor):
    """Claims to be on a GPU, but needs none."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Elsewhere:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device="cuda:0")  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


def test_a_wrapper_reports_the_device_of_its_inner_tensors() -> None:
    weight = nn.Parameter(Int8.of(torch.randn(8, 8)), requires_grad=False)
    shell, home, device = Shell(weight), (weight.qdata, weight.scale), torch.device("cuda:0")
    for _ in range(2):
        weight.scale = Elsewhere(home[1])
        shell.follow()
        assert weight.device.type == "cpu", "as its class reports for tensors on two devices"
        weight.qdata = Elsewhere(home[0])
        shell.follow()
        assert (weight.device, weight.is_cuda, type(weight), weight.shape) == (device, True, Int8, (8, 8))
        weight.qdata, weight.scale = home
        shell.follow()
        assert (weight.device.type, weight.is_cuda) == ("cpu", False)
    assert isinstance(weight, nn.Parameter)
    assert [id(weight.qdata), id(weight.scale)] == list(map(id, home))


def test_a_wrapper_that_packs_for_one_device_reports_another() -> None:
    class Choosy(Int8):
        def __new__(cls, qdata: torch.Tensor, scale: torch.Tensor) -> Choosy:
            assert qdata.device.type == scale.device.type == "cpu"
            return Int8.__new__(cls, qdata, scale)  # type: ignore[return-value]

        @property
        def dtype(self) -> torch.dtype:  # type: ignore[override]
            return torch.uint8

    weight = nn.Parameter(Choosy.of(torch.randn(8, 4)), requires_grad=False)
    shell, inside, dtype = Shell(weight), weight.qdata, torch.Tensor.dtype.__get__(weight)  # type: ignore[attr-defined]
    for device, qdata in (("cuda", Elsewhere(inside)), ("cpu", inside)) * 2:
        weight.qdata = qdata
        shell.follow()
        assert (weight.device.type, type(weight), weight.shape, weight.stride()) == (device, Choosy, (8, 4), (4, 1))
        assert torch.Tensor.dtype.__get__(weight) == dtype != weight.dtype  # type: ignore[attr-defined]


class PackedForMeta(nn.Module):
    """Unpacks its weight only if that is on the device that it was packed for."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(Int8.of(torch.randn(8, 4)), requires_grad=False)
        self.bias = nn.Parameter(torch.randn(8), requires_grad=False)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.weight.qdata.device.type != "meta":
            raise RuntimeError("packed for meta")
        destination[prefix + "weight"] = torch.arange(32).view(8, 4)


def test_weights_are_saved_on_the_device_that_they_are_packed_for() -> None:
    model = nn.Sequential(PackedForMeta(), nn.Linear(4, 8))
    undo, weight = refuse_moves(model, torch.device("meta")), model[0].weight
    state = model.state_dict()
    assert list(state) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert state["0.bias"].data_ptr() == model[0].bias.data_ptr()
    assert torch.equal(state["0.weight"], torch.arange(32).view(8, 4))
    assert state["1.weight"].data_ptr() == model[1].weight.data_ptr()
    assert model[0].weight is weight
    assert weight.qdata.device.type == "cpu"
    undo()
    undo = refuse_moves(model, torch.device("cpu"))
    for _ in range(2):  # on that device it fails too; then it stays as it is
        with pytest.raises(RuntimeError, match="packed for meta") as error:
            model.state_dict()
        assert error.value.__context__ is None or error.value.__suppress_context__
        undo()


# -- attributes ------------------------------------------------------------------------------------------------------


class Rebinds(Attributes):
    """Its forward replaces an attribute, and uses the new one in the next step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        self.holder.shift = self.holder.shift * 1.5
        self.q, self.spare = getattr(self, "spare", self.q.clone().neg_()), self.q
        return x


def test_an_attribute_that_a_forward_replaces_is_never_stale() -> None:
    model, plain = chain(Rebinds), chain(Rebinds)
    with offloaded(model):
        steps(model, plain, range(6))
    steps(model, plain, range(2))


class Counts(Attributes):
    """Its forward writes to an attribute: in place, or without a new version, as kernels with their own caches do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        self.holder.shift.numpy()[:] *= 0.5
        self.rest["scales"][0].mul_(1.25)
        return x


def test_an_attribute_that_a_forward_writes_to_is_updated() -> None:
    model, plain = chain(Counts), chain(Counts)
    with offloaded(model):
        steps(model, plain, range(5))
    steps(model, plain, range(2))


class Assigns(Attributes):
    """Its forward assigns other data to tensors."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        self.bias.data = self.bias.data * 0.5
        return x


def test_data_that_a_forward_assigns_is_adopted() -> None:
    model, plain = chain(Assigns), chain(Assigns)
    with offloaded(model):
        steps(model, plain, range(5))
    steps(model, plain, range(2))


class Repacks(Stated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        self.weight.data = self.weight.data.view(-1, 2).contiguous()
        return x


def test_data_of_another_shape_in_a_forward_is_refused_by_name() -> None:
    with offloaded(chain(Repacks)) as streamer, pytest.raises(OffloadError, match=r"\.weight was replaced by a"):
        streamer._modules.model(rows(0))


def test_an_attribute_with_another_modules_weight_is_no_second_place_of_it() -> None:
    def referring() -> nn.Sequential:
        model = chain(Classed)
        for block in model:
            block.first = [model[0].weight]
        return model

    model, plain = referring(), referring()
    with offloaded(model) as streamer:
        steps(model, plain)
        assert sum("0.weight" in [t.name for t in unit.tensors] for unit in streamer.plan.manifest.units) == 1


def test_an_attribute_on_another_device_stays_there() -> None:
    model = chain(Classed)
    model[0].shapes = torch.empty(5, device="meta")
    with offloaded(model):
        model(rows(0))
        assert model[0].shapes.is_meta


# -- tensors that cannot be moved ------------------------------------------------------------------------------------


class Opaque(torch.Tensor):
    """A wrapper that does not expose its inner tensors."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Opaque:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


class Fresh(TwoTensor):
    """A wrapper that creates its inner tensors when they are requested."""

    @property
    def a(self) -> torch.Tensor:
        return self._a.clone()

    @a.setter
    def a(self, value: torch.Tensor) -> None:
        self._a = value


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "wrapper": (lambda: [{"a": Opaque(torch.ones(3))}], r"\.0\.a is a .*Opaque, which has no memory"),
    "fresh": (lambda: Fresh(torch.ones(3), torch.ones(3)), r"\.a is another tensor at each access"),
    "sparse": (lambda: torch.eye(4).to_sparse(), " is torch.sparse_coo"),
    "quantised": (lambda: SimpleNamespace(q=_quantised(3)), r"\.q is quantized"),
    "packed": (lambda: torch.ops.quantized.linear_prepack(_quantised(3, 3), None), " is a .*LinearPackedParams"),
}


def _quantised(*shape: int) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(shape), 0.1, 0, torch.qint8)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:.*quantiz.*")
def test_tensors_that_cannot_be_moved_are_refused_by_their_path(name: str) -> None:
    model = chain(Classed)
    make, message = REFUSED[name]
    model[2].found = make()
    with pytest.raises(UnsupportedError, match=r"2\.found" + message):
        weightstream.offload(model, device="cpu", device_budget="40KiB")
    steps(model, chain(Classed))


# -- other owners of the memory --------------------------------------------------------------------------------------

HOLDERS: dict[str, Callable[[nn.Module], object]] = {
    "detached": lambda model: model[2].weight.detach(),
    "data": lambda model: model[2].weight.data,
    "a view": lambda model: [model[2].weight.detach()[3:5]],
    "numpy": lambda model: model[2].weight.detach().numpy(),
    "numpy of bytes": lambda model: model[2].weight.data.view(torch.uint8).numpy()[4:],
    "a state": lambda model: {"a": model[2].state_dict()["weight"]},
}
NO_HOLDERS: dict[str, Callable[[nn.Module], object]] = {
    "the parameter": lambda model: [model[2].weight, dict(model.named_parameters())],
    "a clone": lambda model: copy.deepcopy(model.state_dict()),
    "a graph": lambda model: model(rows(0).requires_grad_()),
    "a dropped view": lambda model: model[2].weight.detach().numpy().sum(),
    "a dropped cycle": lambda model: _cycle(model[2].weight.detach()),
}


def _cycle(value: object) -> None:
    cycle = [value]
    cycle.append(cycle)


def warnings_of(model: nn.Module, caplog: pytest.LogCaptureFixture) -> list[str]:
    with caplog.at_level(logging.WARNING, logger="weightstream"):
        weightstream.offload(model, device="cpu", device_budget=int(0.45 * nbytes(model))).remove()
    return [message for record in caplog.records if "outside of the model" in (message := record.getMessage())]


@pytest.mark.parametrize("name", HOLDERS)
def test_other_owners_of_a_weights_memory_are_warned_of(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = chain(Classed)
    held = HOLDERS[name](model)
    (message,) = warnings_of(model, caplog)
    assert message.startswith("the memory of 2.weight is also used by")
    assert held is not None


@pytest.mark.parametrize("name", NO_HOLDERS)
def test_objects_without_the_memory_cause_no_warning(name: str, caplog: pytest.LogCaptureFixture) -> None:
    gc.disable()
    try:
        model = chain(Classed)
        held = NO_HOLDERS[name](model)
        assert warnings_of(model, caplog) == []
        del held
    finally:
        gc.enable()


@pytest.mark.parametrize("views", [2, 1])
def test_an_outside_view_of_memory_that_several_buffers_share_is_reported(
    views: int, caplog: pytest.LogCaptureFixture
) -> None:
    base = torch.randn(2 * WIDTH, WIDTH)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    for index in range(views):
        model[index].register_buffer("part", base[index * WIDTH : (index + 1) * WIDTH])
    outside = base[:3]
    with caplog.at_level(logging.WARNING, "weightstream"), weightstream.offload(model, device="cpu"):
        assert "0.part" in caplog.text
    assert outside.shape[0] == 3
