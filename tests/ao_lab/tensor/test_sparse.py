"""Compressed codes come back as the codes of the pruned weight, quantized; what cannot be stored is refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fast
import reference
from ao_lab import QuantizedTensor, Recipe, SparseQuantizedTensor, quantized, quantized_compressed
from ao_lab.tensor import sparse_codes
from ao_lab.tensor.sparse import check_stored, compressed
from ao_lab.tensor.sparse_codes import dense_scheme, kept_metadata, sparse_scheme
from reference import SCHEMES
from reference.sparsity.stored_codes import unsupported_reason
from tests.support.quantized_weights import SPARSE_KINDS, pair, pruned, same

STORED = [name for name, scheme in SCHEMES.items() if unsupported_reason(scheme) is None]


@st.composite
def sparse_matrices(draw):
    """2:4 matrices of any magnitudes, with groups of two, one and no elements, rows of zeros, and -0."""
    rows, groups = draw(st.integers(1, 3)), draw(st.sampled_from([32, 64, 96]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    w = torch.randn((rows * 128, groups * 8), generator=generator)[: rows * 16] * 2.0 ** draw(
        st.integers(-20, 12)
    )
    keep = torch.rand((w.shape[0], w.shape[1] // 4, 4), generator=generator).argsort(-1) < draw(
        st.integers(0, 2)
    )
    w = w * keep.reshape(w.shape)  # negative zeros among what was pruned
    w[draw(st.integers(0, rows * 16 - 1))] = 0
    return w.to(draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])))


@given(
    sparse_matrices(),
    st.sampled_from([name for name in STORED if not isinstance(SCHEMES[name].scale.block, tuple)]),
)
def test_codes_are_those_of_the_pruned_weight(w, name):
    shape = (w.shape[0], w.shape[1] // 256 * 256)
    w = w[:, : shape[1]]
    t = quantized_compressed(w, name)
    dense = quantized(w + 0, name)
    q = t.quantized
    assert (q.shape, q.axis, q.scheme) == (shape, 1, SCHEMES[name])
    assert torch.equal(q.codes, dense.codes)
    for part in ("scale", "outer", "zero"):
        mine, other = getattr(q, part), getattr(dense, part)
        assert (mine is None and other is None) or torch.equal(mine, other)
    assert same(t.dequantize(), dense.dequantize())
    bits = min(SCHEMES[name].format.bits, 8)
    assert t.codes.shape == (shape[0], shape[1] // 2 * bits // 8)
    assert torch.equal(t.metadata, reference.compress(w).metadata)


@given(sparse_matrices())
def test_elements_of_16_bits_are_the_weight(w):
    if w.dtype == torch.float32:
        w = w.to(torch.bfloat16)
    element = str(w.dtype).removeprefix("torch.")
    t = quantized_compressed(w, element)
    assert same(t.dequantize(), w + 0)
    values, metadata = reference.compress(w)
    assert torch.equal(t.codes.view(w.dtype).view(torch.int16), values.view(torch.int16))
    assert torch.equal(t.metadata, metadata)


def test_elements_keep_infinities_and_payloads_of_nan():
    w = pruned(8, 32)
    w[w != 0] = torch.tensor([0x7F81, 0x7F80, -1, -0x80], dtype=torch.int16).view(torch.bfloat16).repeat(32)
    t = quantized_compressed(w, "bfloat16")
    assert torch.equal(t.dequantize().view(torch.int16), w.view(torch.int16))


@pytest.mark.parametrize("scheme", SPARSE_KINDS)
def test_bytes_and_the_dense_equivalent(scheme):
    t, dense = pair(scheme, 128, 256)
    assert isinstance(t, SparseQuantizedTensor)
    assert isinstance(t, QuantizedTensor)
    assert same(t.dequantize(), dense)
    assert t.to_layout("2:4") is t
    if scheme != "bfloat16":
        plain = t.to_layout("plain")
        assert type(plain) is QuantizedTensor
        assert torch.equal(plain, quantized(pruned(128, 256), scheme))
        assert torch.equal(t.t().to_layout("plain"), plain.t())
        half = plain.codes.nbytes // 2
        assert (t.codes.nbytes, t.metadata.nbytes) == (half, 128 * 256 // 8)


def test_lengths_that_fill_no_byte():
    w = pruned(3, 12)
    t = quantized_compressed(w, "fp8_rowwise")
    assert t.metadata.shape == (3, 2)
    assert same(t.dequantize(), quantized(w, "fp8_rowwise").dequantize())


def test_an_element_that_rounds_to_zero_stays_kept():
    w = torch.zeros(1, 8)
    w[0, :2] = torch.tensor([1e-6, 1.0])
    t = quantized_compressed(w, "int8_rowwise")
    assert t.codes.tolist() == [[0, 127, 0, 0]]
    assert t.metadata.tolist() == [[0b1110_0100]]


def test_large_weights_are_compressed_in_pieces(monkeypatch):

    whole = quantized_compressed(pruned(96, 256), "int4_g32_asymmetric")
    monkeypatch.setattr(sparse_codes, "PIECE", 1024)
    pieces = quantized_compressed(pruned(96, 256), "int4_g32_asymmetric")
    assert torch.equal(whole, pieces)
    assert same(pieces.dequantize(), whole.dequantize())


@pytest.mark.parametrize(
    ("w", "scheme", "message"),
    [
        (torch.ones(4, 8), "int8_rowwise", "8 of 8 groups have more.*sparsify_"),
        (torch.zeros(4, 6), "int8_rowwise", "multiple of 4, got shape"),
        (torch.zeros(8), "int8_rowwise", "matrices"),
        (torch.zeros(4, 64), "nf4", "flattened"),
        (torch.zeros(4, 32), "torchao.int4_g32_tinygemm", "floating-point numbers"),
        (torch.full((4, 8), torch.nan), "int8_rowwise", "NaN or infinity"),
        (torch.zeros(4, 8), "bfloat16", "not stored as bfloat16"),
        (
            torch.zeros(4, 8),
            Recipe(weight=SCHEMES["int8_rowwise"], kernel="int8"),
            "_int_mm reads every code",
        ),
        (
            torch.zeros(4, 8),
            Recipe(weight=SCHEMES["fp8_rowwise"], kernel="scaled_mm"),
            "_scaled_mm reads every code",
        ),
        (torch.zeros(4, 8), Recipe(weight=SCHEMES["fp8_rowwise"], kernel="fused"), "decode every code"),
        (torch.zeros(4, 8, dtype=torch.int32), "int8_rowwise", "got torch.int32"),
    ],
)
def test_what_cannot_be_stored(w, scheme, message):
    with pytest.raises(ValueError, match=message):
        quantized_compressed(w, scheme)


def test_other_axes_and_tensors_are_refused():
    with pytest.raises(ValueError, match="got axis 0"):
        quantized_compressed(torch.zeros(8, 8), "int8_rowwise", axis=0)
    t = quantized_compressed(pruned(8, 32), "int8_rowwise")
    for given_again in (t, quantized(pruned(8, 32), "int8_rowwise")):
        with pytest.raises(ValueError, match="quantized already"):
            quantized_compressed(given_again, "int8_rowwise")
    with pytest.raises(TypeError, match="takes a torch tensor"):
        quantized_compressed([[0.0]], "int8_rowwise")


def test_codes_outside_of_the_metadata_are_an_error():
    w = pruned(8, 32)
    dense = quantized(w, "int8_rowwise")
    assert torch.equal(compressed(dense, kept_metadata(w)), quantized_compressed(w, "int8_rowwise"))
    with pytest.raises(ValueError, match="outside of its 2:4 metadata are not zero"):
        compressed(dense, kept_metadata(w.flip(-1)))


def test_parts_of_files_are_checked():
    t = quantized_compressed(pruned(8, 32), "int8_rowwise")
    check_stored(t)
    with pytest.raises(ValueError, match="64 groups of its metadata"):
        check_stored(t.remade({**t.parts, "metadata": torch.zeros_like(t.metadata)}))
    plain = quantized_compressed(pruned(8, 32), "bfloat16")
    check_stored(plain)
    with pytest.raises(ValueError, match="a scale of 1, got 2"):
        check_stored(plain.remade({**plain.parts, "scale": torch.tensor(2.0)}))


def test_names_of_schemes():
    scheme = SCHEMES["int8_rowwise"]
    sparse = sparse_scheme(scheme)
    assert (sparse.name, dense_scheme(sparse), sparse_scheme(sparse)) == ("int8_rowwise_2:4", scheme, sparse)
    assert dense_scheme(scheme) is scheme
    assert sparse.key != scheme.key


def test_masks_are_decided_before_rounding():
    """Codes of three mantissa bits tie in a sixteenth of the groups; the places are those of the weight's own values."""
    w = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    kept = fast.prune(w)
    t = quantized_compressed(w.masked_fill(~kept, 0), "fp8_rowwise")
    assert torch.equal(t.metadata, fast.compress(w, kept).metadata)
