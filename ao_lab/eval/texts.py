"""Text to measure models on: a file of one's own, or text that every installation has, the source of sympy.

Of sympy those files count whose path's hash falls into a tenth (as the experiments keep them from training), in the order of
their paths. Its version and hash name it, because another version is another text.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from pathlib import Path

SKIPPED = frozenset({"tests", "benchmarks"})
SHARE = 0.1


@dataclass(frozen=True)
class Text:
    """Text and its name, which results carry."""

    name: str
    text: str


def text_of(path: Path | None) -> Text:
    """The text of a file, or the built-in one; ValueError where it is empty, no UTF-8, or sympy is not installed."""
    if path is None:
        return built_in()
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is no UTF-8 text ({error.reason} at byte {error.start}); convert it"
        ) from error
    if not text.strip():
        raise ValueError(f"{path} is empty; give a file with some thousand words")
    return Text(f"{path.name}-{digest(text)}", text)


def built_in() -> Text:
    """A tenth of the source of the installed sympy, about a megabyte."""
    spec = importlib.util.find_spec("sympy")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("the built-in text is the source of sympy, which is not installed; give --text FILE")
    root = Path(spec.submodule_search_locations[0])
    paths = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    chosen = [path for path in paths if held_out(path) and not SKIPPED.intersection(path.split("/"))]
    text = "".join((root / path).read_text(encoding="utf-8").replace("\r\n", "\n") for path in chosen)
    return Text(f"sympy-{importlib.metadata.version('sympy')}-{digest(text)}", text)


def held_out(path: str) -> bool:
    """Whether a file is of the tenth that is measured on."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") < SHARE * 2**64


def digest(text: str) -> str:
    """The first letters of a hash."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]


__all__ = ["Text", "built_in", "text_of"]
