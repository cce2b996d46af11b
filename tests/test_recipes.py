"""The scripts of docs/recipes.md run as they stand, stream their model, and give the plain model's results."""

from __future__ import annotations

import importlib.util
import logging
import re
import runpy
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from chat_model import saved
from models import TEXT
from words import CHAT, tokenizer

transformers = pytest.importorskip("transformers")

PAGE = Path(__file__).resolve().parents[1] / "docs" / "recipes.md"
SCRIPT = re.compile(r"^## (.*?)$(?:(?!^## ).)*?^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SCRIPTS = dict(SCRIPT.findall(PAGE.read_text()))
LONGEST = 25  # lines


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipes")
    saved(path / "model")
    sizes = {name: TEXT[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    transformers.BertModel(transformers.BertConfig(**sizes, intermediate_size=160)).save_pretrained(path / "encoder")
    tokenizer(CHAT).save_pretrained(path / "encoder")
    (path / "offload.toml").write_text('device_budget = "260KiB"\n')
    return path


@pytest.fixture
def within(folders: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(folders)
    monkeypatch.setattr("weightstream.runtime.devices.cuda.is_available", lambda: False)  # plain models run on the CPU
    levels = {name: logging.getLogger(name).level for name in (None, "weightstream")}
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # other libraries' own
        yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def needs(*packages: str) -> None:
    """Skip where packages of scripts/requirements-recipes.txt are missing: `scripts/recipes` has them."""
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        pytest.skip(f"no {', '.join(missing)}")


def ran(heading: str) -> dict[str, Any]:
    """The names of a script after its run, from a file of its own: nnsight reads its source, once."""
    script = Path(f"{heading.replace(' ', '_')}.py")
    script.write_text(SCRIPTS[heading])
    return runpy.run_path(str(script))


def streamed(found: dict[str, Any], name: str = "model") -> Any:
    """The plain model, after a check that the offloaded one streamed."""
    model = found[name]
    assert model.weightstream.stats().fills > 4
    model.weightstream.remove()
    return model


def test_scripts_are_short() -> None:
    assert len(SCRIPTS) >= 10
    assert max(script.count("\n") for script in SCRIPTS.values()) <= LONGEST


@pytest.mark.usefixtures("within")
def test_openai_clients(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    needs("openai", "uvicorn")
    from weightstream.serving import server
    from weightstream.text.engine import TextModel
    from weightstream.text.sampling import Sampling

    model, is_up = TextModel("./model"), threading.Event()
    model.load(config="offload.toml", device="cpu")
    answer = model.generate(model.encode("w7 w5 w9 w8 w11"), Sampling(max_new_tokens=8))
    served = server.ServedModel(model=model, name="model", context=64, drafts={})
    with server.bound_socket("127.0.0.1", 0) as bound:
        arguments = served, bound, 4, is_up.set
        threading.Thread(target=server.serve_forever, args=arguments, daemon=True).start()
        assert is_up.wait(30)
        monkeypatch.setenv("OPENAI_BASE_URL", f"http://127.0.0.1:{bound.getsockname()[1]}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        found = ran("OpenAI clients")
    found["client"].close()
    assert capsys.readouterr().out == answer.text


@pytest.mark.usefixtures("within")
def test_pipelines_of_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    found = ran("Pipelines of transformers")
    pipe = transformers.pipeline("text-generation", model=streamed(found), tokenizer=found["tokenizer"])
    want = pipe(["w5 w9 w23", "w7 w8"], do_sample=False, max_new_tokens=8, batch_size=2)
    assert capsys.readouterr().out == f"{want}\n"


@pytest.mark.stress
@pytest.mark.usefixtures("within")
def test_continuous_batching() -> None:
    found = ran("Continuous batching")
    answers = streamed(found).generate_batch(
        [[5, 9, 23], [7, 8]], found["settings"], continuous_batching_config=found["eager"]
    )
    got = [each.generated_tokens for each in found["answers"].values()]
    assert got == [each.generated_tokens for each in answers.values()]
    assert len(set(got[0])) > 2


@pytest.mark.stress
@pytest.mark.usefixtures("within")
def test_evaluation_with_lm_eval() -> None:
    needs("lm_eval")
    found = ran("Evaluation with lm-eval")
    model = streamed(found)
    assert found["results"]["own"]["perplexity,none"] > 1
    lm = found["HFLM"](pretrained=model, tokenizer=found["lm"].tokenizer, batch_size=2)
    want = found["lm_eval"].simple_evaluate(model=lm, tasks=[found["task"]], bootstrap_iters=0)["results"]
    assert found["results"] == want


@pytest.mark.stress
@pytest.mark.usefixtures("within")
def test_embeddings_with_sentence_transformers() -> None:
    needs("sentence_transformers")
    found = ran("Embeddings with sentence-transformers")
    encoder = found["encoder"]
    streamed({"model": encoder[0].auto_model})
    assert (found["vectors"] == encoder.encode(["w5 w9", "w23"])).all()
    assert found["vectors"].std() > 0.01


def hidden_states(model: Any) -> Any:
    with torch.no_grad():
        return model(torch.tensor([[5, 9, 23]]), output_hidden_states=True)


@pytest.mark.stress
@pytest.mark.usefixtures("within")
def test_activations_with_nnsight() -> None:
    needs("nnsight")
    found = ran("Activations with nnsight")
    want = hidden_states(streamed(found))
    assert torch.equal(found["logits"], want.logits)
    assert torch.equal(found["hidden"].reshape(want.hidden_states[2].shape), want.hidden_states[2])


@pytest.mark.stress
@pytest.mark.usefixtures("within")
def test_activations_with_transformer_lens() -> None:
    needs("transformer_lens")
    found = ran("Activations with TransformerLens")
    tokens = found["bridge"].to_tokens("w5 w9 w23")
    plain = streamed(found)
    with torch.no_grad():
        want = plain(tokens)
    assert torch.equal(found["logits"], want.logits)
    assert len(found["cache"]) > 20


@pytest.mark.usefixtures("within")
def test_components_of_diffusers() -> None:
    needs("diffusers")
    found = ran("Components of diffusers")
    assert found["streamer"].stats().fills > 4
    vae = streamed(found, "vae")
    assert torch.equal(found["image"], vae(torch.zeros(1, 3, 32, 32)).sample)


@pytest.mark.usefixtures("within")
def test_notebooks(capsys: pytest.CaptureFixture[str]) -> None:
    """The cell runs twice: the first model is gone before the second one is there."""
    found: dict[str, Any] = {}
    for _ in range(2):
        exec(SCRIPTS["Notebooks"], found)
    assert capsys.readouterr().out.count("LlamaForCausalLM on ") == 2
    found["model"].weightstream.remove()


@pytest.mark.usefixtures("within")
def test_the_log(caplog: pytest.LogCaptureFixture) -> None:
    ran("The log")
    texts = [record.getMessage() for record in caplog.records if record.name == "weightstream"]
    assert any("stream" in text for text in texts)
    assert not any(text.startswith("generate: eager") for text in texts)
