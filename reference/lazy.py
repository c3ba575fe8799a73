"""Packages whose public names are imported when they are first used.

The names and the modules that define them stand in `__init__.pyi`, one a line, which type checkers read as well:

    from reference.formats.encode import encode as encode

Where a folder has the name of a function (`quantize`), the import of anything in it would put the folder in the function's
place: such functions are imported by `__init__.py` itself, before anyone can ask.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def homes_of(stub: Path) -> dict[str, str]:
    """The module that defines each public name of a stub."""
    imports = [node for node in ast.parse(stub.read_text("utf-8")).body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}


def exported(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package, from the stub beside its file."""
    homes = homes_of(Path(file).with_suffix(".pyi"))
    names = sorted(homes)

    def find(name: str) -> Any:
        """Import a public name when it is first used."""
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return find, lambda: names, names


__all__ = ["exported", "homes_of"]
