"""What `import ao_lab` leaves behind for transformers and the libraries around it, without importing them.

transformers looks quantizers up in a table, and has no entry points by which a package could name its own. So the table is
filled when it comes into being: a finder waits for the module that reads models, lets it be imported as ever, then registers.
The same for `Trainer`, accelerate, peft and torch's asynchronous checkpoints, where they handle weights in their own way. Where
a module has been imported before, registering is done at once. Either order of the imports works, no library imports the other,
and `import ao_lab` stays as quick as it is.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import TYPE_CHECKING, Any

from ao_lab.install.versions import check_loaded

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

#: By the module that is waited for, our function that registers with it. transformers reads and writes models in the first.
AWAITED = {
    "transformers.modeling_utils": "ao_lab.checkpoint.transformers.quantizer:register",
    "transformers.trainer": "ao_lab.checkpoint.transformers.methods:register",
    "accelerate.utils.modeling": "ao_lab.tensor.libraries:register_accelerate",
    "accelerate.utils.fsdp_utils": "ao_lab.tensor.libraries:register_accelerate",
    "peft.peft_model": "ao_lab.tensor.libraries:register_peft",
    "torch.distributed.checkpoint._state_dict_stager": "ao_lab.tensor.libraries:register_async_checkpoints",
}


class Waiting:
    """Finds the modules that are waited for as the other finders do, with a loader that registers afterwards.

    Neither class has its abstract base of importlib.abc: that module takes longer to import than all of this.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The specification of an awaited module; None for all others."""
        if fullname not in AWAITED:
            return None
        for finder in sys.meta_path:
            find: Any = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if finder is self or find is None else find(fullname, path, target)
            if spec is not None:
                loader: Any = None if spec.loader is None else Registering(spec.loader, fullname)
                spec.loader = loader
                return spec
        return None


class Registering:
    """Another loader, after which ours is registered. The module keeps the other one, as if this had not been."""

    def __init__(self, loader: Any, name: str) -> None:
        self.loader, self.name = loader, name

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
        register(self.name)


def install() -> None:
    """Register now with what has been imported already, or else when it is. A second call does nothing."""
    for name in AWAITED:
        if name in sys.modules:
            register(name)
    waits = any(name not in sys.modules for name in AWAITED)
    if waits and not any(isinstance(finder, Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, Waiting())


def register(name: str) -> None:
    """Register with an awaited module; a UserWarning where its version lacks what ours needs.

    Where all have been imported, nothing waits any more.
    """
    if all(other in sys.modules for other in AWAITED):
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Waiting)]
    check_loaded()
    try:
        module, _, function = AWAITED[name].partition(":")
        getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError) as error:
        warnings.warn(
            f"ao_lab is not registered with this {name.partition('.')[0]} ({error}): HfConfig, folders in ao_lab's layout and "
            "loops of transformers need transformers 5; `pip install 'ao_lab[hf]'`",
            UserWarning,
            stacklevel=2,
        )


__all__ = ["AWAITED", "install", "register"]
