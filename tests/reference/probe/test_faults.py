"""The bank: each fault is what its name says, and leaves what it does not touch."""

import numpy as np
import pytest

import reference
from reference import SCHEMES
from reference.probe.faults import FAULTS, RIGHT, Case, typical_inputs, typical_weight


def case(scheme="fp8_rowwise", weight=None, tokens=70, channels=768, outputs=66):
    x, w = typical_inputs(tokens, channels), typical_weight(outputs, channels)
    inputs = None if scheme is None else SCHEMES[scheme]
    return Case(x, w, inputs, SCHEMES[weight or scheme], "a case")


def near(x, y):
    """Within float32's rounding of scales and elements."""
    return np.linalg.norm(x - y) < 1e-6 * np.linalg.norm(y)


def test_scales_of_other_rows():
    one = case()
    x = reference.dequantize(one.xq).astype(np.float64)
    scale = one.xq.scale.astype(np.float64)
    for name, moved in (("rows shifted", np.roll(scale, 1, 0)), ("first row", scale[:1])):
        expected = (x / scale * moved) @ one.b.T
        assert near(FAULTS[name].outputs(one), expected)
    moved = np.roll(one.wq.scale, 1, 0) / one.wq.scale
    assert near(FAULTS["columns shifted"].outputs(one), one.right * moved.T)


def test_scales_of_blocks():
    one = case("fp8_1x128", "fp8_128x128", outputs=128)
    x = one.a.reshape(70, 6, 128) / one.xq.scale[..., None]
    scale = one.xq.scale
    for name, moved in (
        ("transposed blocks", scale.reshape(-1).reshape(6, 70).T),
        ("last blocks", np.concatenate([scale[:, :4], scale[:, :2]], 1)),
    ):
        expected = (x * moved[..., None]).reshape(70, 768) @ one.b.T
        assert near(FAULTS[name].outputs(one), expected)
    assert FAULTS["last blocks"].outputs(case("fp8_1x128", "fp8_128x128", channels=512, outputs=128)) is None
    assert FAULTS["short accumulator"].outputs(one) is None


def test_parts_that_are_missing():
    one = case()
    wrong = FAULTS["dropped tail"].outputs(one)
    np.testing.assert_allclose(one.right - wrong, one.a[:, -16:] @ one.b[:, -16:].T, rtol=1e-9, atol=1e-9)
    rows = FAULTS["unwritten rows"].outputs(one)
    assert (rows[:64] == one.right[:64]).all()
    assert not rows[64:].any()
    part = FAULTS["lost part"].outputs(one)
    assert (part != one.right).sum() == 64 * 64
    assert FAULTS["unwritten rows"].outputs(case(tokens=64)) is None


def test_saturation():
    """Magnitudes that a fault clips, of one row with one large element."""
    x, w = np.full((64, 64), 0.125, np.float32), np.eye(64, dtype=np.float32)
    x[:, 0] = 8.0
    one = Case(x, w, SCHEMES["fp8_rowwise"], SCHEMES["fp8_rowwise"])
    first = {
        name: FAULTS[name].outputs(one)[0, 0]
        for name in ("upper bound", "stale scale", "wrong maximum", "no scale")
    }
    assert first == pytest.approx(
        {"upper bound": 1, "stale scale": 4, "wrong maximum": 8 * 240 / 448, "no scale": 8}, rel=1e-3
    )
    assert FAULTS["wrong bias"].outputs(one)[0, 0] == pytest.approx(4, rel=1e-3)


def test_sums_that_are_short():
    one = case()
    for name, low, high in (("short accumulator", 1e-5, 2e-3), ("bfloat16 sums", 1e-3, 2e-2)):
        wrong = FAULTS[name].outputs(one)
        assert low < np.linalg.norm(wrong - one.right) / np.linalg.norm(one.right) < high


def test_right_kernels_are_right():
    one = case(tokens=32, outputs=16)
    size = np.linalg.norm(one.right)
    for name, kernel in RIGHT.items():
        most = 0.08 if name == "powers of two" else 1e-5
        assert np.linalg.norm(kernel(one) - one.right) < most * size, name


def test_what_a_scheme_cannot_have_is_none():
    dense = case(None, "int4_g64_asymmetric")
    assert {name for name, fault in FAULTS.items() if fault.outputs(dense) is not None} == {
        "columns shifted", "dropped tail", "dropped tile", "dropped block", "unwritten rows", "lost part", "bfloat16 sums",
        "no scales applied", "weight scale not applied", "outputs shifted by a channel", "outputs shifted by a token",
    }  # fmt: skip
    assert FAULTS["no zero point"].outputs(case("int8_rowwise_asymmetric")) is not None
    assert FAULTS["no outer scale"].outputs(case("nvfp4")) is not None
    assert FAULTS["no zero point"].outputs(case()) is None
    with pytest.raises(ValueError, match="is not quantized"):
        dense.xq  # noqa: B018


def test_inputs_are_those_of_a_layer():
    x = typical_inputs(512, 256)
    sizes = np.abs(x).max(1)
    assert sizes.max() > 30 * sizes.min()
    assert 0.2 < (x == 0).mean() < 0.5
    values = np.linalg.svd(x / np.linalg.norm(x, axis=1, keepdims=True), compute_uv=False) ** 2
    assert values.sum() ** 2 / (values**2).sum() < 256 / 4
