"""Error measures, each defined once; all sums are in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from reference import Quantized

# Stored bytes of a quantized tensor: elements packed to their bits, scales and zero points.


@dataclass(frozen=True)
class Stored:
    """Bytes of a tensor by part."""

    elements: int
    scales: int = 0
    outer: int = 0
    zeros: int = 0

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.elements + self.scales + self.outer + self.zeros

    def __add__(self, other: Stored) -> Stored:
        return Stored(
            self.elements + other.elements,
            self.scales + other.scales,
            self.outer + other.outer,
            self.zeros + other.zeros,
        )


def stored(q: Quantized) -> Stored:
    """Bytes of a quantized tensor. Elements count by the bits of their format, packed over the whole tensor; scales and zero
    points count as the arrays of the quantizer (an int8 zero point takes a byte even where four bits would do)."""
    return Stored(
        elements=math.ceil(math.prod(q.shape) * q.scheme.format.bits / 8),
        scales=_bytes(q.scale),
        outer=_bytes(q.outer),
        zeros=_bytes(q.zero),
    )


def stored_plain(tensor: Tensor) -> Stored:
    """Bytes of a tensor that is not quantized."""
    return Stored(elements=_bytes(tensor))


def _bytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.nbytes


@dataclass(frozen=True)
class Error:
    """Sums over elements, from which every measure is computed; `+` combines several tensors."""

    signal: float = 0.0
    noise: float = 0.0
    product: float = 0.0
    rounded: float = 0.0
    largest: float = 0.0
    largest_error: float = 0.0

    @classmethod
    def of(cls, exact: Tensor, rounded: Tensor) -> Error:
        """The error of `rounded` against `exact`."""
        x, y = exact.double(), rounded.double()
        difference = x - y
        return cls(
            signal=float((x * x).sum()),
            noise=float((difference * difference).sum()),
            product=float((x * y).sum()),
            rounded=float((y * y).sum()),
            largest=float(x.abs().max()),
            largest_error=float(difference.abs().max()),
        )

    def __add__(self, other: Error) -> Error:
        return Error(
            self.signal + other.signal,
            self.noise + other.noise,
            self.product + other.product,
            self.rounded + other.rounded,
            # Python's max drops a NaN that comes second; NumPy's keeps it wherever it is.
            float(np.maximum(self.largest, other.largest)),
            float(np.maximum(self.largest_error, other.largest_error)),
        )

    @property
    def snr_db(self) -> float:
        """Signal to noise: 10 log10(sum x^2 / sum (x - y)^2) decibel; inf without noise, -inf without signal."""
        if math.isnan(self.noise):
            return math.nan
        if self.noise == 0:
            return math.inf
        return 10 * math.log10(self.signal / self.noise) if self.signal else -math.inf

    @property
    def cosine_distance(self) -> float:
        """1 - cosine of the angle between x and y: 0 is exact; independent of an overall scale."""
        norm = math.sqrt(self.signal * self.rounded)
        return 1 - self.product / norm if norm else math.nan

    @property
    def max_error(self) -> float:
        """Largest |x - y| as a fraction of the largest |x|; inf without signal."""
        if self.largest_error == 0:
            return 0.0
        return self.largest_error / self.largest if self.largest else self.largest_error * math.inf


def mean_and_error(values: Tensor | np.ndarray) -> tuple[float, float]:
    """Mean and its standard error; values are independent (one per document)."""
    values = torch.as_tensor(values, dtype=torch.float64)
    count = values.numel()
    return float(values.mean()), float(values.std() / math.sqrt(count)) if count > 1 else math.nan
