"""What the package's page shows: README.md, and the addresses of the repository that the release is built from.

A page of a package lies beside no files: links and pictures are absolute there, or are no links. TRIMTAB_REPOSITORY is
the address of the repository, https://HOST/OWNER/NAME, and TRIMTAB_REF the tag that is built; without them words alone
are left.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^]]*)\]\((?!\w+:|#)([^)]+)\)")


def page(text: str, repository: str, ref: str) -> str:
    """`text` with absolute links and pictures; without those, where no repository is given."""

    def absolute(found: re.Match[str]) -> str:
        picture, words, path = found.groups()
        if not repository:
            return "" if picture else words
        return f"{picture}[{words}]({repository}/{'raw' if picture else 'blob'}/{ref}/{path})"

    return LINK.sub(absolute, text)


def urls(repository: str, ref: str) -> dict[str, str]:
    """The addresses that the page lists."""
    places = {"Documentation": "docs/start.md", "Changelog": "CHANGELOG.md"}
    found = {name: f"{repository}/blob/{ref}/{path}" for name, path in places.items()}
    return {"Source": repository, **found, "Issues": f"{repository}/issues"} if repository else {}


class PackagePage(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        repository, ref = os.environ.get("TRIMTAB_REPOSITORY", "").rstrip("/"), os.environ.get("TRIMTAB_REF", "HEAD")
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": page(text, repository, ref)}
        metadata["urls"] = urls(repository, ref)
