"""Trainers of transformers and TRL over a streamed model: logs and adapters are those of the resident model, bitwise,
and no fill is unplanned."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import weightstream

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the trainers and their libraries

WORDS, TOKENS, RANK = 256, 24, 4
STEP = {"batch": 2, "tokens": TOKENS, "rank": RANK}


class Trained(NamedTuple):
    """The log of a training without its times, the adapters, and the streamer if there is one."""

    log: list[dict[str, Any]]
    adapters: dict[str, torch.Tensor]
    streamer: weightstream.Streamer | None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=160, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("checkpoint")
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(path)
    return path


def tokenizer() -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({str(i): i for i in range(WORDS)}, unk_token="0")
    made = tokenizers.Tokenizer(words)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokens = {"pad_token": "1", "eos_token": "2", "unk_token": "0"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **tokens)


def texts() -> list[list[int]]:
    random = torch.Generator().manual_seed(3)
    return [torch.randint(3, WORDS, (TOKENS,), generator=random).tolist() for _ in range(16)]


def trainer_of(kind: str, model: Any, settings: dict[str, Any]) -> Any:
    """A trainer of LoRA adapters, which evaluates in between."""
    lora = peft.LoraConfig(r=RANK, target_modules="all-linear", lora_dropout=0.1, task_type="CAUSAL_LM")
    ids = texts()
    if kind == "transformers":
        data = [{"input_ids": text, "labels": text} for text in ids]
        args = transformers.TrainingArguments(**settings, gradient_checkpointing=True)
        adapted = peft.get_peft_model(model, lora)
        return transformers.Trainer(adapted, args, train_dataset=data, eval_dataset=data[:4])
    common = {"peft_config": lora, "processing_class": tokenizer()}
    if kind == "sft":
        data = datasets.Dataset.from_dict({"input_ids": ids, "labels": ids})
        args = trl.SFTConfig(**settings, max_length=2 * TOKENS)
        return trl.SFTTrainer(model, args, train_dataset=data, eval_dataset=data.select(range(4)), **common)
    words = [list(map(str, text)) for text in ids]
    parts = {"prompt": slice(8), "chosen": slice(8, 16), "rejected": slice(16, None)}
    data = datasets.Dataset.from_dict({name: [" ".join(text[part]) for text in words] for name, part in parts.items()})
    args = trl.DPOConfig(**settings, max_length=2 * TOKENS)
    return trl.DPOTrainer(model, args=args, train_dataset=data, eval_dataset=data.select(range(4)), **common)


def trained(kind: str, model: Any, out: Path) -> Trained:
    settings = {
        "output_dir": str(out), "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 4,
        "logging_steps": 1, "report_to": [], "use_cpu": True, "seed": 1, "save_strategy": "no", "disable_tqdm": True,
        "eval_strategy": "steps", "eval_steps": 2, "bf16": True, "learning_rate": 1e-3,
    }  # fmt: skip
    transformers.set_seed(1)
    trainer = trainer_of(kind, model, settings)
    trainer.train()
    timed = ("_runtime", "_per_second", "total_flos")
    log = [{k: v for k, v in entry.items() if not k.endswith(timed)} for entry in trainer.state.log_history]
    adapters = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    return Trained(log, adapters, getattr(model, "weightstream", None))


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["transformers", "sft", "dpo"])
def test_trainers_do_the_same_over_a_streamed_model(kind: str, folder: Path, tmp_path: Path) -> None:
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder).requires_grad_(False)
    expected = trained(kind, plain, tmp_path)
    model = weightstream.from_pretrained(folder, device="cpu", device_budget="300KiB", train=STEP, progress=False)
    found = trained(kind, model, tmp_path)
    assert found.log == expected.log
    assert len(found.adapters) == 2 * 7 * 6
    assert all(torch.equal(found.adapters[name], value) for name, value in expected.adapters.items())
    assert any(float(value.abs().max()) > 0 for name, value in found.adapters.items() if "lora_B" in name)
    assert found.streamer is not None
    assert found.streamer.plan.what == "train"
    stats = found.streamer.stats()
    assert stats.fills > 2 * 8
    assert stats.unplanned_fills == 0
    found.streamer.remove()
