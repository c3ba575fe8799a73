"""Operations that read the values of a `QuantizedTensor`: computed of the dequantized weight, the result is a dense tensor.

What other libraries do with a layer's weight beside multiplying by it: a sum with an adapter's update, norms of rows, singular
values, statistics that new rows of a table are drawn from. A result of arithmetic is no weight of a scheme, so it is dense, in
the weight's dtype; `copy_` quantizes it again. Each call dequantizes the whole weight.

Activation functions and products in which a weight would be an input are not among them: there a dense copy would be made in
each step, which a user has to ask for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ao_lab.tensor.op_registry import operation
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from ao_lab.tensor.torch_changes.memory import refuse_array

aten = torch.ops.aten

#: Elementwise arithmetic, comparisons and tests.
ELEMENTWISE = (
    aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Tensor, aten.rsub.Scalar,
    aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.addcmul.default, aten.lerp.Scalar,
    aten.lerp.Tensor, aten.neg.default, aten.abs.default, aten.pow.Tensor_Scalar, aten.sqrt.default,
    aten.isnan.default, aten.isinf.default, aten.eq.Tensor, aten.eq.Scalar, aten.ne.Tensor, aten.ne.Scalar,
    aten.gt.Scalar, aten.lt.Scalar, aten.ge.Scalar, aten.le.Scalar, aten.where.self, aten.sign.default,
)  # fmt: skip
#: Statistics.
REDUCTIONS = (
    aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.amax.default, aten.amin.default,
    aten.max.default, aten.min.default, aten.any.default, aten.all.default, aten.std.correction, aten.var.correction,
    aten.linalg_vector_norm.default, aten.norm.Scalar, aten.norm.ScalarOpt_dim, aten.dot.default,
)  # fmt: skip
#: Decompositions, and rows put in another place.
MATRICES = (
    aten._linalg_svd.default, aten.linalg_qr.default, aten.index_copy.default, aten.index_add.default,
    aten.index_put.default, aten.scatter.src, aten.scatter_add.default, aten.flip.default, aten.roll.default,
    aten.repeat.default, aten.tril.default, aten.triu.default, aten.diagonal_copy.default,
)  # fmt: skip
#: All of these.
READS = (*ELEMENTWISE, *REDUCTIONS, *MATRICES)


def dense(value: Any) -> Any:
    """Arguments with each QuantizedTensor among them dequantized."""
    return tree_map_only(QuantizedTensor, QuantizedTensor.dequantize, value)


@operation(aten.view.dtype)
def _as_dtype(func: Any, args: Any, kwargs: Any) -> Any:
    """The bits of another dtype, as NumPy is given bfloat16 ones: there are none of the whole weight."""
    refuse_array(args[0])


@operation(*READS)
def _read(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*dense(args), **dense(kwargs))


__all__ = ["READS", "dense"]
