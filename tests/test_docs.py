"""The documentation refers to things that exist: files of the package, names in them, pages and headings. Its reference
has every public name."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import weightstream

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "weightstream"
PAGES = [*sorted(ROOT.glob("docs/**/*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
ROOMS = sorted(folder.name for folder in SOURCE.iterdir() if folder.is_dir() and not folder.name.startswith("__"))
PATHS = re.compile(rf"`((?:{'|'.join(ROOMS)})/[\w/]*)(\.py)?((?:\.[A-Za-z]\w*)*)`")
FILES = re.compile(r"`((?:tests|scripts|benchmarks|docs|examples)/[\w./-]+)")
LINKS = re.compile(r"\[[^\]]*\]\(([^)#\s]*)(?:#([\w-]+))?\)")


def _pages(*left_out: str) -> list[object]:
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES if page.name not in left_out]


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", _pages("renames.md"))  # which cites old paths
def test_files_and_names_cited_by_a_page_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    missing = [path for path in FILES.findall(text) if not list(ROOT.glob(path.rstrip("./")))]
    for path, _, names in PATHS.findall(text):
        file = SOURCE / f"{path}.py"
        if not file.is_file() and not (SOURCE / path).is_dir():
            missing.append(path)
        elif names:
            source = file.read_text(encoding="utf-8")
            missing += [f"{path}: {name}" for name in names[1:].split(".") if not re.search(rf"\b{name}\b", source)]
    assert not missing


@pytest.mark.parametrize("page", _pages())
def test_links_between_pages_resolve(page: Path) -> None:
    broken = []
    for target, anchor in LINKS.findall(page.read_text(encoding="utf-8")):
        if "://" in target or target.startswith("mailto:"):
            continue
        there = (page.parent / target).resolve() if target else page
        if not there.exists() or (anchor and anchor not in _anchors(there)):
            broken.append(f"{target}#{anchor}" if anchor else target)
    assert not broken


def test_each_public_name_is_in_the_reference() -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in sorted(ROOT.glob("docs/reference/*.md")))
    assert sorted(re.findall(r"^::: weightstream\.(\w+)$", pages, re.MULTILINE)) == sorted(weightstream.__all__)


def test_each_page_is_in_the_navigation_of_the_site() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")]
    assert [page for page in pages if f": {page}\n" not in navigation] == []


@pytest.mark.stress
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    subprocess.run(["scripts/site", tmp_path / "site"], cwd=ROOT, check=True, timeout=280)
    assert "from_pretrained" in (tmp_path / "site" / "reference" / "loading" / "index.html").read_text(encoding="utf-8")
