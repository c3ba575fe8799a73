"""Modules that were renamed, so that pickles of before still load: they name the module in which each class stood."""

from __future__ import annotations

import importlib
import sys

#: Modules that are gone, and those that hold their classes now.
RENAMED = {
    "reference.compress": "reference.sparsity.compress",
    "reference.scales": "reference.quantize.scales",
}
#: Modules whose name is a package now, and the classes that stood in them.
PACKAGES = {
    "reference.formats": ("reference.formats.formats", ("Format",)),
    "reference.quantize": ("reference.quantize.quantize", ("Quantized",)),
    "reference.schemes": ("reference.schemes.schemes", ("Scale", "Scheme", "Zero")),
}


def install() -> None:
    """Enter the old names. Called once, when `reference` has imported all of its modules."""
    for old, new in RENAMED.items():
        sys.modules.setdefault(old, importlib.import_module(new))
    for package, (home, names) in PACKAGES.items():
        for name in names:
            setattr(sys.modules[package], name, getattr(sys.modules[home], name))


__all__ = ["install"]
