"""`hqq` for torch tensors; `reference.calibration.hqq` states the algorithm.

CPU tensors run the reference. On a GPU one kernel holds a block in registers over all steps (`fast.kernels.calibration.hqq`);
where it takes no such block, and on other devices, the same steps run as float64 operations of torch, some blocks at a time.
Sums have the reference's order. Powers may differ from NumPy's in the last bit of float64, so a zero point may differ where a
weight lies as near to a boundary, or two mean errors are as equal.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

import reference
from fast.calibration.inputs import float_tensor, numpy_of, torch_of, weight_matrix
from fast.dispatch import has_kernels
from fast.quantize.quantize import choose_scales, dequantize, quantize
from reference.arrays.namespace import namespace_of
from reference.calibration.hqq import check_options, check_scheme, zero_of
from reference.calibration.inputs import LARGEST, tree_sum
from reference.formats.storage import load, store
from reference.quantize.blocks import Blocks
from reference.quantize.stored import Quantized, Scales
from reference.schemes.schemes import Scheme, scheme_of

#: Elements that are split at a time.
CHUNK = 1 << 24


def hqq(
    w: torch.Tensor,
    scheme: str | Scheme,
    *,
    steps: int = 20,
    p: float = 0.7,
    beta: float = 10.0,
    stop: str = "block",
) -> Quantized:
    """w (N, K) in a scheme whose zero points, or scales, are found by half-quadratic splitting: see `reference.hqq`."""
    w = float_tensor(w, "hqq", "w")
    if w.device.type != "cpu":
        return hqq_on_device(w, scheme, steps=steps, p=p, beta=beta, stop=stop)
    result = reference.hqq(numpy_of(w), scheme, steps=steps, p=p, beta=beta, stop=stop)
    return torch_of(result)  # type: ignore[no-any-return]


def hqq_on_device(
    w: torch.Tensor,
    scheme: str | Scheme,
    *,
    steps: int = 20,
    p: float = 0.7,
    beta: float = 10.0,
    stop: str = "block",
) -> Quantized:
    """The same on w's device, whatever it is."""
    w, scheme = weight_matrix(w, "hqq"), scheme_of(scheme)
    check_scheme(scheme, stop)
    check_options(steps, p, beta)
    blocks = Blocks.of(tuple(w.shape), scheme.scale, -1)
    scales = choose_scales(w, scheme)
    if not steps or not w.numel():
        return quantize(w, scheme, scales=scales)
    if scheme.zero is None:
        return _by_scales(w, scheme, blocks, scales, steps, p, beta)
    zero = _zero_points(w, scheme, blocks, scales, (steps, p, beta, stop))
    return quantize(w, scheme, scales=replace(scales, zero=zero))


def _zero_points(
    w: torch.Tensor, scheme: Scheme, blocks: Blocks, scales: Scales, options: tuple[int, float, float, str]
) -> torch.Tensor:
    """Stored zero points in the shape of the scales."""
    ns = namespace_of(w)
    record, (low, high) = zero_of(scheme), scheme.format.integer_range
    middle, top = (low + high + 1) / 2, 2**scheme.format.bits - 1
    split = blocks.split(ns, w)
    rows = split.reshape(-1, split.shape[-1])
    s = _floats(load(ns, blocks.accept(scales.scale, ns), scheme.scale.storage)).reshape(-1, 1)
    value = _floats(load(ns, blocks.accept(scales.zero, ns), record.storage)).reshape(-1, 1)
    *search, stop = options
    short = _by_kernel(rows, s, value, record.storage, middle, top, search) if stop == "block" else None
    if short is None:
        wide, rule = s.double(), Rule(record.storage, middle, top, *search)
        steps = _by_tensor if stop == "tensor" else _by_blocks
        found = steps(rows, wide, middle - value.double() / wide, rule)
        short = _short((middle - found) * wide)
    short = short.reshape(*split.shape[:-1], 1)
    return blocks.expose(store(ns, short.view(torch.int32), record.storage), ns)


def _by_kernel(
    rows: torch.Tensor,
    s: torch.Tensor,
    value: torch.Tensor,
    storage: str,
    middle: float,
    top: int,
    search: list[Any],
) -> torch.Tensor | None:
    """Zero points as values (n,), or None where no kernel takes these blocks."""
    if not has_kernels(rows):
        return None
    from fast.kernels.calibration import hqq as kernel

    if not kernel.covers(rows, search[0]):
        return None
    made: torch.Tensor = kernel.zero_points(rows, s.flatten(), value.flatten(), storage, middle, top, *search)
    return made


class Rule:
    """What a step needs beside weights, scales and zero points. `as_stored` rounds zero points to their storage."""

    def __init__(self, storage: str, middle: float, top: int, steps: int, p: float, beta: float) -> None:
        self.storage, self.middle, self.top = storage, middle, top
        self.steps, self.p, self.beta = steps, p, beta

    def as_stored(self, z: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        """Zero points in steps of the scale, as their stored values give them back."""
        value = _short((self.middle - z) * s)
        if self.storage != "float32":
            value = value.to(getattr(torch, self.storage))
        return self.middle - value.double() / s


def _by_blocks(rows: torch.Tensor, s: torch.Tensor, z: torch.Tensor, rule: Rule) -> torch.Tensor:
    """The zero point of the least mean |error| of each block (n, 1)."""
    out = torch.empty_like(z)
    count = max(CHUNK // rows.shape[1], 1)
    for start in range(0, len(rows), count):
        part = slice(start, start + count)
        out[part] = _search(rows[part].double(), s[part], z[part], rule)
    return out


def _search(w: torch.Tensor, s: torch.Tensor, z: torch.Tensor, rule: Rule) -> torch.Tensor:
    """A block that has ended goes on in step with the others, and nothing of it is taken: the host never waits."""
    best, least = z, torch.full_like(z, torch.inf)
    active = torch.ones_like(z, dtype=torch.bool)
    for _ in range(rule.steps):
        error, following = _step(w, s, z, rule)
        active = active & (error < least)
        best, least = torch.where(active, z, best), torch.where(active, error, least)
        z = rule.as_stored(following, s)
    return best


def _by_tensor(rows: torch.Tensor, s: torch.Tensor, z: torch.Tensor, rule: Rule) -> torch.Tensor:
    """The zero points (n, 1) of the step after the last one that lowered the mean |error| of the tensor."""
    w = rows.double()
    z = z.round() if rule.top == 15 else z
    least = torch.inf
    for _ in range(rule.steps):
        errors, z = _step(w, s, z, rule)
        error = float(tree_sum(errors, 0))
        if not error < least:
            break
        least = error
    return z


def _step(w: torch.Tensor, s: torch.Tensor, z: torch.Tensor, rule: Rule) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean |error| of each block (n, 1), the next zero points (n, 1))."""
    q = (w / s + z).round_().clamp_(0, rule.top)
    error = w - (q - z) * s
    size = w.shape[1]
    following = tree_sum(q - (w - shrink(error, rule.p, rule.beta)) / s)[:, None] / size
    return tree_sum(error.abs())[:, None] / size, following


def shrink(x: torch.Tensor, p: float, beta: float) -> torch.Tensor:
    """sign(x) max(|x| - |x|^(p - 1) / beta, 0), and 0 at 0."""
    size = x.abs()
    return (size - size ** (p - 1) / beta).clamp_(min=0).copysign_(x)


def _by_scales(
    w: torch.Tensor, scheme: Scheme, blocks: Blocks, scales: Scales, steps: int, p: float, beta: float
) -> Quantized:
    """The same with scales as the unknown; each step is a `quantize` under the scales so far."""
    ns, storage = namespace_of(w), scheme.scale.storage
    counts = blocks.split(ns, torch.ones(w.shape, dtype=torch.bool, device=w.device), zeros=True)
    scale = _floats(load(ns, blocks.accept(scales.scale, ns), storage)).double()
    best, least = scale, torch.full_like(scale, torch.inf)
    split = blocks.split(ns, w)
    for _ in range(steps):
        stored = blocks.expose(store(ns, _short(scale).view(torch.int32), storage), ns)
        q = quantize(w, scheme, scales=replace(scales, scale=stored))
        values = blocks.split(ns, dequantize(q, torch.float32)).double()
        error = split.double() - values
        loss = tree_sum(error.abs() * counts)[..., None]
        lower = loss < least
        best, least = torch.where(lower, scale, best), torch.where(lower, loss, least)
        target = split.double() - shrink(error, p, beta)
        scale = torch.where(lower, _refined(ns, scale, target, values * counts, scheme), best)
    stored = blocks.expose(store(ns, _short(best).view(torch.int32), storage), ns)
    return quantize(w, scheme, scales=replace(scales, scale=stored))


def _refined(
    ns: Any, scale: torch.Tensor, target: torch.Tensor, values: torch.Tensor, scheme: Scheme
) -> torch.Tensor:
    """Decoded scales after one step, as stored: times sum(target v) / sum(v^2), or over it for an encoding scale."""
    above, below = tree_sum(target * values)[..., None], tree_sum(values * values)[..., None]
    if scheme.scale.stored == "encode":
        above, below = below, above
    good = (above > 0) & (below > 0)
    moved = scale * torch.where(good, above, 1.0) / torch.where(good, below, 1.0)
    storage = scheme.scale.storage
    return _floats(load(ns, store(ns, _short(moved).view(torch.int32), storage), storage)).double()


def _short(values: torch.Tensor) -> torch.Tensor:
    """float64 rounded to float32; finite stays finite."""
    return values.clamp(-LARGEST, LARGEST).float()


def _floats(bits: torch.Tensor) -> torch.Tensor:
    """float32 patterns as float32."""
    return bits.contiguous().view(torch.float32)


__all__ = ["hqq"]
