"""Operations that read a weight's values have the dense results of the dequantized weight."""

import pytest
import torch

from ao_lab import quantized
from ao_lab.tensor.values.reads import READS
from tests.support.quantized_weights import pair, same, weight

aten = torch.ops.aten
OTHER, ROW, ROWS = weight(32, 64, seed=2), weight(1, 64, seed=3), torch.tensor([3, 1])
#: The arguments after the weight, where they are not none, one number or one matrix.
ARGUMENTS = {
    aten.addcmul.default: (OTHER, OTHER),
    aten.lerp.Scalar: (OTHER, 0.5),
    aten.lerp.Tensor: (OTHER, OTHER),
    aten.pow.Tensor_Scalar: (2,),
    aten.sum.dim_IntList: ([0],),
    aten.mean.dim: ([0], True),
    aten.norm.ScalarOpt_dim: (2, [1]),
    aten.norm.Scalar: (),
    aten._linalg_svd.default: (),
    aten.index_copy.default: (0, ROWS, OTHER[:2]),
    aten.index_add.default: (0, ROWS, OTHER[:2]),
    aten.index_put.default: ([ROWS], OTHER[:2]),
    aten.scatter.src: (0, ROWS[:, None], OTHER[:2]),
    aten.scatter_add.default: (0, ROWS[:, None], OTHER[:2]),
    aten.flip.default: ([0],),
    aten.roll.default: ([1],),
    aten.repeat.default: ([2, 1],),
}


def called(op, t):
    if op is aten.where.self:
        return op(OTHER > 0, t, OTHER)
    if op is aten.dot.default:
        return op(t.view(-1), t.view(-1))
    given = ARGUMENTS.get(op)
    if given is None:
        needed = [a for a in op._schema.arguments[1:] if not a.has_default_value() and not a.kwarg_only]
        given = tuple(OTHER if str(a.type) == "Tensor" else 0.5 for a in needed)
    return op(t, *given)


@pytest.mark.parametrize("op", READS, ids=str)
def test_results_are_those_of_the_dense_weight(op):
    t = quantized(weight(32, 64).abs(), "int4_g32")
    made, wanted = called(op, t), called(op, t.dequantize())
    pairs = zip(made, wanted, strict=True) if isinstance(made, tuple) else [(made, wanted)]
    assert all(type(one) is torch.Tensor and same(one, other) for one, other in pairs)


def test_either_side_and_either_storage():
    t, dense = pair("int8_rowwise", 32, 64)
    assert same(OTHER.bfloat16() + t, OTHER.bfloat16() + dense)
    assert same(t.norm(dim=1), dense.norm(dim=1))
    assert torch.isfinite(t).all()
    half = t.float()
    assert same(torch.linalg.qr(half).R, torch.linalg.qr(half.dequantize()).R)
