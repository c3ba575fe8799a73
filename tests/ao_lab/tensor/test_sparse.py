"""2:4 weights: codes come back as those of the pruned weight, quantized; what differs from dense storage, and is refused.

What is the same of every storage (pieces, copies, products, files) is in test_view_ops, test_matmul_ops, test_fsdp.
"""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fast
import reference
from ao_lab import QuantizedTensor, Recipe, SparseQuantizedTensor, quantized, quantized_compressed
from ao_lab.tensor import sparse_codes
from ao_lab.tensor.sparse import check_stored, compressed
from ao_lab.tensor.sparse_codes import dense_scheme, metadata_of, sparse_scheme
from reference import SCHEMES, Scales
from reference.sparsity.compress import unsupported_reason
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
            "_int_mm reads every value",
        ),
        (
            torch.zeros(4, 8),
            Recipe(weight=SCHEMES["fp8_rowwise"], kernel="scaled_mm"),
            "_scaled_mm reads every value",
        ),
        (torch.zeros(4, 8), Recipe(weight=SCHEMES["fp8_rowwise"], kernel="fused"), "decode every value"),
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
    assert torch.equal(compressed(dense, metadata_of(w)), quantized_compressed(w, "int8_rowwise"))
    with pytest.raises(ValueError, match="outside of its 2:4 metadata are not zero"):
        compressed(dense, metadata_of(w.flip(-1)))


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


@pytest.mark.parametrize("scheme", SPARSE_KINDS)
def test_batches_of_one_matrix(scheme):
    """As products with a batch ask for them: all parts are repeated."""
    t, dense = pair(scheme, 128, 256)
    batch, repeated = t.expand(3, 128, 256), dense.expand(3, 128, 256)
    assert same(batch.dequantize(), repeated)
    assert same(batch.transpose(1, 2)[1].dequantize(), dense.t())
    x = torch.randn(3, 5, 256, dtype=torch.bfloat16)
    assert same(torch.bmm(x, batch.transpose(1, 2)), torch.bmm(x, repeated.transpose(1, 2)))


def test_copies_that_are_refused_change_nothing():
    t = quantized_compressed(pruned(8, 32), "int8_rowwise")
    before = t.clone()
    for source, message in (
        (torch.ones(8, 32), "prune first"),
        (torch.zeros(8, 64), "must be the same"),
        (quantized(pruned(8, 32), "int8_rowwise"), "a dense one into 2:4"),
        (quantized_compressed(pruned(8, 32), "fp8_rowwise"), "must be the same"),
        (
            quantized_compressed(pruned(8, 32), "int8_rowwise", input_scales=Scales(torch.tensor(0.5))),
            "input_scale",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            t.copy_(source)
    with pytest.raises(ValueError, match="into a dense one"):
        quantized(pruned(8, 32), "int8_rowwise").copy_(t)
    assert torch.equal(t, before)


def test_parts_and_orientation_of_earlier_pickles():
    """Pickles of dense tensors had no metadata; the axis of 2:4 ones said which way round they were read."""
    dense = quantized(pruned(8, 32), "int8_rowwise")
    rebuild, (parts, *others) = dense.__reduce_ex__(2)
    parts.pop("metadata")
    assert torch.equal(rebuild(parts, *others), dense)
    t = quantized_compressed(pruned(8, 32), "int8_rowwise").t()
    rebuild, (parts, fields, *others) = t.__reduce_ex__(2)
    assert torch.equal(rebuild(parts, {**fields, "axis": -2, "transposed": False}, *others), t)


def test_modules():
    layer = nn.Linear(32, 8, bias=False, dtype=torch.bfloat16)
    t = quantized_compressed(pruned(8, 32), "int8_rowwise")
    layer.weight = nn.Parameter(t, requires_grad=False)
    other = copy.deepcopy(layer)
    other.weight.copy_(pruned(8, 32, seed=1))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.weight, t)
    assert layer.to(torch.float32).weight.dtype == torch.float32
    other.weight.data = quantized_compressed(pruned(8, 32, seed=1), "int8_rowwise")
    assert torch.equal(other.weight, quantized_compressed(pruned(8, 32, seed=1), "int8_rowwise"))
    with pytest.raises(TypeError, match="SparseQuantizedTensor, not QuantizedTensor"):
        other.weight.data = quantized(pruned(8, 32), "int8_rowwise")
    shared = t.clone().share_memory_()
    assert shared.metadata.is_shared()


def test_quantized_inputs_are_those_of_the_dense_layer():
    recipe = Recipe(weight=SCHEMES["int8_rowwise"], activation=SCHEMES["int8_rowwise"], kernel="dequantize")
    w, x = pruned(16, 64), torch.randn(3, 64, dtype=torch.bfloat16)
    t, dense = quantized_compressed(w, recipe), quantized(w, recipe)
    assert same(torch.nn.functional.linear(x, t), torch.nn.functional.linear(x, dense))
    reference_recipe = dense.with_recipe(kernel="reference")
    assert same(
        torch.nn.functional.linear(x, t.with_recipe(kernel="reference")),
        torch.nn.functional.linear(x, reference_recipe),
    )


@pytest.mark.parametrize("kernel", ["int8", "scaled_mm", "fused"])
def test_kernels_of_dense_codes_do_not_take_it(kernel):
    element = "int8_rowwise" if kernel == "int8" else "fp8_rowwise"
    activation = None if kernel == "fused" else SCHEMES[element]
    t = quantized_compressed(pruned(16, 64), Recipe(weight=SCHEMES[element], activation=activation))
    with pytest.raises(
        ValueError, match=f"kernel '{kernel}' does not take.*stored as .out, in.*dequantize, reference"
    ):
        torch.nn.functional.linear(torch.randn(3, 64, dtype=torch.bfloat16), t.with_recipe(kernel=kernel))


def test_adapters_multiply_it_in_compiled_programs_too():
    from ao_lab.qat import lora

    t, dense = pair("int8_rowwise", 16, 64)
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    for linear in (lora.frozen_linear, torch.compile(lora.frozen_linear, backend="aot_eager")):
        inputs = x.clone().requires_grad_()
        y = linear(inputs, t, None)
        assert same(y, torch.nn.functional.linear(x, dense))
        y.sum().backward()
        assert same(inputs.grad, torch.ones(3, 16, dtype=torch.bfloat16) @ dense)


def test_hashes_tell_storages_apart():
    t = quantized_compressed(pruned(8, 32), "int8_rowwise")
    same_again = quantized_compressed(pruned(8, 32, seed=1), "int8_rowwise")
    dense = quantized(pruned(8, 32), "int8_rowwise")
    assert t._stable_hash_for_caching() == same_again._stable_hash_for_caching()
    others = (dense, t.t(), t.to(torch.float32), quantized_compressed(pruned(8, 64), "int8_rowwise"))
    assert t._stable_hash_for_caching() not in {one._stable_hash_for_caching() for one in others}


@pytest.mark.parametrize("scheme", ["int8_rowwise", "int4_g32_asymmetric", "bfloat16"])
def test_compiled_programs(scheme):
    torch._dynamo.reset()
    t, dense = pair(scheme, 16, 64)
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    program = torch.compile(torch.nn.functional.linear, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert same(program(x, t), torch.nn.functional.linear(x, dense))
        other, other_dense = pair("fp8_rowwise", 16, 64)
        assert same(program(x, other), torch.nn.functional.linear(x, other_dense))
