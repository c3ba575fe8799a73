"""Sums of rows: against a loop in NumPy's float32, against torch's own on the dequantized table, in every array library."""

import numpy as np
import pytest
import torch

import reference
from reference import SCHEMES, embedding_bag
from tests.support.embedding import CASES, Case, bags_of, table_of

SCHEMES_OF_ALL_KINDS = ("nf4", "nvfp4", "fp8_tensorwise", "fp8_128x128", "int3_g128", "mxfp6_e2m3")


def by_loops(q, ids, offsets, weights, mode, padding):
    """float32 sums, one id after the other."""
    dense = reference.dequantize(q).numpy()
    ends = [*offsets.tolist()[1:], len(ids)]
    result = np.zeros((len(offsets), q.shape[1]), np.float32)
    with np.errstate(all="ignore"):
        for bag, (begin, end) in enumerate(zip(offsets.tolist(), ends, strict=True)):
            kept = [at for at in range(begin, end) if int(ids[at]) != padding]
            for at in kept:
                row = dense[int(ids[at])]
                result[bag] += row if weights is None else np.float32(weights[at]) * row
            if mode == "mean":
                result[bag] /= np.float32(max(len(kept), 1))
    return torch.from_numpy(result)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.scheme}-{case.mode}-{case.width}")
def test_sums_are_rounded_one_by_one(case):
    q = table_of(case)
    ids, offsets, weights = bags_of(case, q.shape[0])
    y = embedding_bag(q, ids, offsets, weights, mode=case.mode, padding=case.padding, dtype=case.dtype)
    expected = by_loops(q, ids, offsets, weights, case.mode, case.padding).to(getattr(torch, case.dtype))
    nan = expected.isnan()
    assert torch.equal(y.isnan(), nan)
    assert torch.equal(torch.where(nan, 0, y), torch.where(nan, 0, expected))


@pytest.mark.parametrize("name", SCHEMES_OF_ALL_KINDS)
def test_tables_whose_rows_share_scales(name):
    q = reference.quantize(torch.randn(128, 128), name, packed=SCHEMES[name].format.bits < 8)
    ids, offsets = torch.randint(0, 128, (40,)), torch.tensor([0, 7, 7, 30])
    assert torch.equal(embedding_bag(q, ids, offsets), by_loops(q, ids, offsets, None, "sum", None))


def test_the_order_of_ids_matters():
    """1e8 + 1 - 1e8 in float32 is 0 in this order, and 1 in another."""
    q = reference.quantize(torch.tensor([[1e8] * 32, [1.0] * 32, [-1e8] * 32]), "int8_rowwise")
    first, other = (embedding_bag(q, torch.tensor(ids), torch.tensor([0])) for ids in ([0, 1, 2], [0, 2, 1]))
    assert first.unique().tolist() == [0.0]
    assert other.unique().tolist() == [1.0]


@pytest.mark.parametrize("library", ["numpy", pytest.param("jax", marks=pytest.mark.nightly), "torch"])
def test_libraries_agree(library):
    case = Case("int4_g32", width=64, weighted=True, dtype="bfloat16", padding=41)
    q, (ids, offsets, weights) = table_of(case), bags_of(case, 61)
    expected = by_loops(q, ids, offsets, weights, "sum", 41).to(torch.bfloat16)
    if library != "torch":
        to = np.asarray if library == "numpy" else pytest.importorskip("jax.numpy").asarray
        parts = [to(part.numpy()) for part in (q.codes, q.scale)]
        q = reference.Quantized(*parts, None, None, q.shape, q.axis, q.scheme, q.packed)
        ids, offsets, weights = (to(part.numpy()) for part in (ids, offsets, weights))
    y = embedding_bag(q, ids, offsets, weights, padding=41, dtype="bfloat16")
    bits = y.view(torch.int16).numpy() if library == "torch" else np.asarray(y).view(np.int16)
    assert (bits == expected.view(torch.int16).numpy())[~expected.isnan().numpy()].all()


def test_bags_without_ids():
    q = table_of(CASES[0])
    none = torch.zeros(0, dtype=torch.long)
    assert torch.equal(embedding_bag(q, none, torch.tensor([0, 0])), torch.zeros(2, 128))
    assert embedding_bag(q, none, none).shape == (0, 128)
    assert torch.equal(embedding_bag(q, none, torch.tensor([0]), mode="mean"), torch.zeros(1, 128))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"ids": torch.tensor([0, 61])}, ValueError, r"id 61 at place 1 is outside of a table of 61 rows \(0 to 60\)"),
        ({"ids": torch.tensor([-1, 2])}, ValueError, "id -1 at place 0"),
        ({"ids": torch.tensor([0.0, 1.0])}, TypeError, "ids are integers, got float32"),
        ({"ids": torch.tensor([[0, 1]])}, ValueError, "ids have one axis"),
        ({"offsets": torch.tensor([1])}, ValueError, "offsets begin with 0"),
        ({"offsets": torch.tensor([0, 2, 1])}, ValueError, "never fall"),
        ({"offsets": torch.tensor([0, 3])}, ValueError, "at most at 2"),
        ({"offsets": torch.zeros(0, dtype=torch.long)}, ValueError, "2 ids belong to no bag"),
        ({"weights": torch.ones(3)}, ValueError, r"weights of shape \(3,\) for 2 ids"),
        ({"weights": torch.ones(2), "mode": "mean"}, ValueError, "mode='mean' takes none"),
        ({"mode": "max"}, ValueError, "mode"),
        ({"table": torch.ones(2, 2)}, TypeError, "takes a table as a Quantized, got Tensor"),
        ({"table": reference.quantize(torch.ones(32), "mxfp8_e4m3")}, ValueError, r"shape \(rows, width\)"),
    ],
)  # fmt: skip
def test_what_is_refused(changes, error, message):
    given = {"table": table_of(CASES[0]), "ids": torch.tensor([0, 1]), "offsets": torch.tensor([0])} | changes
    with pytest.raises(error, match=message):
        embedding_bag(**given)
