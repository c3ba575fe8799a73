"""How many bytes of tensors live while a function runs, counted at every operation of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """`most`: the largest sum of sizes of storages, of those made inside, that lived after an operation."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.before: set[int] = set()
        self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for one in tree_leaves((args, kwargs)):
            if isinstance(one, torch.Tensor) and one.untyped_storage()._cdata not in self.storages:
                self.before.add(one.untyped_storage()._cdata)
        result = function(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, torch.Tensor):
                storage = one.untyped_storage()
                if storage._cdata not in self.before:
                    self.storages.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.storages = {key: one for key, one in self.storages.items() if not one[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.storages.values()))
        return result


def most_bytes(run: Callable[[], Any]) -> int:
    """The most bytes that lived beside the function's arguments."""
    with LiveBytes() as live:
        run()
    return live.most
