"""Products of many rows and a preshuffled weight on a GPU: what is taken, what is launched, and calls like one before it."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from fast.kernels.linear_small.host import check_row_scales
from fast.kernels.linear_small.layout import ArrangedWeight
from fast.kernels.sm90_sparse24_gemm.variants import KINDS
from fast.kernels.sm90_w4a16_gemm.schedule import Grid, Schedule, grid_of, scheduled
from fast.kernels.sm90_w4a16_gemm.select import choose, ratio_of
from fast.kernels.sm90_w4a16_gemm.variants import (
    ATOM,
    ELEMENTS,
    FEATURES,
    PANEL,
    Variant,
    Weight,
    sources,
    with_scales,
)
from fast.launch import cache
from fast.launch.call import FLOAT_NAMES
from fast.launch.direct import allocator, current_device, current_stream
from fast.launch.driver import Launch, clusters_at_once, function_of, launcher, tensor_map
from fast.launch.nvrtc import cached_cubin, missing_compiler
from fast.launch.operands import GROUP, HOPPER, MOST_ROWS, TensorMaps, addresses_of, processors_of

INPUTS = (torch.bfloat16, torch.float16)
NAME = "sm90_w4a16_gemm"
#: Four bits, which the kernel is told: no compiler may know them.
NIBBLE = 15
#: The kernel's arguments: the tensor maps of x (two boxes) and y; then words, scales, zeros, bias, y as addresses, and tokens,
#: features, steps, each, bias_kind, group, cut, whole (two), shares, nibble, and x_scale (`Problem` in the source).
ARGUMENTS = struct.Struct("=384s5Q11i4xQ")
#: Bytes of the three tensor maps.
MAPS = 384
#: The same of experts, and behind it ends as an address, words_each, scales_each, zeros_each and experts.
GROUPED_ARGUMENTS = struct.Struct("=384s5Q11i4xQQ3qi4x")
#: By device and what is decoded, what the compiler or the driver said of a variant: no other is tried in this process then.
FAILED: dict[tuple[int, Weight], str] = {}
#: Columns of a group whose elements have a product more each.
SIXTEEN = 16
#: Rows up to which that product is hidden; of more the dense weight is quicker (times: reports/LOG.md).
MOST_OF_SIXTEEN = 1024
#: Rows of NF4 up to which it is quicker than the dense weight: each element reads a word of shared memory, beside those that
#: products read (times: reports/LOG.md).
MOST_OF_LEVELS = 2048
#: Elements of a weight of either, of fewer than which the dense one is quicker behind fewer rows.
SMALL = 1 << 23
#: Rows up to which such a weight is quicker than the dense one (times: reports/LOG.md).
MOST_OF_SMALL = 512


def sm90_w4a16_gemm(
    x: torch.Tensor,
    w: ArrangedWeight,
    bias: torch.Tensor | None = None,
    *,
    x_scale: torch.Tensor | None = None,
    key: Any = None,
    record: Any = None,
) -> torch.Tensor | None:
    """x (..., K) times the transpose of what `dequantize` gives of a weight (N, K) in x's dtype, plus bias (N): (..., N).

    Sums are float32 over all of K, in an order that only shapes, dtypes and the device say; the bias is added in float32, and
    the result rounded once to x's dtype. x_scale: float32, one for each row of x, by which its sums are multiplied in float32
    before that: x is then the rows' codes, which are exact in its dtype. None where another route has to take it, see
    `refused`. key, record: see `launch.cache`, of a call without x_scale. ValueError for other scales.
    """
    call = product_of(x, w, bias, x_scale)
    if call is None:
        return None
    y = call(x, w.words, w.scale, w.zero, bias, x_scale)
    cache.remember(key, call, record)
    return y


def product_of(
    x: torch.Tensor, w: ArrangedWeight, bias: torch.Tensor | None, x_scale: torch.Tensor | None = None
) -> Product | None:
    """The call, not made yet; None and errors as `sm90_w4a16_gemm`."""
    check_row_scales(x_scale, x, x.numel() // w.shape[1], NAME)
    if refused(x, w, bias) is not None:
        return None
    try:
        return Product(x, w, bias, x_scale=x_scale)
    except (RuntimeError, OSError) as error:
        leave_out(x, w, error)
        return None


def leave_out(x: torch.Tensor, w: ArrangedWeight, error: Exception) -> None:
    """Such weights are multiplied dense on this device from now on; a warning says so."""
    FAILED[x.get_device(), weight_of(w)] = f"it did not compile or load before: {error}"
    warnings.warn(f"sm90_w4a16_gemm is left out, dense weights are multiplied: {error}", stacklevel=4)


def refused(x: torch.Tensor, w: ArrangedWeight, bias: torch.Tensor | None) -> str | None:
    """Why the kernel does not take a call; None where it does."""
    return refused_operands(x, w, bias) or refused_rows(x.numel() // w.shape[1], w)


def refused_rows(rows: int, w: ArrangedWeight) -> str | None:
    """Why so many rows are not multiplied by a weight as it is stored: the dense one is quicker. None where they are."""
    most = most_rows(w)
    if rows > most:
        return f"{w.element} in groups of {w.group} is multiplied by the dense weight from {most + 1} rows on"
    return None


def refused_operands(x: torch.Tensor, w: ArrangedWeight, bias: torch.Tensor | None) -> str | None:
    """Why operands are not taken, whatever is quicker; None where they are."""
    if bias is not None and bias.dtype not in FLOAT_NAMES:
        return f"a bias is a float, got {bias.dtype}"
    if not x.numel() or x.numel() // w.shape[1] > MOST_ROWS:
        return f"there are 1 to {MOST_ROWS} rows, got {tuple(x.shape)}"
    return refused_weight(w, x.dtype, x.device)


def refused_weight(w: ArrangedWeight, dtype: torch.dtype, device: torch.device) -> str | None:
    """The same of any rows of a dtype on a device."""
    n, length = w.shape
    if w.element not in ELEMENTS:
        return f"elements are {', '.join(ELEMENTS)}, got {w.element}"
    if dtype not in INPUTS:
        return f"inputs are {' or '.join(map(str, INPUTS))}, got {dtype}"
    if n % FEATURES or length % (2 * ATOM) or (n, length) != (w.rows, w.columns):
        return f"weights have multiples of {FEATURES} rows and columns, got {w.shape}"
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != HOPPER:
        return f"it is for GPUs of capability {HOPPER}, got {device}"
    index = torch.cuda.current_device() if device.index is None else device.index
    return FAILED.get((index, weight_of(w))) or missing_compiler()


def rows_taken(w: ArrangedWeight, dtype: torch.dtype) -> int:
    """The most rows of a dtype that the kernel takes of a weight on its device; 0 where none."""
    return most_rows(w) if takes(w, dtype) else 0


def takes(w: ArrangedWeight, dtype: torch.dtype) -> bool:
    """Whether there are rows of a dtype that the kernel takes of a weight on its device."""
    return refused_weight(w, dtype, w.words.device) is None


def most_rows(w: ArrangedWeight) -> int:
    """The most rows for which the dense weight is not quicker."""
    if w.group != SIXTEEN and w.element != "nf4":
        return MOST_ROWS
    if w.shape[0] * w.shape[1] < SMALL:
        return MOST_OF_SMALL
    return MOST_OF_SIXTEEN if w.group == SIXTEEN else MOST_OF_LEVELS


def weight_of(w: ArrangedWeight) -> Weight:
    """What the kernel decodes."""
    return Weight(w.element, w.zero is not None, max(1, ATOM // (w.group or ATOM)))


def programs_of(variant: Variant, grid: Grid, schedule: Schedule) -> int:
    """Programs to launch: with splits a cluster for each tile, else at most the clusters that run at once, which persist."""
    tiles = sum(grid.counts(schedule))
    return (tiles if variant.splits > 1 else min(tiles, grid.clusters)) * variant.cluster


class Product:
    """A call: all that shapes and dtypes say, so that a repetition allocates, looks a tensor map up and launches.

    inputs, buffers, launches, finish: what it is as a step of a program (`fast.prepared`), as `launch.call.Call` has them.
    x_scale: scales of rows, where calls have them.
    """

    inputs: tuple[str, ...] = ("x", "words", "scale", "zero", "bias")

    def __init__(
        self, x: torch.Tensor, w: ArrangedWeight, bias: torch.Tensor | None, variant: Variant | None = None,
        schedule: Schedule | None = None, x_scale: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self.index, self.device, self.dtype = x.get_device(), x.device, x.dtype
        self.features, self.length = w.shape
        self.tokens, self.shape = x.numel() // self.length, (*x.shape[:-1], self.features)
        weight = weight_of(w)
        if variant is None:
            variant = choose(self.tokens, self.features, self.length, weight, processors_of(self.index))
        if x_scale is not None:
            variant, self.inputs = with_scales(variant, weight), (*self.inputs, "x_scale")
        self.variant, self.maps = variant, TensorMaps(self._describe)
        self.strides, self.allocate = torch.empty(self.shape, device="meta").stride(), allocator(self.device)
        self.launch, at_once = launch_of(variant, weight, FLOAT_NAMES[self.dtype], self.index)
        grid = grid_of(variant, self.tokens, self.features, at_once)
        one = schedule or scheduled(grid, ratio_of(variant, weight))
        self.programs = programs_of(variant, grid, one)
        self.buffers = {"y": (self.shape, self.dtype, ())}
        self.rest = (
            self.tokens, self.features, self.length // ATOM, (w.group or self.length) // ATOM or 1,
            0 if bias is None else KINDS.index(FLOAT_NAMES[bias.dtype]), GROUP, one.cut, *one.whole, one.shares, NIBBLE,
        )  # fmt: skip

    def __call__(
        self, x: Any, words: Any, scale: Any, zero: Any, bias: Any = None, x_scale: Any = None
    ) -> torch.Tensor | None:
        """The product of operands with the same key; None for a negative view, which has to be resolved."""
        if current_device() != self.index:  # type: ignore[misc]
            with torch.cuda.device(self.index):
                return self(x, words, scale, zero, bias, x_scale)
        found = addresses_of((x, words, scale, zero, bias, x_scale))
        if found is None:
            return None
        addresses, _kept = found
        y = self.allocate(self.shape, self.strides, self.dtype)
        at = addresses[0], y.data_ptr()
        self.launch(
            self.programs,
            current_stream(self.index),  # type: ignore[misc]
            self.maps[at],
            *addresses[1:5],
            at[1],
            *self.rest,
            addresses[5],
        )
        return y

    def launches(self) -> list[tuple[Callable[..., Any], list[str]]]:
        """The launch, and the names of its addresses."""
        return [(self.launch_at, [*self.inputs, "y"])]

    def launch_at(self, stream: int, addresses: Sequence[int | None]) -> None:
        """Launch on operands and y at these addresses, None for what is not there."""
        (x, words, scale, zero, bias), y, scales = addresses[:5], addresses[-1], addresses[5:-1]
        at: Any = (x, y)
        self.launch(
            self.programs,
            stream,
            self.maps[at],
            words,
            scale,
            zero or 0,
            bias or 0,
            y,
            *self.rest,
            *(scales or (0,)),
        )

    @staticmethod
    def finish(tensors: Sequence[Any]) -> Any:
        """The result, of inputs and buffers."""
        return tensors[-1]

    def _describe(self, x: int, y: int) -> bytes:
        """The tensor maps at two addresses."""
        return described(self.variant, self.tokens, self.length, self.features, x, y)


def described(one: Variant, tokens: int, length: int, features: int, x: int, y: int) -> bytes:
    """The tensor maps of a variant, of x (tokens, length) and y (tokens, features) at two addresses."""
    made = tensor_map(x, tokens, 2 * length, (one.tokens // one.pair, PANEL))
    made += tensor_map(x, tokens, 2 * length, (one.box, PANEL))
    return made + tensor_map(y, tokens, 2 * features, (min(one.chunk, 256), PANEL))


class Compiled(NamedTuple):
    """What a call launches directly: `function(stream, addresses)`."""

    function: Callable[[int, Sequence[int | None]], Any]


class ProductLaunch:
    """A product as one of the launches of a `launch.call.Call`, in place of a `launcher.CompiledLaunch`.

    Its pointers are x, words, scale, zero and bias (None where there is none), x_scale where rows have scales, and y.
    """

    def __init__(self, product: Product) -> None:
        self.product = product
        self.compiled = {(product.index,): Compiled(product.launch_at)}

    def run(self, pointers: Sequence[torch.Tensor | None], device: int) -> tuple[int, ...]:
        """Run on tensors of one device, on its current stream; what it was compiled for. ValueError for negative views."""
        found = addresses_of(pointers)
        if found is None:
            raise ValueError(
                "sm90_w4a16_gemm: operands must not be negative views; resolve_neg() makes them plain"
            )
        with torch.cuda.device(device):
            self.product.launch_at(current_stream(device), found[0])  # type: ignore[misc]
        return (device,)


@lru_cache(maxsize=256)
def launch_of(variant: Variant, weight: Weight, name: str, device: int) -> tuple[Launch, int]:
    """What launches a variant, compiled at first use, and how many of its clusters run at once. name: of the dtype of x."""
    shared = variant.shared(weight)
    cubin = cached_cubin(*sources(variant, weight, name, name), name=NAME)
    function = function_of(cubin, NAME, shared, device)
    at_once = clusters_at_once(function, variant.cluster, variant.threads, shared, device)
    return launcher(function, variant.threads, shared, arguments_of(variant), MAPS), at_once


def arguments_of(variant: Variant) -> struct.Struct:
    """How a variant's arguments lie."""
    return GROUPED_ARGUMENTS if variant.grouped else ARGUMENTS


__all__ = [
    "ARGUMENTS",
    "ELEMENTS",
    "FAILED",
    "GROUPED_ARGUMENTS",
    "INPUTS",
    "MAPS",
    "Product",
    "ProductLaunch",
    "arguments_of",
    "described",
    "launch_of",
    "leave_out",
    "product_of",
    "programs_of",
    "refused",
    "refused_operands",
    "refused_rows",
    "refused_weight",
    "rows_taken",
    "sm90_w4a16_gemm",
    "takes",
    "weight_of",
]
