"""Held-out damping against sweeps one by one, judged on other tokens."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from reference import choose_scales, dequantize, gptq, held_out_damping, search_scales, second_moment
from reference.calibration.damping import DAMPINGS, held_out_errors
from tests.support.refusals import refused

F = np.float32


def split_tokens(seed, k=48, few=60, many=2000):
    """Weights, and the Hessians of few tokens and of many other ones of the same kind."""
    rng = np.random.default_rng(seed)
    mixed = np.eye(k) + rng.standard_normal((k, k)) / np.sqrt(k)
    x = rng.standard_normal((few + many, k)) @ mixed
    return rng.standard_normal((6, k)).astype(F), second_moment(x[:few]).value, second_moment(x[few:]).value


@settings(max_examples=10)
@given(
    st.integers(0, 10**6),
    st.sampled_from(["stored", "activation"]),
    st.sampled_from(["mxint8", "int3_rowwise"]),
)
def test_errors_are_those_of_gptq_on_held_out_tokens(seed, order, kind):
    w, h, val = split_tokens(seed, 64)
    scheme = "int3_g64_asymmetric" if kind == "int3_rowwise" else "mxfp4"
    scales = choose_scales(w, scheme)
    errors = held_out_errors(w, h, val, scheme, scales=scales, order=order)
    for damping, error in zip(DAMPINGS, errors, strict=True):
        made = gptq(w, h, scheme, scales=scales, order=order, damping=damping)
        change = dequantize(made.quantized).astype(np.float64) - w
        np.testing.assert_allclose(error, np.trace(change @ val @ change.T), rtol=1e-9)
    best = held_out_damping(w, h, val, scheme, scales=scales, order=order)
    assert best == DAMPINGS[int(errors.argmin())]


def test_few_tokens_want_more_damping_than_many():
    w, few, _ = split_tokens(0, few=50)
    _, _, many = split_tokens(0, many=20000)
    assert held_out_damping(w, few, many, "int8_rowwise") >= 0.1
    assert held_out_damping(w, many, many, "int8_rowwise") <= 0.03


def test_rows_are_spaced_evenly_and_scales_go_with_them():
    w, h, val = split_tokens(1, 64)
    for scheme in ("mxfp4", "int8_rowwise", "int8_tensorwise", "fp8_128x128", "nf4"):
        scales = choose_scales(w, scheme)
        part = held_out_errors(w, h, val, scheme, scales=scales, rows=3, candidates=[0.01, 1.0])
        for damping, error in zip([0.01, 1.0], part, strict=True):
            made = gptq(w, h, scheme, scales=scales, damping=damping)
            change = (dequantize(made.quantized).astype(np.float64) - w)[[0, 2, 4]]
            np.testing.assert_allclose(error, np.trace(change @ val @ change.T), rtol=1e-9)
        whole = held_out_errors(w, h, val, scheme, scales=scales, rows=99, candidates=[1.0])
        np.testing.assert_array_equal(
            whole, held_out_errors(w, h, val, scheme, scales=scales, candidates=[1.0])
        )


def test_ties_take_the_earlier_and_scales_are_searched():
    w, h, val = split_tokens(2, 32)
    independent = np.diag(np.diag(h))
    assert held_out_damping(w, independent, val, "mxfp4", candidates=[0.3, 0.01]) == 0.3
    given = search_scales(w, "mxfp4", weights=np.diag(h).copy())
    np.testing.assert_array_equal(
        held_out_errors(w, h, val, "mxfp4"), held_out_errors(w, h, val, "mxfp4", scales=given)
    )
    # Only lower triangles are read.
    np.testing.assert_array_equal(
        held_out_errors(w, np.tril(h), np.tril(val), "mxfp4"), held_out_errors(w, h, val, "mxfp4")
    )


def test_refusals_name_the_way_out():
    w, h, val = split_tokens(3, 32)
    refused(ValueError, "one damping at least", held_out_damping, w, h, val, "mxfp4", candidates=[])
    refused(ValueError, "0 or more, got -1", held_out_damping, w, h, val, "mxfp4", candidates=[0.1, -1])
    refused(ValueError, "1 or more, or None; got 0", held_out_damping, w, h, val, "mxfp4", rows=0)
    refused(ValueError, r"\(32, 32\), inputs by inputs", held_out_damping, w, h, val[:3, :3], "mxfp4")
    refused(ValueError, "no input was seen", held_out_damping, w, h, 0 * val, "mxfp4")
    refused(ValueError, "order", held_out_damping, w, h, val, "mxfp4", order="act")
