"""A tiny model that chats: a random Llama whose greedy tokens vary, with the tokenizer of words.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from models import TEXT
from weightstream.text.engine import TextModel
from words import CHAT, tokenizer

transformers = pytest.importorskip("transformers")


def saved(path: Path, sizes: Mapping[str, Any] = TEXT, **generation: Any) -> Path:
    """Save the model in a folder, which is returned. `generation` are fields of its generation_config.json."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**sizes, initializer_range=0.3)  # large enough that greedy tokens vary
    model = transformers.LlamaForCausalLM(config)
    model.generation_config.update(**generation)
    model.save_pretrained(path)
    tokenizer(CHAT).save_pretrained(path)
    return path


@contextmanager
def streaming(path: Path) -> Iterator[TextModel]:
    """The model, saved in this folder and loaded with a budget of half of its weights."""
    loaded = TextModel(str(saved(path)))
    loaded.load(device="cpu", device_budget="512KiB")
    yield loaded
    loaded.streamer.remove()
