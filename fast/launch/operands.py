"""Operands of kernels in CUDA C++: their addresses, and the tensor maps by which the copy engine reads and writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache

import torch

from fast.launch.driver import STEP

#: Compute capability of the GPUs that the sources are for.
HOPPER = (9, 0)
#: Rows at most: sizes are 32-bit numbers in the sources.
MOST_ROWS = 2**31 - 1
#: Addresses of operands whose tensor maps a call keeps.
MOST = 1024
#: Tiles of rows that share their weights' values in the L2 cache.
GROUP = 8


@lru_cache(maxsize=64)
def processors_of(index: int) -> int:
    """Multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(index).multi_processor_count


def addresses_of(
    tensors: Iterable[torch.Tensor | None],
) -> tuple[list[int], list[torch.Tensor]] | None:
    """Addresses, 0 for None, and the copies that were made of tensors that are not contiguous or not at a multiple of STEP
    bytes: they have to live until the launch. None where one is a negative view, which has to be resolved."""
    addresses, kept = [], []
    for tensor in tensors:
        if tensor is None:
            addresses.append(0)
            continue
        address = tensor.data_ptr()
        if address % STEP or not tensor.is_contiguous() or tensor.is_neg():
            if tensor.is_neg():
                return None
            kept.append(tensor.clone(memory_format=torch.contiguous_format))
            address = kept[-1].data_ptr()
        addresses.append(address)
    return addresses, kept


class TensorMaps(dict[tuple[int, ...], bytes]):
    """Tensor maps at addresses, which `describe` makes; the oldest of more than MOST are forgotten."""

    def __init__(self, describe: Callable[..., bytes]) -> None:
        super().__init__()
        self.describe = describe

    def __missing__(self, at: tuple[int, ...]) -> bytes:
        made = self.describe(*at)
        while len(self) >= MOST:
            self.pop(self._oldest(), None)
        self[at] = made
        return made

    def _oldest(self) -> tuple[int, ...]:
        """The addresses that came first; none where another thread is changing this."""
        try:
            return next(iter(self), ())
        except RuntimeError:
            return ()


__all__ = ["GROUP", "HOPPER", "MOST", "MOST_ROWS", "TensorMaps", "addresses_of", "processors_of"]
