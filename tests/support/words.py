"""A tokenizer made in code: one word per id (`w17` is 17). The first three ids are special."""

from __future__ import annotations

from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

CHAT = "{% for m in messages %}w7 {{ m['content'] }} w8{% endfor %}{% if add_generation_prompt %} w11{% endif %}"


def tokenizer(chat_template: str | None = CHAT, *, num_words: int = 128) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = ["<pad>", "<bos>", "<eos>", *(f"w{i}" for i in range(3, num_words))]
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", chat_template=chat_template
    )
