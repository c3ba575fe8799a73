"""Checkpoint formats of other libraries: one module for each, which registers its reader under the name that `config.json` has.

A reader is given the folder (headers only: no tensor has been read) and the object `quantization_config` of `config.json`, and
returns `Records`: for every quantized weight its scheme, its shape, the tensors it is made of, and the function that makes a
`QuantizedTensor` of them. `ao_lab.load_pretrained` checks and reads the rest. A new format is a module in this folder, or a
folder with a module `reader`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ao_lab.checkpoint.io.shards import Folder
    from ao_lab.checkpoint.records import Records

#: Of a folder and its `quantization_config`; ValueError that names the folder and the rule for what no scheme represents.
Reader = Callable[["Folder", Mapping[str, Any]], "Records"]
_READERS: dict[str, Reader] = {}


def reader(*methods: str) -> Callable[[Reader], Reader]:
    """Registers a reader under the values of `quant_method` that it is for."""

    def registered(function: Reader) -> Reader:
        for method in methods:
            if _READERS.setdefault(method, function) is not function:
                raise ValueError(f"quant_method {method!r} has a reader already: {_READERS[method]}")
        return function

    return registered


@cache
def readers() -> Mapping[str, Reader]:
    """Every registered reader by `quant_method`; imports the modules of this folder."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}" + (".reader" if module.ispkg else ""))
    return _READERS


__all__ = ["Reader", "reader", "readers"]
