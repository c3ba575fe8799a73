"""The operands of a layer's products, quantized and dense, from a sample."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ao_lab.gemm.problem import Problem, problem_of
from ao_lab.training.casts import STREAMS, Matrix, quantize_one, transposed
from ao_lab.training.products import scheme_key
from ao_lab.tuning.samples import TrainingSample
from reference.training.recipe import Product


@dataclass(frozen=True)
class Pair:
    """Both operands of a product as the tensor core gets them, and dense."""

    problem: Problem
    record: Product
    a: Matrix
    b: Matrix
    dense_a: torch.Tensor
    dense_b: torch.Tensor
    dtype: torch.dtype


def pairs_of(sample: TrainingSample) -> Iterator[Pair]:
    """The products that a layer's step makes."""
    x, w, g = sample.x, sample.w, sample.g
    tensors = {"output": (x, w)}
    if g is not None:
        tensors |= {"input_grad": (g, transposed(w)), "weight_grad": (transposed(g), transposed(x))}
    for name, (a, b) in tensors.items():
        record: Product = getattr(sample.recipe, name)
        stream = STREAMS.get({"input_grad": "g", "weight_grad": "g.T"}.get(name, ""), 0)
        left, right = quantize_one(a, record.a, 0, stream), quantize_one(b, record.b)
        shape = (a.shape[0], b.shape[0], a.shape[1])
        keys = scheme_key(left), scheme_key(right)
        problem = problem_of(name, *keys, shape, x.dtype, record.accumulation)
        yield Pair(problem, record, left, right, a, b, x.dtype)


__all__ = ["Pair", "pairs_of"]
