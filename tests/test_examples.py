"""The examples run as they stand."""

from __future__ import annotations

import runpy
import warnings
from pathlib import Path

import pytest

EXAMPLES = sorted(Path(__file__).parents[1].joinpath("examples").glob("*.py"))


@pytest.mark.few(1)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_outputs_are_identical(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run the examples in this process: an interpreter for each would import transformers and diffusers again."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)  # peft reads it
        runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out.endswith("identical: True\n")
