"""Figures of the site: they are next to the rows that they show, outside of docs/, and are copied into the site."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

_FIGURES = "benchmarks/results"


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add every figure, at its path from the root of the project."""
    root = Path(config.docs_dir).parent
    for path in sorted((root / _FIGURES).glob("*.png")):
        files.append(File.generated(config, f"{_FIGURES}/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Rewrite links to figures, which leave docs/ on a code host, for the site."""
    return markdown.replace(f"](../{_FIGURES}/", f"]({_FIGURES}/")
