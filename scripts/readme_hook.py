"""Gives the packages the README with absolute links and figures, as an index has no other files of the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(\]\()((?!\w+:|#)[^)\s]+)")  # of Markdown, relative
_FIGURE = re.compile(r'((?:src|srcset)=")((?!\w+:)[^"]+)')


class ReadmeHook(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        readme = Path(self.root, "README.md").read_text(encoding="utf-8")
        repository = metadata["urls"]["Repository"]
        readme = _FIGURE.sub(rf"\g<1>{repository}/raw/main/\2", readme)
        readme = _LINK.sub(rf"\g<1>{repository}/blob/main/\2", readme)
        metadata["readme"] = {"content-type": "text/markdown", "text": readme}
