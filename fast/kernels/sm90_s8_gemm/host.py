"""Products of many rows of int8 codes on a GPU: what is taken, what is launched, and calls like one before it."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from fast.kernels.sm90_s8_gemm.products import INTEGER
from fast.kernels.sm90_s8_gemm.select import choose, programs_of
from fast.kernels.sm90_s8_gemm.variants import FEATURES, ROW, THREADS, Variant, sources
from fast.kernels.sm90_sparse24_gemm.variants import KINDS
from fast.launch import cache
from fast.launch.call import FLOAT_NAMES
from fast.launch.direct import allocator, current_device, current_stream
from fast.launch.driver import STEP, Launch, clusters_at_once, function_of, launcher, tensor_map
from fast.launch.nvrtc import cached_cubin, missing_compiler
from fast.launch.operands import GROUP, HOPPER, MOST_ROWS, TensorMaps, addresses_of, processors_of
from reference import Quantized

NAME = "sm90_s8_gemm"
#: The kernel's arguments: the tensor maps of weight, x and, where it is stored, y; then x_scale, scale, bias, y as addresses,
#: and tokens, features, steps, x_scale_step, scale_step, bias_kind, group (`Problem` in the source), filled up to 8 bytes.
ARGUMENTS = struct.Struct("=384s4Q7i4x")
#: Bytes of the three tensor maps.
MAPS = 384
#: What the compiler or the driver said of a variant: nothing more is tried in this process then.
FAILED: list[str] = []
#: What rows of y, in elements, are multiples of.
FEATURES_STEP = 8
Operands = Sequence[Any]


def linear_of_codes(
    x: Quantized, w: Quantized, bias: torch.Tensor | None, dtype: torch.dtype, key: Any
) -> torch.Tensor | None:
    """Rows of int8 codes (M, K) times the transpose of a weight of int8 codes (N, K): the sum, exact in int32, as float32,
    times x's scale, times the weight's, plus the bias, each rounded to float32; then one rounding to `dtype`.

    None where another kernel has to take it, see `refused`, or is faster (`select`). key: of the call; see `launch.cache`.
    """
    operands = (x.codes, x.scale, x.zero, w.codes, w.scale, bias)
    if refused(x, w, dtype) is not None:
        return None
    variant = choose(x.shape[0], w.shape[0], is_stored(dtype), processors_of(x.codes.get_device()))
    if variant is None:
        return None
    try:
        call = Product(variant, INTEGER, dtype, operands)
    except (RuntimeError, OSError) as error:
        FAILED.append(f"it did not compile or load before: {error}")
        warnings.warn(f"sm90_s8_gemm is left out, Triton's kernel multiplies: {error}", stacklevel=2)
        return None
    y = call(*operands)
    cache.remember(key, call, x.scheme)
    return y


def refused(x: Quantized, w: Quantized, dtype: torch.dtype) -> str | None:
    """Why the kernel does not take a product of checked codes; None where it does."""
    if FAILED:
        return FAILED[0]
    if (x.scheme.element, w.scheme.element) != (INTEGER, INTEGER):
        return f"elements are {INTEGER}, got {x.scheme.element} and {w.scheme.element}"
    if x.zero is not None:
        return "there are no zero points"
    return refused_sizes(x.shape[0], tuple(w.shape), dtype, device_of(x.codes))


def refused_sizes(rows: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> str | None:
    """The same of so many rows and a weight (N, K) of codes that it takes, on a device."""
    features, length = shape
    if dtype not in FLOAT_NAMES:
        return f"results are {', '.join(FLOAT_NAMES.values())}, got {dtype}"
    if not rows or not features or not length or max(rows, features, length) > MOST_ROWS:
        return f"sizes are 1 to {MOST_ROWS}, got {(rows, features, length)}"
    if length % STEP or features % FEATURES_STEP:
        return f"K is a multiple of {STEP} and N of {FEATURES_STEP}, got {(rows, features, length)}"
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != HOPPER:
        return f"it is for GPUs of capability {HOPPER}, got {device}"
    return missing_compiler()


def is_faster(rows: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether so many rows by a weight (N, K) are taken, and faster than by Triton's kernel."""
    if FAILED or refused_sizes(rows, shape, dtype, device) is not None:
        return False
    index = torch.cuda.current_device() if device.index is None else device.index
    return choose(rows, shape[0], is_stored(dtype), processors_of(index)) is not None


def device_of(codes: torch.Tensor) -> torch.device:
    """Where it would run; a function of its own, so that tests can say another one."""
    return codes.device


def is_stored(dtype: torch.dtype) -> bool:
    """Whether the copy engine writes y."""
    return dtype.itemsize == 2


class Product:
    """A call: all that shapes and dtypes say, so that a repetition allocates, looks tensor maps up and launches.

    operands: codes of x (M, K), scale and zero point (None) of x, codes of the weight (N, K), its scale, bias (N) or None. A
    scale is one number or one for each row. element: of `products.ELEMENTS`. inputs, buffers, launches, finish: what it is as a
    step of a program (`fast.prepared`), as `launch.call.Call` has them.
    """

    inputs = ("x", "x_scale", "zero", "codes", "scale", "bias")

    def __init__(self, variant: Variant, element: str, dtype: torch.dtype, operands: Operands) -> None:
        x, x_scale, _, codes, scale, bias = operands
        self.variant, self.dtype, self.index, self.device = variant, dtype, x.get_device(), x.device
        (self.tokens, self.length), self.features = x.shape, codes.shape[0]
        self.shape, self.maps = (self.tokens, self.features), TensorMaps(self._describe)
        self.allocate, self.buffers = allocator(self.device), {"y": (self.shape, dtype, ())}
        self.launch, at_once = _launch(variant, element, FLOAT_NAMES[dtype], self.index)
        clusters = programs_of(variant.tokens, self.tokens, self.features, variant.pair) // variant.pair
        self.programs = min(clusters, max(1, at_once)) * variant.pair
        self.rest = (
            self.tokens, self.features, -(-self.length // ROW), int(x_scale.numel() > 1), int(scale.numel() > 1),
            0 if bias is None else KINDS.index(FLOAT_NAMES[bias.dtype]), GROUP,
        )  # fmt: skip

    def __call__(self, x: Any, x_scale: Any, zero: Any, codes: Any, scale: Any, bias: Any = None) -> Any:
        """The product of operands with the same key; None for a negative view, which has to be resolved."""
        if current_device() != self.index:  # type: ignore[misc]
            with torch.cuda.device(self.index):
                return self(x, x_scale, zero, codes, scale, bias)
        found = addresses_of((codes, x, x_scale, scale, bias))
        if found is None:
            return None
        addresses, _kept = found
        y = self.allocate(self.shape, (self.features, 1), self.dtype)
        written = y.data_ptr()
        at = (addresses[0], addresses[1], written if self.variant.stored else 0)
        self.launch(
            self.programs, current_stream(self.index), self.maps[at], *addresses[2:], written, *self.rest
        )  # type: ignore[misc]
        return y

    def launches(self) -> list[tuple[Callable[..., Any], list[str]]]:
        """The launch, and the names of its addresses."""
        return [(self.launch_at, ["codes", "x", "x_scale", "scale", "bias", "y"])]

    def launch_at(self, stream: int, addresses: Sequence[int | None]) -> None:
        """Launch on operands and y at these addresses, None for what is not there."""
        weight, x, x_scale, scale, bias, y = addresses
        at: Any = (weight, x, y if self.variant.stored else 0)
        self.launch(self.programs, stream, self.maps[at], x_scale, scale, bias or 0, y, *self.rest)

    @staticmethod
    def finish(tensors: Sequence[Any]) -> Any:
        """The result, of inputs and buffers."""
        return tensors[-1]

    def _describe(self, weight: int, x: int, y: int) -> bytes:
        """The tensor maps at these addresses."""
        one = self.variant
        made = tensor_map(weight, self.features, self.length, (FEATURES, ROW))
        made += tensor_map(x, self.tokens, self.length, (one.tokens // one.pair, ROW))
        if one.stored:
            made += tensor_map(y, self.tokens, 2 * self.features, (one.chunk, ROW))
        return made


@lru_cache(maxsize=256)
def _launch(variant: Variant, element: str, name: str, device: int) -> tuple[Launch, int]:
    """What launches a variant, compiled at first use, and how many of its clusters run at once. name: of the output's dtype."""
    function = function_of(
        cached_cubin(*sources(variant, element, name), name=NAME), NAME, variant.shared, device
    )
    at_once = clusters_at_once(function, variant.pair, THREADS, variant.shared, device)
    return launcher(function, THREADS, variant.shared, ARGUMENTS, MAPS), at_once


__all__ = ["ARGUMENTS", "FAILED", "MAPS", "Product", "is_stored", "linear_of_codes", "refused"]
