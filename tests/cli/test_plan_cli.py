"""`weightstream plan`, run in this process with only a config.json: its screen, JSON, files and errors."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

import weightstream
from chat_model import saved
from repeats import only
from weightstream.cli import app
from weightstream.errors import CheckpointError
from weightstream.measure import profile as profiles
from weightstream.plan import multi_device
from weightstream.plan.manifest import Profile
from weightstream.plan.plan import Plan

report = importlib.import_module("weightstream.cli.plan")  # in the package the command has this name

transformers = pytest.importorskip("transformers")

GIB = 2**30
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
}
NUM_PARAMETERS = 2 * 1000 * 512 + 512 + 4 * (2 * 512 * 512 + 2 * 512 * 128 + 3 * 512 * 1024 + 2 * 512)
NUM_BUFFERED = 2 * 32  # both tables of rotary frequencies, in float32
NBYTES = 2 * NUM_PARAMETERS + 4 * NUM_BUFFERED
MACHINE = Profile(  # where the host is never the bottleneck
    machine="Test GPU", device_nbytes=4 * GIB, link_bytes_per_s=1e9, op_s=1e-7, op_launch_s=1e-6, overhead_s=5e-5
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small-llama")
    (path / "config.json").write_text(json.dumps(SHAPE))
    return path


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("machine") / "profile.json"
    path.write_text(profiles.to_json(MACHINE))
    return path


@pytest.fixture
def plan(folder: Path, machine: Path) -> Callable[..., Result]:
    """Plans the small model on the test machine, with 30 GiB of host memory, whatever is free here."""

    def run(*flags: object) -> Result:
        arguments = ["--profile", machine, "--host-budget", "30GiB", *flags]
        return CliRunner().invoke(app, ["plan", str(folder), *map(str, arguments)])

    return run


@pytest.fixture(scope="module")
def swept(folder: Path, machine: Path) -> dict[str, Any]:
    """The output of a sweep, and of a plan of 8 MiB."""
    flags = ["--profile", str(machine), "--host-budget", "30GiB", "--device-budget", "8MiB", "--sweep", "--json"]
    return facts(CliRunner().invoke(app, ["plan", str(folder), *flags]))


def shown_of(result: Result) -> str:
    assert result.exit_code == 0, result.output
    return result.stdout


def facts(result: Result) -> dict[str, Any]:
    return json.loads(shown_of(result))


def refused(result: Result) -> str:
    """The message of a run that failed as it should: only on stderr, no traceback, exit code 2."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr


# -- the screen ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("few_plans")
def test_the_screen_fits_100_columns_and_is_plain_when_piped(plan: Callable[..., Result]) -> None:
    text = shown_of(plan("--device-budget", "8MiB", "--batch", 4, "--sweep"))
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 100
    labels = re.findall(r"^ *(\w+): ", text, re.MULTILINE)
    assert labels == ["model", "machine", "memory", "besides", "moves", "predicted", "weights", "limit", "note"]
    assert f"{NUM_PARAMETERS / 1e6:.1f}M parameters" in " ".join(text.split())  # a long path folds the line
    assert "Test GPU, measured" in text
    assert "(batch 4, tokens 1, context 2048)" in text
    assert re.search(r"limit: link, busy [\d.]+ ms of a step; compute [\d.]+ (ms|us)\n", text)


@pytest.mark.stress
def test_the_rows_of_a_sweep_are_plans_and_the_chosen_budget_is_marked(
    plan: Callable[..., Result], swept: dict[str, Any]
) -> None:
    text = shown_of(plan("--device-budget", "8MiB", "--sweep"))
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    rows = [row for row in cells if len(row) == 8]
    plans = swept["sweep"]
    assert {row[4] for row in rows} == {f"{1e3 * p['run_s']:,.1f}" for p in plans}
    assert [row[0] for row in rows if "▶" in row[0]] == ["▶ 8.00"]
    assert "budget MiB" in text
    assert rows[-1][6] == "all fits"
    assert {(row[3], row[4]) for row in rows} == {
        ("yes" if p["compressed_nbytes"] else "", f"{1e3 * p['run_s']:,.1f}") for p in plans
    }
    assert swept["compressed_nbytes"] > 0
    assert rows[-1][3] == "", "everything fits uncompressed"


@pytest.mark.stress
@pytest.mark.parametrize(
    ("width", "lost"), [(60, {"", "compressed"}), (80, set()), pytest.param(100, set(), marks=pytest.mark.stress)]
)
def test_a_sweep_is_a_line_per_budget_at_any_width(
    plan: Callable[..., Result], swept: dict[str, Any], width: int, lost: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    text = shown_of(plan("--device-budget", "8MiB", "--sweep"))
    assert max(map(len, text.splitlines())) <= width
    lines = text.partition("step time over budget")[2].splitlines()
    assert sum(line.startswith("│") for line in lines) == len(swept["sweep"])
    heads = zip(*(line.strip("┃").split("┃") for line in lines if line.startswith("┃")), strict=True)
    shown = {" ".join(" ".join(head).split()).replace(" /", "/") for head in heads}
    assert {"budget MiB", "resident", "ring", "compressed", "step ms", "tokens/s", "limit", ""} - shown == lost


@pytest.mark.stress
@pytest.mark.parametrize("charset", only(["ascii", "latin-1"], "latin-1"))
def test_boxes_are_ascii_if_the_stream_needs_it(folder: Path, machine: Path, charset: str) -> None:
    flags = ["--profile", str(machine), "--host-budget", "30GiB", "--device-budget", "8MiB", "--sweep"]
    result = CliRunner(charset=charset).invoke(app, ["plan", str(folder), *flags])
    text = shown_of(result)
    assert text.isascii()
    assert "> 8.00" in text
    assert "model.layers.0..3" in text
    assert "| #" in text


def test_the_budget_and_what_comes_besides_add_up_apart() -> None:
    plan = Plan.from_json(json.dumps(_bare_plan()))
    plan = replace(plan, budget=100 * GIB, activation_nbytes=1, cache_nbytes=20 * GIB)
    assert report.memory_lines(plan) == {
        "memory": "spare 100.0GiB for weights",
        "besides": "cache 20.0GiB + activations 1B = 20.0GiB",
    }
    plan = replace(plan, ring_nbytes=GIB, slots_nbytes=4 * GIB, activation_nbytes=0, cache_nbytes=0)
    assert report.memory_lines(plan) == {"memory": "ring 1.0GiB + slots 4.0GiB + spare 95.0GiB = 100.0GiB for weights"}


def _bare_plan() -> dict[str, Any]:
    manifest = {"units": [], "order": []}
    return {"manifest": manifest, "resident": [], "ring_nbytes": 0, "extents": [], "first": [], "after": []}


def test_the_report_of_a_plan_is_on_the_screen(plan: Callable[..., Result]) -> None:
    text = " ".join(shown_of(plan("--device-budget", "8MiB")).split())
    printed = str(Plan.from_json(json.dumps(facts(plan("--device-budget", "8MiB", "--json"))["plan"])))
    assert len(printed.splitlines()) == 5
    assert all(line in text for line in printed.splitlines()[1:])


def test_a_training_step_is_planned(plan: Callable[..., Result]) -> None:
    flags = ("--device-budget", "8MiB", "--train", "--tokens", "256", "--batch", "2", "--rank", "8")
    text = " ".join(shown_of(plan(*flags)).split())
    found = facts(plan(*flags, "--json"))
    assert "tokens/s (training, batch 2, tokens 256)" in text
    num = 4 * 8 * (4 * 512 + 2 * (512 + 128) + 3 * (512 + 1024))  # q and o, k and v, and the MLP
    assert f"{num / 1e3:.1f}K trainable parameters: activations" in text
    assert found["trained_nbytes"] == 16 * num
    without = facts(plan(*flags, "--no-checkpoints", "--json"))
    assert without["activation_nbytes"] > 1.5 * found["activation_nbytes"]
    assert found["step_s"] > without["compute_s"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--rank", "8"), "--rank: only for a training step; pass --train, too"),
        (("--train", "--draft", "self"), "train: --draft: only for generation; leave out --draft, or train"),
        (("--train", "--gpus", "2"), "train: a process trains on one GPU; leave out gpus"),
    ],
)
def test_flags_that_contradict_training_are_refused(
    plan: Callable[..., Result], flags: tuple[str, ...], message: str
) -> None:
    assert message in " ".join(refused(plan("--device-budget", "8MiB", *flags)).split())


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("flags", "note"),
    [
        (("--device-budget", "100%"), "everything fits and nothing streams: leave out the budget"),
        (("--device-budget", "8MiB"), "1 GiB more on the device would take about"),
        (("--device-budget", "14MiB", "--batch", 64, "--tokens", 2048), "would be as fast"),
        (("--device-budget", "8MiB", "--batch", 4096), "shortage: weights"),
    ],
)
def test_advice(plan: Callable[..., Result], flags: tuple[object, ...], note: str) -> None:
    assert note in " ".join(shown_of(plan(*flags)).split())


def test_without_a_budget_none_is_advised(plan: Callable[..., Result]) -> None:
    assert "     note: everything fits and nothing streams\n" in shown_of(plan())


@pytest.mark.stress
def test_a_smaller_budget_that_is_advised_is_as_fast(plan: Callable[..., Result]) -> None:
    flags = ("--batch", 64, "--tokens", 2048, "--json")
    found = facts(plan("--device-budget", "14MiB", *flags))
    smaller = facts(plan("--device-budget", found["enough_budget"], *flags))
    assert smaller["budget"] == found["enough_budget"] < found["budget"]
    assert smaller["limit"] == "compute"
    assert smaller["step_s"] <= 1.001 * found["step_s"]


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightstream.runtime.devices.cuda.is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_the_plan_is_that_of_run_on_the_cpu(tmp_path: Path) -> None:
    """The same least budget, step, units and ring; and the screen says how to plan for a GPU."""
    chat_model, flags = saved(tmp_path), ["--context", "64", "--host-budget", "20GiB"]

    def called(command: str, *more: str) -> Result:
        return CliRunner().invoke(app, [command, str(chat_model), *flags, *more])

    texts = [refused(called(command, "--device-budget", "1KiB")) for command in ("plan", "run")]
    least = int(re.findall(r"\((\d+) bytes\): ", " ".join(texts[0].split()))[0])
    assert " ".join(texts[1].split()).endswith(" ".join(texts[0].split()))  # below a note on the prompt
    budget = ("--device-budget", str(2 * least))
    settings: dict[str, Any] = {"device_budget": 2 * least, "context": 64, "host_budget": "20GiB"}
    with weightstream.from_pretrained(chat_model, progress=False, **settings).weightstream as streamer:
        loaded = streamer.plan
    assert weightstream.plan_model(chat_model, **settings) == loaded
    planned = facts(called("plan", *budget, "--json"))
    assert Plan.from_json(json.dumps(planned["plan"])) == loaded
    ran = facts(called("run", *budget, "--json", "--max-new-tokens", "2"))
    assert ran["plan"] == loaded.summary()
    text = " ".join(shown_of(called("plan", *budget)).split())
    assert "machine: the CPU" in text
    assert 'no GPU here: try --gpu "RTX 4090"' in text
    assert "graph" not in text
    assert re.search(r"predicted: ~[\d.]+ (ms|us) per step, ~[\d,.]+ tokens/s", text)


@pytest.fixture
def plan_for(folder: Path) -> Callable[..., Result]:
    """Plans the small model for a GPU by name."""

    def run(*flags: object) -> Result:
        return CliRunner().invoke(app, ["plan", str(folder), *map(str, flags)])

    return run


@pytest.mark.usefixtures("few_plans")
def test_a_gpu_is_planned_for_by_name(plan_for: Callable[..., Result]) -> None:
    """Its memory is the default budget, its rates are marked as assumed, and its host holds everything."""
    text = " ".join(shown_of(plan_for("--gpu", "4090")).split())
    assert "machine: RTX 4090, PCIe 4 x16, assumed from the data sheet" in text
    assert "everything fits and nothing streams" in text
    found = facts(plan_for("--gpu", "rtx 4090", "--json"))
    assert (found["basis"], found["on_cpu"]) == ("data sheet", False)
    assert 20 * GIB < found["budget"] + found["cache_nbytes"] + found["activation_nbytes"] < 23 * GIB
    flags = ("--gpu", "RTX 4090", "--device-budget", "6MiB", "--codec", "none", "--json")
    fast, slow = facts(plan_for(*flags)), facts(plan_for(*flags, "--link", "PCIe 3"))
    assert slow["copy_s"] > 1.8 * fast["copy_s"] > 0
    assert slow["machine"] == "RTX 4090, PCIe 3 x16"
    assert slow["disk_nbytes"] == 0


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--gpu", "RTX 9999"), "There are RTX 3090, RTX 4080, RTX 4090"),
        (("--gpu", "A100"), "did you mean A100 40GB or A100 80GB?"),
        (("--gpu", "4090", "--device", "cpu"), "leave out --profile and --device"),
        (("--gpu", "4090", "--host-budget", "50%"), "give bytes, such as 64GiB"),
        (("--gpu", "4090", "--link", "PCIe 5"), "faster than that of RTX 4090, PCIe 4 x16"),
        (("--gpu", "4090", "--link", "fast"), "give a rate such as 25GB/s, or PCIe 4"),
        (("--device", "cpu", "--link", "25GB/s"), "a CPU, which has no link"),
        (("--gpu", "4090", "--target", "soon"), "such as 10tok/s or 100ms"),
        (("--gpu", "4090", "--target", "10tok/s", "--offload-group-size", "2"), "leave them out"),
        (("--gpu", "4090", "--target", "10tok/s", "--speculate", "lookup"), "without drafts; leave out speculate"),
        (("--gpu", "4090", "--target", "1us"), "such as 10tok/s or 100ms"),
        (("--gpu", "4090", "--target", "0.001ms"), "is out of reach: ~"),
    ],
)
def test_what_is_wrong_with_a_machine_or_a_target(
    plan_for: Callable[..., Result], flags: tuple[str, ...], expected: str
) -> None:
    assert expected in " ".join(refused(plan_for(*flags)).split())


@pytest.mark.usefixtures("few_plans")
def test_a_target_finds_the_least_budget(plan: Callable[..., Result]) -> None:
    """The text names the flag with which the same plan comes without a target; with less it is too slow."""
    target = ("--target", "150tok/s")
    text = " ".join(shown_of(plan(*target)).split())
    named = re.search(r"target: 150 tokens/s takes --device-budget (\d+)KiB, which gives (\d+) tokens/s", text)
    assert named is not None, text
    least = 1024 * int(named[1])
    found, same = facts(plan(*target, "--json")), facts(plan("--device-budget", least, "--json"))
    assert found["plan"] == same["plan"]
    assert found["tokens_per_s"] >= 150
    assert facts(plan("--device-budget", least * 15 // 16, "--json"))["tokens_per_s"] < 150
    assert "out of reach" in refused(plan(*target, "--device-budget", least * 15 // 16))


# -- JSON and files -----------------------------------------------------------------------------------------------


def test_json_is_complete_and_the_only_output(plan: Callable[..., Result], folder: Path) -> None:
    found = facts(plan("--device-budget", "8MiB", "--batch", 2, "--context", 64, "--json"))
    assert found["model"] == str(folder)
    assert (found["num_parameters"], found["dtype"], found["machine"]) == (
        NUM_PARAMETERS + NUM_BUFFERED,
        "bfloat16",
        "Test GPU",
    )
    assert found["budget"] == 8 << 20
    held = found["resident_nbytes"] + found["ring_nbytes"] + found["buffer_nbytes"]
    assert found["device_nbytes"] == held <= 8 << 20
    assert found["nbytes"] == NBYTES
    assert found["held_nbytes"] == found["resident_nbytes"] + found["host_nbytes"] + found["disk_nbytes"]
    assert found["cache_nbytes"] == 2 * 64 * 4 * 2 * 128 * 2
    assert found["tokens_per_s"] == 2 / found["graph_s"]
    assert (found["basis"], found["on_cpu"], found["in_graphs"]) == ("measured", False, True)
    assert found["limit"] == "link"
    assert found["copy_s"] <= found["step_s"] * (1 + 1e-9)
    plan_itself = Plan.from_json(json.dumps(found["plan"]))
    assert plan_itself.step_s == found["step_s"]
    assert plan_itself.workload is not None
    assert (plan_itself.workload.batch, plan_itself.workload.tokens, plan_itself.workload.context) == (2, 1, 64)
    assert "sweep" not in found


def test_more_memory_is_never_slower_in_a_sweep(swept: dict[str, Any]) -> None:
    plans = swept["sweep"]
    assert len(plans) > 10
    assert all(p["device_nbytes"] <= p["budget"] for p in plans)
    assert [p["budget"] for p in plans].count(8 << 20) == 1, "the chosen budget has a row"
    times = [p["run_s"] for p in plans]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]


def test_save_writes_the_plan(plan: Callable[..., Result], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    found = facts(plan("--device-budget", "8MiB", "--json", "--save", path))
    assert Plan.from_json(path.read_text()) == Plan.from_json(json.dumps(found["plan"]))


@pytest.mark.usefixtures("few_plans")
def test_plot_draws_a_picture(plan: Callable[..., Result], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "curve.png"
    text = shown_of(plan("--device-budget", "8MiB", "--plot", path))
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    assert "step time over budget" not in text


def test_plot_without_matplotlib_names_the_package(
    plan: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install" in refused(plan("--device-budget", "8MiB", "--plot", tmp_path / "curve.png"))
    assert not list(tmp_path.iterdir())


# -- settings and errors ------------------------------------------------------------------------------------------


def test_a_share_is_one_of_the_profiled_device(plan: Callable[..., Result]) -> None:
    assert facts(plan("--device-budget", "1%", "--json"))["budget"] == 4 * GIB // 100


def test_classic_flags_are_planned_too(plan: Callable[..., Result]) -> None:
    found = facts(plan("--offload-group-size", 2, "--offload-params", "down_proj", "--json"))
    assert found["host_nbytes"] == 2 * 512 * 1024 * 2
    assert found["tokens_per_s"] > 0


def test_an_impossible_budget_prints_its_arithmetic(plan: Callable[..., Result]) -> None:
    message = refused(plan("--device-budget", "1KiB"))
    assert re.match(r"error: device budget 1\.0KiB \(1024 bytes\) < .* = .*", message)


def save_to(place: str) -> Callable[[Path], tuple[object, ...]]:
    return lambda folder: ("--device-budget", "8MiB", "--save", folder / place)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (lambda _: ("--device-budget", "96MX"), "device_budget = '96MX'"),
        (lambda _: ("--device-budget", "120%"), "up to 100 %"),
        (lambda _: ("--device-budgte", "8MiB"), "--device-budget"),
        (lambda _: ("--batch", 0), "--batch"),
        (lambda folder: ("--profile", folder / "none.json"), "none.json: No such file"),
        (lambda folder: ("--profile", folder / "config.json"), "config.json: not a profile"),
        (save_to("not/there.json"), "there.json: No such file"),
        (lambda folder: ("--device-budget", "8MiB", "--plot", folder / "a.nothing"), "name a .png file"),
    ],
)
def test_wrong_input_is_named(
    plan: Callable[..., Result],
    folder: Path,
    flags: Callable[[Path], tuple[object, ...]],
    expected: str,
) -> None:
    assert expected in refused(plan(*flags(folder)))


@pytest.mark.parametrize("content", [None, "{}", '{"model_type": "nothing-like-it"}', "no json"])
def test_a_folder_without_a_model(tmp_path: Path, machine: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    arguments = ["plan", str(tmp_path), "--profile", str(machine), "--device-budget", "8MiB"]
    message = refused(CliRunner().invoke(app, arguments))
    assert message.startswith("error: ")
    assert str(tmp_path) in message


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    message = refused(CliRunner().invoke(app, ["plan", str(tmp_path / "none"), "--device-budget", "8MiB"]))
    assert str(tmp_path / "none") in message


@pytest.mark.parametrize(
    "inside", ["dtype=float16/none", "a.dtype=auto/none", "seed/dtype=auto", "device_budget=8MiB.d/x"]
)
def test_a_path_in_an_error_stays_as_it_is(inside: str, tmp_path: Path) -> None:
    message = refused(CliRunner().invoke(app, ["plan", str(tmp_path / inside), "--device-budget", "8MiB"]))
    assert str(tmp_path / inside) in message


def test_a_name_with_a_final_slash_is_a_path() -> None:
    message = refused(CliRunner().invoke(app, ["plan", "nosuch/", "--device-budget", "8MiB"]))
    assert message.strip() == "error: nosuch: no such file or folder"


def test_an_error_is_one_line(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def refuse(name: str) -> bool:
        raise CheckpointError("transformers:\n  one\n\ntwo; pass dtype='float16'\n")

    monkeypatch.setattr("weightstream.api.plan_model.is_pipeline_checkpoint", refuse)
    message = refused(CliRunner().invoke(app, ["plan", str(folder)]))
    assert message.strip() == "error: transformers: one two; pass --dtype float16"


MIXTURES = {
    "qwen3_moe": ({"num_experts": 8, "moe_intermediate_size": 256, "num_experts_per_tok": 2}, None),
    "llama4_text": (
        {"num_local_experts": 8, "intermediate_size_mlp": 512, "interleave_moe_layer_step": 1, "head_dim": 64},
        "each step reads all experts of model.layers.0.feed_forward.experts and 3 more: Llama4TextExperts does not "
        "take rows of stacks by ids",
    ),
}


@pytest.mark.stress
@pytest.mark.parametrize("kind", MIXTURES)
def test_the_reason_for_reading_all_experts_is_shown(kind: str, machine: Path, tmp_path: Path) -> None:
    sizes, reason = MIXTURES[kind]
    named = {"qwen3_moe": "Qwen3MoeForCausalLM", "llama4_text": "Llama4ForCausalLM"}[kind]
    (tmp_path / "config.json").write_text(json.dumps({**SHAPE, "model_type": kind, "architectures": [named], **sizes}))
    flags = ["plan", str(tmp_path), "--profile", str(machine), "--host-budget", "30GiB", "--device-budget"]
    for budget, streams in (("32MiB", True), ("1GiB", False)):
        screen = CliRunner().invoke(app, [*flags, budget])
        shown = " ".join(screen.stdout.split())
        assert screen.exit_code == 0, screen.output
        assert (f"experts: {reason}" in shown) if reason and streams else ("reads all" not in shown)
        shown_reason = json.loads(CliRunner().invoke(app, [*flags, budget, "--json"]).stdout)["experts"]
        assert shown_reason == reason or shown_reason.startswith(reason)


@pytest.mark.usefixtures("few_plans")
def test_over_several_gpus(folder: Path, machine: Path) -> None:
    """Two links move the layers in half the time. The other GPUs are assumed to equal the one in the profile."""

    def planned(*flags: object) -> Result:
        arguments = ["plan", str(folder), "--profile", str(machine), "--codec", "none", *map(str, flags)]
        return CliRunner().invoke(app, arguments)

    one = json.loads(planned("--device-budget", "5MiB", "--json").stdout)
    two = json.loads(planned("--device-budget", "5MiB", "--gpus", 2, "--json").stdout)
    assert set(two["devices"]) == {"cuda:0", "cuda:1"}
    assert two["nbytes"] == NBYTES
    assert two["step_s"] < 0.7 * one["step_s"]
    shown = planned("--device-budget", "5MiB", "--gpus", 2)
    assert shown.exit_code == 0, shown.output
    for words in ("cuda:0", "cuda:1", "over 2 GPUs", "predicted: ", "per step over 2 links"):
        assert words in shown.stdout
    refused = planned("--device-budget", "5MiB", "--gpus", 2, "--sweep")
    assert refused.exit_code == 2
    assert "--sweep: only for one GPU" in refused.stderr
    assert planned("--device-budget", "1KiB", "--gpus", 2).exit_code == 2


@pytest.mark.usefixtures("few_plans")
def test_weights_that_fit_compute_as_long_on_several_gpus(folder: Path, machine: Path) -> None:
    """All on the first GPU, or two of the four blocks on the other: then the states of a token move there and back."""

    def planned(budget: str, *flags: object) -> dict[str, Any]:
        arguments = ["--profile", machine, "--codec", "none", "--device-budget", budget, "--json", *flags]
        return facts(CliRunner().invoke(app, ["plan", str(folder), *map(str, arguments)]))

    one, fits, halves = planned("64MiB"), planned("64MiB", "--gpus", 2), planned("12MiB", "--gpus", 2)
    assert [len(each["devices"]) for each in (fits, halves)] == [1, 2]
    assert fits["step_nbytes"] == halves["step_nbytes"] == 0
    hops_s = 2 * 2 * (multi_device.HOP_S + 2 * SHAPE["hidden_size"] / MACHINE.link_bytes_per_s)
    assert fits["graph_s"] == pytest.approx(one["graph_s"], rel=1e-9)
    assert halves["graph_s"] == pytest.approx(one["graph_s"] + hops_s, rel=1e-9)
    for several in (fits, halves):
        assert several["step_s"] == pytest.approx(one["step_s"], rel=1e-9), "the host launches as much"


@pytest.mark.usefixtures("few_plans")
def test_by_tensor_parallelism(folder: Path, machine: Path, tmp_path: Path) -> None:
    """The plan of one of two processes. All other flags apply to that one."""

    def planned(*flags: object) -> Result:
        return CliRunner().invoke(app, ["plan", str(folder), "--profile", str(machine), *map(str, flags)])

    half = ("--device-budget", "3MiB", "--codec", "none", "--gpus", 2, "--tp")
    one = json.loads(planned("--device-budget", "6MiB", "--codec", "none", "--json").stdout)
    shard = json.loads(planned(*half, "--json", "--save", tmp_path / "plan.json").stdout)
    assert shard["tp_size"] == 2
    assert shard["step_nbytes"] == pytest.approx(one["step_nbytes"] / 2, rel=0.1)
    assert Plan.from_json((tmp_path / "plan.json").read_text()).step_s == shard["step_s"] < 0.7 * one["step_s"]
    shown = planned(*half, "--sweep")
    assert shown.exit_code == 0, shown.output
    for words in (f"a shard of {folder}", "ranks: one of 2 processes", "step time over budget"):
        assert words in shown.stdout
    for flags, said in (
        (("--tp",), "pass --gpus 2 or more, too"),
        (("--tp", "--gpus", 2, "--device-budget", "1KiB"), "budget"),
        (("--tp", "--gpus", 2, "--config", tmp_path / "two.toml"), "all processes have the same budget"),
    ):
        (tmp_path / "two.toml").write_text('max_memory = {0 = "3MiB", 1 = "4MiB"}\n')
        refused = planned(*flags)
        assert refused.exit_code == 2
        assert said in " ".join(refused.stderr.split())


def test_the_assumed_hit_rates_are_named(machine: Path, tmp_path: Path) -> None:
    """A model whose tokens use 4 of 128 experts, planned as gpt-oss-120b."""
    sizes = {"num_experts": 128, "moe_intermediate_size": 256, "num_experts_per_tok": 4, "num_hidden_layers": 2}
    architecture = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | architecture | sizes))
    flags = ["--profile", str(machine), "--device-budget", "140MiB", "--host-budget", "30GiB", "--json"]
    found = facts(CliRunner().invoke(app, ["plan", str(tmp_path), *flags]))
    assert (found["hit_curve"], found["counted_rows"]) == ("gpt-oss-120b", 0)
    assert 0 < found["found_share"] < 1
    text = Plan.from_json(json.dumps(found["plan"])).predictions()["experts"]
    assert re.search(r"finds about \d+ % there \(hits as measured on gpt-oss-120b\) and fetches", text)
