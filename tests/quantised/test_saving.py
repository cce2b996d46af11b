"""Saved files and copies of a quantised model equal those of the plain model in the same versions of libraries,
names,
classes and bytes included, while it is offloaded and afterwards. Where the plain model fails, ours may fail too."""

from __future__ import annotations

import contextlib
import copy
import io
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import CHECKPOINTS, MIXTURES, llama, merged, on_the_fly
from formats import build, held_nbytes, inputs
from safetensors import safe_open
from torch import nn

import weightstream
from weightstream.adapters.hf import private_quantised
from weightstream.runtime.tensors.leaves import storage_of

# optimum reads it on all models
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

IDS = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(5))
STATES = ("as it is loaded", "after a forward")
TIMES = ("offloaded", "removed")
Run = Callable[[Any], torch.Tensor]
Save = Callable[[Any, Run, Path], Any]


# -- comparison --------------------------------------------------------------------------------------------------------


def facts(value: Any) -> Any:
    """Classes and bytes of a value, however deeply nested its tensors are."""
    if isinstance(value, torch.Tensor) and storage_of(value) is None:  # a wrapper
        inside: Any = value
        return type(value), value.dtype, {name: facts(getattr(inside, name)) for name in inside.__tensor_flatten__()[0]}
    if isinstance(value, torch.Tensor):
        flat = value.detach().as_subclass(torch.Tensor).contiguous().reshape(-1)
        return type(value), value.dtype, tuple(value.shape), flat.view(torch.uint8).cpu().numpy().tobytes()
    if isinstance(value, dict):
        return {key: facts(item) for key, item in value.items()}
    return value


def state_of(model: nn.Module) -> Any:
    state = model.state_dict()
    return type(state), list(state), facts(state), state._metadata  # type: ignore[attr-defined]


def state(model: Any, run: Run, folder: Path) -> Any:
    return state_of(model)


def saved_state(model: Any, run: Run, folder: Path) -> Any:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    size = file.tell()
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    return size, list(loaded), facts(loaded)


def saved_model(model: Any, run: Run, folder: Path) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    with zipfile.ZipFile(file) as parts:
        assert not any(b"weightstream." in parts.read(name) for name in parts.namelist() if name.endswith("data.pkl"))
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    return state_of(loaded), facts(run(loaded))


def copied(model: Any, run: Run, folder: Path) -> Any:
    made = copy.deepcopy(model)
    return type(made), state_of(made), facts(run(made))


def pretrained(model: Any, run: Run, folder: Path, **settings: Any) -> Any:
    model.save_pretrained(folder, **settings)
    return {file.name: contents(file) for file in sorted(folder.iterdir())}


def pretrained_as_held(model: Any, run: Run, folder: Path) -> Any:
    return pretrained(model, run, folder, save_original_format=False)


def contents(path: Path) -> Any:
    if path.suffix != ".safetensors":
        return path.read_bytes()
    with safe_open(path, "pt") as file:  # the metadata has no order
        names = sorted(file.keys())
        return path.stat().st_size, file.metadata(), {name: facts(file.get_tensor(name)) for name in names}


def result(save: Save, model: Any, run: Run, folder: Path) -> Any:
    try:
        return save(model, run, folder)
    except Exception as error:  # any error of the libraries
        return error


def check(save: Save, plain: Any, ours: Any, run: Run, tmp_path: Path) -> None:
    wanted = result(save, plain, run, tmp_path / "plain")
    found = result(save, ours, run, tmp_path / "ours")
    if isinstance(wanted, Exception):
        assert not isinstance(found, Exception) or type(found) is type(wanted), found
    else:
        assert found == wanted


SAVES: list[Save] = [state, saved_state, saved_model, copied]
OF_TRANSFORMERS: list[Save] = [*SAVES, pretrained, pretrained_as_held]


# -- small nets, from memory -------------------------------------------------------------------------------------------


@pytest.mark.few(36)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of bitsandbytes int8
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("when", TIMES)
@pytest.mark.parametrize("before", STATES)
def test_a_net_is_saved_as_the_plain_one(name: str, before: str, when: str, save: Save, tmp_path: Path) -> None:
    plain, ours = build(name), build(name)
    (x,) = inputs(plain, (2,))

    def run(model: Any) -> torch.Tensor:
        found: torch.Tensor = model(x)
        return found

    streamer = weightstream.offload(ours, device="cpu", device_budget=int(0.4 * held_nbytes(ours)))
    after(before, plain, ours, run, unpacks=name.startswith("compressed"))
    if when == "removed":
        streamer.remove()
    check(save, plain, ours, run, tmp_path)


def after(before: str, plain: Any, ours: Any, run: Run, *, unpacks: bool) -> None:
    """`unpacks`: the plain model unpacks completely in its first forward, and ours never does."""
    if before == STATES[1]:
        run(ours)
        if not unpacks:
            run(plain)


@pytest.mark.parametrize("name", ["parts"], indirect=True)
def test_saving_loses_no_update(name: str) -> None:
    """After a write to the output of `state_dict`, the next step computes with it."""
    plain, ours = build(name), build(name)
    (x,) = inputs(plain, (2,))
    with weightstream.offload(ours, device="cpu", device_budget=int(0.4 * held_nbytes(ours))):
        for _ in range(3):
            for model in (plain, ours):
                model.state_dict()["0.up.weight.packed.data_"].numpy()[:3] += 1  # type: ignore[operator]
            assert torch.equal(ours(x), plain(x))


# -- checkpoints of transformers ---------------------------------------------------------------------------------------


@pytest.fixture(params=CHECKPOINTS)
def checkpoint(request: pytest.FixtureRequest) -> Iterator[str]:
    pytest.importorskip("accelerate")
    pytest.importorskip(CHECKPOINTS[request.param][0])
    with torch.compiler.set_stance("force_eager"):
        yield request.param


def loaded(path: Path, **settings: Any) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(path, **settings)


def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(IDS).logits
    return found


def offloaded(path: Path, source: str, **settings: Any) -> Any:
    budget = (path / "model.safetensors").stat().st_size // 3
    if source == "file":
        return weightstream.from_pretrained(path, device="cpu", device_budget=budget, **settings)
    model = loaded(path, **settings)
    weightstream.offload(model, device="cpu", device_budget=max(budget, held_nbytes(model) // 2))
    return model


UNPACKED = ("fp8", "mxfp4", *MIXTURES)  # by transformers as it loads them, without kernels; not by weightstream


@pytest.mark.few(7)
@pytest.mark.parametrize("save", OF_TRANSFORMERS)
@pytest.mark.parametrize("when", TIMES)
@pytest.mark.parametrize("before", STATES)
@pytest.mark.parametrize("source", ["file", "memory"])
def test_a_checkpoint_is_saved_as_the_plain_one(
    folder: Any, checkpoint: str, source: str, before: str, when: str, save: Save, tmp_path: Path
) -> None:
    path = folder(checkpoint)
    kept = checkpoint == "fp8" and source == "file"  # as with kernels
    with private_quantised.keeping_quantised({}) if kept else contextlib.nullcontext():
        plain = loaded(path)
    ours = offloaded(path, source)
    if checkpoint in UNPACKED and source == "file":
        if checkpoint != "fp8" or save in (saved_model, copied):
            pytest.skip("transformers has no such model here: test_a_checkpoint_that_stays_packed_is_saved_packed")
        run: Run = lambda model: torch.empty(0)  # noqa: E731
    else:
        run = logits
    after(before, plain, ours, run, unpacks=checkpoint.startswith("compressed"))
    if when == "removed":
        ours.weightstream.remove()
    check(save, plain, ours, run, tmp_path)


@pytest.mark.few(3)
@pytest.mark.parametrize("when", TIMES)
@pytest.mark.parametrize("checkpoint", UNPACKED, indirect=True)
def test_a_checkpoint_that_stays_packed_is_saved_packed(
    folder: Any, checkpoint: str, when: str, tmp_path: Path
) -> None:
    """The file's names and bytes. Copies and pickles compute, though the library could not."""
    path = folder(checkpoint)
    ours = offloaded(path, "file")
    wanted = logits(ours)
    if when == "removed":
        ours.weightstream.remove()
    _, _, in_file = contents(path / "model.safetensors")
    assert set(ours.state_dict()) == merged(in_file)
    if checkpoint not in MIXTURES:
        own = {key: (torch.Tensor, *value[1:]) for key, value in facts(ours.state_dict()).items()}
        assert own == in_file
    copies = [copy.deepcopy(ours)]
    if not checkpoint.startswith("compressed"):  # its hook, which is of the plain model too, cannot be pickled
        file = io.BytesIO()
        torch.save(ours, file)
        file.seek(0)
        copies.append(torch.load(file, weights_only=False))
    for made in copies:
        assert state_of(made)[1:3] == state_of(ours)[1:3]
        assert torch.equal(logits(made), wanted)
    ours.save_pretrained(tmp_path / "saved", save_original_format=checkpoint in MIXTURES)
    assert contents(tmp_path / "saved" / "model.safetensors")[2] == in_file
    assert torch.equal(logits(loaded(tmp_path / "saved")), wanted)
    again = offloaded(tmp_path / "saved", "file")
    assert torch.equal(logits(again), wanted)
    again.weightstream.remove()


@pytest.mark.few(3)
@pytest.mark.parametrize("save", OF_TRANSFORMERS)
@pytest.mark.parametrize("when", TIMES)
@pytest.mark.parametrize("kind", ["bnb nf4", "bnb int8", "torchao int8", "torchao float8"])
def test_a_model_quantised_at_load_is_saved_as_the_plain_one(kind: str, when: str, save: Save, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip(CHECKPOINTS[kind][0])
    llama().save_pretrained(tmp_path / "source")
    plain = loaded(tmp_path / "source", quantization_config=on_the_fly(kind))
    ours = offloaded(tmp_path / "source", "file", quantization_config=on_the_fly(kind))
    after(STATES[1], plain, ours, logits, unpacks=False)
    if when == "removed":
        ours.weightstream.remove()
    check(save, plain, ours, logits, tmp_path)
