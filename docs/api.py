"""Build the API pages of `ao_lab`, `reference` and `fast` with pdoc into ``build/docs``, and check them.

``python docs/api.py [FOLDER]``, or ``make docs``. Pages are made from docstrings. The build fails on a warning of pdoc, on a
public name without a place on its page or without a docstring, and on a function that takes arrays and whose docstring (with
those that it refers to: "errors as in `quantize`") does not say which shapes and dtypes it takes and which errors it raises.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

#: Packages whose public names have a page, and submodules that are public too.
PACKAGES = ("ao_lab", "reference", "fast")
SUBMODULES = ("ao_lab.jax", "ao_lab.testing")
#: Warnings that concern no page: annotations that only type checkers import stand as text instead of a link; a private name
#: that torch sets on tensors.
HARMLESS = ("Error parsing type annotation", "QuantizedTensor._is_param")
#: Words that say which shapes, which dtypes, which errors.
STATED = {
    "shapes": re.compile(r"shape|\baxis\b|\bmatri|\([^)]*\bK\b[^)]*\)"),
    "dtypes": re.compile(r"dtype|float(32|16|64)|uint(8|16|32)|int8|boolean"),
    "errors": re.compile(r"(Value|Type)Error"),
}
#: Arguments that hold arrays.
ARRAYS = {"x", "a", "b", "w", "q", "g", "codes", "packed", "values", "gate", "up", "first", "scale"}


def main(folder: str = "build/docs") -> int:
    """Build into a folder; 1 and the problems on stderr where there are any."""
    root = Path(__file__).resolve().parents[1]
    sys.path.insert(0, str(root))
    problems = [*build(Path(folder)), *missing(Path(folder)), *unstated()]
    sys.stderr.writelines(f"{problem}\n" for problem in problems)
    if not problems:
        sys.stdout.write(f"API pages: {Path(folder) / 'index.html'}\n")
    return 1 if problems else 0


def build(folder: Path) -> list[str]:
    """Write the pages; returns pdoc's warnings."""
    import pdoc

    own = [spec for package in PACKAGES for spec in (package, f"!{package}.")]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pdoc.pdoc(*own, *SUBMODULES, output_directory=folder)
    return [
        f"pdoc: {one.message}"
        for one in caught
        if "pdoc" in str(one.filename) and not any(words in str(one.message) for words in HARMLESS)
    ]


def public(name: str) -> list[str]:
    """Public names of a package."""
    return [one for one in importlib.import_module(name).__all__ if not one.startswith("__")]


def missing(folder: Path) -> list[str]:
    """Public names that have no place on the page of their package, and those without a docstring."""
    found = []
    for package in PACKAGES:
        page = (folder / f"{package}.html").read_text(encoding="utf-8")
        module = importlib.import_module(package)
        for name in public(package):
            value = getattr(module, name)
            if f'id="{name}"' not in page:
                found.append(f"{package}.{name} is not on its page")
            if (inspect.isclass(value) or callable(value)) and not (value.__doc__ or "").strip():
                found.append(f"{package}.{name} has no docstring")
    return found


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


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
