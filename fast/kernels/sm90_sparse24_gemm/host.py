"""Products of tokens and a 2:4 weight on a GPU: what is launched for a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from fast.kernels.sm90_sparse24_gemm.arrange import arrange
from fast.kernels.sm90_sparse24_gemm.variants import (
    ELEMENTS,
    KERNEL,
    PANEL,
    ROW,
    Elements,
    Problem,
    Variant,
    choose,
    fitted,
)
from fast.launch import cuda
from fast.launch.cuda import BIAS, GROUP, CudaLaunch, Maps, processors_of
from fast.launch.driver import tensor_map
from fast.launch.launcher import Call

#: Tokens of the smallest tile that the copy engine writes.
LEAST_STORED = 128
Operands = Sequence[Any]
#: Pointers of a launch, of which the first two are read through their tensor maps alone.
POINTERS = ("values", "x", "metadata", "x_scale", "scale", "bias", "y")
#: Numbers of the source's `Problem`: tokens, features, steps, panels, blocks, x_scale_step, scale_step, bias_kind, group;
#: filled up to 8 bytes.
NUMBERS = "9i4x"
#: Operands in the order of calls.
OPERANDS = ("x", "values", "metadata", "bias", "x_scale", "scale")


def linear_sparse(name: str, fast_sums: bool, operands: Operands, key: Any) -> torch.Tensor | None:
    """The product of checked operands, by the variant for their shape. name: of the output's dtype; key: see `dispatch`."""
    x, values, metadata, *rest = operands
    bits = _bits(operands)
    arranged = metadata.dim() == 3
    order = metadata if arranged else arrange(metadata, bits)
    call = product(name, fast_sums, (x, values, order, *rest))
    y: torch.Tensor = call.result("y", key, before=None if arranged else partial(_arranged_first, bits))
    return y


def _arranged_first(bits: int, call: Call) -> Callable[..., Any]:
    """A call of canonical metadata, which is put in order in each."""
    return lambda x, values, metadata, *rest: call(x, values, arrange(metadata, bits), *rest)


def product(name: str, fast_sums: bool, operands: Operands, variant: Variant | None = None) -> Call:
    """The call whose launch made "y" of operands with arranged metadata. variant: by default that of `variant_for`."""
    x, values, metadata, bias, x_scale, scale = operands
    one = variant or variant_for(name, fast_sums, operands)
    launch = launch_of(one, name, operands)
    call = Call(dict(zip(OPERANDS, operands, strict=True)))
    call.allocate("y", (*x.shape[:-1], values.shape[0]), name)
    call.launch(launch, POINTERS)
    return call


def variant_for(name: str, fast_sums: bool, operands: Operands) -> Variant:
    """That of `variant_of` for operands."""
    x, features, elements = operands[0], operands[1].shape[0], _elements(operands)
    scaled, processors = operands[4] is not None or operands[5] is not None, processors_of(x.get_device())
    shape = x.numel() // x.shape[-1], features, x.shape[-1]
    return variant_of(*shape, elements, name, scaled=scaled, fast_sums=fast_sums, processors=processors)


def variant_of(
    tokens: int, features: int, k: int, elements: Elements, name: str, *, processors: int, scaled: bool = False,
    fast_sums: bool = True,
) -> Variant:  # fmt: skip
    """That of `variants.choose`; where the copy engine can write y, it does. name: of y's dtype; scaled: whether rows or
    columns have scales."""
    bits, promote = elements.bits, not fast_sums and elements.bits == 8 and not elements.integer
    variant = choose(tokens, features, k * bits // 8, bits, promote, processors)
    if not is_stored(variant, bits, features, name, scaled):
        return variant
    return fitted(*variant[:3], variant.pair, variant.splits, bits, stored=True)


def launch_of(variant: Variant, name: str, operands: Operands) -> CudaLaunch:
    """The launch of a variant. RuntimeError or OSError where it does not compile or load."""
    x, values, metadata, _, x_scale, scale = operands
    problem, features = Problem(_elements(operands), name), values.shape[0]
    tokens, length = x.numel() // x.shape[-1], x.shape[-1] * problem.elements.bits // 8
    shared = variant.shared(problem.elements.bits)
    at_once = cuda.clusters_at_once(KERNEL, variant, problem, shared, x.get_device())
    numbers = (
        tokens, features, steps_of(variant, length), metadata.shape[1], -(-features // 64),
        int(x_scale is not None and x_scale.numel() > 1), int(scale is not None and scale.numel() > 1), BIAS, GROUP,
    )  # fmt: skip
    first, second = boxes(variant)

    def describe(values: int, x: int, y: int = 0) -> bytes:
        result = tensor_map(values, features, length // 2, first) + tensor_map(x, tokens, length, second)
        return (
            result + tensor_map(y, tokens, 2 * features, (variant.chunk, ROW)) if variant.stored else result
        )

    return CudaLaunch(
        KERNEL, variant, problem, POINTERS, programs_of(variant, tokens, features, at_once), shared, (NUMBERS, numbers),
        maps=Maps(describe, 2, (0, 1, 6) if variant.stored else (0, 1)),
    )  # fmt: skip


def is_stored(variant: Variant, bits: int, features: int, name: str, scaled: bool) -> bool:
    """Whether the copy engine writes y: rows are multiples of 16 bytes, and nothing but a bias enters."""
    plain = not scaled and name in ("bfloat16", "float16")
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


def _elements(operands: Operands) -> Any:
    """Of values and x."""
    names = (str(one.dtype).removeprefix("torch.") for one in (operands[1], operands[0]))
    return ELEMENTS[tuple(names)]  # type: ignore[index]


def _bits(operands: Operands) -> int:
    """Of an element."""
    bits: int = _elements(operands).bits
    return bits


__all__ = [
    "boxes",
    "is_stored",
    "launch_of",
    "linear_sparse",
    "product",
    "programs_of",
    "steps_of",
    "variant_for",
    "variant_of",
]
