"""bitsandbytes' 4-bit checkpoints: the library's weights to the bit, any codes by the published layout, one error else."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from ao_lab.checkpoint.formats.bitsandbytes import RECORDS
from reference.formats.formats import FORMATS
from tests.ao_lab.checkpoint.formats.folders.library_weights import case, cases, folder_of, grids, read
from tests.ao_lab.checkpoint.formats.folders.published_layouts import bitsandbytes_weight

CONFIG = {"quant_method": "bitsandbytes", "load_in_4bit": True}
READ = [name for name in cases("bitsandbytes") if name.partition("_")[0] in RECORDS]
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


@pytest.mark.parametrize("name", READ)
def test_what_the_library_dequantizes(name, tmp_path):
    config, tensors, expected = case("bitsandbytes", name)
    weight = read(folder_of(tmp_path / "model", config, tensors))
    assert weight.dtype == expected.dtype
    assert torch.equal(
        weight.dequantize().view(BITS[weight.dtype]), expected.contiguous().view(BITS[weight.dtype])
    )
    assert weight.scale.dtype == torch.float32
    assert weight.outer is None
    size = int(name.split("_")[1])
    assert weight.scheme.scale.block == (f"flat:{size}" if "flat" in name else size)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 9),
    columns=st.sampled_from([1, 7, 16, 32, 64, 96]),
    size=st.sampled_from([32, 64]),
    nested=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_codes_and_maxima_stay(tmp_path_factory, rows, columns, size, nested, seed):
    rng = np.random.default_rng(seed)
    codes, count = rng.integers(0, 16, (rows, columns)), -(-rows * columns // size)
    table, double, absmax = (
        torch.tensor(FORMATS["nf4"].values),
        None,
        torch.from_numpy(rng.random(count, np.float32)),
    )
    if nested:
        block = int(rng.integers(1, 4))
        kept = rng.integers(0, 256, count).astype(np.uint8)
        book = rng.standard_normal(256).astype(np.float32)
        maxima = rng.random(-(-count // block), np.float32)
        expected = torch.from_numpy(book[kept] * maxima[np.arange(count) // block] + np.float32(0.125))
        double = (torch.from_numpy(book), torch.from_numpy(maxima), block, 0.125)
        absmax = torch.from_numpy(kept)
    else:
        expected = absmax
    tensors = bitsandbytes_weight(codes, absmax, table, size=size, dtype="float32", nested=double)
    weight = read(folder_of(tmp_path_factory.mktemp("bnb"), CONFIG, tensors, prefix="layer.weight"))
    assert np.array_equal(reference.unpack(weight.codes.numpy(), "nf4", (rows, columns)), codes)
    assert torch.equal(weight.scale.reshape(-1), expected)
    spread = expected.repeat_interleave(size)[: codes.size].reshape(rows, columns)
    assert torch.equal(weight.dequantize(), table[torch.from_numpy(codes)] * spread)


def with_state(tensors, **changes):
    """The tensors with another state."""
    key = next(key for key in tensors if "quant_state" in key)
    state = {**json.loads(bytes(tensors[key].tolist())), **changes}
    text = json.dumps({name: value for name, value in state.items() if value is not None})
    return {**tensors, key: torch.tensor(list(text.encode()), dtype=torch.uint8)}


STATES = {
    "blocks": ({"blocksize": 48}, "blocksize is one of"),
    "dtype": ({"dtype": "float64"}, "dtype is one of float32, float16, bfloat16, got float64"),
    "codebook": ({"quant_type": "nf5"}, "quant_type is that of the tensor's name"),
    "vector": ({"shape": [2048]}, "shape is that of a matrix"),
    "empty": ({"shape": [0, 128]}, "shape is that of a matrix"),
    "text": ({"shape": "16"}, "shape is tuple"),
    "no block": ({"blocksize": None}, "blocksize is int"),
    "nested text": ({"nested_offset": "1"}, "nested_offset is float"),
    "nested blocks": ({"nested_blocksize": 0}, "maxima are quantized in blocks"),
    "nested in half": ({"nested_dtype": "float16"}, "from float32"),
    "other blocks": ({"blocksize": 32}, r"absmax.* is uint8 of shape \(64,\).* got uint8 of shape \(32,\)"),
    "other shape": ({"shape": [16, 256]}, r"is uint8 of shape \(2048, 1\).* got uint8 of shape \(1024, 1\)"),
    "other nested": ({"nested_blocksize": 4}, r"nested_absmax.* is float32 of shape \(8,\)"),
    "single": ({"nested_offset": None}, r"absmax.* is float32 of shape \(32,\).* got uint8"),
}  # fmt: skip
NESTED = "nf4_64_nested_rows_uint8"


@pytest.mark.parametrize("name", STATES)
def test_one_error_for_states_that_do_not_fit(name, tmp_path):
    config, tensors, _ = case("bitsandbytes", NESTED)
    changes, said = STATES[name]
    with pytest.raises(ValueError, match=said):
        read(folder_of(tmp_path / "model", config, with_state(tensors, **changes)))


WRONG = {
    "8 bits": ({"load_in_8bit": True, "load_in_4bit": False}, {}, "load_in_8bit.*rounded twice"),
    "no state": ({}, {"weight.quant_state.bitsandbytes__nf4": None}, "no tensor named"),
    "no codes": ({}, {"weight": None}, "lacks tensor layer.weight,"),
    "no maxima": ({}, {"weight.absmax": None}, "lacks tensor layer.weight.absmax"),
    "no nested": ({}, {"weight.nested_absmax": None}, "lacks tensor layer.weight.nested_absmax"),
    "codebook": ({}, {"weight.quant_map": torch.zeros(16)}, "quant_map is another codebook"),
    "codes as int64": ({}, {"weight": torch.zeros(128, 1, dtype=torch.int64)}, "stores quantized values in one of"),
    "no JSON": ({}, {"weight.quant_state.bitsandbytes__nf4": torch.zeros(9, dtype=torch.uint8)}, "is no JSON"),
    "long": ({}, {"weight.quant_state.bitsandbytes__nf4": torch.zeros(9999, dtype=torch.uint8)}, "at most 4096 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_one_error_for_what_cannot_be_read(name, tmp_path):
    config, tensors, _ = case("bitsandbytes", NESTED)
    changes, others, said = WRONG[name]
    tensors = {key: part for key, part in (tensors | others).items() if part is not None}
    with pytest.raises(ValueError, match=said):
        read(folder_of(tmp_path / "model", config | changes, tensors))


def test_the_record_quantizes_as_the_library():
    """Codes and maxima of bitsandbytes.functional.quantize_4bit."""
    grid = grids("nf4")
    again = reference.quantize(grid["weight"], scheme_of_blocks(64), packed=True)
    stored = grid["codes"].reshape(16, 32)
    assert torch.equal(again.codes, stored >> 4 | stored << 4)
    assert torch.equal(again.scale.reshape(-1), grid["scale"])


def scheme_of_blocks(size):
    return replace(RECORDS["nf4"], scale=replace(RECORDS["nf4"].scale, block=size, partial=False))


def test_fp4_is_refused(tmp_path):
    """Its codebook has two zeros, which no format has."""
    config, tensors, _ = case("bitsandbytes", "fp4_64_plain_rows_uint8")
    with pytest.raises(
        ValueError, match=r"quant_type is .* one of nf4; got fp4; load the folder with bitsandbytes"
    ):
        read(folder_of(tmp_path / "model", config, tensors))
