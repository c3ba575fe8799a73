"""A product as a choice sees it: lengths, dtypes, what the weight holds, and the device.

No tensor is part of it, so that `choose` can be asked for any number of rows and for a GPU that is not here.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from fast.kernels.triton_small_m.layout import ArrangedWeight
    from reference import Quantized, Scheme

#: Layouts of a weight: as `reference.quantize` stores it, in the order of the tensor core's fragments, as 8-bit codes beside
#: inputs that are codes too; in 2:4 storage beside inputs of the same element, and int4 there.
PLAIN, PRESHUFFLED, CODES, SPARSE, SPARSE_INT4 = "plain", "preshuffled", "codes", "2:4", "2:4 int4"
#: Compute capability that kernels in CUDA C++ are compiled for.
SM90 = (9, 0)


class Device(NamedTuple):
    """What a choice asks of a device. capability: of a CUDA device, (0, 0) of others. processors: its multiprocessors. nvrtc:
    whether kernels in CUDA C++ can be compiled."""

    capability: tuple[int, int]
    processors: int
    nvrtc: bool

    @property
    def is_sm90(self) -> bool:
        """Whether kernels in CUDA C++ run: a GPU of capability 9.0, and NVRTC."""
        return self.capability == SM90 and self.nvrtc


#: An H100 or H200 with torch's own wheels: what pages and tests of choices are made for where there is no GPU.
HOPPER = Device(SM90, 132, True)


@lru_cache(maxsize=64)
def device_of(device: torch.device) -> Device:
    """The facts of a device. Under Triton's interpreter, and on a CPU, there is no CUDA C++."""
    if device.type != "cuda":
        return Device((0, 0), HOPPER.processors, False)
    from fast.launch.launcher import interpreted
    from fast.launch.nvrtc import missing_compiler

    properties = torch.cuda.get_device_properties(device)
    nvrtc = missing_compiler() is None and not interpreted()
    return Device((properties.major, properties.minor), properties.multi_processor_count, nvrtc)


class Problem(NamedTuple):
    """A product of rows (`rows`, k) by a weight (n, k).

    rows: of experts those of one, on average. layout: see above. inputs: the dtype of the rows; of "codes" and
    "2:4" that of the result. element, group, zero: what a preshuffled weight has, see `ArrangedWeight`; of
    "codes" the inputs' element and whether they have zero points, of "2:4" the weight's element. filled:
    whether a preshuffled weight has rows or columns that are none of its own, a plain one tiled scales.
    products: 2 where two weights like this one are multiplied at once. experts: how many weights there are, 0
    for one matrix. weight: of a plain weight scheme, axis and whether it is packed.
    """

    layout: str
    rows: float
    n: int
    k: int
    inputs: torch.dtype
    device: Device
    element: str = ""
    group: int = 0
    zero: bool = False
    filled: bool = False
    products: int = 1
    experts: int = 0
    weight: tuple[Scheme, int, bool] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k)."""
        return self.n, self.k


def of_preshuffled(
    w: ArrangedWeight, rows: float, inputs: torch.dtype, products: int = 1, experts: int = 0
) -> Problem:
    """Rows of a dtype by a preshuffled weight, or by one of `experts`."""
    (n, k), filled = w.shape, w.shape != (w.rows, w.columns)
    facts: tuple[Any, ...] = (w.element, w.group, w.zero is not None, filled)
    return Problem(PRESHUFFLED, rows, n, k, inputs, device_of(w.words.device), *facts, products, experts)


def of_stored(w: Quantized, rows: int, inputs: torch.dtype) -> Problem:
    """Rows of a dtype by a weight in the plain layout; (0, 0) where it is no matrix."""
    n, k = (int(length) for length in w.shape) if len(w.shape) == 2 else (0, 0)
    weight = (w.scheme, w.axis, w.packed)
    filled = bool(w.tiled)
    return Problem(PLAIN, rows, n, k, inputs, device_of(w.codes.device), filled=filled, weight=weight)


def of_codes(
    x: Scheme, w: Scheme, shape: tuple[int, int], rows: int, dtype: torch.dtype, device: torch.device
) -> Problem:
    """Rows of 8-bit codes by the codes of a weight (N, K), into a dtype."""
    zero = x.zero is not None
    return Problem(CODES, rows, *shape, dtype, device_of(device), element=x.element, zero=zero)


def of_sparse(values: torch.Tensor, rows: int, dtype: torch.dtype) -> Problem:
    """Rows of the element of 2:4 values (N, K/2) by these, into a dtype."""
    n, k = int(values.shape[0]), 2 * int(values.shape[1])
    element = str(values.dtype).removeprefix("torch.")
    return Problem(SPARSE, rows, n, k, dtype, device_of(values.device), element)


def of_sparse_int4(
    codes: torch.Tensor, rows: int, inputs: torch.dtype, group: int, zero: bool, products: int = 1
) -> Problem:
    """Rows of a dtype by int4 in 2:4 storage, codes (N, K/4)."""
    n, k = int(codes.shape[0]), 4 * int(codes.shape[1])
    facts = ("int4", group, zero, False, products)
    return Problem(SPARSE_INT4, rows, n, k, inputs, device_of(codes.device), *facts)


__all__ = [
    "CODES",
    "HOPPER",
    "PLAIN",
    "PRESHUFFLED",
    "SM90",
    "SPARSE",
    "SPARSE_INT4",
    "Device",
    "Problem",
    "device_of",
    "of_codes",
    "of_preshuffled",
    "of_sparse",
    "of_sparse_int4",
    "of_stored",
]
