"""What a package's page shows beside pyproject.toml: addresses of the project, and README with links that work there.

Nothing here knows an address: the environment variable AO_LAB_REPOSITORY gives it when a package is built, and the release
workflow sets it to the repository that it runs in. Without it the metadata have no project URLs, and README's relative links,
which would lead nowhere on the page, become their text. A wheel that is made of an sdist has the sdist's metadata.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

VARIABLE = "AO_LAB_REPOSITORY"
VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
#: A link or an image in Markdown whose target is a file of the repository.
RELATIVE = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|mailto:|#)([^)\s]+)\)")


class Page(MetadataHookInterface):
    """Gives hatchling the fields `urls` and `readme`, which pyproject.toml calls dynamic."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Fill both fields in."""
        root, repository = Path(self.root), os.environ.get(VARIABLE, "").rstrip("/")
        found = VERSION.search((root / "ao_lab" / "install" / "versions.py").read_text("utf-8"))
        if found is None:
            raise ValueError('ao_lab/install/versions.py has no line __version__ = "..."')
        metadata["urls"] = urls(repository)
        text = absolute((root / "README.md").read_text("utf-8"), repository, f"v{found[1]}")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def urls(repository: str) -> dict[str, str]:
    """The addresses of a repository by their labels; none where it is not known. ValueError for what is no web address."""
    if not repository:
        return {}
    if not repository.startswith("https://"):
        raise ValueError(f"{VARIABLE}={repository!r} is no address; give the repository's, https://...")
    return {
        "Repository": repository,
        "Documentation": f"{repository}/blob/main/docs/index.md",
        "Issues": f"{repository}/issues",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
    }


def absolute(text: str, repository: str, tag: str) -> str:
    """README with relative links led to the files of a tag, or to their text alone; code blocks stay as they are."""
    pieces, end = [], 0
    for fence in FENCE.finditer(text):
        pieces += [_links(text[end : fence.start()], repository, tag), fence[0]]
        end = fence.end()
    return "".join([*pieces, _links(text[end:], repository, tag)])


def _links(text: str, repository: str, tag: str) -> str:
    def target(found: re.Match[str]) -> str:
        image, label, path = found.groups()
        if not repository:
            return "" if image else label
        return f"{image}[{label}]({repository}/{'raw' if image else 'blob'}/{tag}/{path})"

    return RELATIVE.sub(target, text)
