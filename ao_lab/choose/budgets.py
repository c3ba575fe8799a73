"""Budgets of `choose_`, and what an option costs: stored bytes, exactly, or microseconds of a product, measured.

Bytes are those of codes, scales of both levels, zero points and padding, as files of layout "ao_lab" hold them; preshuffled
on a GPU a weight may take more. Microseconds are those of `ao_lab.tune`'s table where it has the product, else measured
now, as `tune` measures them, and not saved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from ao_lab.checkpoint.size import size_of
from ao_lab.choose.items import Item
from ao_lab.gemm.choices import Choice as TunedChoice
from ao_lab.gemm.choices import rows_range
from ao_lab.quantization.plan import Change
from ao_lab.quantization.report import inference_choices
from ao_lab.tensor.metadata import for_products
from ao_lab.tensor.quantized_tensor import QuantizedTensor, quantized
from ao_lab.transforms.layers import TABLES
from ao_lab.tuning.candidates import Limits, serving_choice
from ao_lab.tuning.measure import release, timings
from ao_lab.tuning.samples import ServingSample

#: What an item costs under a change of its weight, or (None) as it is.
Meter = Callable[[Item, Change | None], float]


class Budget(Protocol):
    """What a choice may cost."""

    def meter(self) -> Meter:
        """What finds costs; what is measured is measured once."""

    def limit(self, items: Sequence[Item]) -> float:
        """The budget in the unit of the costs."""

    def text(self, cost: float, items: Sequence[Item]) -> str:
        """A cost in the unit of the budget."""


class _Stored:
    """Costs are stored bytes."""

    def meter(self) -> Meter:
        """Bytes of layout "ao_lab"."""
        return stored_bytes


@dataclass(frozen=True)
class Bits(_Stored):
    """Average stored bits per parameter of the selected weights, all included: quantized values, scales, zero points."""

    bits: float

    def __post_init__(self) -> None:
        _check_number("Bits", self.bits, "4.25 is that of int4 in groups of 64 with 16-bit scales")

    def limit(self, items: Sequence[Item]) -> float:
        """In bytes."""
        return self.bits * sum(item.numel for item in items) / 8

    def text(self, cost: float, items: Sequence[Item]) -> str:
        """Bits of a weight."""
        return f"{cost * 8 / sum(item.numel for item in items):.4g} bits"


@dataclass(frozen=True)
class Bytes(_Stored):
    """Bytes of the selected weights."""

    bytes: int

    def __post_init__(self) -> None:
        _check_number("Bytes", self.bytes, "it is the size of the chosen weights, not of the whole model")

    def limit(self, items: Sequence[Item]) -> float:
        """As it is."""
        return float(self.bytes)

    def text(self, cost: float, items: Sequence[Item]) -> str:
        """Bytes."""
        return f"{cost:,.0f} bytes"


@dataclass(frozen=True)
class Microseconds:
    """Total time of the layers' matmuls, one after the other, for inputs of this many tokens."""

    time: float
    rows: int = 1
    launches: str = "graph"

    def __post_init__(self) -> None:
        _check_number("Microseconds", self.time, "it is the sum over the chosen layers' matmuls")
        if type(self.rows) is not int or self.rows < 1:
            raise ValueError(f"Microseconds: rows is an integer of at least 1, got {self.rows!r}")
        Limits(None, None, self.launches)

    def limit(self, items: Sequence[Item]) -> float:
        """As it is."""
        return float(self.time)

    def text(self, cost: float, items: Sequence[Item]) -> str:
        """Microseconds."""
        return f"{cost:.1f} microseconds"

    def meter(self) -> Meter:
        """Measured once for weights that are alike."""
        known: dict[object, float] = {}

        def time(item: Item, change: Change | None) -> float:
            weight = item.parameter
            shape = tuple(weight.shape[::-1] if item.transposed else weight.shape)
            recipe = None if change is None else (change.recipe, change.config.sparsity)
            key = (recipe, shape, weight.dtype, weight.device)
            count = sum(not isinstance(module, TABLES) for module, _ in item.places.values())
            if count and key not in known:
                known[key] = self._measured(shape, weight, change)
            return count * known.get(key, 0.0)

        return time

    def _measured(self, shape: tuple[int, ...], weight: torch.Tensor, change: Change | None) -> float:
        if weight.is_meta:
            raise ValueError("Microseconds: weights on the meta device cannot be timed; load them first")
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(self.rows, shape[1], generator=generator).to(weight.device, weight.dtype)
        dense = torch.randn(shape, generator=generator).to(weight.device, weight.dtype)
        try:
            if change is None:
                calls = {"dense": lambda: F.linear(x, dense)}
                timing: Any = timings(calls, weight.device, self.launches)["dense"]
                return float(timing.seconds) * 1e6
            return _seconds(self._choice(quantized(dense, change.recipe, axis=-1), x)) * 1e6
        finally:
            release()

    def _choice(self, q: QuantizedTensor, x: torch.Tensor) -> TunedChoice:
        wanted = rows_range(self.rows)
        for choice in inference_choices(q):
            p = choice.problem
            if p.rows == wanted and p.dtype == str(x.dtype) and choice.candidate.seconds is not None:
                return choice
        sample = ServingSample("", x, for_products(q))
        return serving_choice(sample, Limits(None, None, self.launches))


def _seconds(choice: TunedChoice) -> float:
    seconds = choice.candidate.seconds
    if seconds is None:
        reasons = "; ".join(f"{one.kernel}: {one.reason}" for one in choice.candidates)
        raise ValueError(
            f"Microseconds: no kernel for this matmul could be timed ({reasons}); give Bits or Bytes"
        )
    return seconds


def stored_bytes(item: Item, change: Change | None) -> float:
    """Of a weight: codes, scales, zero points, padding; of a dense one its elements."""
    if change is None:
        return float(item.parameter.nbytes)
    shape = tuple(item.parameter.shape)[::-1] if change.transposed else tuple(item.parameter.shape)
    return float(size_of(change, shape).bytes)


def _check_number(name: str, value: Any, hint: str) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        raise ValueError(f"{name} is a positive number, got {value!r}; {hint}")


__all__ = ["Bits", "Bytes", "Microseconds"]
