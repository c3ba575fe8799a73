"""Products of tokens and a 2:4 weight on a GPU: what is launched for a call, and calls like one before it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from fast.kernels.sm90_sparse24_gemm.arrange import arrange
from fast.kernels.sm90_sparse24_gemm.select import choose
from fast.kernels.sm90_sparse24_gemm.variants import ELEMENTS, KINDS, PANEL, ROW, Variant, fitted, sources
from fast.launch import cache
from fast.launch.direct import allocator, current_device, current_stream
from fast.launch.driver import Launch, clusters_at_once, function_of, launcher, tensor_map
from fast.launch.nvrtc import cached_cubin
from fast.launch.operands import GROUP, TensorMaps, addresses_of, processors_of

#: Tokens of the smallest tile that the copy engine writes.
LEAST_STORED = 128
Operands = Sequence[Any]


#: The kernel's arguments: the tensor maps of values, x and, where it is stored, y; then metadata, x_scale, scale, bias, y as
#: addresses, and tokens, features, steps, panels, blocks, x_scale_step, scale_step, bias_kind, group (`Problem` in the source),
#: filled up to 8 bytes.
ARGUMENTS = struct.Struct("=384s5Q9i4x")
#: Bytes of the three tensor maps.
MAPS = 384


def linear_sparse(name: str, fast_sums: bool, operands: Operands, key: Any) -> torch.Tensor | None:
    """The product of checked operands, by the variant for their shape. name: of the output's dtype; key: see `launch.cache`."""
    call = product(name, fast_sums, operands)
    y = call(*operands)
    cache.remember(key, call, None)
    return y


def product(name: str, fast_sums: bool, operands: Operands, variant: Variant | None = None) -> Product:
    """The call for operands of these shapes, dtypes and device. variant: by default that of `select.choose`."""
    x, values = operands[0], operands[1]
    elements = ELEMENTS[_name(values), _name(x)]
    bits, features = elements.bits, values.shape[0]
    tokens, length = x.numel() // x.shape[-1], x.shape[-1] * bits // 8
    if variant is None:
        processors = processors_of(x.get_device())
        promote = not fast_sums and bits == 8 and not elements.integer
        variant = choose(tokens, features, length, bits, promote, processors)
        if is_stored(variant, bits, features, name, operands):
            variant = fitted(*variant[:3], variant.pair, variant.splits, bits, stored=True)
    return Product(variant, elements.values, elements.x, bits, name, operands)


def is_stored(variant: Variant, bits: int, features: int, name: str, operands: Operands) -> bool:
    """Whether the copy engine writes y: rows are multiples of 16 bytes, and nothing but a bias enters."""
    plain = operands[4] is None and operands[5] is None and name in ("bfloat16", "float16")
    return (
        plain and bits == 16 and features % 8 == 0 and variant.tokens >= LEAST_STORED and variant.splits == 1
    )


def boxes(variant: Variant) -> tuple[tuple[int, int], tuple[int, int]]:
    """Boxes (rows, bytes) of values and of x that a copy of the kernel takes."""
    return (variant.features, PANEL // 2 * variant.panels), (variant.tokens // variant.pair, PANEL)


def steps_of(variant: Variant, length: int) -> int:
    """Stages along K, for rows of x of `length` bytes."""
    return -(-length // (PANEL * variant.panels))


def tiles_of(variant: Variant, tokens: int, features: int) -> int:
    """Tiles of clusters."""
    return -(-tokens // variant.tokens) * -(-features // (variant.features * variant.pair))


def programs_of(variant: Variant, tokens: int, features: int, at_once: int) -> int:
    """Programs to launch: with splits a cluster for each tile, else at most the clusters that run at once, which persist."""
    tiles = tiles_of(variant, tokens, features)
    return (tiles if variant.splits > 1 else min(tiles, max(1, at_once))) * variant.cluster


class Product:
    """A call: all that shapes and dtypes say, so that a repetition allocates, looks two tensor maps up and launches."""

    def __init__(
        self, variant: Variant, values: str, x: str, bits: int, name: str, operands: Operands
    ) -> None:
        tokens_like, stored, metadata, bias, x_scale, scale = operands
        self.variant, self.bits, self.index = variant, bits, tokens_like.get_device()
        self.device, self.dtype = tokens_like.device, getattr(torch, name)
        self.features, k = stored.shape[0], tokens_like.shape[-1]
        self.tokens, self.shape = tokens_like.numel() // k, (*tokens_like.shape[:-1], stored.shape[0])
        self.length, self.arranged = k * bits // 8, metadata.dim() == 3
        self.boxes, self.maps = boxes(variant), TensorMaps(self._describe)
        self.strides, self.allocate = torch.empty(self.shape, device="meta").stride(), allocator(self.device)
        self.launch, at_once = _launch(variant, values, x, bits, name, self.index)
        self.programs = programs_of(variant, self.tokens, self.features, at_once)
        shape = metadata.shape if self.arranged else arrange(metadata[:1], bits).shape
        blocks = -(-self.features // 64)
        self.rest = (
            self.tokens, self.features, steps_of(variant, self.length), shape[1], blocks,
            int(x_scale is not None and x_scale.numel() > 1), int(scale is not None and scale.numel() > 1),
            0 if bias is None else KINDS.index(_name(bias)), GROUP,
        )  # fmt: skip

    def __call__(
        self, x: Any, values: Any, metadata: Any, bias: Any = None, x_scale: Any = None, scale: Any = None
    ) -> torch.Tensor | None:
        """The product of operands with the same key; None for a negative view, which has to be resolved."""
        if current_device() != self.index:  # type: ignore[misc]
            with torch.cuda.device(self.index):
                return self(x, values, metadata, bias, x_scale, scale)
        if not self.arranged:
            metadata = arrange(metadata, self.bits)
        found = addresses_of((values, x, metadata, x_scale, scale, bias))
        if found is None:
            return None
        addresses, _kept = found
        y = self.allocate(self.shape, self.strides, self.dtype)
        written = y.data_ptr()
        key = (addresses[0], addresses[1], written if self.variant.stored else 0)
        self.launch(
            self.programs, current_stream(self.index), self.maps[key], *addresses[2:], written, *self.rest
        )  # type: ignore[misc]
        return y

    def _describe(self, values: int, x: int, y: int) -> bytes:
        """The tensor maps at these addresses."""
        first, second = self.boxes
        made = tensor_map(values, self.features, self.length // 2, first) + tensor_map(
            x, self.tokens, self.length, second
        )
        if self.variant.stored:
            made += tensor_map(y, self.tokens, 2 * self.features, (self.variant.chunk, ROW))
        return made


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@lru_cache(maxsize=256)
def _launch(variant: Variant, values: str, x: str, bits: int, name: str, device: int) -> tuple[Launch, int]:
    """What launches a variant, compiled at first use, and how many of its clusters run at once."""
    elements = next(one for one in ELEMENTS.values() if (one.values, one.x) == (values, x))
    shared = variant.shared(bits)
    function = function_of(
        cached_cubin(*sources(variant, elements, name)), "sm90_sparse24_gemm", shared, device
    )
    at_once = clusters_at_once(function, variant.cluster, variant.threads, shared, device)
    return launcher(function, variant.threads, shared, ARGUMENTS, MAPS), at_once


__all__ = [
    "ARGUMENTS",
    "MAPS",
    "Product",
    "boxes",
    "is_stored",
    "linear_sparse",
    "product",
    "programs_of",
    "steps_of",
]
