"""Pickles written under earlier module names load as today's classes, with the same contents."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from ao_lab.testing.strategies import assert_same_bits, assert_same_quantized
from reference import FORMATS, SCHEMES, choose_scales, compress, dequantize, quantize

OLD = Path(__file__).resolve().parents[1] / "ao_lab" / "install" / "data" / "reference.pkl"
X = np.linspace(-3, 3, 64, dtype=np.float32).reshape(2, 32)
TODAY = {
    "quantized": quantize(X, "mxfp4"),
    "scales": choose_scales(X, "int4_g32_asymmetric"),
    "scheme": SCHEMES["nvfp4"],
    "format": FORMATS["nf4"],
    "compressed": compress(X, "2:4"),
}


@pytest.fixture(scope="module")
def old():
    return pickle.loads(OLD.read_bytes())


def test_old_pickles_have_todays_classes(old):
    assert {name: type(value) for name, value in old.items()} == {
        name: type(value) for name, value in TODAY.items()
    }


@pytest.mark.parametrize("name", ["scheme", "format"])
def test_records_are_equal(old, name):
    assert old[name] == TODAY[name]


def test_a_stored_tensor_is_the_same(old):
    assert old["quantized"].scheme is not None
    assert old["quantized"].scheme.key == "mxfp4"
    assert_same_quantized(old["quantized"], TODAY["quantized"])
    assert_same_bits(dequantize(old["quantized"]), dequantize(TODAY["quantized"]))
    assert_same_quantized(
        quantize(X, "int4_g32_asymmetric", scales=old["scales"]), quantize(X, "int4_g32_asymmetric")
    )


@pytest.mark.parametrize("name", ["scales", "compressed"])
def test_arrays_are_the_same(old, name):
    assert_same_bits(old[name], TODAY[name])


@pytest.mark.parametrize("name", TODAY)
def test_todays_pickles_load(name):
    again = pickle.loads(pickle.dumps(TODAY[name]))
    assert type(again) is type(TODAY[name])
    if name in ("scheme", "format"):
        assert again == TODAY[name]
    elif name == "quantized":
        assert_same_quantized(again, TODAY[name])
    else:
        assert_same_bits(again, TODAY[name])
