"""`weightstream run --jsonl`: an answer per line, drawn as the line says, else as the flags say; and limits of both."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from chat_model import streaming
from weightstream.cli import app
from weightstream.cli.jsonl import read_lines
from weightstream.errors import ConfigError
from weightstream.text.engine import TextModel
from weightstream.text.sampling import Sampling
from words import tokenizer

transformers = pytest.importorskip("transformers")

PROMPT = "w5 w9 w23"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextModel]:
    with streaming(tmp_path_factory.mktemp("llama")) as loaded:
        yield loaded


def test_lines_are_answered_as_they_say(model: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[Any] = [
        {"prompt": PROMPT},
        {"prompt": PROMPT, "top_p": 0.99, "seed": 3},
        "",
        {"messages": [{"role": "user", "content": "w5 \u2028\x85 w9"}], "temperature": 0.8, "seed": 2**64 - 1},
        {"prompt": PROMPT, "max_new_tokens": 3},
    ]
    text = "\r\n".join(line and json.dumps(line, ensure_ascii=False) for line in lines)
    (tmp_path / "lines.jsonl").write_text(f"\ufeff{text}\n", encoding="utf-8")
    generate, lengths = TextModel.generate, []

    def recorded(self: TextModel, *args: Any, **options: Any) -> Any:
        lengths.append(options["cache_length"])
        return generate(self, *args, **options)

    monkeypatch.setattr(TextModel, "generate", recorded)
    flags = ("--device", "cpu", "--device-budget", "512KiB", "--max-new-tokens", "6", "--system", "w40")
    result = CliRunner().invoke(app, ["run", model.name, *flags, "--jsonl", str(tmp_path / "lines.jsonl")])
    assert result.exit_code == 0, result.output
    monkeypatch.undo()

    def own(text: str, **sampling: Any) -> str:
        return model.generate(model.encode(text), Sampling(**{"max_new_tokens": 6} | sampling)).text

    greedy, chat = own(PROMPT, temperature=0.0), "w7 w40 w8w7 w5 w9 w8 w11"
    drawn = own(PROMPT, top_p=0.99, seed=3)
    found = [json.loads(line)["text"] for line in result.stdout.splitlines()]
    assert found == [
        greedy,
        drawn,
        own(chat, temperature=0.8, seed=2**64 - 1),
        own(PROMPT, temperature=0.0, max_new_tokens=3),
    ]
    assert drawn != greedy
    assert lengths == 4 * [7 + 6]  # of the longest line: an answer does not depend on the lines before it


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("3", "line 2: Input should be an object"),
        ("{", "line 2: Invalid JSON"),
        ('{"prompt": "w5", "messages": []}', "line 2: it needs either prompt or messages"),
        ('{"prompt": "w5", "top_k": 3}', "line 2: top_k: Extra inputs are not permitted"),
        ('{"prompt": "w5", "temperature": NaN}', "line 2: temperature=nan: it is finite"),
        ('{"prompt": "w5", "top_p": 1.5}', "line 2: top_p=1.5: it is from 0 to 1"),
        ('{"prompt": "w5", "max_new_tokens": 0}', "line 2: max_new_tokens=0: it is at least 1"),
        ('{"prompt": "w5", "seed": 18446744073709551616}', "line 2: seed=18446744073709551616: it is from"),
        (json.dumps({"prompt": "w5 " * 64}), "line 2: the prompt has 64 tokens, and the model 64 positions"),
        ('{"prompt": " "}', "line 2: the prompt ' ' has no tokens"),
    ],
)
def test_lines_that_are_none_are_errors(model: TextModel, tmp_path: Path, line: str, text: str) -> None:
    (tmp_path / "lines.jsonl").write_text(f"\n{line}\n")
    with pytest.raises(ConfigError, match=text):
        read_lines(tmp_path / "lines.jsonl", model, Sampling(max_new_tokens=4), [])


def test_an_answer_ends_with_the_positions_of_the_model(tmp_path: Path) -> None:
    """GPT-2 has no embedding of later ones."""
    torch.manual_seed(3)
    sizes = {"vocab_size": 128, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    config = transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    tokenizer(None).save_pretrained(tmp_path)
    result = CliRunner().invoke(app, ["run", str(tmp_path), "--device", "cpu", "--prompt", PROMPT, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert len(found["tokens"]) == 16 - 3 or found["finish"] == "stop"
    assert "max_new_tokens is 13: the prompt has 3 of the model's 16 positions" in result.stderr


@pytest.mark.parametrize("flag", [("--temperature", "inf"), ("--seed", str(2**64))])
def test_flags_that_no_text_can_be_drawn_with_are_errors(model: TextModel, flag: tuple[str, str]) -> None:
    result = CliRunner().invoke(app, ["run", model.name, *flag])
    assert result.exit_code == 2, result.output
    assert f"error: {' '.join(flag)}: it is " in result.stderr
