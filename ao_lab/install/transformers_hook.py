"""What `import ao_lab` leaves behind for transformers, without importing it: our quantizer is there once transformers is.

transformers looks quantizers up in a table, and has no entry points by which a package could name its own. So the table is
filled when it comes into being: a finder waits for the module that reads models, lets it be imported as ever, then registers.
Where that module has been imported before, registering is done at once. Either order of the two imports works, neither library
imports the other, and `import ao_lab` stays as quick as it is.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

#: The module of `from_pretrained` and `save_pretrained`; without it transformers reads and writes no model.
AWAITED = "transformers.modeling_utils"
REGISTERS = "ao_lab.checkpoint.transformers.quantizer"


class Waiting:
    """Finds one module as the other finders do, with a loader that registers afterwards.

    Neither class has its abstract base of importlib.abc: that module takes longer to import than all of this.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The specification of the awaited module; None for all others."""
        if fullname != AWAITED:
            return None
        for finder in sys.meta_path:
            find: Any = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if finder is self or find is None else find(fullname, path, target)
            if spec is not None:
                loader: Any = None if spec.loader is None else Registering(spec.loader)
                spec.loader = loader
                return spec
        return None


class Registering:
    """Another loader, after which our quantizer is registered. The module keeps the other one, as if this had not been."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the other does."""
        result: ModuleType | None = self.loader.create_module(spec)
        return result

    def exec_module(self, module: ModuleType) -> None:
        """As the other does; then register."""
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        register()


def install() -> None:
    """Register now, where transformers reads models already, or else when it comes to that. A second call does nothing."""
    if AWAITED in sys.modules:
        register()
    elif not any(isinstance(finder, Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, Waiting())


def register() -> None:
    """Register with transformers; a UserWarning where its version lacks what our quantizer needs."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Waiting)]
    try:
        importlib.import_module(REGISTERS).register()
    except ImportError as error:
        warnings.warn(
            f"ao_lab is not registered with this transformers ({error}): HfConfig and folders in ao_lab's layout need "
            "transformers 5; `pip install 'ao_lab[hf]'`",
            UserWarning,
            stacklevel=2,
        )


__all__ = ["AWAITED", "install", "register"]
