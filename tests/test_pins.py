"""The pins of scripts/: each package once, and in those of the demo all that the package itself needs."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PIN = re.compile(r"^([\w.-]+)==\S+$", re.MULTILINE)


def pinned(name: str) -> list[str]:
    return [found.lower().replace("_", "-") for found in PIN.findall((ROOT / "scripts" / name).read_text())]


def test_each_package_is_pinned_once() -> None:
    counted = Counter(pinned("requirements-demo.txt") + pinned("requirements.txt") + pinned("requirements-alone.txt"))
    assert [name for name, num in counted.items() if num > 1] == []
    assert "-r requirements-demo.txt" in (ROOT / "scripts" / "requirements.txt").read_text().splitlines()


def test_the_demo_has_what_the_package_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["transformers"]
    names = {re.match(r"[\w.-]+", each)[0].lower().replace("_", "-") for each in wanted}
    assert names <= set(pinned("requirements-demo.txt"))
