"""In a clone the packages beside `ao_lab` have everyday names; a user's file must not stand in for one of them.

Python takes `reference` and `fast` from the first folder of its path that has them, which is the script's. A `reference.py`
beside a script would be imported in place of the specification and fail far away from its cause, so `import ao_lab` looks
first where the names lead, without running what is there. Nothing is redirected: the user's own `import reference` keeps its
meaning, and ao_lab says no instead. A wheel has them inside `ao_lab` (`packages`), where nothing can be in the way.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec

from ao_lab.install.packages import INSIDE

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
#: What every part of ao_lab imports. `experiments` is looked at where the command line uses it.
PACKAGES = ("reference", "fast")


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


__all__ = ["PACKAGES", "check", "location"]
