"""What the site has from outside of docs/: the README as its first page, three more pages of the root, and figures.

Links of pages are those of the repository, so that they also work where it is hosted. Here they get their targets in
the site; files that the site does not have are linked in the repository.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_ROOT_PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
_FIGURES = "benchmarks/results"
_LINK = re.compile(r"(\]\()((?!\w+:|#)[^)#\s]+)")  # of Markdown, relative
_PICTURE = re.compile(r'<picture>.*?srcset="(.*?)".*?<img alt="(.*?)" src="(.*?)".*?</picture>', re.DOTALL)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages of the root, and every figure at its path in the repository."""
    root = Path(config.docs_dir).parent
    figures = [path for path in (root / _FIGURES).iterdir() if path.suffix in (".png", ".svg")]
    sources = {target: root / name for name, target in _ROOT_PAGES.items()}
    sources |= {f"{_FIGURES}/{path.name}": path for path in sorted(figures)}
    for target, path in sources.items():
        files.append(File.generated(config, target, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to pages and figures of the site, and others to the repository."""
    if page.file.src_uri.startswith("reference/"):
        return markdown
    root = Path(config.docs_dir).parent
    source = PurePosixPath(os.path.relpath(page.file.abs_src_path or config.docs_dir, root))

    def linked(match: re.Match[str]) -> str:
        path = os.path.normpath(source.parent / match[2])
        target = _ROOT_PAGES.get(path, path.removeprefix("docs/"))
        if files.get_file_from_path(target) is None:
            return f"{match[1]}{config.repo_url}/blob/main/{path}"
        return match[1] + os.path.relpath(target, PurePosixPath(page.file.src_uri).parent)

    both = r"![\2](\3#only-light)\n![\2](\1#only-dark)"  # by the site's own switch
    return _LINK.sub(linked, _PICTURE.sub(both, markdown))
