"""The command line, run in this process on a tiny random language model with a tokenizer of its own."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from models import TEXT
from plain_model import prefer_in_plain_model
from weightstream import __version__
from weightstream.cli import app
from weightstream.measure import profile
from words import tokenizer

transformers = pytest.importorskip("transformers")

NUM_LAYERS = 6
NUM_TOKENS = 8
BUDGET = "512KiB"  # of a model of about 1 MiB
PROMPT = "w5 w9 w23"
EAGER = "graphs are captured on CUDA, and the model is on cpu"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-llama")
    torch.manual_seed(3)
    sizes = TEXT | {"num_hidden_layers": NUM_LAYERS, "max_position_embeddings": 2048}
    config = transformers.LlamaConfig(**sizes, initializer_range=0.3)  # large enough that greedy tokens vary
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def plain_tokens(folder: Path, prompt: list[int]) -> list[int]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


def run(model: Path, *flags: object, stdin: str | None = None) -> Result:
    arguments = ["run", str(model), "--device", "cpu", "--max-new-tokens", str(NUM_TOKENS), *map(str, flags)]
    return CliRunner().invoke(app, arguments, input=stdin)


def run_json(model: Path, *flags: object, stdin: str | None = None) -> dict:
    result = run(model, "--json", *flags, stdin=stdin)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refused(result: Result) -> str:
    """The message of a run that failed as it should: only on stderr, no traceback, exit code 2."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr


def test_streams_the_plain_models_tokens(folder: Path) -> None:
    found = run_json(folder, "--device-budget", BUDGET, "--prompt", PROMPT, "--verify")
    assert found["tokens"] == plain_tokens(folder, [5, 9, 23])
    assert len(set(found["tokens"])) > 1
    assert found["num_prompt_tokens"] == 3
    assert found["identical"] is True
    assert found["first_difference"] is None


def test_drawn_tokens_are_verified_with_one_seed(folder: Path) -> None:
    flags = ("--device-budget", BUDGET, "--prompt", PROMPT, "--verify", "--temperature", 1)
    first, second = run_json(folder, *flags), run_json(folder, *flags)
    assert first["identical"] is second["identical"] is True
    assert first["tokens"] != second["tokens"]


def test_counts_streamed_bytes(folder: Path) -> None:
    found = run_json(folder, "--device-budget", BUDGET, "--prompt", PROMPT)
    stats, model = found["stats"], transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert stats["steps"] == len(found["tokens"])
    assert stats["model_nbytes"] == sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    assert 0 < stats["held_nbytes"]["device"] <= 512 * 1024 < stats["model_nbytes"]
    assert stats["filled_nbytes"] >= stats["steps"] * (stats["model_nbytes"] - 512 * 1024)
    assert found["device"] == "cpu"
    assert found["decoding"] == {"replays": 0, "reason": EAGER, "speculation": None}
    assert found["identical"] is None
    assert found["text"] == " ".join(f"w{i}" for i in found["tokens"] if i > 2)


def test_shows_text_then_summary(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")  # else a busy machine gets a hint
    result = run(folder, "--device-budget", BUDGET, "--prompt", PROMPT, "--verify")
    assert result.exit_code == 0, result.output
    (text,), summary = result.stdout.splitlines(), result.stderr.splitlines()
    assert summary[0] == f"   prompt: {PROMPT}"
    assert text.split() == [f"w{i}" for i in plain_tokens(folder, [5, 9, 23]) if i > 2]
    labels = [line.partition(":")[0].strip() for line in summary if line[:10].endswith(":")]
    assert labels == ["prompt", "plan", "speed", "streamed", "predicted", "identical"]
    assert summary[-1] == "identical: yes"
    assert max(map(len, summary)) <= 100
    assert "\x1b" not in result.output


@pytest.mark.stress
def test_on_several_devices(folder: Path, tmp_path: Path) -> None:
    flags = ("--gpus", 2, "--device-budget", "300KiB", "--prompt", PROMPT)
    found = run_json(folder, *flags, "--verify")
    assert found["tokens"] == plain_tokens(folder, [5, 9, 23])
    assert found["identical"] is True
    assert found["plan"].startswith("cpu:0: ")
    assert found["stats"]["held_nbytes"]["device"] <= 2 * 300 * 1024
    assert "cpu:1: " in run(folder, *flags).stderr
    out = tmp_path / "trace.json"
    result = CliRunner().invoke(app, ["trace", str(folder), "--device", "cpu", *map(str, flags), "--out", str(out)])
    assert result.exit_code == 0, result.output
    names = {event["args"].get("name") for event in json.loads(out.read_text())["traceEvents"]}
    assert {"cpu:0 compute", "cpu:1 copy"} <= names
    arguments = ["bench", str(folder), "--device", "cpu", *map(str, flags[:4]), "--seconds", "0.1"]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    assert "bit for bit the same" in shown.stdout
    row = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert set(row["devices"]) == {"cpu:0", "cpu:1"}
    assert row["equal"] is True


@pytest.mark.few(1)
@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_progress_is_logged_if_stderr_is_not_a_terminal(
    folder: Path, flags: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # has no stored profile
    profile._say_unmeasured.cache_clear()
    result = run(folder, *flags)
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stderr.splitlines() if "measuring" in line]
    assert lines == ["weightstream: no profile of cpu yet, or an outdated one: measuring it"]
    assert "measuring" not in result.stdout
    logger = logging.getLogger("weightstream.progress")
    assert (logger.level, logger.propagate, logger.handlers) == (logging.NOTSET, True, [])


def test_reports_a_difference(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefer_in_plain_model(monkeypatch, 5, lambda call: call % NUM_TOKENS >= 4)
    flags = ("--device-budget", BUDGET, "--prompt", PROMPT, "--verify")
    result = run(folder, *flags)
    assert result.exit_code == 1
    *_, verdict, plain = result.stderr.splitlines()
    assert verdict == "identical: no (first difference at token 5)"
    other = [*plain_tokens(folder, [5, 9, 23])[:4], *[5] * 4]
    assert plain == f"    plain: {' '.join(f'w{i}' for i in other if i > 2)}"
    result = run(folder, *flags, "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert (found["identical"], found["first_difference"]) == (False, 5)
    assert (found["plain_tokens"], found["plain_text"]) == (other, plain.partition(": ")[2])


def test_a_model_that_differs_from_itself_is_no_difference(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefer_in_plain_model(monkeypatch, 5, lambda call: call > 1)
    result = run(folder, "--device-budget", BUDGET, "--prompt", PROMPT, "--verify")
    assert result.exit_code == 0, result.output
    assert "identical: not known: the model itself is not reproducible here" in result.stderr


def test_chat_applies_the_template(folder: Path) -> None:
    found = run_json(folder, "--device-budget", BUDGET, "--chat", "--prompt", PROMPT)
    assert found["tokens"] == plain_tokens(folder, [7, 5, 9, 23, 8, 11])


def test_prompt_comes_from_a_pipe(folder: Path) -> None:
    assert run_json(folder, "--device-budget", BUDGET, stdin="w5 w9 w23\n")["tokens"] == plain_tokens(
        folder, [5, 9, 23]
    )


TWICE = """
import sys
from weightstream.cli import app
for given in ([], ["--prompt", sys.argv[2]]):
    app(["run", sys.argv[1], "--device", "cpu", "--max-new-tokens", "2", *given], standalone_mode=False)
print("both ran")
"""


@pytest.mark.stress
def test_invalid_utf8_is_replaced(folder: Path) -> None:
    """From a pipe, and as an argument."""
    command = [sys.executable, "-c", TWICE, os.fsencode(folder), b"w5 \xe4\xff"]
    ran = subprocess.run(command, input=b"w5 \xe4\xff", capture_output=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.endswith(b"both ran\n")


def test_classic_flags_offload_the_layers_they_name(folder: Path) -> None:
    flags = ("--offload-backend", "prefetch", "--offload-group-size", 3, "--offload-num-in-group", 2)
    found = run_json(folder, *flags, "--offload-params", "down_proj", "--prompt", PROMPT, "--verify")
    down_nbytes = 64 * 160 * 4
    assert found["stats"]["held_nbytes"]["host"] + found["stats"]["held_nbytes"]["disk"] == 4 * down_nbytes
    assert found["identical"] is True


def test_zero_copy_flags(folder: Path) -> None:
    found = run_json(folder, "--cpu-offload-gb", 0.0002, "--prompt", PROMPT, "--verify")
    stats = found["stats"]
    assert stats["held_nbytes"]["host"] + stats["held_nbytes"]["disk"] >= 0.0002 * 2**30
    assert found["identical"] is True


def test_flags_win_over_the_file(folder: Path, tmp_path: Path) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text('device_budget = "1KiB"\n')
    assert "budget 1.0KiB" in refused(run(folder, "--config", settings, "--prompt", PROMPT))
    found = run_json(folder, "--config", settings, "--device-budget", BUDGET, "--prompt", PROMPT)
    assert found["stats"]["held_nbytes"]["device"] <= 512 * 1024


def test_budget_too_small_prints_the_arithmetic(folder: Path) -> None:
    message = refused(run(folder, "--device-budget", "1KiB", "--prompt", PROMPT))
    assert message.startswith("error: ")
    assert re.search(r"budget 1\.0KiB .*< resident .* \+ ring .* = ", message)


def test_unknown_option_is_named_with_its_neighbours(folder: Path) -> None:
    message = refused(run(folder, "--device-budgte", BUDGET))
    assert "--device-budgte" in message
    assert "--device-budget" in message


@pytest.mark.parametrize(
    ("toml", "expected"),
    [
        ('device_bugdet = "1GiB"', "did you mean device_budget?"),
        ("offload_backend = nope", "line 1, column 19"),
        ('device_budget = "12 parsecs"', "device_budget = '12 parsecs'"),
    ],
)
def test_bad_settings_file(folder: Path, tmp_path: Path, toml: str, expected: str) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text(toml)
    message = refused(run(folder, "--config", settings))
    assert message.startswith(f"error: config file {settings}")
    assert expected in message


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--device-budget", "96MX"), "device_budget = '96MX'"),
        (("--offload-group-size", 2, "--offload-num-in-group", 3), "offload_num_in_group = 3 > offload_group_size = 2"),
        (("--prompt", " ", "--device-budget", BUDGET), "has no tokens"),
        (("--config", "no-such-file.toml"), "no-such-file.toml"),
    ],
)
def test_bad_value(folder: Path, flags: tuple[object, ...], expected: str) -> None:
    message = refused(run(folder, *flags))
    assert message.startswith("error: ")
    assert expected in message


@pytest.mark.parametrize("flag", ["--dtype", "--offload-backend"])
def test_unknown_choice(folder: Path, flag: str) -> None:
    message = refused(run(folder, flag, "bf61"))
    assert flag in message
    assert "'auto'" in message


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
def test_cuda_on_a_machine_without_it(folder: Path) -> None:
    assert "cuda" in refused(run(folder, "--device", "cuda")).lower()


def test_folder_missing(tmp_path: Path) -> None:
    message = refused(run(tmp_path / "nothing-here", "--device-budget", BUDGET))
    assert str(tmp_path / "nothing-here") in message


def copy_weights(folder: Path, to: Path) -> None:
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(folder / name, to)


def test_tokenizer_missing(folder: Path, tmp_path: Path) -> None:
    copy_weights(folder, tmp_path)
    message = refused(run(tmp_path, "--device-budget", BUDGET))
    assert f"{tmp_path} has no tokenizer: none of tokenizer.json, " in message
    assert "sentencepiece" not in message
    (tmp_path / "tokenizer_config.json").write_text("no json")
    assert "its tokenizer cannot be loaded" in refused(run(tmp_path, "--device-budget", BUDGET))


def test_missing_weights_are_not_blamed_on_the_tokenizer(tmp_path: Path) -> None:
    assert "no model.safetensors" in refused(run(tmp_path, "--device-budget", BUDGET))


def test_broken_weights_are_not_blamed_on_the_tokenizer(folder: Path, tmp_path: Path) -> None:
    copy_weights(folder, tmp_path)
    with open(tmp_path / "model.safetensors", "r+b") as file:
        file.truncate(5000)
    message = refused(run(tmp_path, "--device-budget", BUDGET))
    assert "model.safetensors" in message
    assert "tokenizer" not in message


def test_a_broken_config_is_not_blamed_on_the_tokenizer(folder: Path, tmp_path: Path) -> None:
    copy_weights(folder, tmp_path)
    (tmp_path / "config.json").write_text("no json")
    assert "config.json" in refused(run(tmp_path, "--device-budget", BUDGET))


def edit(path: Path, **facts: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))


def test_errors_name_flags(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings without a flag are named as Python arguments."""
    model = Path(shutil.copytree(folder, tmp_path / "model"))
    edit(model / "config.json", architectures=["X"], auto_map={"AutoModelForCausalLM": "modeling_x.X"})
    for command in ("run", "plan"):
        message = refused(CliRunner().invoke(app, [command, str(model), "--device-budget", BUDGET, "--device", "cpu"]))
        assert "pass --trust-remote-code to run the code with it that has X" in message
        assert "trust_remote_code" not in message
    edit(model / "config.json", architectures=["LlamaForSequenceClassification"])
    message = refused(run(model, "--device-budget", BUDGET))
    assert "pass model_class=transformers.AutoModel for the model without its head" in message
    assert message.endswith("(of weightstream.from_pretrained, in Python)\n")
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 5})())
    message = refused(run(folder, "--device-budget", BUDGET, "--dtype", "float16"))
    assert message.endswith("free some space or pass another --offload-folder\n")


def test_chat_without_a_template(folder: Path, tmp_path: Path) -> None:
    copy_weights(folder, tmp_path)
    tokenizer(None).save_pretrained(tmp_path)
    assert "leave out --chat" in refused(run(tmp_path, "--device-budget", BUDGET, "--chat", "--prompt", PROMPT))


def test_transformers_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install 'weightstream[transformers]'" in refused(run(folder))


@pytest.mark.filterwarnings("default")
def test_an_ignored_setting_is_one_line_of_warning(folder: Path) -> None:
    result = run(folder, "--device-budget", BUDGET, "--offload-params", "mlp", "--prompt", PROMPT)
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith("warning: prefetch.offload_params = ['mlp'] ignored")
    assert result.stderr.count("warning") == 1
    assert result.stderr.splitlines()[1].startswith("   prompt: ")


def test_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"weightstream {__version__}\n"


@pytest.mark.few(1)
@pytest.mark.parametrize(("command", "option"), [("run", "--device-budget"), ("pack", "--verify"), ("plan", "--sweep")])
def test_help_loads_no_torch(command: str, option: str) -> None:
    code = "from weightstream.__main__ import main; main()"
    ran = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code, command, "--help"], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert option in ran.stdout
    loaded = {line.rpartition("|")[2].strip() for line in ran.stderr.splitlines()}
    assert "typer" in loaded
    assert not loaded & {"torch", "transformers", "numpy"}
