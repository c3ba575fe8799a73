"""Masks and 2:4 storage as plain torch expressions; see `torch_expressions`, which they belong to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from experiments.kernels.cases.case import Case, Inputs
from reference import FORMATS, SCHEMES
from reference.sparsity.transposable import MASKS, ROW_PAIRS

#: The two columns of each pair of a row.
PAIRS = ((0, 0, 0, 1, 1, 2), (1, 2, 3, 2, 3, 3))


def pruned(x: torch.Tensor, kept: int, group: int) -> torch.Tensor:
    """The mask of the `kept` largest magnitudes of each group, by a stable sort."""
    magnitudes = x.abs().unflatten(-1, (-1, group))
    order = magnitudes.argsort(dim=-1, descending=True, stable=True)[..., :kept]
    return torch.zeros_like(magnitudes, dtype=torch.bool).scatter(-1, order, True).flatten(-2)


def stored(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and metadata of what a mask keeps, two of every four at most."""
    k0, k1, k2, k3 = mask.unflatten(-1, (-1, 4)).unbind(-1)
    first = torch.where(k0, 0, torch.where(k1, 1, 2))
    second = torch.where(k0 & k1, 1, torch.where((k0 | k1) & (k2 | ~k3), 2, 3))
    values = x.masked_fill(~mask, 0).unflatten(-1, (-1, 4)).gather(-1, torch.stack([first, second], -1))
    nibbles = (first | (second << 2)).unflatten(-1, (-1, 2))
    return values.flatten(-2), (nibbles[..., 0] | (nibbles[..., 1] << 4)).to(torch.uint8)


def restored(values: torch.Tensor, metadata: torch.Tensor) -> torch.Tensor:
    """The dense tensor."""
    wide = metadata.long()
    nibbles = torch.stack([wide & 15, wide >> 4], -1).flatten(-2)
    index = torch.stack([nibbles & 3, nibbles >> 2], -1)
    pairs = values.unflatten(-1, (-1, 2))
    return pairs.new_zeros(*nibbles.shape, 4).scatter(-1, index, pairs).flatten(-2)


def best_of_tiles(x: torch.Tensor, picks: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """The best of the 90 masks of each tile. picks: a pair of each row; masks: (90, 16)."""
    tiles = x.float().abs().unflatten(-1, (-1, 4)).unflatten(-3, (-1, 4)).transpose(-3, -2)
    pairs = tiles[..., list(PAIRS[0])] + tiles[..., list(PAIRS[1])]
    rows = [pairs[..., row, :].index_select(-1, picks[:, row]) for row in range(4)]
    best = ((rows[0] + rows[1]) + (rows[2] + rows[3])).argmax(-1)
    return masks[best].unflatten(-1, (4, 4)).transpose(-3, -2).flatten(-4, -3).flatten(-2)


def _tables(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = inputs["x"]
    picks, masks = torch.tensor(ROW_PAIRS.astype("int64")), torch.tensor(MASKS)
    return x, picks.to(x.device), masks.to(x.device)


def _first(inputs: Inputs) -> tuple[Any, ...]:
    return (inputs["x"],)


def _prune(case: Case) -> Any:
    kept, group = (
        (int(n) for n in case.name.split(".")[2].split("of")) if case.name.count(".") > 1 else (2, 4)
    )
    return lambda x: pruned(x, kept, group), _first


def _compress(case: Case) -> Any:
    if case.scheme == "bfloat16":
        return lambda x: stored(x, pruned(x, 2, 4)), _first

    def run(x: torch.Tensor) -> Any:
        codes = x.view(torch.uint8)
        values, metadata = stored(codes, (codes & 127) != 0)
        return values.view(x.dtype), metadata

    return run, _first


def _decompress(case: Case) -> Any:
    return restored, lambda inputs: tuple(inputs["x"])


def _quantize_compressed(case: Case) -> Any:
    fmt = SCHEMES[case.scheme].format
    low, high, dtype = fmt.min, fmt.max, getattr(torch, FORMATS[fmt.name].name)

    def run(x: torch.Tensor, scale: torch.Tensor) -> Any:
        codes = (x.float() * (1 / scale)).clamp(low, high).to(dtype).view(torch.uint8)
        return stored(codes, pruned(x, 2, 4))

    return run, lambda inputs: (inputs["x"], inputs["scale"])


def _compress_transposable(case: Case) -> Any:
    def run(x: torch.Tensor, picks: torch.Tensor, masks: torch.Tensor) -> Any:
        mask = best_of_tiles(x, picks, masks)
        return stored(x, mask), stored(x.t(), mask.t())

    return run, _tables


SPARSE: dict[str, Callable[[Case], Any]] = {
    "prune": _prune,
    "compress": _compress,
    "decompress": _decompress,
    "quantize_compressed": _quantize_compressed,
    "prune_transposable": lambda case: (best_of_tiles, _tables),
    "compress_transposable": _compress_transposable,
}
