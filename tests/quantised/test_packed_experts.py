"""Experts that stay packed although transformers would unpack them: leaves, formats, and refusals."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import (
    AWQ,
    CHECKPOINTS,
    GPTQ,
    MIXTURES,
    NF4,
    compressed_mixture,
    float8_mixture,
    matrices,
    mixture,
    on_the_fly,
    words_of,
)
from formats import FP8, INT4, INT8, TOKEN
from safetensors.torch import load_file, save_file

import weightstream
from weightstream.adapters.hf.packed_formats import packed_stacks, unpack_kernels_of

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

IDS = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(5))
Tensors = dict[str, torch.Tensor]


def loaded(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, device_map={"": "cpu"})


def offloaded(path: Path, share: float = 0.6) -> Any:
    nbytes = (path / "model.safetensors").stat().st_size
    return weightstream.from_pretrained(path, device="cpu", device_budget=int(share * nbytes))


def changed(path: Path, change: Callable[[Tensors], Tensors] = dict, **quantization: Any) -> None:
    """Rewrite a checkpoint's tensors, and settings in its config."""
    tensors, config = load_file(path / "model.safetensors"), json.loads((path / "config.json").read_text())
    save_file(change(tensors), path / "model.safetensors", {"format": "pt"})
    config["quantization_config"] |= quantization
    (path / "config.json").write_text(json.dumps(config))


def assert_same(path: Path, model: Any) -> None:
    plain = loaded(path)
    for i in range(3):
        assert torch.equal(model(IDS[:, : 7 + i]).logits, plain(IDS[:, : 7 + i]).logits)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", MIXTURES)
def test_any_rows_unpack_as_the_stack_that_transformers_makes(folder: Any, name: str) -> None:
    """Rows may be picked first, in any number and order, and the module is the plain one of transformers."""
    pytest.importorskip(CHECKPOINTS[name][0])
    path = folder(name)
    plain, model = loaded(path), offloaded(path)
    for number in (1, 2):
        experts, module = (each.model.layers[number].mlp.experts for each in (plain, model))
        assert type(module) is type(experts)
        assert packed_stacks(module).keys() == {"gate_up_proj", "down_proj"}
        for stack, packed in packed_stacks(module).items():
            wanted = getattr(experts, stack)
            assert (packed.shape, packed.dtype) == (tuple(wanted.shape), wanted.dtype)
            leaves = [module._parameters[leaf].detach() for leaf in packed.leaves]
            for rows in ([3], [5, 0, 5], list(range(8))):
                picked = tuple(leaf.view(torch.uint8)[rows].view(leaf.dtype) for leaf in leaves)
                assert torch.equal(packed.format.unpacked(picked, packed.dtype), wanted[rows])
    model.weightstream.remove()


SCALES: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "bytes of exponents": ("fp8 glm4", lambda scales: scales.view(torch.uint8)),
    "float8 with float16": ("compressed fp8 glm4", torch.Tensor.half),
    "float8 with one per matrix": ("compressed fp8 glm4", lambda scales: scales.amax().reshape(1)),
    "int4 with float16": ("compressed int4 deepseek", torch.Tensor.half),
    "int4 with float32": ("compressed int4 deepseek", torch.Tensor.float),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("scales", SCALES)
def test_scales_of_other_types(scales: str, tmp_path: Path) -> None:
    name, change = SCALES[scales]
    pytest.importorskip(CHECKPOINTS[name][0])
    CHECKPOINTS[name][1](tmp_path)
    is_scale = lambda key: "_scale" in key and ".experts." in key  # noqa: E731
    changed(tmp_path, lambda tensors: {k: change(t) if is_scale(k) else t for k, t in tensors.items()})
    model = offloaded(tmp_path)
    assert_same(tmp_path, model)
    model.weightstream.remove()


def test_layers_that_are_not_quantised_stay_plain(tmp_path: Path) -> None:
    float8_mixture("qwen3", "float32", tmp_path, plain_layer=1)
    model = offloaded(tmp_path)
    assert [bool(packed_stacks(layer.mlp.experts)) for layer in model.model.layers] == [True, False, True]
    assert_same(tmp_path, model)
    model.save_pretrained(tmp_path / "saved")
    assert_same(tmp_path, loaded(tmp_path / "saved"))
    model.weightstream.remove()


def test_other_formats_that_transformers_unpacks(tmp_path: Path) -> None:
    """Integers of 8 bits with a scale per row; and float8 whose activations have scales, which transformers ignores."""
    pytest.importorskip("compressed_tensors")
    for index, (weights, activations, packing) in enumerate(
        ((INT8, None, "pack-quantized"), (FP8, FP8 | {"strategy": "tensor", "dynamic": False}, "float-quantized"))
    ):
        path = tmp_path / str(index)
        path.mkdir()
        compressed_mixture("qwen3", weights, activations, packing, path)
        model = offloaded(path)
        assert_same(path, model)
        model.weightstream.remove()


def in_float4(tensors: Tensors) -> Tensors:
    """Experts with two weights in a byte, and a scale for 32 of them, as those of DeepSeek-V4."""
    chance, found = torch.Generator().manual_seed(3), dict(tensors)
    for name in [key for key in tensors if ".experts." in key and key.endswith(".weight")]:
        rows, columns = tensors[name].shape
        found[name] = torch.randint(-128, 128, (rows, columns // 2), generator=chance).to(torch.int8)
        exponents = torch.randint(120, 123, (rows, columns // 32), generator=chance).to(torch.uint8)
        found[f"{name}_scale_inv"] = exponents.view(torch.float8_e8m0fnu)
    return found


def in_e5m2(tensors: Tensors) -> Tensors:
    return {k: t.float().to(torch.float8_e5m2) if t.dtype == torch.float8_e4m3fn else t for k, t in tensors.items()}


@pytest.mark.parametrize("change", [in_float4, in_e5m2])
def test_other_floats_in_blocks(change: Callable[[Tensors], Tensors], tmp_path: Path) -> None:
    """The function of transformers unpacks them, and no kernel, whose speed and memory a plan would assume."""
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    if change is in_float4 and not hasattr(fp8.Fp8Dequantize, "_unpack_fp4"):
        pytest.skip("this transformers unpacks no float4 in blocks")
    float8_mixture("qwen3", "ue8m0", tmp_path)
    changed(tmp_path, change, **({"expert_dtype": "fp4"} if change is in_float4 else {}))
    model = offloaded(tmp_path, 0.8)
    assert packed_stacks(model.model.layers[1].mlp.experts)
    assert unpack_kernels_of(model) == set()
    assert_same(tmp_path, model)
    model.weightstream.remove()


def test_a_plan_of_a_model_whose_weights_are_cast(tmp_path: Path) -> None:
    """Routers that transformers keeps in float32 are in bfloat16 in the file."""
    CHECKPOINTS["fp8 deepseek"][1](tmp_path)
    changed(
        tmp_path,
        lambda tensors: {k: t.bfloat16() if k.endswith("gate.weight") else t for k, t in tensors.items()},
    )
    model = offloaded(tmp_path)
    assert_same(tmp_path, model)
    found = model.weightstream.plan
    plan = weightstream.plan_model(tmp_path, device="cpu", device_budget=found.budget)
    assert plan.manifest.nbytes == found.manifest.nbytes
    assert plan.resident == found.resident
    model.weightstream.remove()


def test_a_folder_with_merged_experts_is_loaded(folder: Any, tmp_path: Path) -> None:
    """`save_original_format=False` keeps the names of the model, which transformers' own modules for float8 have."""
    path = folder("fp8 qwen3")
    model = offloaded(path)
    model.save_pretrained(tmp_path, save_original_format=False)
    again = offloaded(tmp_path)
    assert packed_stacks(again.model.layers[1].mlp.experts)
    assert_same(path, again)
    for each in (model, again):
        each.weightstream.remove()


def test_a_removed_model_and_its_copy_compute(folder: Any) -> None:
    """compressed-tensors replaces forwards in the first forward after `remove`. A copy has weights of its own."""
    pytest.importorskip("compressed_tensors")
    path = folder("compressed fp8 glm4")
    model = offloaded(path)
    model.weightstream.remove()
    assert_same(path, model)
    copied = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.zero_()
    assert_same(path, copied)


@pytest.mark.parametrize("kind", ["bnb nf4", "torchao int8"])
def test_experts_that_transformers_leaves_unquantised_are_named(kind: str, tmp_path: Path, caplog: Any) -> None:
    pytest.importorskip("bitsandbytes" if kind == "bnb nf4" else "torchao")
    mixture("qwen3").save_pretrained(tmp_path)
    model = weightstream.from_pretrained(
        tmp_path, device="cpu", device_budget="900KiB", quantization_config=on_the_fly(kind)
    )
    method = {"bnb nf4": "bitsandbytes", "torchao int8": "torchao"}[kind]
    line = f"linear layers only with {method}: model.layers.0.mlp.experts and 2 more stay as they are"
    assert any(record.getMessage().endswith(line) for record in caplog.records)
    assert model.model.layers[0].mlp.experts.down_proj.dtype == torch.bfloat16
    model.weightstream.remove()


def linear_experts(path: Path) -> Any:
    """Save a mixture whose experts are a list of modules, and no stacks. Returns its class."""
    sizes = dict.fromkeys(("vocab_size", "d_model", "encoder_ffn_dim", "decoder_ffn_dim"), 128)
    sizes |= {f"{part}_{name}": 1 for part in ("encoder", "decoder") for name in ("layers", "sparse_step")}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    model = transformers.NllbMoeForConditionalGeneration(transformers.NllbMoeConfig(**sizes, **heads, num_experts=4))
    model.to(torch.bfloat16).save_pretrained(path)
    return type(model)


def in_nf4(path: Path, kind: Any = None, **options: Any) -> Any:
    """The model in a folder, quantised by bitsandbytes while it is loaded."""
    config = transformers.BitsAndBytesConfig(**NF4, llm_int8_skip_modules=["classifier", "lm_head"])
    return weightstream.from_pretrained(
        path, device="cpu", device_budget="900KiB", model_class=kind, quantization_config=config, **options
    )


def test_experts_that_are_linear_layers_are_quantised(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    model = in_nf4(tmp_path, linear_experts(tmp_path))
    assert model.model.encoder.layers[0].ffn.experts["expert_0"].fc1.weight.dtype == torch.uint8
    model.weightstream.remove()


@pytest.mark.parametrize("is_linear", [True, False])
def test_experts_that_a_checkpoint_lacks_are_named(is_linear: bool, tmp_path: Path) -> None:
    """It holds plain ones, so the method that quantises it while it is loaded is not the reason."""
    pytest.importorskip("bitsandbytes")
    kind = linear_experts(tmp_path) if is_linear else mixture("qwen3").save_pretrained(tmp_path)
    lacking = "encoder.layers.0.ffn.experts.expert_0.fc1.weight" if is_linear else "layers.1.mlp.experts."
    path = tmp_path / "model.safetensors"
    save_file({key: t for key, t in load_file(path).items() if lacking not in key}, path, {"format": "pt"})
    with pytest.raises(weightstream.CheckpointError, match=f"the checkpoint lacks .*{lacking}"):
        in_nf4(tmp_path, kind)
    in_nf4(tmp_path, kind, allow_missing=True).weightstream.remove()


@pytest.mark.parametrize("kind", ["Int8", "Float8"])
def test_experts_that_torchao_quantises_by_name_stream_whole(kind: str, tmp_path: Path, caplog: Any) -> None:
    """In the implementations that torchao has: none that copies single matrices."""
    quantization = pytest.importorskip("torchao.quantization")
    mixture("qwen3").save_pretrained(tmp_path)
    each = quantization.Int8WeightOnlyConfig(version=2) if kind == "Int8" else quantization.Float8WeightOnlyConfig()
    named = quantization.FqnToConfig({"re:.*experts.(gate_up_proj|down_proj)": each})
    options = {"quantization_config": transformers.TorchAoConfig(named), "experts_implementation": "eager"}
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_map={"": "cpu"}, **options)
    model = weightstream.from_pretrained(tmp_path, device="cpu", device_budget="500KiB", **options)
    assert any(f"holds its stacks as {kind}Tensor" in record.getMessage() for record in caplog.records)
    assert model.weightstream.plan.step_nbytes > 0
    for implementation in ("eager",) if kind == "Int8" else ("eager", "grouped_mm"):
        for each in (model, plain):
            each.set_experts_implementation(implementation)
        assert torch.equal(model(IDS).logits, plain(IDS).logits)
    for each in (model, plain):
        each.set_experts_implementation("batched_mm")
        with pytest.raises(NotImplementedError):
            each(IDS)
    model.weightstream.remove()


# -- where hub kernels are installed -----------------------------------------------------------------------------------


class AskedHub(Exception):
    """transformers asked the hub for a kernel."""


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretends that the package `kernels`, and a GPU that its kernels run on, are there."""
    from transformers.integrations import finegrained_fp8, hub_kernels
    from transformers.quantizers import quantizer_mxfp4

    def ask(*args: Any, **kwargs: Any) -> Any:
        raise AskedHub

    for module in (finegrained_fp8, quantizer_mxfp4):
        monkeypatch.setattr(module, "is_kernels_available", lambda: True)
    monkeypatch.setattr(hub_kernels, "get_kernel", ask)
    monkeypatch.setattr(finegrained_fp8, "lazy_load_kernel", ask)
    gpu = SimpleNamespace(is_available=lambda: True, get_device_capability=lambda: (9, 0), empty_cache=lambda: None)
    on_gpu = SimpleNamespace(current_accelerator=lambda: torch.device("cuda"))  # up to 5.17
    fake = SimpleNamespace(cuda=gpu, xpu=torch.xpu, device=torch.device, accelerator=on_gpu)
    monkeypatch.setattr(quantizer_mxfp4, "torch", fake)
    monkeypatch.setattr(quantizer_mxfp4, "get_current_accelerator", lambda: torch.device("cuda"), raising=False)
    monkeypatch.setattr(quantizer_mxfp4, "is_triton_available", lambda version: True)
    quantizer = transformers.quantizers.quantizer_finegrained_fp8
    monkeypatch.setattr(quantizer, "torch", SimpleNamespace(cuda=gpu, nn=torch.nn, uint8=torch.uint8))


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("name", ["mxfp4", "fp8 qwen3"])
def test_hub_kernels_are_not_used_for_experts(folder: Any, name: str) -> None:
    """transformers alone would run other code, in packed form: outputs are those of the dequantised model."""
    path = folder(name)
    with pytest.raises(AskedHub):
        loaded(path)(IDS)
    kind = transformers.Mxfp4Config if name == "mxfp4" else transformers.FineGrainedFP8Config
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        path, device_map={"": "cpu"}, quantization_config=kind(dequantize=True)
    )
    model = offloaded(path)
    assert packed_stacks(model.model.layers[1].mlp.experts)
    assert torch.equal(model(IDS).logits, plain(IDS).logits)
    model.weightstream.remove()
    assert torch.equal(model(IDS).logits, plain(IDS).logits)


def test_experts_in_the_order_of_hub_kernels_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in objects of the kernels, so nothing of them could be moved."""
    from transformers.integrations import mxfp4

    def swizzle(blocks: torch.Tensor, scales: torch.Tensor, kernels: Any) -> tuple[Any, torch.Tensor]:
        return SimpleNamespace(data=blocks), scales

    monkeypatch.setattr(mxfp4, "swizzle_mxfp4", swizzle)
    monkeypatch.setattr(mxfp4, "get_current_accelerator", lambda: None)  # torch for CUDA names one without a GPU, too
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_local_experts": 4, "num_hidden_layers": 1}
    config = transformers.GptOssConfig(**sizes, vocab_size=64, num_attention_heads=4, num_key_value_heads=2)
    model = transformers.GptOssForCausalLM(config)
    experts = mxfp4.Mxfp4GptOssExperts(config)
    model.model.layers[0].mlp.experts = experts
    matmul = SimpleNamespace(PrecisionConfig=SimpleNamespace, FlexCtx=SimpleNamespace, InFlexData=SimpleNamespace)
    for stack, height in (("gate_up_proj", 128), ("down_proj", 64)):
        blocks, scales = torch.zeros(4, height, 2, 16, dtype=torch.uint8), torch.zeros(4, height, 2, dtype=torch.uint8)
        kernels = SimpleNamespace(matmul_ogs=matmul)
        mxfp4.swizzle_mxfp4_convertops(blocks, scales, experts, stack, torch.device("cpu"), kernels)
    with pytest.raises(weightstream.UnsupportedError, match=r"Mxfp4GptOssExperts holds .* order of hub kernels"):
        weightstream.offload(model, device="cpu", device_budget="1MiB")


# -- refused -----------------------------------------------------------------------------------------------------------


def _block_scales(tensors: Tensors) -> Tensors:
    return {k: t.amax() if k.endswith("_scale_inv") and ".experts." in k else t for k, t in tensors.items()}


def _without_scales(tensors: Tensors) -> Tensors:
    return {k: t for k, t in tensors.items() if not (k.endswith("_scale_inv") and ".experts." in k)}


def _row_indices(tensors: Tensors) -> Tensors:
    packed = [key for key in tensors if key.endswith("weight_packed")]
    return tensors | {key.replace("_packed", "_g_idx"): torch.zeros(8, dtype=torch.int32) for key in packed}


NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "asymmetric": (
        functools.partial(compressed_mixture, "qwen3", INT4 | {"symmetric": False}, None, "pack-quantized"),
        "pack-quantized, asymmetric: transformers does not pass the zero points",
    ),
    "int8": (
        functools.partial(compressed_mixture, "qwen3", INT8, INT8 | TOKEN, "int-quantized"),
        "int-quantized, 8 bits, .* transformers does not unpack such experts",
    ),
    "nvfp4": (
        functools.partial(compressed_mixture, "qwen3", NVFP4, None, "nvfp4-pack-quantized"),
        "without their global scale, so to other values",
    ),
    "actorder": (
        lambda path: (CHECKPOINTS["compressed int4 deepseek"][1](path), changed(path, _row_indices))[1],
        "with actorder: transformers unpacks experts without weight_g_idx",
    ),
    "no scales": (
        lambda path: (CHECKPOINTS["fp8 qwen3"][1](path), changed(path, _without_scales))[1],
        "transformers finds no scales for its float8",
    ),
    "one scale per matrix": (
        lambda path: (CHECKPOINTS["fp8 qwen3"][1](path), changed(path, _block_scales))[1],
        "block float8 does not merge into a stack .*load it with transformers",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    make, reason = REFUSED[case]
    make(tmp_path)
    with pytest.raises(weightstream.UnsupportedError, match=reason):
        offloaded(tmp_path)
    with pytest.raises(weightstream.UnsupportedError, match=reason):
        weightstream.plan_model(tmp_path, device="cpu", device_budget="1MiB")


MATRIX = "model.layers.1.mlp.experts.3.up_proj.weight"
BROKEN: dict[str, Callable[[Tensors], Tensors]] = {
    "without a matrix": lambda tensors: {k: t for k, t in tensors.items() if MATRIX not in k},
    "without a scale": lambda tensors: {k: t for k, t in tensors.items() if MATRIX + "_scale" not in k},
    "without an expert": lambda tensors: {k: t for k, t in tensors.items() if ".experts.7." not in k},
    "with an expert more": lambda tensors: (
        tensors | {k.replace(".7.", ".8."): t.clone() for k, t in tensors.items() if ".experts.7." in k}
    ),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("case", BROKEN)
def test_other_numbers_of_matrices_are_named(name: str, case: str, tmp_path: Path) -> None:
    """transformers loads some of these, with each scale after the missing one for another matrix."""
    pytest.importorskip(CHECKPOINTS[name][0])
    CHECKPOINTS[name][1](tmp_path)
    changed(tmp_path, BROKEN[case])
    with pytest.raises(weightstream.CheckpointError, match=r"has [79] tensors mlp.experts.*weight\w* for 8 experts"):
        offloaded(tmp_path)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", MIXTURES)
def test_unlike_dtypes_of_scales_are_refused(name: str, tmp_path: Path) -> None:
    """A merged stack would have scales of a third dtype, and products of other bits."""
    pytest.importorskip(CHECKPOINTS[name][0])
    CHECKPOINTS[name][1](tmp_path)
    changed(
        tmp_path,
        lambda tensors: {k: t.half() if MATRIX + "_scale" in k else t for k, t in tensors.items()},
    )
    with pytest.raises(weightstream.UnsupportedError, match=r"tensors have unlike dtypes: torch\.\w+, torch\.\w+"):
        offloaded(tmp_path)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_experts_in_words_are_refused_by_name(method: str, tmp_path: Path) -> None:
    """Also with `allow_missing`, which would give them random values, as transformers does."""
    pytest.importorskip("gptqmodel")
    words_of(mixture("qwen3").half(), method, AWQ if method == "awq" else GPTQ, tmp_path)
    for allow_missing in (False, True):
        with pytest.raises(weightstream.UnsupportedError, match=f"transformers loads no experts in {method}"):
            weightstream.from_pretrained(
                tmp_path, device="cpu", device_budget="900KiB", dtype="float16", allow_missing=allow_missing
            )


@pytest.mark.parametrize("bits", [4, 8])
def test_experts_in_bits_of_bitsandbytes_are_refused_by_name(bits: int, tmp_path: Path) -> None:
    """Also with `ignore_mismatched_sizes`. transformers would give them random values, or integers without scales."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model, tensors = mixture("qwen3"), Tensors()
    for stack, whole in model.state_dict().items():
        for name, matrix in matrices(stack, whole).items():
            tensors[name] = matrix
            if name != stack and bits == 4:
                tensors[name], state = bitsandbytes.functional.quantize_4bit(matrix, quant_type="nf4")
                tensors |= {f"{name}.{part}": value for part, value in state.as_dict(packed=True).items()}
            elif name != stack:
                scale = matrix.float().abs().amax(1, keepdim=True) / 127
                tensors[name] = (matrix.float() / scale).round().to(torch.int8)
                tensors[name.removesuffix("weight") + "SCB"] = scale[:, 0] * 127
    linear = ["q_proj", "k_proj", "v_proj", "o_proj", "gate", "lm_head"]
    about = {"quant_method": "bitsandbytes", f"load_in_{bits}bit": True, "llm_int8_skip_modules": linear}
    model.config.quantization_config = about | ({"bnb_4bit_quant_type": "nf4"} if bits == 4 else {})
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    for ignores in (False, True):
        with pytest.raises(weightstream.UnsupportedError, match="transformers loads no experts in bitsandbytes"):
            weightstream.from_pretrained(
                tmp_path, device="cpu", device_budget="900KiB", ignore_mismatched_sizes=ignores
            )


@pytest.mark.parametrize("is_quantised", [False, True])
def test_nvfp4_of_transformers_is_refused_by_name(is_quantised: bool, tmp_path: Path) -> None:
    """transformers quantises linear layers on the fly, on one GPU, and loads no checkpoint of it."""
    mixture("qwen3").save_pretrained(tmp_path)
    options = {} if is_quantised else {"quantization_config": transformers.NVFP4Config()}
    if is_quantised:
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "nvfp4"}}))
    with pytest.raises(weightstream.UnsupportedError, match="quantised with nvfp4, which is not supported"):
        weightstream.from_pretrained(tmp_path, device="cpu", device_budget="900KiB", **options)
