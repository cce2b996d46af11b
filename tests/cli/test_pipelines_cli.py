"""Pipelines on the command line: plan, run, bench and pack of a tiny one."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pty
import re
import shutil
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result
from PIL import Image
from typer.testing import CliRunner

from weightstream.cli import app
from weightstream.cli.pipelines import save_media

pipelines = pytest.importorskip("pipelines")
pytest.importorskip("accelerate")

pytestmark = [
    pytest.mark.usefixtures("few_plans"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]
CALL = ("--height", 32, "--width", 32, "--steps", 3)
BUDGET = "800KiB"  # of 1.6 MiB


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-flux")
    pipelines.build("flux").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def video(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-wan")
    pipelines.build("wan").save_pretrained(path)
    return path


def weightstream(command: str, *flags: Any) -> Result:
    return CliRunner().invoke(app, [command, *map(str, flags), "--device", "cpu"])


def answered(command: str, *flags: Any) -> Any:
    result = weightstream(command, *flags, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def pixels(path: Path) -> bytes:
    with Image.open(path) as made:
        return made.tobytes()


@pytest.mark.stress
def test_a_plan_shows_every_component(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightstream.cli.pipelines._BUDGETS", 2)  # of a sweep: each is a search
    flags = ("--device-budget", BUDGET, *CALL, "--sweep")
    result = weightstream("plan", folder, *flags, "--save", tmp_path / "plan.json")
    assert result.exit_code == 0, result.output
    for text in ("text_encoder_2", "3 x forward", "1 x decode", "predicted:", "seconds per call over budget", "▶"):
        assert text in result.stdout
    found = answered("plan", folder, *flags)
    assert found["device_nbytes"] <= 800 << 10 < found["nbytes"]
    assert {row["budget"] for row in found["sweep"]} == {found["nbytes"] // 2, 800 << 10, found["nbytes"]}
    assert [turn["num"] for turn in found["turns"]] == [1, 1, 3, 1]
    assert found["seconds"] >= found["bound_s"] > 0
    assert json.loads((tmp_path / "plan.json").read_text())["copied_nbytes"] == found["copied_nbytes"]
    more = answered("plan", folder, "--device-budget", BUDGET, *CALL[:4], "--steps", 30)
    assert more["seconds"] > 5 * found["seconds"] - found["turns"][0]["seconds"]


@pytest.mark.stress
def test_a_pipeline_on_a_gpu_by_name_and_its_least_budget(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightstream.api.other_budgets._BITS", 2)  # few budgets: each is a search
    monkeypatch.setattr("weightstream.api.other_budgets._BISECTIONS", 1)
    flags = ["plan", folder, *CALL, "--gpu", "RTX 3090", "--link", "PCIe 3", "--device-budget", BUDGET]

    def planned(*more: str) -> Result:
        return CliRunner().invoke(app, [*map(str, flags), *more])

    found = json.loads(planned("--json").stdout)
    slower = f"{2 * found['seconds']:.9f}s"
    text = " ".join(planned("--target", slower).stdout.split())
    assert "machine: RTX 3090, PCIe 3 x16, assumed from the data sheet" in text
    least = re.search(r"target: .* takes --device-budget (\w+), which gives ~.* per call", text)
    assert least is not None, text
    refused = planned("--target", f"{found['seconds'] / 1000:.9f}s")
    assert refused.exit_code == 2
    assert "out of reach: ~" in refused.stderr


def test_the_written_image_equals_the_plain_one(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "image.png"
    flags = ("--device-budget", BUDGET, *CALL, "--prompt", "w5 w9 w23", "--out", out)
    found = answered("run", folder, *flags, "--verify", "--seed", 5)
    assert found["identical"] is True
    assert found["files"] == [str(out)]
    assert found["held_nbytes"]["device"] <= 800 << 10
    assert found["stats"]["transformer"]["steps"] == 3
    assert not any(found["stats"]["transformer"]["experts"].values())
    first = pixels(out)
    assert len(first) == 32 * 32 * 3
    result = weightstream("run", folder, *flags, "--seed", 6)
    assert result.exit_code == 0, result.output
    assert "predicted:" in result.stdout
    assert "transformer" in result.stdout
    assert pixels(out) != first, "another seed"


def read_until_closed(terminal: int, shown: bytearray) -> None:
    with contextlib.suppress(OSError):  # the read at the end of a terminal's output fails with this
        while part := os.read(terminal, 4096):
            shown += part


@pytest.mark.stress
def test_bench_shows_its_progress_on_a_terminal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    shown = bytearray()
    reader = threading.Thread(target=read_until_closed, args=(ours, shown))
    reader.start()
    try:
        with os.fdopen(theirs, "w") as terminal, monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", terminal)
            flags = ["--device", "cpu", "--seconds", "0.1", *map(str, CALL)]
            app(["bench", str(folder), *flags], standalone_mode=False)
    finally:
        reader.join()
        os.close(ours)
    phases = (b"the offloaded pipeline", b"the resident pipeline", b"the link alone")
    positions = [shown.find(name) for name in phases]
    assert min(positions) >= 0, shown
    assert positions == sorted(positions)


def test_a_difference_is_reported(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from weightstream.cli.pipelines import PipelineSession

    plain = PipelineSession.plain

    def other(self: PipelineSession) -> None:
        plain(self)
        with torch.no_grad():
            self.pipe.transformer.proj_out.weight.mul_(1.5)

    monkeypatch.setattr(PipelineSession, "plain", other)
    flags = ("--device-budget", BUDGET, *CALL, "--out", tmp_path / "x.png", "--verify")
    result = weightstream("run", folder, *flags)
    assert result.exit_code == 1
    assert "identical: no" in result.stdout


@pytest.mark.parametrize("command", [("run", "--verify"), ("bench", "--seconds", "0.1")], ids=["run", "bench"])
def test_a_pipeline_that_differs_from_itself_is_no_difference(
    command: tuple[str, ...], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weightstream.cli.pipelines import PipelineSession

    plain = PipelineSession.plain

    def restless(self: PipelineSession) -> None:
        plain(self)
        calls = itertools.count(1)
        self.pipe.transformer.register_forward_hook(lambda _, __, output: (output[0] + next(calls), *output[1:]))

    monkeypatch.setattr(PipelineSession, "plain", restless)
    name, *flags = command
    out = ("--out", tmp_path / "x.png") if name == "run" else ()
    result = weightstream(name, folder, "--device-budget", BUDGET, *CALL, *out, *flags)
    assert result.exit_code == 0, result.output
    assert "not known: the model itself is not reproducible here" in " ".join(result.stdout.split())


@pytest.mark.stress
def test_a_video_is_written(video: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "video.gif"
    flags = ("--device-budget", "300KiB", *CALL, "--frames", 5, "--prompt", "w5 w9", "--out", out)
    assert answered("run", video, *flags)["files"] == [str(out)]
    with Image.open(out) as made:
        assert made.n_frames == 5
    monkeypatch.chdir(tmp_path)
    assert answered("run", video, *flags[:-2])["files"] == ["video.gif"]


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp", ".bmp"])
def test_several_images_are_numbered(suffix: str, tmp_path: Path) -> None:
    images = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    written = save_media(SimpleNamespace(images=images), tmp_path / f"x{suffix}")
    assert [path.name for path in written] == [f"x-1{suffix}", f"x-2{suffix}"]
    for path, colour in zip(written, ((255, 0, 0), (0, 0, 255)), strict=True):
        with Image.open(path) as made:
            assert np.allclose(made.getpixel((4, 4)), colour, atol=2)


@pytest.mark.parametrize("suffix", [".gif", ".webp"])
def test_several_videos_are_numbered(suffix: str, tmp_path: Path) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "lime", "blue")]
    written = save_media(SimpleNamespace(frames=[frames, frames[:2]]), tmp_path / f"x{suffix}")
    assert [path.name for path in written] == [f"x-1{suffix}", f"x-2{suffix}"]
    for path, num_frames in zip(written, (3, 2), strict=True):
        with Image.open(path) as made:
            assert made.n_frames == num_frames
            assert made.info["loop"] == 0, "it repeats"


@pytest.mark.parametrize(("name", "text"), [("x.png", "a video is written as .gif"), ("x.mp4", "pip install imageio")])
def test_an_impossible_video_file_is_reported_first(
    video: Path, name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightstream.cli.pipelines._WRITERS", ("no_such_writer",))
    monkeypatch.setattr("weightstream.pipeline_from_pretrained", lambda *_, **__: pytest.fail("it was loaded"))
    result = weightstream("run", video, "--device-budget", "300KiB", *CALL, "--out", tmp_path / name)
    assert result.exit_code == 2
    assert text in result.stderr


@pytest.mark.stress
def test_an_mp4_is_written(video: Path, tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    out = tmp_path / "video.mp4"
    flags = ("--device-budget", "300KiB", *CALL, "--frames", 5, "--prompt", "w5 w9", "--out", out)
    assert answered("run", video, *flags)["files"] == [str(out)]
    assert out.stat().st_size > 0


def test_errors_of_the_pipeline_itself_are_shown(video: Path, tmp_path: Path) -> None:
    flags = ("--device-budget", "300KiB", "--height", 33, "--out", tmp_path / "x.gif")
    result = weightstream("run", video, *flags)
    assert result.exit_code == 2
    assert "WanPipeline cannot run with --height 33" in result.stderr


@pytest.mark.few(1)
@pytest.mark.parametrize("command", ["run", "bench"])
def test_a_pipeline_that_needs_more_than_a_prompt(command: str, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "i2i")
    path = tmp_path / "i2i" / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"_class_name": "FluxImg2ImgPipeline"}))
    out = ("--out", tmp_path / "x.png") if command == "run" else ()
    result = weightstream(command, tmp_path / "i2i", "--device-budget", BUDGET, *CALL, *out)
    assert result.exit_code == 2
    assert "FluxImg2ImgPipeline cannot run with" in result.stderr


@pytest.mark.stress
def test_calls_are_timed(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    flags = ("--device-budget", BUDGET, *CALL, "--seconds", 0.1, "--out", out)
    found = answered("bench", folder, *flags)
    assert found["equal"] is True
    assert [system["name"] for system in found["systems"]] == ["raw link floor", "offloaded", "resident"]
    assert found["predicted_s"] > 0
    assert json.loads(out.read_text())["systems"] == found["systems"]
    shown = weightstream("bench", folder, *flags[:-2])
    assert shown.exit_code == 0, shown.output
    assert "all images are bit for bit the same" in shown.stdout


@pytest.mark.stress
def test_a_pack_is_the_same_pipeline(folder: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["pack", str(folder), str(tmp_path / "packed"), "--verify"])
    assert result.exit_code == 0, result.output
    flags = (*CALL, "--prompt", "w5 w9", "--device-budget", BUDGET)
    files = [tmp_path / "plain.png", tmp_path / "packed.png"]
    for model, file in zip((folder, tmp_path / "packed"), files, strict=True):
        assert answered("run", model, *flags, "--out", file)["files"] == [str(file)]
    assert files[0].read_bytes() == files[1].read_bytes()
    diffusers = pytest.importorskip("diffusers")
    again = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "packed")
    assert torch.equal(again.vae.decoder.conv_in.weight, pipelines.build("flux").vae.decoder.conv_in.weight)


@pytest.mark.parametrize(
    ("command", "flags", "text"),
    [
        ("run", ("--chat",), "leave out --chat"),
        ("run", ("--max-new-tokens", 5), "leave out --max-new-tokens"),
        ("run", ("--out", "x.pdf"), "--out x.pdf: an image is written as .png"),
        ("run", ("--out", "x.gif"), "an image is written as .png"),
        ("run", ("--out", "/nowhere/x.png"), "the folder /nowhere does not exist"),
        ("plan", ("--frames", 4), "takes no num_frames"),
        ("plan", ("--device-budget", "1KiB"), "device budget"),
        ("plan", ("--host-budget", "1GiB"), "device_budget"),
    ],
)
def test_wrong_input(folder: Path, command: str, flags: tuple[Any, ...], text: str) -> None:
    arguments = flags if "--device-budget" in flags else ("--device-budget", BUDGET, *flags)
    result = weightstream(command, folder, *arguments)
    assert result.exit_code == 2
    assert text in result.stderr


def test_options_of_pipelines_are_refused_for_models(folder: Path) -> None:
    for command in ("plan", "run", "bench"):
        result = weightstream(command, folder / "text_encoder", "--device-budget", BUDGET, "--height", 32)
        assert result.exit_code == 2
        assert "not a pipeline of diffusers: leave out --height" in result.stderr
