"""Pipelines loaded from files: weights view the files, images equal those of diffusers' own load, errors are
reported."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import weightstream
from repeats import only
from streaming import DEVICES

pipelines = pytest.importorskip("pipelines")
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from weightstream.adapters.diffusers import load as pipeline_files  # noqa: E402
from weightstream.inputs import machine  # noqa: E402
from weightstream.store.checkpoint import Checkpoint  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("few_plans"),
    # diffusers' own, of numpy
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`upcast_vae` is deprecated:FutureWarning"),
]
LARGE = 4096  # bytes: smaller tensors may be in memory


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny pipeline, saved once."""
    folders: dict[str, Path] = {}

    def save(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name)
            pipelines.build(name).save_pretrained(folders[name])
        return folders[name]

    return save


def parts(pipe: Any) -> dict[str, nn.Module]:
    return {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}


def nbytes(pipe: Any) -> int:
    return sum(t.nbytes for part in parts(pipe).values() for t in part.parameters())


def plain(folder: Path, device: str = "cpu", **options: Any) -> Any:
    """The pipeline that diffusers loads, in memory of an allocator: CPU kernels give other bits for pages of a file."""
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder, **options)
    for part in parts(pipe).values():
        for tensor in (*part.parameters(), *part.buffers()):
            tensor.data = tensor.data.clone()
        part.to(device)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def loaded(folder: Path, device: str = "cpu", share: float = 0.5, **options: Any) -> Any:
    budget = int(share * sum(path.stat().st_size for path in folder.rglob("*.safetensors")))
    example = options.pop("example_inputs", None)
    pipe = weightstream.pipeline_from_pretrained(
        folder, device=device, device_budget=budget, example_inputs=example, progress=False, **options
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def places(found: Any) -> dict[str, list[bool]]:
    """For each component, whether each weight views memory of a file."""
    return {
        name: [any(m.locate(t.data_ptr()) is not None for m in found.of(name)) for t in part.parameters()]
        for name, part in parts(found.pipe).items()
    }


# slow ones run in CI only where nothing is loaded; flux runs in most tests below
KINDS = only(pipelines.PIPELINES, "sd3", "wan")


@pytest.mark.few(1)
@pytest.mark.parametrize("name", KINDS)
def test_images_are_the_same_bits(name: str, device: str, saved: Callable[[str], Path]) -> None:
    folder = saved(name)
    want = pipelines.image(plain(folder, device), name)
    pipe = loaded(folder, device, example_inputs=pipelines.arguments(name))
    assert type(pipe).__name__ == type(pipelines.build(name)).__name__
    for _ in range(2):
        assert torch.equal(pipelines.image(pipe, name), want)
    assert sum(stats.fills for stats in pipe.weightstream.stats().components.values()) > 0
    pipe.weightstream.remove()
    pipe.weightstream = None
    for part in parts(pipe).values():
        assert not part.training
        for tensor in part.parameters():
            tensor.data = tensor.data.clone()  # in memory of its own again, on the host
        part.to(device)
    assert torch.equal(pipelines.image(pipe, name), want)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", pipelines.PIPELINES)
def test_weights_view_the_files(name: str, saved: Callable[[str], Path]) -> None:
    """There is no second copy of any weight, and nothing is written."""
    found = pipeline_files.load_pipeline(saved(name), progress=False)
    assert not found.folders
    assert all(all(homed) for homed in places(found).values())
    assert set(places(found)) == set(parts(pipelines.build(name)))


def test_headers_are_read_once(saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """They give the dtype, size and weights of a diffusers model. transformers' loader reads its own headers again."""
    nums: Counter[str] = Counter()
    opened = Checkpoint.open.__func__  # type: ignore[attr-defined]

    def count(cls: Any, path: Path, *args: Any) -> Checkpoint:
        nums[Path(path).parent.name] += 1
        return opened(cls, path, *args)  # type: ignore[no-any-return]

    monkeypatch.setattr(Checkpoint, "open", classmethod(count))
    parts = pipeline_files.load_pipeline(saved("flux"), progress=False).pipe.components
    of_transformers = {name for name, part in parts.items() if isinstance(part, transformers.PreTrainedModel)}
    assert of_transformers
    assert nums == {name: 2 if name in of_transformers else 1 for name in (*of_transformers, "transformer", "vae")}


@pytest.mark.stress
@pytest.mark.parametrize("option", [pytest.param("dtype", marks=pytest.mark.stress), "torch_dtype"])
def test_another_dtype(option: str, saved: Callable[[str], Path], tmp_path: Path) -> None:
    """Converted weights go to the offload folder, once, and equal those that diffusers converts."""
    folder = saved("flux")
    want = pipelines.image(plain(folder, dtype=torch.bfloat16), "flux")
    pipe = loaded(folder, offload_folder=tmp_path, **{option: torch.bfloat16})
    assert {p.dtype for part in parts(pipe).values() for p in part.parameters()} == {torch.bfloat16}
    assert torch.equal(pipelines.image(pipe, "flux"), want)
    written = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    assert nbytes(pipe) <= written < 1.4 * nbytes(pipe)  # headers of tiny tensors
    pipe.weightstream.remove()
    assert not list(tmp_path.rglob("*.safetensors"))
    assert torch.isfinite(pipelines.image(pipe, "flux")).all()


def test_modules_that_stay_in_float32(saved: Callable[[str], Path]) -> None:
    """Wan's norms do, with every dtype."""
    theirs = diffusers.DiffusionPipeline.from_pretrained(saved("wan"), dtype=torch.bfloat16).transformer
    ours = pipeline_files.load_pipeline(saved("wan"), dtype="bfloat16", progress=False).pipe.transformer
    wanted = {name: param.dtype for name, param in theirs.named_parameters()}
    assert {name: param.dtype for name, param in ours.named_parameters()} == wanted
    assert set(wanted.values()) == {torch.float32, torch.bfloat16}
    sketch, _ = pipeline_files.sketch_components(saved("wan"), dtype="bfloat16")
    assert {name: param.dtype for name, param in sketch.transformer.named_parameters()} == wanted


@pytest.mark.parametrize("name", ["a.safetensors", "z.safetensors"])
def test_an_overlaid_index_is_read_as_diffusers_reads_it(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    transformer = pipelines.build("flux").transformer
    transformer.save_pretrained(tmp_path / "transformer", max_shard_size="200KB")
    save_file({"proj_out.weight": transformer.proj_out.weight.detach() * 2}, tmp_path / "transformer" / name)
    (path,) = (tmp_path / "transformer").glob("*.index.json")
    facts = json.loads(path.read_text())
    facts["weight_map"]["proj_out.weight"] = name
    path.write_text(json.dumps(facts))
    expected = type(transformer).from_pretrained(tmp_path / "transformer").state_dict()
    loaded = pipeline_files.load_component(type(transformer), tmp_path / "transformer", tmp_path)
    assert all(torch.equal(tensor, expected[key]) for key, tensor in loaded.model.state_dict().items())
    assert "1 tensors are in several files" in caplog.text


@pytest.mark.stress
def test_variants(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """The files of a variant if a component has them, otherwise its plain ones; also in shards."""
    pipe = pipelines.build("flux")
    pipe.to(torch.bfloat16)
    pipe.save_pretrained(tmp_path, variant="bf16", max_shard_size="200KB")
    pipe.vae.save_pretrained(tmp_path / "vae")
    for path in (tmp_path / "vae").glob("*bf16*"):
        path.unlink()
    assert list(tmp_path.glob("transformer/*.index.bf16.json"))
    found = pipeline_files.load_pipeline(tmp_path, variant="bf16", progress=False)
    assert {p.dtype for part in parts(found.pipe).values() for p in part.parameters()} == {torch.bfloat16}
    assert not found.folders
    assert all(all(homed) for homed in places(found).values())
    assert torch.equal(found.pipe.transformer.proj_out.weight, pipe.transformer.proj_out.weight)
    with pytest.raises(weightstream.CheckpointError, match=r"bf16.*pass variant="):
        pipeline_files.load_pipeline(tmp_path, progress=False)
    with pytest.raises(weightstream.CheckpointError, match=r"bf16.*pass variant="):
        weightstream.plan_model(tmp_path, device="cpu", device_budget="1MiB")
    from weightstream.api.pack import pack

    pack(str(tmp_path), tmp_path.parent / "packed-bf16", variant="bf16", verify=True)
    packed = pipeline_files.load_pipeline(tmp_path.parent / "packed-bf16", progress=False).pipe
    assert torch.equal(packed.transformer.proj_out.weight, pipe.transformer.proj_out.weight)
    assert not list((tmp_path.parent / "packed-bf16").rglob("*bf16*"))
    for load in (pipeline_files.load_pipeline, pipeline_files.sketch_components):
        with pytest.raises(weightstream.CheckpointError, match=r"no component has files of the variant 'fp16'"):
            load(saved("flux"), variant="fp16")
    plan = weightstream.plan_model(tmp_path, device="cpu", device_budget="1MiB", variant="bf16")
    assert plan.plans["transformer"].manifest.nbytes == sum(p.nbytes for p in pipe.transformer.parameters())


def test_a_component_in_a_single_file(device: str, saved: Callable[[str], Path], tmp_path: Path) -> None:
    folder, other = saved("flux"), pipelines.build("flux").transformer
    with torch.no_grad():
        other.proj_out.weight.mul_(1.5)
    save_file(dict(other.state_dict()), tmp_path / "other.safetensors")
    model = plain(folder, device)
    model.transformer.load_state_dict(other.state_dict())
    want = pipelines.image(model, "flux")
    pipe = loaded(folder, device, transformer=tmp_path / "other.safetensors")
    assert torch.equal(pipelines.image(pipe, "flux"), want)
    found = pipeline_files.load_pipeline(folder, transformer=str(tmp_path / "other.safetensors"), progress=False)
    assert all(all(homed) for homed in places(found).values())
    assert not found.folders


def test_a_component_in_gguf(device: str, saved: Callable[[str], Path], tmp_path: Path) -> None:
    """Quantised bytes stay in the file. The image equals that of diffusers with the same file."""
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "flux.gguf"
    writer = gguf.GGUFWriter(path, "flux")
    for name, tensor in pipelines.build("flux").transformer.state_dict().items():
        values = tensor.numpy()
        is_quantised = values.ndim == 2 and values.shape[1] % 32 == 0
        number = gguf.GGMLQuantizationType.Q8_0 if is_quantised else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(values, number), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    theirs = diffusers.FluxTransformer2DModel.from_single_file(
        path,
        config=str(saved("flux") / "transformer"),
        quantization_config=diffusers.GGUFQuantizationConfig(compute_dtype=torch.float32),
        torch_dtype=torch.float32,
    )
    for param in theirs.parameters():
        param.data = param.data.clone()
    want = pipelines.image(plain(saved("flux"), device, transformer=theirs.to(device)), "flux")
    found = pipeline_files.load_pipeline(saved("flux"), transformer=path, dtype="float32", progress=False)
    assert not found.folders
    assert all(all(homed) for homed in places(found).values())
    pipe = loaded(saved("flux"), device, 0.1, transformer=path, dtype="float32")
    assert torch.equal(pipelines.image(pipe, "flux"), want)
    assert pipe.weightstream.stats().components["transformer"].fills > 0


def test_a_quantised_component(device: str, saved: Callable[[str], Path], tmp_path: Path) -> None:
    """NF4, as diffusers saves it: the bytes of the file stream unchanged."""
    pytest.importorskip("bitsandbytes")
    if device == "cpu":
        pytest.skip("diffusers loads NF4 on a GPU alone")
    folder = tmp_path / "nf4"
    shutil.copytree(saved("flux"), folder)
    config = diffusers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    options = {"quantization_config": config, "torch_dtype": torch.float32}
    model = diffusers.FluxTransformer2DModel.from_pretrained(folder / "transformer", device_map=device, **options)
    shutil.rmtree(folder / "transformer")
    model.save_pretrained(folder / "transformer")
    # otherwise weights that are not quantised become float16
    options = {"device_map": device, "torch_dtype": torch.float32}
    theirs = diffusers.FluxTransformer2DModel.from_pretrained(folder / "transformer", **options)
    reference = plain(saved("flux"), device)
    reference.transformer = theirs
    want = pipelines.image(reference, "flux")
    pipe = loaded(folder, device, 0.6)
    assert torch.equal(pipelines.image(pipe, "flux"), want)
    plan = pipe.weightstream.components["transformer"].plan
    assert plan.manifest.nbytes < 0.7 * sum(p.nbytes for p in pipelines.build("flux").transformer.parameters())


RENAMED = {  # SD3's transformer: the names of diffusers, and of single files
    "time_text_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
    "time_text_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
    "time_text_embed.text_embedder.linear_1": "y_embedder.mlp.0",
    "time_text_embed.text_embedder.linear_2": "y_embedder.mlp.2",
    "pos_embed.proj": "x_embedder.proj",
    "pos_embed.pos_embed": "pos_embed",
    "transformer_blocks": "joint_blocks",
    "attn.to_out.0": "x_block.attn.proj",
    "attn.to_add_out": "context_block.attn.proj",
    "norm1.linear": "x_block.adaLN_modulation.1",
    "norm1_context.linear": "context_block.adaLN_modulation.1",
    "ff.net.0.proj": "x_block.mlp.fc1",
    "ff.net.2": "x_block.mlp.fc2",
    "ff_context.net.0.proj": "context_block.mlp.fc1",
    "ff_context.net.2": "context_block.mlp.fc2",
    "norm_out.linear": "final_layer.adaLN_modulation.1",
}


def in_one_file(state: dict[str, torch.Tensor], last: int) -> dict[str, torch.Tensor]:
    """SD3's transformer in the form of its single files: projections are joined, and two of them have swapped
    halves."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if (kind := next((k for k in ("attn.to_q.", "attn.add_q_proj.") if k in name), None)) is not None:
            others = [name.replace("_q", end) for end in ("_q", "_k", "_v")]
            tensor = torch.cat([state[other] for other in others])
            block = "x_block" if "to_q" in kind else "context_block"
            name = name.replace(kind, f"{block}.attn.qkv.")
        elif any(part in name for part in ("attn.to_k", "attn.to_v", "attn.add_k", "attn.add_v")):
            continue
        if "norm_out" in name or f"blocks.{last}.norm1_context" in name:
            tensor = torch.cat(tensor.chunk(2)[::-1])
        if name.startswith("proj_out"):
            name = f"final_layer.linear.{name.rpartition('.')[2]}"
        for theirs, single in RENAMED.items():
            name = name.replace(theirs, single) if theirs in name and f"x_block.{theirs}" not in name else name
        found[f"model.diffusion_model.{name}"] = tensor.contiguous()
    return found


@pytest.mark.stress
def test_a_single_file(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """Components that the file lacks are passed as folders. Slices of a joined projection stay in the file."""
    folder = saved("sd3")
    state = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    save_file(in_one_file(state, last=3), tmp_path / "one.safetensors")
    others = {name: folder / name for name in ("text_encoder", "text_encoder_2", "text_encoder_3", "vae")}
    found = pipeline_files.load_pipeline(tmp_path / "one.safetensors", base=folder, progress=False, **others)
    ours = dict(found.pipe.transformer.state_dict())
    assert ours.keys() == state.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in state.items())
    (written,) = found.folders
    assert 0 < written.nbytes < 0.1 * sum(tensor.nbytes for tensor in state.values())
    pipe = weightstream.pipeline_from_pretrained(
        tmp_path / "one.safetensors", base=folder, device="cpu", device_budget="300KiB", progress=False, **others
    )
    pipe.set_progress_bar_config(disable=True)
    assert pipe.weightstream.stats().held_nbytes["device"] <= 300 << 10
    assert torch.equal(pipelines.image(pipe, "sd3"), pipelines.image(plain(folder), "sd3"))


@pytest.mark.parametrize("options", [pytest.param({}, marks=pytest.mark.stress), {"codec": "compressed"}])
def test_a_coded_component(options: dict[str, Any], tmp_path: Path) -> None:
    """A pack is decoded into the offload folder if nothing can decode it at use, or for another dtype."""
    folder = tmp_path / "coded"
    model = pipelines.build("flux")
    model.to(torch.bfloat16)
    model.save_pretrained(folder)
    want = pipelines.image(plain(folder, dtype=torch.bfloat16), "flux")
    from weightstream.api.pack import pack

    pack(str(folder), tmp_path / "packed", codec="compressed", verify=True)
    pipe = loaded(tmp_path / "packed", share=0.6, **options)
    assert torch.equal(pipelines.image(pipe, "flux"), want)
    pipe.weightstream.remove()


@pytest.mark.few(1)
@pytest.mark.parametrize(("option", "dtype"), [({}, torch.float32), ({"dtype": "float16"}, torch.float16)])
def test_a_load_announces_what_it_will_need(
    option: dict[str, str], dtype: torch.dtype, saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are compiled for the dtype and bytes of the files, starting before these are read."""
    asked: list[tuple[torch.dtype, int]] = []
    prepared: list[set[str]] = []
    monkeypatch.setattr(machine, "dtypes_to_load", lambda *about: asked.append(about[:2]) or {"bfloat16"})
    monkeypatch.setattr(machine, "prepare_decoding", lambda _, dtypes, __: prepared.append(set(dtypes)))
    loaded(saved("flux"), **option).weightstream.remove()
    held = [load_file(file) for file in saved("flux").rglob("*.safetensors")]
    assert asked == [(dtype, sum(tensor.nbytes for tensors in held for tensor in tensors.values()))]
    assert prepared == [set(), {"bfloat16"}]


def test_the_plan_of_files(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """The plan from headers, or only from configs, equals the plan of the pipeline that is loaded next."""
    example = pipelines.arguments("flux")
    pipe = loaded(saved("flux"), example_inputs=example)
    there = pipe.weightstream.plan(**example)
    budget = int(0.5 * sum(path.stat().st_size for path in saved("flux").rglob("*.safetensors")))
    found = weightstream.plan_model(saved("flux"), device="cpu", device_budget=budget, example_inputs=example)
    assert [(t.component, t.entry, t.num) for t in found.turns] == [(t.component, t.entry, t.num) for t in there.turns]
    assert {name: plan.resident for name, plan in found.plans.items()} == {
        name: plan.resident for name, plan in there.plans.items()
    }
    assert found.device_nbytes <= budget
    folder = tmp_path / "described"
    shutil.copytree(saved("flux"), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    bare = weightstream.plan_model(folder, device="cpu", device_budget="300KiB", dtype="bfloat16")
    sizes = {p.nbytes * 2 // p.element_size() for p in pipe.transformer.parameters()}
    assert bare.plans["transformer"].manifest.nbytes == sum(2 * p.numel() for p in pipe.transformer.parameters()), sizes
    assert bare.turns[-1].component == "vae"


@pytest.mark.stress
def test_the_plan_of_configs_has_one_dtype(tmp_path: Path) -> None:
    """Without a dtype argument, components without files have the dtype of the others."""
    pipe = pipelines.build("flux")
    pipe.to(torch.float16)
    pipe.save_pretrained(tmp_path / "flux", max_shard_size="200KB")
    for path in (tmp_path / "flux").rglob("*.safetensors"):
        path.unlink()
    for name in ("text_encoder", "text_encoder_2"):
        path = tmp_path / "flux" / name / "config.json"
        facts = json.loads(path.read_text())
        del facts["dtype"]
        path.write_text(json.dumps(facts | {"torch_dtype": "float16"}))
    assert list((tmp_path / "flux").glob("transformer/*.index.json"))
    sketch, checkpoints = pipeline_files.sketch_components(tmp_path / "flux")
    found = {f"{name}.{key}": p.dtype for name, part in parts(sketch).items() for key, p in part.named_parameters()}
    assert {dtype for key, dtype in found.items() if ".wo." not in key} == {torch.float16}  # T5 keeps these in float32
    assert set(checkpoints.values()) == {None}
    settings = {"device": "cpu", "device_budget": "300KiB"}
    assert weightstream.plan_model(tmp_path / "flux", **settings).seconds > 0
    for dtype in ("float32", torch.bfloat16):
        assert weightstream.plan_model(tmp_path / "flux", **settings, dtype=dtype).seconds > 0


@pytest.mark.stress
def test_dtypes_are_those_of_the_files(tmp_path: Path) -> None:
    """The configs on the Hub often have another dtype."""
    want = pipelines.image(pipelines.build("sdxl"), "sdxl")
    pipelines.build("sdxl").save_pretrained(tmp_path)
    for name in ("text_encoder", "text_encoder_2"):
        path = tmp_path / name / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "float16", "torch_dtype": "float16"}))
    pipe = loaded(tmp_path)
    assert {p.dtype for part in parts(pipe).values() for p in part.parameters()} == {torch.float32}
    assert torch.equal(pipelines.image(pipe, "sdxl"), want)
    sketch, _ = pipeline_files.sketch_components(tmp_path)
    assert {p.dtype for part in parts(sketch).values() for p in part.parameters()} == {torch.float32}


# -- errors ------------------------------------------------------------------------------------------------------------


def broken(folder: Path, tmp_path: Path, change: Callable[[Path], None]) -> Path:
    made = tmp_path / "broken"
    shutil.copytree(folder, made)
    change(made)
    return made


def without_weights(folder: Path) -> None:
    for path in (folder / "vae").glob("*.safetensors"):
        path.unlink()


def with_pickles(folder: Path) -> None:
    for path in (folder / "vae").glob("*.safetensors"):
        path.rename(path.with_suffix(".bin"))


def cut(folder: Path) -> None:
    path = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def of_another_model(folder: Path) -> None:
    path = folder / "transformer" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_attention_heads": 4}))


def missing_some(folder: Path) -> None:
    path = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    del tensors["proj_out.weight"]
    save_file(tensors, path)


EVIL = "import pathlib\npathlib.Path(__file__, '..', 'ran').resolve().touch()\nclass C: pass\n"


def index(folder: Path, **facts: Any) -> None:
    path = folder / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))


def with_code_of_a_component(folder: Path) -> None:
    (folder / "vae" / "evil.py").write_text(EVIL)
    index(folder, vae=["evil", "C"])


def with_code_of_a_pipeline(folder: Path) -> None:
    (folder / "evil.py").write_text(EVIL)
    index(folder, _class_name=["evil", "C"])


def with_code_of_no_name(folder: Path) -> None:
    (folder / "None.py").write_text(EVIL)


def with_a_component_elsewhere(folder: Path) -> None:
    shutil.copytree(folder / "transformer", folder.parent / "flux")
    index(folder, **{"../flux": ["diffusers", "FluxTransformer2DModel"]})


def with_a_link_to_elsewhere(folder: Path) -> None:
    path = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    path.rename(folder.parent / "secret.safetensors")
    path.symlink_to(folder.parent / "secret.safetensors")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (without_weights, r"vae: no diffusion_pytorch_model.safetensors"),
        (with_pickles, r"\.bin.*save it as safetensors"),
        (cut, r"transformer.*safetensors"),
        (of_another_model, r"diffusers cannot load it.*shape"),
        (missing_some, r"1 tensors got no value, such as proj_out.weight"),
        (with_code_of_a_component, r"vae/evil\.py: code.*trust_remote_code"),
        (with_code_of_a_pipeline, r"evil\.py: code.*trust_remote_code|must be string"),
        (with_code_of_no_name, r"None\.py: code.*trust_remote_code"),
        (with_a_component_elsewhere, r"component '\.\./flux', which cannot be a folder"),
        (with_a_link_to_elsewhere, "outside the model folder"),
        (lambda folder: (folder / "model_index.json").unlink(), "its model_index.json cannot be read"),
        (lambda folder: (folder / "model_index.json").write_text("[]"), "its model_index.json is not a JSON object"),
        (lambda folder: index(folder, _class_name=None), "has no _class_name"),
        (lambda folder: index(folder, _class_name="NovelPipeline"), r"has no pipeline NovelPipeline; a newer one may"),
        (lambda folder: index(folder, _class_name="AutoencoderKL"), "has no pipeline AutoencoderKL"),
    ],
)
def test_broken_folders(
    change: Callable[[Path], None], text: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = broken(saved("flux"), tmp_path, change)
    with pytest.raises(weightstream.CheckpointError, match=text):
        weightstream.pipeline_from_pretrained(folder, device="cpu", device_budget="1MiB", offload_folder=tmp_path / "o")
    assert not list((tmp_path / "o").rglob("*.safetensors"))
    assert not list(tmp_path.rglob("ran")), "code was run"


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"dtype": "float17"}, weightstream.ConfigError, "dtype"),
        ({"dtype": "float16", "torch_dtype": "float16"}, weightstream.ConfigError, "the same"),
        ({"dtype": 5}, weightstream.ConfigError, "floating point dtype"),
        ({"dtype": "int8"}, weightstream.ConfigError, "floating point dtype"),
        ({"torch_dtype": {"transformer": torch.bfloat16}}, weightstream.ConfigError, "floating point dtype"),
        ({"device_buget": "6GiB"}, weightstream.ConfigError, r"FluxPipeline takes no device_buget: it takes .*vae"),
        ({"device_map": "balanced"}, weightstream.ConfigError, "device_budget="),
        ({"quantization_config": object()}, weightstream.ConfigError, "files are loaded as they are"),
        ({"use_safetensors": False}, weightstream.ConfigError, "takes no use_safetensors"),
        ({"example_inputs": ["a cat"]}, weightstream.ConfigError, "keyword arguments of a call.*not list"),
        ({"base": "."}, weightstream.ConfigError, "goes with a single file"),
        ({"host_budget": "1GiB"}, weightstream.ConfigError, "device_budget"),
        ({"device_budget": "1KiB"}, weightstream.PlanError, "device budget"),
        ({"text_encoder": "x.safetensors"}, weightstream.UnsupportedError, "cannot be loaded from a single file"),
        ({"transformer": "none.safetensors"}, weightstream.CheckpointError, "none.safetensors"),
    ],
)
def test_impossible_options(
    options: dict[str, Any], kind: type[Exception], text: str, saved: Callable[[str], Path]
) -> None:
    settings = {"device": "cpu", "device_budget": "1MiB", "progress": False} | options
    with pytest.raises(kind, match=text):
        weightstream.pipeline_from_pretrained(saved("flux"), **settings)


@pytest.mark.stress
def test_options_with_their_only_possible_value(saved: Callable[[str], Path]) -> None:
    pipe = loaded(saved("flux"), use_safetensors=True, low_cpu_mem_usage=True, local_files_only=True)
    assert torch.equal(pipelines.image(pipe, "flux"), pipelines.image(plain(saved("flux")), "flux"))


@pytest.mark.stress
def test_a_component_that_is_cast_while_the_pipeline_runs(tmp_path: Path) -> None:
    """Also from files, and with the cast in their plan."""
    pipelines.build("upcast").save_pretrained(tmp_path)
    example = pipelines.arguments("upcast")
    want = pipelines.image(plain(tmp_path, dtype=torch.float16), "upcast")
    pipe = loaded(tmp_path, example_inputs=example)
    for _ in range(2):
        assert torch.equal(pipelines.image(pipe, "upcast"), want)
    there = pipe.weightstream.plan(**example)
    found = weightstream.plan_model(tmp_path, device="cpu", device_budget="900KiB", example_inputs=example)
    sizes = [[t.plan.manifest.nbytes for t in p.turns if t.component == "vae"] for p in (there, found)]
    assert sizes[0] == sizes[1]
    assert min(sizes[0]) > 1.9 * found.plans["vae"].manifest.nbytes


def test_pipelines_and_models_are_not_interchangeable(saved: Callable[[str], Path]) -> None:
    with pytest.raises(weightstream.CheckpointError, match="pipeline_from_pretrained loads it"):
        weightstream.from_pretrained(saved("flux"), device="cpu")
    with pytest.raises(weightstream.CheckpointError, match=r"its model_index\.json"):
        weightstream.pipeline_from_pretrained(saved("flux") / "text_encoder", device="cpu")
    with pytest.raises(weightstream.ConfigError, match="is not a diffusers pipeline"):
        weightstream.plan_model(saved("flux") / "text_encoder", device="cpu", device_budget="1MiB", variant="fp16")
    with pytest.raises(weightstream.CheckpointError, match="no such file"):
        weightstream.pipeline_from_pretrained("./nowhere", device="cpu")
