"""Where `reference`, `fast` and `experiments` are: beside `ao_lab` in a clone, inside it where a wheel was installed.

`import reference` works in a clone. A wheel must not put everyday names into site-packages, where a folder `experiments` of a
user's project would be hidden by ours, so it holds `ao_lab.reference`, `ao_lab.fast` and `ao_lab.experiments`, and its build
(`.ci/wheel.py`) writes our imports accordingly. Both spellings are found in both places, after everything else has failed to
find a module, so that one program and one pickle serve a clone and a wheel; the objects are the same.

In a clone a user's file must not stand in for one of them: Python takes `reference` from the first folder of its path that has
it, which is the script's, and a `reference.py` there would fail far away from its cause. So `import ao_lab` looks first where
the names lead (`check`), without running what is there. Nothing is redirected: the user's own `import reference` keeps its
meaning, and ao_lab says no instead. The names that are public are those of a stub, each imported at its first use (`public`).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

NAMES = ("reference", "fast", "experiments")
HOME = Path(__file__).resolve().parents[1]
#: Whether they lie inside `ao_lab`.
INSIDE = (HOME / NAMES[0] / "__init__.py").is_file()
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
#: What every part of ao_lab imports. `experiments` is looked at where the command line uses it.
PACKAGES = ("reference", "fast")
#: What type checkers read of `ao_lab`: its public names.
STUB = HOME / "__init__.pyi"


def module_name(package: str) -> str:
    """The name under which this copy of ao_lab imports one of NAMES."""
    return f"ao_lab.{package}" if INSIDE else package


def own_spelling(name: str) -> str | None:
    """How this copy of ao_lab spells a module that was asked for in the other spelling; None for any other name."""
    inside = name.startswith("ao_lab.")
    bare = name.removeprefix("ao_lab.")
    if inside == INSIDE or bare.partition(".")[0] not in NAMES:
        return None
    return bare if inside else f"ao_lab.{name}"


def check(*names: str) -> None:
    """ImportError where one of the names leads elsewhere than to the package beside ao_lab; it names the file in the way."""
    for name in () if INSIDE else names:
        found = location(name)
        if found is None:
            raise ImportError(
                f"ao_lab needs its package {name!r}, which should lie in {ROOT} and is not there; install ao_lab again"
            )
        if os.path.dirname(os.path.realpath(found)) != os.path.realpath(os.path.join(ROOT, name)):
            raise ImportError(
                f"{found} is in the way: ao_lab imports its own package {name!r} from {ROOT}, and Python finds that "
                f"file first. Rename it, or run from another folder (python -P leaves the script's folder out of the path)",
                name=name,
                path=found,
            )


def location(name: str) -> str | None:
    """The file that a top-level name leads to: of the module that is loaded already, else of what would be. None: nothing."""
    spec = spec_of(name)
    if spec is None:
        return getattr(sys.modules.get(name), "__file__", None)
    if spec.origin is not None and spec.has_location:
        return spec.origin
    places = list(spec.submodule_search_locations or ())
    return places[0] if places else spec.origin


def spec_of(name: str) -> ModuleSpec | None:
    """Where a name leads, without importing it."""
    if name in sys.modules:
        return getattr(sys.modules[name], "__spec__", None)
    return importlib.util.find_spec(name)


class Alias(ModuleType):
    """A module in the other spelling: its names are those of the module that it leads to."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.modules[own_spelling(self.__name__) or ""], name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set nothing that is there: importing `quantize.stored` must not hide the function `quantize` behind its package."""
        if name.startswith("__") or not hasattr(self, name):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return dir(sys.modules[own_spelling(self.__name__) or ""])


class Spellings:
    """Finds modules in the other spelling."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A specification that leads to the module, or None."""
        own = own_spelling(fullname)
        loader: Any = self
        return ModuleSpec(fullname, loader, is_package=True) if own is not None else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """An empty module that asks the other for its names."""
        own = own_spelling(spec.name) or ""
        try:
            importlib.import_module(own)
        except ModuleNotFoundError as error:
            if error.name != own:
                raise
            raise ModuleNotFoundError(f"No module named {spec.name!r}", name=spec.name) from None
        module = Alias(spec.name)
        # Its own, and empty: what lies below it is looked for here again, not in the other's folder a second time.
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is left to be run."""


def install() -> None:
    """Take part in imports, once, behind every other finder."""
    if not any(isinstance(finder, Spellings) for finder in sys.meta_path):
        finder: Any = Spellings()
        sys.meta_path.append(finder)


@cache
def homes() -> dict[str, str]:
    """The module that defines each public name, submodules left out."""
    from reference.lazy import homes_of

    return {name: module for name, module in homes_of(STUB).items() if module != "ao_lab"}


def public(name: str) -> Any:
    """The object of a public name. Functions of the specification take torch tensors as well: those run in `fast`."""
    module = homes()[name]
    value = getattr(importlib.import_module(module), name)
    if module != module_name("reference") or not callable(value) or isinstance(value, type):
        return value
    from ao_lab.dispatch import dispatched

    return dispatched(name)


__all__ = ["INSIDE", "NAMES", "PACKAGES", "STUB", "check", "homes", "install", "module_name", "public"]
