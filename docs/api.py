"""API pages: those of `ao_lab` by topic (`topics.py`), those of `reference` and `fast` by folder; and what docstrings must say.

A function that takes arrays has to state, in its docstring or in those that it refers to ("errors as in `quantize`"), which
shapes and dtypes it takes and which errors it raises: `unstated` lists those that do not.
"""

from __future__ import annotations

import importlib
import inspect
import re
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import ao_lab
from docs.topics import DATA, TOPICS, Topic, names

#: Where the methods that all configurations have are described.
WITH_INHERITED = ("ao_lab.SchemeConfig",)
DOCS = Path(__file__).resolve().parent
#: Packages whose public names have a place on a page, and submodules of `ao_lab` that are public too.
PACKAGES = ("ao_lab", "reference", "fast")
SUBMODULES = ("ao_lab.jax", "ao_lab.optim", "ao_lab.plot", "ao_lab.testing")
ABOUT = {
    "reference": (
        "The specification",
        "Functions of NumPy arrays, JAX arrays and torch tensors. In an installed wheel: `ao_lab.reference`.",
    ),
    "fast": (
        "The kernels",
        "The same functions for torch tensors, by kernels where there are some. In an installed wheel: `ao_lab.fast`.",
    ),
}
#: Words that say which shapes, which dtypes, which errors.
STATED = {
    "shapes": re.compile(r"shape|\baxis\b|\bmatri|\([^)]*\bK\b[^)]*\)"),
    "dtypes": re.compile(r"dtype|float(32|16|64)|uint(8|16|32)|int8|boolean"),
    "errors": re.compile(r"(Value|Type)Error"),
}
#: Arguments that hold arrays.
ARRAYS = {"x", "a", "b", "w", "q", "g", "codes", "packed", "values", "gate", "up", "first", "scale"}


def pages() -> dict[str, str]:
    """Markdown of each page by its file name."""
    made = {
        f"{slug}.md": page(one.title, one.about + guides(one), {"": names(one)})
        for slug, one in TOPICS.items()
    }
    made |= {f"{package}.md": page(*ABOUT[package], by_folder(package)) for package in ABOUT}
    links = [
        f"- [{one.title}]({slug}.md): {', '.join(map(linked, names(one)))}" for slug, one in TOPICS.items()
    ]
    links += [f"- [{title}]({package}.md) `{package}`" for package, (title, _) in ABOUT.items()]
    listed = "\n".join(name.removesuffix(".md") for name in made)
    made["index.md"] = (
        "# API by topic\n\n" + "\n".join(links) + f"\n\n```{{toctree}}\n:hidden:\n\n{listed}\n```\n"
    )
    return made


def page(title: str, about: str, sections: dict[str, list[str]]) -> str:
    """One page: names under headings, none where the heading is empty."""
    text = f"# {title}\n\n{about}\n"
    for heading, found in sections.items():
        text += f"\n## {heading}\n" if heading else ""
        text += "".join(f"\n```{{eval-rst}}\n{directive(name)}\n```\n" for name in found)
    return text


def guides(topic: Topic) -> str:
    """The pages that show how the names are used, by their titles."""
    found = []
    for path in topic.guides.split():
        title = (DOCS / path).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        found.append(f"[{title}](../../{path})")
    return f" Guide: {', '.join(found)}." if found else ""


def linked(name: str) -> str:
    """A name as a link to its place."""
    return f"{{py:obj}}`{name.removeprefix('ao_lab.')} <{name}>`"


def directive(name: str) -> str:
    """What autodoc is asked for; of a class that is one of `ao_lab` under another name, where that is described."""
    value, last = value_of(name), name.rpartition(".")[2]
    if inspect.isclass(value):
        own = getattr(ao_lab, last, None)
        if own is value and name != f"ao_lab.{last}":
            return f".. py:class:: {name}\n\n   The class :py:class:`ao_lab.{last}`."
        return f".. autoclass:: {name}\n   :members:" + "\n   :inherited-members:" * (name in WITH_INHERITED)
    if callable(value):
        return f".. autofunction:: {name}"
    # Tuples of names are their values too.
    values = f" {', '.join(f'``{one}``' for one in value)}." if isinstance(value, tuple) else ""
    return f".. py:data:: {name}\n\n   {DATA[last]}{values}"


def by_folder(package: str) -> dict[str, list[str]]:
    """Full names of a package under the first folder of the modules that define them."""
    found: dict[str, list[str]] = {}
    for name in public(package):
        home = getattr(value_of(f"{package}.{name}"), "__module__", None) or package
        folder = home.split(".")[1] if home.startswith(f"{package}.") else "formats"
        found.setdefault(folder, []).append(f"{package}.{name}")
    return dict(sorted(found.items()))


def value_of(name: str) -> Any:
    """What a full name names."""
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


@lru_cache(maxsize=1)
def places() -> dict[str, str]:
    """Full names that have a place on a page, by themselves and, of `ao_lab`, by their last part."""
    full = [name for one in TOPICS.values() for name in names(one)]
    full += [f"{package}.{name}" for package in ABOUT for name in public(package)]
    short = {name.rpartition(".")[2]: name for name in reversed(full) if name.startswith("ao_lab.")}
    return {name: name for name in full} | short


def public(name: str) -> list[str]:
    """Public names of a package."""
    return [one for one in importlib.import_module(name).__all__ if not one.startswith("__")]


def unstated() -> list[str]:
    """Functions of arrays that do not state shapes, dtypes or errors."""
    found = []
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in public(package):
            value = getattr(module, name)
            if inspect.isfunction(value) and takes_arrays(value):
                text = contract(module, name, set())
                found += [
                    f"{package}.{name} states no {what}"
                    for what, words in STATED.items()
                    if not words.search(text)
                ]
    return found


def takes_arrays(function: Any) -> bool:
    """Whether the first argument of a function holds an array."""
    return next(iter(inspect.signature(function).parameters), "") in ARRAYS


def contract(module: ModuleType, name: str, seen: set[tuple[str, str]]) -> str:
    """A docstring with those of the public functions that it names."""
    key = (module.__name__, name)
    if key in seen or not hasattr(module, name):
        return ""
    seen.add(key)
    text = inspect.getdoc(getattr(module, name)) or ""
    parts = [text]
    for package, other in re.findall(r"`(?:(reference|fast|ao_lab)\.)?(\w+)(?:\([^`]*\))?`", text):
        parts.append(contract(importlib.import_module(package) if package else module, other, seen))
    if module.__name__ == "fast":
        # The kernels compute what the specification says, under its name.
        parts.append(contract(importlib.import_module("reference"), name, seen))
    return "\n".join(parts)
