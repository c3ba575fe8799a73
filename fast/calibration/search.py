"""`search_scales` for torch tensors; `reference.calibration.search` states the rule.

Large CPU tensors with blocks along a row go through a compiled loop (`fast.cpu.search`), others run the reference. On a GPU one
kernel tries all candidates of such blocks (`fast.kernels.calibration.candidates`); of other blocks and errors, and on other
devices, candidates are quantized and dequantized in turn, some rows at a time. Errors are summed in float64: another candidate
than the reference's may be taken where two are equal up to the order of those sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

import reference
from fast.calibration.inputs import float_tensor, numpy_of, torch_of
from fast.cpu.search import searched
from fast.dispatch import has_kernels
from fast.quantize.quantize import dequantize, quantize
from reference import Scales, Scheme
from reference.arrays.namespace import Namespace, namespace_of
from reference.calibration.inputs import LARGEST
from reference.calibration.search import Candidate, Search, is_double, least_error, power_of, signed, stepped
from reference.formats.storage import load
from reference.quantize.blocks import Blocks
from reference.quantize.scales import choose
from reference.schemes.schemes import Scale, scheme_of

#: Elements of a block at most that the kernel takes.
LONGEST = 1024
#: Elements of a CPU tensor from which on compiling a loop, once for a rule, pays.
WORTH = 1 << 17
#: Elements that are looked at a time: their float64 temporaries are half a gigabyte each.
CHUNK = 1 << 26


def search_scales(
    w: torch.Tensor,
    scheme: str | Scheme,
    *,
    weights: torch.Tensor | None = None,
    candidates: Sequence[Candidate] | None = None,
    norm: float = 2.0,
    outer: torch.Tensor | None = None,
) -> Scales:
    """Scales for w (N, K) by `reference.search_scales`, tensors on w's device, where weights and outer may lie or not."""
    w = float_tensor(w, "search_scales", "w")
    if w.device.type != "cpu":
        return search_scales_on_device(
            w, scheme, weights=weights, candidates=candidates, norm=norm, outer=outer
        )
    options = {"weights": numpy_of(weights), "candidates": candidates, "norm": norm, "outer": numpy_of(outer)}
    array = numpy_of(w)
    scales = searched(array, scheme, **options) if w.numel() >= WORTH else None
    return torch_of(reference.search_scales(array, scheme, **options) if scales is None else scales)


def search_scales_on_device(
    w: torch.Tensor,
    scheme: str | Scheme,
    *,
    weights: torch.Tensor | None = None,
    candidates: Sequence[Candidate] | None = None,
    norm: float = 2.0,
    outer: torch.Tensor | None = None,
) -> Scales:
    """The same on w's device, whatever it is."""
    record = scheme_of(scheme)
    check_weights(w, record, "search_scales")
    blocks = Blocks.of(tuple(w.shape), record.scale, -1)
    # Few numbers, whose checks are the reference's.
    name = str(w.dtype).removeprefix("torch.")
    search = Search.of(record, name, numpy_of(weights), candidates, norm, blocks)
    fixed = None if outer is None else Scales(outer=outer.to(w.device))
    if fixed is None and record.outer is not None and not is_double(record):
        fixed = Scales(outer=quantize(w, record).outer)
    part = DeviceSearch(search, torch.from_numpy(search.weights).to(w.device), name)
    if not isinstance(record.scale.block, int) or is_double(record):
        return part.best(w, fixed)
    parts = [part.best(rows, fixed) for rows in w.split(max(CHUNK // w.shape[1], 1))]
    scale, zero = (_joined([getattr(one, field) for one in parts]) for field in ("scale", "zero"))
    return Scales(scale, parts[0].outer, zero)


def _joined(parts: list[Any]) -> Any:
    return (
        None
        if parts[0] is None
        else torch.cat([signed(namespace_of(part), part) for part in parts]).view(parts[0].dtype)
    )


@dataclass(frozen=True)
class DeviceSearch:
    """`reference.calibration.search.Search` with its weights on the device."""

    search: Search
    weights: torch.Tensor
    dtype: str

    def best(self, w: torch.Tensor, fixed: Scales | None) -> Scales:
        """The scales of a matrix, or of rows of one."""
        scheme = self.search.scheme
        ns, blocks = namespace_of(w), Blocks.of(tuple(w.shape), scheme.scale, -1)
        if has_kernels(w) and self.covered(blocks) and self.search.candidates:
            return self.best_by_kernel(ns, w, blocks, fixed)
        weights = self._in_blocks(ns, blocks)
        tried = (
            (scales, self._errors(blocks.split(ns, self._change(w, scales)), weights))
            for scales in self._scales(ns, w, blocks, fixed)
        )
        return least_error(ns, tried, blocks, scheme)

    def _change(self, w: torch.Tensor, scales: Scales) -> torch.Tensor:
        """q - w in float64 under these scales."""
        return dequantize(quantize(w, self.search.scheme, scales=scales)).double() - w.double()

    def covered(self, blocks: Blocks) -> bool:
        """Whether the kernel takes these blocks and errors."""
        size = blocks.block if isinstance(blocks.block, int) else 0
        whole = 0 < size <= LONGEST and blocks.shape[1] % size == 0
        return whole and self.search.norm in (2, 3) and self.weights.dim() == 1

    def best_by_kernel(self, ns: Namespace, w: torch.Tensor, blocks: Blocks, fixed: Scales | None) -> Scales:
        """The same in one launch after the candidates' scales were made."""
        from fast.kernels.calibration.candidates import best_candidates

        scheme = self.search.scheme
        tried = list(self._scales(ns, w, blocks, fixed))
        stored = torch.stack([scales.scale.reshape(-1) for scales in tried])
        zeros = None if scheme.zero is None else torch.stack([scales.zero.reshape(-1) for scales in tried])
        decoded = load(ns, stored, scheme.scale.storage).view(torch.float32)
        wide = w.float() if w.dtype == torch.float64 else w.contiguous()
        index = best_candidates(
            wide, self.weights, scheme, decoded, zeros, tried[0].outer, cubes=self.search.norm == 3
        )
        scale, zero = (
            None if part is None else signed(ns, part).gather(0, index[None]).view(part.dtype)
            for part in (stored, zeros)
        )
        shape = blocks.scale_shape
        return Scales(scale.reshape(shape), tried[0].outer, None if zero is None else zero.reshape(shape))

    def _in_blocks(self, ns: Namespace, blocks: Blocks) -> torch.Tensor:
        """The weights as they broadcast against blocks."""
        if self.weights.dim() == 3:
            return self.weights
        rows = self.weights[None]
        if isinstance(blocks.block, int):
            return Blocks.of(tuple(rows.shape), self.search.scheme.scale, -1).split(ns, rows, zeros=True)
        return blocks.split(ns, rows.expand(blocks.shape), zeros=True)

    def _errors(self, off: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Errors (..., blocks, 1) of the differences of blocks."""
        if self.weights.dim() == 3:
            turned = off.transpose(0, 1)
            return (turned @ weights * turned).sum(-1).mT[..., None]
        power: torch.Tensor = power_of(off, self.search.norm)
        return power.mul_(weights).sum(-1, keepdim=True)

    def _scales(
        self, ns: Namespace, w: torch.Tensor, blocks: Blocks, fixed: Scales | None
    ) -> Iterator[Scales]:
        """The stored scales of each candidate in turn."""
        scheme = self.search.scheme
        base = quantize(w, scheme, scales=fixed).scales
        split = blocks.split(ns, w.float())
        low, high = split.amin(-1), split.amax(-1)
        for candidate in self.search.candidates:
            if isinstance(candidate, int):
                yield Scales(stepped(base.scale, candidate, scheme, self.dtype), base.outer, base.zero)
                continue
            down, up = candidate if isinstance(candidate, tuple) else (candidate, candidate)
            ends = torch.stack([low * down, high * up], -1).clamp(-LARGEST, LARGEST)
            yield self._of_ends(ns, ends, blocks, fixed)

    def _of_ends(self, ns: Namespace, ends: torch.Tensor, blocks: Blocks, fixed: Scales | None) -> Scales:
        """The scales of blocks with these least and largest values (..., blocks, 2): those of a small tensor of them.

        Where a record computes in another dtype than float32, its rules run as torch operations.
        """
        scheme = self.search.scheme
        if scheme.scale.compute == "input" and self.dtype in ("bfloat16", "float16"):
            return choose(ns, ends.view(torch.int32), blocks, scheme, self.dtype, fixed).stored
        pairs = pairs_record(scheme)
        flat = isinstance(blocks.block, str)
        return quantize(ends.reshape(-1) if flat else ends.reshape(len(ends), -1), pairs, scales=fixed).scales


@lru_cache(maxsize=256)
def pairs_record(scheme: Scheme) -> Scheme:
    """The record with blocks of two elements, for scales of the ends of blocks."""
    block = scheme.scale.block
    if block in (-1, "tensor"):
        return scheme
    size: Any = "flat:2" if isinstance(block, str) else (1, 2) if isinstance(block, tuple) else 2
    scale: Scale = replace(scheme.scale, block=size, partial=False)
    return replace(scheme, name=f"{scheme.name}, ends of blocks", scale=scale)


def check_weights(w: torch.Tensor, scheme: Scheme, what: str) -> None:
    """The errors of `reference.calibration.nearest.checked_weights`."""
    if w.dim() != 2 or not w.shape[1]:
        raise ValueError(
            f"{what} takes a matrix (outputs, inputs), got shape {tuple(w.shape)}; give matrices one by one"
        )
    wrong = int((~w.isfinite()).sum())
    if wrong:
        raise ValueError(f"{what} takes finite weights, got {wrong} of NaN or infinity; replace them")
    if scheme.rounding == "stochastic":
        raise ValueError(
            f"{what} chooses the nearest values, and {scheme.name} rounds stochastically; use "
            f"dataclasses.replace(scheme, rounding='nearest_even')"
        )


__all__ = ["check_weights", "search_scales", "search_scales_on_device"]
