"""The public names of ao_lab, read from the stub `ao_lab/__init__.pyi` that type checkers read."""

from __future__ import annotations

import ast
import importlib
from functools import cache
from pathlib import Path
from typing import Any

from ao_lab.install.packages import module_name

STUB = Path(__file__).resolve().parents[1] / "__init__.pyi"


@cache
def homes() -> dict[str, str]:
    """The module that defines each public name, submodules left out."""
    imports = [node for node in ast.parse(STUB.read_text()).body if isinstance(node, ast.ImportFrom)]
    named = {alias.name: node.module or "" for node in imports for alias in node.names}
    return {name: module for name, module in named.items() if module != "ao_lab"}


def public(name: str) -> Any:
    """The object of a public name. Functions of the specification take torch tensors as well: those run in `fast`."""
    module = homes()[name]
    value = getattr(importlib.import_module(module), name)
    if module != module_name("reference") or not callable(value) or isinstance(value, type):
        return value
    from ao_lab.dispatch import dispatched

    return dispatched(name)


__all__ = ["homes", "public"]
