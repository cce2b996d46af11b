"""Trains LoRA adapters over a model that streams: losses and adapters are those of the resident model, bit for bit."""

import tempfile

import peft
import torch
import transformers

import weightstream

BATCH, TOKENS, RANK, STEPS = 2, 64, 8, 4


def trained(model: transformers.PreTrainedModel) -> list[torch.Tensor]:
    """The losses of a few steps, and the adapters after them."""
    torch.manual_seed(1)
    model.activation_checkpointing_enable()
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=RANK, target_modules="all-linear", lora_dropout=0.1))
    adapters = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-3)
    adapted.train()
    losses = []
    for _ in range(STEPS):
        ids = torch.randint(0, model.config.vocab_size, (BATCH, TOKENS))
        with torch.autocast("cpu", torch.bfloat16):
            loss = adapted(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(adapter.detach() for adapter in adapters)]


with tempfile.TemporaryDirectory() as folder:
    config = transformers.LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(folder)

    resident = transformers.AutoModelForCausalLM.from_pretrained(folder)
    expected = trained(resident)

    step = {"batch": BATCH, "tokens": TOKENS, "rank": RANK}
    streaming = weightstream.from_pretrained(folder, device="cpu", device_budget="4MiB", train=step)
    print(streaming.weightstream.plan)
    found = trained(streaming)
    print(streaming.weightstream.stats())
    streaming.weightstream.remove()

print("losses:", [round(float(loss), 3) for loss in found[:STEPS]])
print("identical:", all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)))
