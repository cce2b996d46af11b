"""The log of `offload()`: what the planner knew, before it planned."""

from __future__ import annotations

import logging

import pytest
import torch

import weightstream


def test_the_inputs_of_the_planner_are_logged_once_before_planning(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
    with (
        caplog.at_level(logging.DEBUG, logger="weightstream"),
        weightstream.offload(model, device="cpu", device_budget="48KiB", codec="none"),
    ):
        pass
    messages = [(record.levelno, record.getMessage()) for record in caplog.records]
    (logged,) = [text for level, text in messages if level == logging.DEBUG and text.startswith("planning Sequential")]
    assert "\nbudget      48.0KiB of device memory for weights\n" in logged
    assert "\ndevice      the CPU, " in logged
    assert "\nstep        any call, its work is unknown\n" in logged
    summaries = [text for _, text in messages if "resident + " in text]
    order = [text for _, text in messages]
    assert order.index(logged) < order.index(summaries[0])
