"""Packs a small language model compressed, runs it from the pack, and shows that every bit is as before."""

import tempfile
from pathlib import Path

import torch
import transformers

import weightstream
from weightstream.cli import app

torch.manual_seed(0)
sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4}
config = transformers.LlamaConfig(vocab_size=2048, **sizes)
ids = torch.randint(2048, (1, 16))


def nbytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
    source, packed = Path(folder, "model"), Path(folder, "packed")
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(source)
    # $ weightstream pack MODEL OUT --codec auto
    app(["pack", str(source), str(packed), "--codec", "auto"], standalone_mode=False)
    print(f"{nbytes(packed)} bytes instead of {nbytes(source)}: {nbytes(packed) / nbytes(source):.2f}")

    # On a GPU leave codec out. Here RAM plays the device, where weights stay compressed only with an explicit codec.
    model = weightstream.from_pretrained(packed, device="cpu", device_budget="4MiB", codec="compressed", progress=False)
    plan = model.weightstream.plan
    print(plan.summary())
    logits = [model(ids).logits for _ in range(3)]
    held = model.weightstream.stats().held_nbytes
    print(f"held: {held['device']} bytes in the budget of {plan.budget}, {held['host']} in host memory")

    plain = transformers.AutoModelForCausalLM.from_pretrained(source).eval()
    state = plain.state_dict()  # reading a compressed weight decodes it
    same = all(torch.equal(weight, state[name]) for name, weight in model.state_dict().items())
    print("identical:", same and all(torch.equal(found, plain(ids).logits) for found in logits))
