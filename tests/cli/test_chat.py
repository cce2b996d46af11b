"""`weightstream run --chat`: turns through a pipe, the memory of earlier turns, and the ends of an answer and of the
chat."""

from __future__ import annotations

import builtins
import io
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from models import TEXT
from weightstream.cli import app, chat
from weightstream.text.engine import TextModel
from weightstream.text.stream import Answer
from words import CHAT, tokenizer

transformers = pytest.importorskip("transformers")

NUM_TOKENS = 8
BUDGET = "512KiB"  # of a model of about 1 MiB


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-llama")
    torch.manual_seed(3)
    sizes = TEXT | {"num_hidden_layers": 6, "max_position_embeddings": 128}
    config = transformers.LlamaConfig(**sizes, initializer_range=0.3)  # large enough that greedy tokens vary
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    tokenizer(CHAT).save_pretrained(path)
    return path


def talk(folder: Path, *lines: str, flags: tuple[str, ...] = ("--max-new-tokens", str(NUM_TOKENS))) -> Result:
    arguments = ["run", str(folder), "--device", "cpu", "--device-budget", BUDGET, "--chat", *flags]
    result = CliRunner().invoke(app, arguments, input="".join(f"{line}\n" for line in lines))
    assert result.exit_code == 0, result.output
    return result


def answers(result: Result) -> list[list[str]]:
    return [line.split() for line in result.stdout.splitlines()]


@pytest.fixture(scope="module")
def plain(folder: Path) -> Callable[[str], list[str]]:
    """The plain model's answer to the words of a whole chat."""
    model, words = transformers.AutoModelForCausalLM.from_pretrained(folder), tokenizer(CHAT)

    def answer(text: str) -> list[str]:
        ids = words(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        options: dict[str, Any] = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "pad_token_id": 0}
        made = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return words.decode(made[0, ids.shape[1] :], skip_special_tokens=True).split()

    return answer


def test_each_line_is_a_turn_that_knows_the_earlier_ones(folder: Path, plain: Callable[[str], list[str]]) -> None:
    first, second = answers(talk(folder, "w5 w9", "", "w23"))
    assert first == plain("w7 w5 w9 w8 w11")
    assert second == plain(f"w7 w5 w9 w8w7 {' '.join(first)} w8w7 w23 w8 w11")


def test_a_system_prompt_that_the_template_refuses_is_an_error_before_the_load(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tokenizer("{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}w7").save_pretrained(
        tmp_path
    )
    monkeypatch.setattr(TextModel, "load", lambda *_, **__: pytest.fail("it was loaded"))
    result = CliRunner().invoke(app, ["run", str(tmp_path), "--chat", "--system", "w5"], input="w9\n")
    assert result.exit_code == 2
    assert "its chat template refuses these messages: no system" in result.stderr


def test_clear_forgets_and_exit_ends(folder: Path) -> None:
    first, second = answers(talk(folder, "w5 w9", "/clear", "w5 w9", "/exit", "w6"))
    assert first == second


@pytest.mark.stress
def test_a_truncated_answer_is_marked(folder: Path) -> None:
    assert "[cut at 8 tokens: raise --max-new-tokens]" in talk(folder, "w5 w9").stderr
    once = talk(folder, flags=("--max-new-tokens", "8", "--prompt", "w5 w9"))
    assert "(8 generated, cut by --max-new-tokens, the first after" in once.stderr


def test_a_conversation_that_is_too_long_is_reported(folder: Path) -> None:
    result = talk(folder, "w5 w9", flags=("--max-new-tokens", "126"))
    assert "[5 tokens so far + 126 of --max-new-tokens > 128 of the model: /clear" in result.stderr
    assert not result.stdout


def test_an_interrupt_ends_only_the_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add, before = Answer._add, signal.getsignal(signal.SIGINT)

    def interrupted(self: Answer, token: int) -> None:
        add(self, token)
        if len(self.ids) == 3:
            signal.raise_signal(signal.SIGINT)

    whole = answers(talk(folder, "w5 w9"))[0]
    monkeypatch.setattr(Answer, "_add", interrupted)
    result = talk(folder, "w5 w9", "w6")
    assert result.stderr.count("[stopped]") == 2
    first, second = answers(result)
    assert first == whole[: len(first)]
    assert len(first) == len(second) == 3
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_interrupt_ends_the_program() -> None:
    with chat._stoppable() as is_stopped:
        signal.raise_signal(signal.SIGINT)
        assert is_stopped()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def typed_lines(monkeypatch: pytest.MonkeyPatch, *lines: Any) -> Iterator[str]:
    """The lines that a terminal gives, or errors that it raises."""
    typed = iter(lines)

    def ask(_: str) -> str:
        found: Any = next(typed)
        if isinstance(found, str):
            return found
        raise found

    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    monkeypatch.setattr(builtins, "input", ask)
    return chat.input_lines()


def test_a_terminal_is_read_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = typed_lines(monkeypatch, "w5", KeyboardInterrupt, "", " w6 ", KeyboardInterrupt, "w7", EOFError, "w8")
    assert list(lines) == ["w5", "w6", "w7"]


def test_a_second_interrupt_at_the_prompt_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = typed_lines(monkeypatch, "w5", KeyboardInterrupt, KeyboardInterrupt, "w6")
    assert next(lines) == "w5"
    with pytest.raises(KeyboardInterrupt):
        next(lines)


def test_an_unknown_command_is_no_message(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A path is one."""
    asked: list[str] = []

    def answer(messages: chat.Conversation, _: object) -> str:
        asked.append(messages[-1]["content"])
        return "w1"

    monkeypatch.setattr(chat, "input_lines", lambda: iter(["/nope", "/etc/hosts is what?", "/exit"]))
    chat.converse(answer, [])
    assert asked == ["/etc/hosts is what?"]
    assert "/nope is no command: /help lists them" in capsys.readouterr().err
