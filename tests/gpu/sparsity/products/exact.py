"""Whether variants compute what they should: bit for bit on integers, within the bound on others, the same every time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

import reference
from fast.kernels.sm90_sparse24_gemm import host
from fast.kernels.sm90_sparse24_gemm.select import CLUSTERS, TILES, WIDE
from fast.kernels.sm90_sparse24_gemm.variants import ELEMENTS, Variant, fitted
from tests.gpu.sparsity.products.inputs import Case, case, wanted

#: Odd and whole sizes: (tokens above a tile's, features, K in groups of 32 elements of 8 bits or 16 of 16).
SHAPES = ((-3, 72, 5), (0, 256, 32), (1, 331, 17), (70, 640, 64))
REPEATS = 20
GUARD = 1024
POISON = 0xA5


class Wrong(NamedTuple):
    """What is wrong with a variant; shape: (tokens, features, K). differ of count elements do, the first at `first`."""

    text: str
    shape: tuple[int, int, int]
    out: str
    differ: int = 0
    count: int = 0
    first: tuple[int, ...] = ()


class Outputs:
    """Makes outputs that are poisoned and lie between guards, as `direct.allocator` would."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.made: list[tuple[torch.Tensor, int]] = []

    def __call__(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = dtype.itemsize
        for length in shape:
            size *= length
        memory = torch.empty(size + 2 * GUARD, dtype=torch.uint8, device=self.device).fill_(POISON)
        self.made.append((memory, size))
        return memory[GUARD : GUARD + size].view(dtype).view(shape)

    def intact(self) -> bool:
        """Whether nothing was written beyond an output."""
        return all(
            bool((memory[:GUARD] == POISON).all() and (memory[GUARD + size :] == POISON).all())
            for memory, size in self.made
        )


def run(
    variant: Variant, one: Case, out: torch.dtype, scaled: bool, arranged: bool = True
) -> tuple[torch.Tensor, bool]:
    """The result of a variant, and whether it wrote only that."""
    extra = (one.bias, one.x_scale, one.scale) if scaled else (None, None, None)
    operands = (one.x, one.values, one.arranged if arranged else one.metadata, *extra)
    outputs = Outputs(one.x.device)
    call = host.product(str(out).removeprefix("torch."), True, operands, variant)
    call.allocate = outputs
    made = call(*operands)
    torch.cuda.synchronize()
    assert made is not None
    return made, outputs.intact()


def variants(bits: int, promote: bool) -> Iterator[Variant]:
    """Every tile with every cluster."""
    for tokens, groups, panels in TILES + WIDE:
        for pair, splits in CLUSTERS:
            if (
                tokens // pair >= 8
                and tokens // pair % 8 == 0
                and not (tokens > 128 and (splits > 1 or promote))
            ):
                yield fitted(tokens, groups, 1 if promote else panels, pair, splits, bits, promote=promote)


def complaint(variant: Variant, dtypes: tuple[str, str]) -> Wrong | None:
    """What is wrong with a variant for a pair of dtypes of values and x, or None."""
    bits = ELEMENTS[dtypes].bits
    kinds = tuple(getattr(torch, name) for name in dtypes)
    for more, features, groups in SHAPES:
        tokens = max(1, variant.tokens + more)
        one = case(tokens, features, groups * (32 if bits == 8 else 16), kinds, whole=True)
        for out in (torch.bfloat16, torch.int32 if dtypes[0] == "int8" else torch.float32):
            found = compared(variant, one, out)
            if found is not None:
                return found
    return None


def compared(variant: Variant, one: Case, out: torch.dtype) -> Wrong | None:
    """A result against what is wanted of it."""
    shape, name = (one.x.shape[0], one.values.shape[0], one.x.shape[1]), str(out).removeprefix("torch.")
    scaled = out != torch.int32
    got, intact = run(variant, one, out, scaled)
    if not intact:
        return Wrong("writes outside of y", shape, name)
    right = wanted(one, out, scaled)
    places = (got != right).nonzero()
    if not len(places):
        return None
    at = tuple(places[0].tolist())
    text = f"{len(places)} of {got.numel()} differ, first at {list(at)}: {got[at].item()}, not {right[at].item()}"
    return Wrong(text, shape, name, len(places), got.numel(), at)


def unstable(variant: Variant, dtypes: tuple[str, str]) -> Wrong | None:
    """Bits that differ between calls, or errors beyond the bound, on random numbers; None where there are none."""
    kinds = tuple(getattr(torch, name) for name in dtypes)
    shape, name = (96, 200, 2048), "float32"
    one = case(*shape, kinds, whole=False)
    first, _ = run(variant, one, torch.float32, True)
    for _ in range(REPEATS):
        again, _ = run(variant, one, torch.float32, True)
        if not torch.equal(again.view(torch.int32), first.view(torch.int32)):
            differ = int((again != first).sum())
            return Wrong("two calls gave different bits", shape, name, differ, first.numel())
    if not torch.equal(run(variant, one, torch.float32, True, arranged=False)[0], first):
        return Wrong("canonical metadata gave other bits than arranged", shape, name)
    given = [part.cpu() for part in (one.x, one.values, one.metadata, one.bias)]
    scales = {"x_scale": one.x_scale.cpu(), "scale": one.scale.cpu()}
    bound = reference.linear_sparse_error_bound(*given, **scales, fast_sums=not variant.promote)
    weight = one.dense.double().cpu()
    truth = (one.x.double().cpu() @ weight.T) * scales["x_scale"].double() * scales[
        "scale"
    ].double().T + given[3].double()
    share = float(((first.double().cpu() - truth).abs() / bound).max())
    return None if share <= 1 else Wrong(f"error {share:.2f} times the bound", shape, name)


__all__ = ["Wrong", "complaint", "run", "unstable", "variants"]
