"""Old module names, so that existing pickles still load: a pickle names the module in which each class was defined."""

from __future__ import annotations

import importlib
import sys

#: `reference`, or `ao_lab.reference` in a wheel.
HERE = __name__.rpartition(".")[0]
#: Modules that no longer exist, and those that define their classes now.
RENAMED = {
    f"{HERE}.compress": f"{HERE}.sparsity.compress",
    f"{HERE}.scales": f"{HERE}.quantize.stored",
}
#: Modules whose name is a package now: the module that defines their classes, and the classes.
PACKAGES = {
    f"{HERE}.formats": (f"{HERE}.formats.formats", ("Format",)),
    f"{HERE}.quantize": (f"{HERE}.quantize.stored", ("Quantized",)),
    f"{HERE}.schemes": (f"{HERE}.schemes.schemes", ("Scale", "Scheme", "Zero")),
}


def install() -> None:
    """Make the old names importable. `reference` calls it once, after it has imported all of its modules."""
    for old, new in RENAMED.items():
        sys.modules.setdefault(old, importlib.import_module(new))
    for package, (home, names) in PACKAGES.items():
        for name in names:
            setattr(sys.modules[package], name, getattr(sys.modules[home], name))


__all__ = ["install"]
