"""An offloaded model behaves as a whole: reads, saves, updates, copies, gradients, several streamers at once."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

import weightstream
from fixtures_structure import Block
from models import MODELS, Model, assert_same, model_nbytes, randomise, step, tensors_of, to_device, weights
from repeats import thinned
from streaming import DEVICES, assert_steps_equal, least_budget, open_streamer, plain, run
from weightstream.errors import OffloadError

NAMES = ("Stack", "TiedLinears", "StridedParameters", "QuantisedWeights", "ViewsOfOneStorage", "llama-bf16")
WARM_STEPS = (0, 1, 4)


def clones(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in weights(module).items()}


def assert_weights(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        assert not tensor.is_meta, name
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor.detach().cpu(), expected[name].cpu()), name


@pytest.mark.few(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_weights_read_true_values_between_steps(name: str, device: str) -> None:
    model = MODELS[name]()
    expected, parameters = clones(model.module), dict(model.module.named_parameters())
    strides = {key: tensor.stride() for key, tensor in weights(model.module).items()}
    with open_streamer(model, device) as streamer:
        for seed in range(4):
            assert_weights(weights(model.module), expected)
            assert {key: tensor.stride() for key, tensor in weights(model.module).items()} == strides
            assert all(tensor is parameters[key] for key, tensor in model.module.named_parameters())
            run(model, device, seed)
        assert streamer.stats().fills > 0
        assert_weights(weights(model.module), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_ties_stay_one_object_and_are_held_once(device: str) -> None:
    model = MODELS["TiedLinears"]()
    module, nbytes = model.module, model_nbytes(model.module)
    with open_streamer(model, device) as streamer:
        for seed in range(3):
            assert module.tail.weight is module.head.weight
            assert module.blocks[4].up.weight is module.blocks[2].up.weight is module.blocks[0].up.weight
            run(model, device, seed)
        assert streamer.stats().model_nbytes == nbytes == model_nbytes(module)


@pytest.mark.few(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_state_dict_is_right_and_stays_right(name: str, device: str) -> None:
    """A state dict taken between steps is not a view of the ring: later steps do not change it."""
    model = MODELS[name]()
    expected = copy.deepcopy(model.module.state_dict())
    with open_streamer(model, device):
        taken = []
        for seed in range(3):
            taken.append(model.module.state_dict())
            run(model, device, seed)
        for state in taken:
            assert_weights(state, expected)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", NAMES)
def test_state_dict_pickles_at_its_own_size(name: str) -> None:
    model = MODELS[name]()
    expected, plain_file = copy.deepcopy(model.module.state_dict()), io.BytesIO()
    torch.save(model.module.state_dict(), plain_file)
    with open_streamer(model, "cpu"):
        run(model, "cpu", 0)
        file = io.BytesIO()
        torch.save(model.module.state_dict(), file)
    assert_weights(torch.load(io.BytesIO(file.getvalue())), expected)
    assert file.tell() <= 1.05 * plain_file.tell()


@pytest.mark.few(1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["llama", "llama-bf16", "t5", "mixtral"])
def test_save_pretrained_round_trips(name: str, device: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    expected = copy.deepcopy(model.module.state_dict())
    with open_streamer(model, device):
        run(model, device, 0)
        model.module.save_pretrained(tmp_path)
        run(model, device, 1)
    loaded = type(model.module).from_pretrained(tmp_path, dtype="auto")
    assert_weights(loaded.state_dict(), expected)


@pytest.mark.few(3)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "warm"), thinned(NAMES, WARM_STEPS))
def test_load_state_dict_reaches_the_next_steps(name: str, warm: int, device: str) -> None:
    """Weights that were filled ahead of time, at the end of a step, must not outlive the load."""
    model, reference = MODELS[name](), plain(name, device)
    other = copy.deepcopy(randomise(MODELS[name]().module, seed=99).state_dict())
    with open_streamer(model, device) as streamer:
        assert_steps_equal(model, reference, device, range(warm))
        for module in (model.module, reference.module):
            module.load_state_dict(other)
        assert_steps_equal(model, reference, device, range(4))
        assert_weights(model.module.state_dict(), reference.module.state_dict())
        assert streamer.stats().fills > 0
    assert_weights(model.module.state_dict(), reference.module.state_dict())


def other_values(parameter: torch.Tensor) -> torch.Tensor:
    """New random values of the same shape, type and device."""
    values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
    return (values * 0.1).to(parameter.dtype).to(parameter.device)


def add(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.add_(other_values(parameter))


def multiply_data(parameter: nn.Parameter) -> None:
    parameter.data.mul_(-0.5)


def replace_data(parameter: nn.Parameter) -> None:
    parameter.data = other_values(parameter)


def write_elements(parameter: nn.Parameter) -> None:
    parameter.data[..., :1] = 0.25


def somewhere(parameter: nn.Parameter) -> tuple[torch.Tensor, ...]:
    """The index of one element in the middle, which a spot check would miss."""
    return tuple(torch.unravel_index(torch.tensor(parameter.numel() * 5 // 9), parameter.shape))


def write_one_element(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter[somewhere(parameter)] = 3.0


def write_one_element_of_data(parameter: nn.Parameter) -> None:
    """`.data` hides the write from autograd's version counter."""
    parameter.data[somewhere(parameter)] = 3.0


def write_to_numpy(parameter: nn.Parameter) -> None:
    """An array of a view has no version, and is gone before the next step. Weights on a GPU have no such array."""
    words = parameter.detach().view({2: torch.int16, 4: torch.int32}[parameter.element_size()])
    if words.is_cuda:
        words ^= 1
    else:
        array = words.numpy()
        array ^= 1


UPDATES = (
    add,
    write_to_numpy,
    multiply_data,
    replace_data,
    write_elements,
    write_one_element,
    write_one_element_of_data,
)


@pytest.mark.few(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("update", UPDATES, ids=lambda update: update.__name__)
@pytest.mark.parametrize(
    ("name", "warm"),
    thinned(("Stack", "TiedLinears"), WARM_STEPS)
    + [
        pytest.param(name, warm, marks=[pytest.mark.stress] * (warm != WARM_STEPS[-1]))
        for name in ("StridedParameters", "llama-bf16")
        for warm in WARM_STEPS
    ],
)
def test_updates_in_place_reach_the_next_steps(
    name: str, update: Callable[[nn.Parameter], None], warm: int, device: str
) -> None:
    model, reference = MODELS[name](), plain(name, device)
    with open_streamer(model, device):
        assert_steps_equal(model, reference, device, range(warm))
        for module in (model.module, reference.module):
            for parameter in module.parameters():
                update(parameter)
        assert_steps_equal(model, reference, device, range(4))
        assert_weights(weights(model.module), weights(reference.module))
    assert_weights(weights(model.module), weights(reference.module))


@pytest.mark.few(3)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("index", range(6))
def test_an_update_of_one_weight_between_steps(index: int, device: str) -> None:
    """One block at a time, in each step: the update is seen, whichever block waits in the ring."""
    model, reference = MODELS["Stack"](), plain("Stack", device)
    with open_streamer(model, device):
        for seed in range(4):
            for module in (model.module, reference.module):
                multiply_data(module.blocks[index].up.weight)
            assert_steps_equal(model, reference, device, range(seed, seed + 1))


def set_parameter(module: nn.Module) -> None:
    old = module.blocks[2].up.weight
    module.blocks[2].up.weight = nn.Parameter(other_values(old))


def assign_state(module: nn.Module) -> None:
    state = {name: other_values(tensor) for name, tensor in module.state_dict().items()}
    module.load_state_dict(state, assign=True)


def add_child(module: nn.Module) -> None:
    torch.manual_seed(3)
    module.blocks[2].up = nn.Linear(32, 64).to(module.blocks[2].up.weight.device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("change", [set_parameter, assign_state, add_child], ids=lambda change: change.__name__)
def test_replaced_parameters_are_followed_or_refused(change: Callable[[nn.Module], None], device: str) -> None:
    """A new Parameter object is either used from then on, or refused by an error; the old values are never used."""
    model, reference = MODELS["Stack"](), plain("Stack", device)
    with open_streamer(model, device):
        assert_steps_equal(model, reference, device, range(2))
        change(reference.module)
        try:
            change(model.module)
            outputs = [run(model, device, seed) for seed in range(4)]
        except OffloadError:
            return
        for seed, output in enumerate(outputs):
            assert_same(output, run(reference, device, seed))


@pytest.mark.few(3)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_a_deepcopy_is_an_independent_plain_model(name: str, device: str) -> None:
    """Compared with a deepcopy of the plain model, since copying may change the strides of a weight."""
    model, reference = MODELS[name](), plain(name, device)
    expected, plain_twin = clones(model.module), copy.deepcopy(reference.module)
    with open_streamer(model, device) as streamer:
        run(model, device, 0)
        twin = copy.deepcopy(model.module)
        assert getattr(twin, "weightstream", None) is None
        for parameter in model.module.parameters():
            multiply_data(parameter)
        assert_weights(weights(twin), expected)
        twin.to(device)
        for seed in range(3):
            inputs = to_device(model.inputs(seed), device)
            run(model, device, seed)
            assert_same(step(twin, inputs), step(plain_twin, inputs))
        assert streamer.stats().steps == 4
        multiply_data(next(twin.parameters()))
        for parameter in reference.module.parameters():
            multiply_data(parameter)
        assert_steps_equal(model, reference, device, range(3))


@pytest.mark.parametrize("device", DEVICES)
def test_a_deepcopy_may_be_converted_copied_and_offloaded(device: str) -> None:
    model, reference = MODELS["Stack"](), plain("Stack", device)
    with open_streamer(model, device):
        run(model, device, 0)
        twin = Model(module=copy.deepcopy(copy.deepcopy(model.module)), inputs=model.inputs)
        with open_streamer(twin, device) as streamer:
            for seed in range(3):
                assert_steps_equal(model, reference, device, range(seed, seed + 1))
                assert_steps_equal(twin, reference, device, range(seed, seed + 1))
            assert streamer.stats().fills > 0
        twin.module.to("cpu", torch.float64)
        assert {p.dtype for p in twin.module.parameters()} == {torch.float64}
        assert twin.module(twin.inputs(0)["x"].double()).dtype == torch.float64


@pytest.mark.parametrize("device", DEVICES)
def test_buffers_updated_by_training_mode_persist(device: str) -> None:
    model, reference = MODELS["LinearBatchNormLinear"](), plain("LinearBatchNormLinear", device)
    before = clones(model.module)
    with open_streamer(model, device):
        model.module.train()
        reference.module.train()
        assert_steps_equal(model, reference, device, range(4))
        assert_weights(weights(model.module), weights(reference.module))
        assert int(model.module.batchnorm.num_batches_tracked) == 4
    assert_weights(weights(model.module), weights(reference.module))
    assert not torch.equal(model.module.batchnorm.running_mean.cpu(), before["batchnorm.running_mean"])


def first_output(model: Model, device: str, seed: int) -> torch.Tensor:
    """With gradients enabled, which makes some modules compute in another way."""
    return next(tensors_of(model.module(**to_device(model.inputs(seed), device))))


@pytest.mark.few(1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["Stack", "llama", "FusedEncoder", "Recurrent"])
def test_backward_is_refused_but_forward_with_gradients_works(name: str, device: str) -> None:
    model, reference = MODELS[name](), plain(name, device)
    with open_streamer(model, device):
        for seed in range(3):
            output = first_output(model, device, seed)
            assert torch.equal(output, first_output(reference, device, seed))
            with pytest.raises(OffloadError, match=r"(?i)backward"):
                output.sum().backward()
        assert all(parameter.grad is None for parameter in model.module.parameters())
        assert_steps_equal(model, reference, device, range(3))


@pytest.mark.parametrize("device", DEVICES)
def test_backward_to_the_inputs_of_a_frozen_model(device: str) -> None:
    model, reference = MODELS["Stack"](), plain("Stack", device)
    found = []
    for each in (model, reference):
        each.module.requires_grad_(False)
    with open_streamer(model, device):
        for each in (model, reference):
            x = each.inputs(0)["x"].to(device).requires_grad_()
            each.module(x).sum().backward()
            found.append(x.grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("device", DEVICES)
def test_steps_in_inference_mode(device: str) -> None:
    """No inference tensor remains: updates work, and later steps use them."""
    model, reference = MODELS["Stack"](), plain("Stack", device)
    with open_streamer(model, device):
        for seed in range(3):
            with torch.inference_mode():
                output = model.module(model.inputs(seed)["x"].to(device)).clone()
            assert_same([output], run(reference, device, seed))
        for module in (model.module, reference.module):
            for parameter in module.parameters():
                add(parameter)
        assert_steps_equal(model, reference, device, range(3))


@pytest.mark.parametrize("device", DEVICES)
def test_a_model_that_was_built_in_inference_mode(device: str) -> None:
    with torch.inference_mode():
        model, reference = MODELS["Stack"](), plain("Stack", device)
        with open_streamer(model, device):
            assert_steps_equal(model, reference, device, range(4))
            model.module.load_state_dict(model.module.state_dict())
            assert_steps_equal(model, reference, device, range(2))
        assert_weights(model.module.state_dict(), reference.module.state_dict())


class RaisesOnce(nn.Module):
    """A block that fails after its first linear, in the middle of a step, when it is `armed`."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block
        self.armed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block(x)
        if self.armed:
            self.armed = False
            raise KeyError("in the middle of a step")
        return self.block.down(self.block.up(x))


@pytest.mark.few(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("warm", WARM_STEPS)
@pytest.mark.parametrize("index", [0, 3, 5])
def test_a_step_that_raises_leaves_a_model_that_works(index: int, warm: int, device: str) -> None:
    model, reference = MODELS["Stack"](), plain("Stack", device)
    for module in (model.module, reference.module):
        module.blocks[index] = RaisesOnce(module.blocks[index])
    expected = clones(model.module)
    with open_streamer(model, device):
        assert_steps_equal(model, reference, device, range(warm))
        model.module.blocks[index].armed = True
        with pytest.raises(KeyError, match="in the middle of a step"):
            run(model, device, 0)
        assert_weights(weights(model.module), expected)
        assert_steps_equal(model, reference, device, range(4))
    assert_weights(weights(model.module), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_two_streamers_take_turns(device: str) -> None:
    names = ("Stack", "llama-bf16")
    models, references = [MODELS[name]() for name in names], [plain(name, device) for name in names]
    with open_streamer(models[0], device) as first:
        with open_streamer(models[1], device) as second:
            for seed in range(3):
                for model, reference in zip(models, references, strict=True):
                    assert_steps_equal(model, reference, device, range(seed, seed + 1))
            assert first.stats().steps == second.stats().steps == 3
        assert_steps_equal(models[0], references[0], device, range(3))


class Pair(nn.Module):
    """One model that calls another inside its own step."""

    def __init__(self, outer: nn.Module, inner: nn.Module) -> None:
        super().__init__()
        self.outer = outer
        self.call_inner = inner.__call__

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(x + self.call_inner(x).mean())


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_inside_a_step_of_another_model(device: str) -> None:
    inner, plain_inner = MODELS["Stack"](), plain("Stack", device)
    outer, plain_outer = MODELS["TiedLinears"](), plain("TiedLinears", device)
    model = Model(module=Pair(outer.module, inner.module).eval(), inputs=outer.inputs)
    reference = Model(module=Pair(plain_outer.module, plain_inner.module).eval(), inputs=outer.inputs)
    with open_streamer(inner, device), open_streamer(model, device):
        assert_steps_equal(model, reference, device, range(4))


@pytest.mark.parametrize("device", DEVICES)
def test_a_branch_that_only_the_second_pass_takes(device: str) -> None:
    model, reference = MODELS["OptionalBranch"](), plain("OptionalBranch", device)
    budget = least_budget(model.module, device)
    with weightstream.offload(model.module, device=device, device_budget=budget) as streamer:
        for seed, branch in enumerate((False, True, False, True, True, False)):
            inputs = to_device(model.inputs(seed), device) | {"branch": branch}
            assert_same(step(model.module, inputs), step(reference.module, inputs))
        assert streamer.stats().held_nbytes["device"] <= budget
