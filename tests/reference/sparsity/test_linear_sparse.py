"""`linear_sparse` of the reference: its roundings one by one, its bound, and what it refuses."""

import numpy as np
import pytest
import torch

import reference
from reference import linear_sparse, linear_sparse_error_bound
from reference.sparsity.linear_sparse import PAIRS

SIZE = (6, 5, 64)


def given(kinds=("float8_e4m3fn",) * 2, size=SIZE, seed=0):
    """x, values, metadata, the dense weight; kinds: of values and x."""
    m, n, k = size
    g = torch.Generator().manual_seed(seed)
    spread = 30 if kinds[0] == "int8" else 1
    w, x = (torch.randn(shape, generator=g) * spread for shape in ((n, k), (m, k)))
    kept = reference.prune(w)
    w = torch.where(kept, w, 0.0).to(getattr(torch, kinds[0]))
    return x.to(getattr(torch, kinds[1])), *reference.compress(w, kept), w


def rest(seed=1):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(5, generator=g), {
        "x_scale": torch.rand(6, 1, generator=g),
        "scale": torch.rand(5, 1, generator=g),
    }


@pytest.mark.parametrize("kinds", PAIRS)
@pytest.mark.parametrize("out", ["float32", "bfloat16", "float16"])
def test_each_operation_is_rounded_to_float32(kinds, out):
    x, values, metadata, w = given(kinds)
    bias, scales = rest()
    # Products of 8 bits are exact in float64, and so are their sums; 16 bits nearly: rounding twice would need a tie.
    sums = (x.double() @ w.double().T).float()
    wanted = ((sums * scales["x_scale"]) * scales["scale"].T + bias).to(getattr(torch, out))
    got = linear_sparse(x, values, metadata, bias, out_dtype=out, **scales)
    assert got.dtype == wanted.dtype
    assert torch.equal(got, wanted)


def test_no_operation_is_left_out_where_there_is_no_scale():
    x, values, metadata, w = given()
    assert torch.equal(linear_sparse(x, values, metadata), (x.double() @ w.double().T).float())
    bias, _ = rest()
    assert torch.equal(linear_sparse(x, values, metadata, bias), (x.double() @ w.double().T).float() + bias)
    one = {"x_scale": torch.tensor(0.3), "scale": torch.tensor([[0.7]])}
    wanted = (x.double() @ w.double().T).float() * one["x_scale"] * one["scale"]
    assert torch.equal(linear_sparse(x, values, metadata, **one), wanted)


@pytest.mark.parametrize(
    ("kind", "name"), [("bfloat16", "bfloat16"), ("float16", "float16"), ("int8", "float32")]
)
def test_the_result_has_x_dtype_where_there_is_one(kind, name):
    x, values, metadata, _ = given((kind, kind))
    assert linear_sparse(x, values, metadata).dtype == getattr(torch, name)


def test_leading_axes_and_libraries():
    x, values, metadata, _ = given()
    bias, scales = rest()
    wanted = linear_sparse(x, values, metadata, bias, **scales)
    folded = {**scales, "x_scale": scales["x_scale"].view(2, 3, 1)}
    assert torch.equal(
        linear_sparse(x.view(2, 3, 64), values, metadata, bias, **folded), wanted.view(2, 3, 5)
    )
    arrays = [
        x.float().numpy().astype(np.float16),
        values.float().numpy().astype(np.float16),
        metadata.numpy(),
    ]
    got = linear_sparse(
        *arrays, bias.numpy(), out_dtype="float32", **{n: s.numpy() for n, s in scales.items()}
    )
    assert isinstance(got, np.ndarray)
    assert np.array_equal(got, wanted.numpy())


def test_integers_are_exact():
    x, values, metadata, w = given(("int8", "int8"), (3, 5, 4096))
    got = linear_sparse(x, values, metadata, out_dtype="int32")
    assert torch.equal(got, (x.long() @ w.long().T).int())


def test_integers_that_do_not_fit():
    """2**17 products of 2**14 are one more than int32 holds."""
    values = torch.full((1, 1 << 17), -128, dtype=torch.int8)
    metadata = torch.full((1, 1 << 15), 0x44, dtype=torch.uint8)
    x = torch.full((1, 1 << 18), -128, dtype=torch.int8)
    with pytest.raises(ValueError, match="does not fit int32"):
        linear_sparse(x, values, metadata, out_dtype="int32")
    assert linear_sparse(x, values, metadata)[0, 0] == 2.0**31


@pytest.mark.parametrize("kinds", PAIRS)
@pytest.mark.parametrize("fast_sums", [True, False])
def test_results_of_other_sums_are_within_the_bound(kinds, fast_sums):
    """Of the model of the tensor core, which keeps 14 bits of float8; and the reference itself."""
    x, values, metadata, w = given(kinds, (4, 5, 512))
    eight = kinds[0].startswith("float8")
    bias, scales = rest()
    scales["x_scale"] = scales["x_scale"][:4]
    truth = (x.double() @ w.double().T) * scales["x_scale"].double() * scales[
        "scale"
    ].double().T + bias.double()
    bound = linear_sparse_error_bound(
        x, values, metadata, bias, fast_sums=fast_sums, out_dtype="float32", **scales
    )
    assert bool(
        (
            (linear_sparse(x, values, metadata, bias, out_dtype="float32", **scales).double() - truth).abs()
            <= bound
        ).all()
    )
    if eight:
        sums = reference.matmul(x, w.T, accumulation="hopper_fp8", promote=None if fast_sums else 128)
        made = sums * scales["x_scale"] * scales["scale"].T + bias
        assert bool(((made.double() - truth).abs() <= bound).all())
        exact = ((x.double() @ w.double().T).float() * scales["x_scale"]) * scales["scale"].T + bias
        assert not torch.equal(made, exact)
    assert bool((bound < (1.0 if eight else 0.01) * (1 + truth.abs().max())).all())


def test_the_bound_is_tight_for_integers_and_none_for_int32():
    x, values, metadata, _ = given(("int8", "int8"))
    assert bool((linear_sparse_error_bound(x, values, metadata, out_dtype="int32") == 0).all())
    bias, scales = rest()
    bound = linear_sparse_error_bound(x, values, metadata, bias, **scales)
    assert bool((bound <= 5 * 2.0**-24 * 64 * 1e4).all())


def test_promoted_sums_have_the_smaller_bound():
    x, values, metadata, _ = given(size=(2, 3, 2048))
    bounds = [linear_sparse_error_bound(x, values, metadata, fast_sums=fast) for fast in (False, True)]
    assert bool((bounds[0] < bounds[1]).all())


def test_nothing_is_promised_beyond_float32():
    x, values, metadata, _ = given()
    huge = {"x_scale": torch.tensor(3e38), "scale": torch.tensor(3e38)}
    assert bool(linear_sparse_error_bound(x, values, metadata, **huge).isinf().all())
    assert bool(linear_sparse(x, values, metadata, **huge).isinf().any())


BAD = {
    "x of another dtype": (TypeError, "by the same", lambda a: a.update(x=a["x"].float())),
    "codes": (TypeError, "view codes", lambda a: a.update(values=a["values"].view(torch.uint8))),
    "other K": (ValueError, "x \\(..., K\\)", lambda a: a.update(x=a["x"][:, :60])),
    "metadata": (ValueError, "metadata of shape", lambda a: a.update(metadata=a["metadata"][:, 1:])),
    "metadata's dtype": (TypeError, "uint8", lambda a: a.update(metadata=a["metadata"].int())),
    "bias": (ValueError, "bias has shape", lambda a: a.update(bias=torch.ones(4))),
    "bias's dtype": (TypeError, "bias of float32", lambda a: a.update(bias=torch.ones(5).double())),
    "x_scale": (ValueError, "x_scale has shape", lambda a: a.update(x_scale=torch.ones(6))),
    "scale": (ValueError, "scale has shape", lambda a: a.update(scale=torch.ones(1, 5))),
    "scale's dtype": (TypeError, "scale in float32", lambda a: a.update(scale=torch.ones(5, 1).bfloat16())),
    "out_dtype": (ValueError, "out_dtype", lambda a: a.update(out_dtype="float64")),
    "int32 of floats": (ValueError, "int32 is for int8", lambda a: a.update(out_dtype="int32")),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_what_is_refused(what):
    x, values, metadata, _ = given()
    kind, message, change = BAD[what]
    arguments = {"x": x, "values": values, "metadata": metadata}
    change(arguments)
    for function in (linear_sparse, linear_sparse_error_bound):
        with pytest.raises(kind, match=message):
            function(**arguments)
