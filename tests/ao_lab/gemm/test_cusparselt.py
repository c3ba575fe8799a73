"""cuSPARSELt's product: what it takes, what it is called with, and which algorithms are used. A stand-in plays the library
here; `tests/gpu/sparsity/layers.py` has the library itself."""

import json

import pytest
import torch

from ao_lab import Recipe, quantized, quantized_compressed, tune
from ao_lab.gemm import cusparselt, select
from ao_lab.gemm.choices import forget
from ao_lab.gemm.cusparselt import Algorithm, Probe, is_repeatable, known, search
from ao_lab.gemm.select import PRODUCTS, select_kernel
from ao_lab.tuning import api
from reference import SCHEMES
from tests.support.quantized_weights import pruned, same

CPU = torch.device("cpu")
#: Weight, input and the dtype of inputs for which it multiplies.
TAKEN = [("bfloat16", None), ("int8_rowwise", "int8_rowwise"), ("int8_rowwise", "int8_rowwise_asymmetric"), ("fp8_rowwise",
"fp8_rowwise"),
         ("fp8_tensorwise", "fp8_tensorwise")]  # fmt: skip


class Library:
    """cuSPARSELt on a CPU: algorithm 2 is wrong, 3 changes from call to call, 1 is refused; the search says 2. Nothing of a
    dtype in `refused` is multiplied."""

    def __init__(self):
        self.calls, self.compressed, self.refused = [], 0, set()

    def compress(self, dense):
        assert dense.is_contiguous()
        self.compressed += 1
        return dense.clone()

    def mm(
        self,
        packed,
        b,
        bias=None,
        alpha=None,
        out_dtype=None,
        transpose_result=False,
        alg_id=0,
        split_k=1,
        split_k_mode=-1,
    ):
        assert transpose_result
        assert b.t().is_contiguous()
        assert b.data_ptr() % 16 == 0
        assert b.shape[1] % (16 if b.dtype.itemsize == 1 else 8) == 0
        assert (out_dtype is None) == (b.dtype.itemsize == 2)
        # A vector is refused for float8, and a number waits for the GPU.
        assert alpha is None
        assert bias is None or (bias.dtype == b.dtype and bias.is_contiguous() and bias.data_ptr() % 16 == 0)
        if b.dtype in self.refused:
            raise RuntimeError("CUDA error: operation not supported\nmore")
        self.calls.append(alg_id)
        if alg_id == 1:
            raise RuntimeError("CUDA error: operation not supported when calling `cusparseLtMatmul`")
        y = b.t().double() @ packed.double().t()
        y = y if bias is None else y + bias.double()
        wrong = alg_id == 2 or (alg_id == 3 and len(self.calls) % 2 and not torch.equal(y, y.round()))
        return (y + 1 if wrong else y).to(out_dtype or b.dtype)

    def mm_search(self, packed, b, bias, alpha, out_dtype, transpose_result):
        assert transpose_result
        return 2, 1, 1, 6


@pytest.fixture
def library(monkeypatch, tmp_path):
    found = Library()
    monkeypatch.setattr(torch, "_cslt_compress", found.compress)
    monkeypatch.setattr(torch, "_cslt_sparse_mm", found.mm)
    monkeypatch.setattr(torch._C, "_cusparselt", found, raising=False)
    monkeypatch.setattr(cusparselt, "_device_reason", lambda w: None)
    monkeypatch.setenv("AO_LAB_CACHE", str(tmp_path))
    forget()
    cusparselt.forget()
    yield found
    forget()
    cusparselt.forget()


def weight(scheme, activation=None, *, n=64, k=128, seed=0):
    inputs = None if activation is None else SCHEMES[activation]
    scheme = quantized_compressed(pruned(1, 32), scheme).scheme if scheme == "bfloat16" else SCHEMES[scheme]
    return quantized_compressed(pruned(n, k, seed=seed), Recipe(weight=scheme, activation=inputs))


@pytest.mark.parametrize(("scheme", "activation"), TAKEN)
def test_what_it_takes(scheme, activation, library):
    assert cusparselt.unsupported_reason(weight(scheme, activation).t(), torch.bfloat16) is None


@pytest.mark.parametrize(
    ("w", "dtype", "reason"),
    [
        (lambda: quantized(pruned(64, 128), "int8_rowwise").t(), torch.bfloat16, "not in 2:4 storage"),
        (lambda: weight("bfloat16").t(), torch.float16, "must be bfloat16 themselves"),
        (lambda: weight("int8_rowwise").t(), torch.bfloat16, "inputs of int8 weights must be int8"),
        (lambda: weight("int4_g32").t(), torch.bfloat16, "not int4"),
        (lambda: weight("int8_g32", "int8_rowwise").t(), torch.bfloat16, "one float32 scale"),
        (lambda: weight("int8_rowwise_asymmetric", "int8_rowwise").t(), torch.bfloat16, "no zero point"),
        (lambda: weight("bfloat16"), torch.bfloat16, "stored as"),
        (lambda: weight("bfloat16", k=120).t(), torch.bfloat16, "multiples of 16"),
        (lambda: weight("int8_rowwise", "int8_rowwise", n=48).t(), torch.bfloat16, "multiples of 32"),
        (lambda: weight("bfloat16").t(), torch.bfloat16, "for Nvidia GPUs"),
    ],
)
def test_why_it_does_not_take_a_weight(w, dtype, reason):
    assert reason in cusparselt.unsupported_reason(w(), dtype)


@pytest.mark.parametrize(("scheme", "activation"), TAKEN)
@pytest.mark.parametrize("rows", [1, 5, 32])
def test_products_are_those_of_the_dense_layer(scheme, activation, rows, library, monkeypatch):
    """Integers bit for bit as kernel "int8" of the dense weight; others exactly here, where all sums are of small integers."""
    w = weight(scheme, activation)
    x = torch.randint(-3, 4, (rows, 128), generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    bias = torch.randn(64, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    monkeypatch.setattr(cusparselt, "known", lambda *key: Algorithm(5))
    found = cusparselt.run(x, w.t(), bias)
    assert library.calls == [5]
    if activation is not None and scheme.startswith("int8"):
        dense = w.to_layout("plain")
        assert same(found, PRODUCTS["int8"].run(x, dense.t(), bias))
    else:
        exact = PRODUCTS["reference"].run(x, w.t(), bias).double()
        # Both are one rounding to bfloat16, each within 2**-9 of its sum; sums and scales in float32 differ by far less, which
        # 2**-12 covers where the bias takes most of a sum away.
        assert ((found.double() - exact).abs() <= 2**-8 * exact.abs() + 2**-12).all()
    assert (found.shape, found.dtype) == ((rows, 64), torch.bfloat16)


def test_the_arrangement_is_made_once_and_again_after_a_change(library, monkeypatch):
    monkeypatch.setattr(cusparselt, "known", lambda *key: Algorithm(0))
    w, x = weight("bfloat16"), torch.randn(8, 128).to(torch.bfloat16)
    first = cusparselt.run(x, w.t(), None)
    assert same(cusparselt.run(x, w.t(), None), first)
    assert library.compressed == 1
    w.copy_(weight("bfloat16", seed=1))
    assert same(cusparselt.run(x, w.t(), None), cusparselt.run(x, weight("bfloat16", seed=1).t(), None))


def test_without_an_algorithm_the_dense_equivalent_is_multiplied(library):
    w, x = weight("bfloat16"), torch.randn(8, 128).to(torch.bfloat16)
    assert same(cusparselt.run(x, w.t(), None), x @ w.dequantize().t())
    assert same(cusparselt.run(x[:0], w.t(), None), x[:0] @ w.dequantize().t())
    assert library.calls == []


@pytest.mark.parametrize("element", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_algorithms_that_are_wrong_are_not_taken(element, library):
    probe = Probe(64, 128, 5, element, CPU)
    assert [one.alg_id for one in probe.algorithms()] == [2, 0, 1, 3, 4, 5]
    assert [probe.is_exact(Algorithm(number)) for number in (0, 1, 2, 3)] == [True, False, False, True]


@pytest.mark.parametrize("offset", [0, 1])
def test_operands_that_the_library_cannot_read_are_copied(offset, library, monkeypatch):
    """Views at odd addresses, and of every other element."""
    monkeypatch.setattr(cusparselt, "known", lambda *key: Algorithm(0))
    w = weight("bfloat16")
    numbers = torch.randint(-3, 4, (8 * 128 + 1,), generator=torch.Generator().manual_seed(1)).bfloat16()
    x, bias = numbers[offset : offset + 8 * 128].view(8, 128), numbers[offset : offset + 128 : 2]
    found = cusparselt.run(x, w.t(), bias)
    assert same(found, cusparselt.run(x.clone(), w.t(), bias.clone()))
    assert library.calls == [0, 0]


def test_a_bias_of_another_dtype_is_added_by_the_dense_product(library, monkeypatch):
    """The library reads a bias as the output's dtype, unchecked."""
    monkeypatch.setattr(cusparselt, "known", lambda *key: Algorithm(0))
    w, x = weight("bfloat16").t(), torch.randn(8, 128).to(torch.bfloat16)
    bias = torch.randn(64)
    assert torch.equal(cusparselt.run(x, w, bias), torch.addmm(bias.bfloat16(), x, w.dequantize()))
    assert library.calls == []


def test_what_the_library_refuses_is_listed_by_tune_and_not_offered(library):
    library.refused.add(torch.float8_e4m3fn)
    layer = torch.nn.Linear(128, 64, dtype=torch.bfloat16)
    layer.weight = torch.nn.Parameter(weight("fp8_rowwise", "fp8_rowwise"), requires_grad=False)
    (choice,) = tune(layer, torch.randn(8, 128).to(torch.bfloat16)).choices
    (found,) = (one for one in choice.candidates if one.kernel == "cusparselt")
    assert found.seconds is None
    assert (
        found.reason
        == "cuSPARSELt refuses torch.float8_e4m3fn of shape (64, 128): CUDA error: operation not supported"
    )
    assert choice.kernel == "dequantize"


def test_algorithms_that_refuse_the_operands_of_a_layer_are_not_taken(library):
    def call(algorithm):
        if algorithm.alg_id != 4:
            raise RuntimeError("CUDA error: operation not supported")
        return torch.zeros(8, 64)

    assert search(call, (64, 128, 8), torch.bfloat16, CPU) == Algorithm(4)


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("mat1 and mat2 shapes cannot be multiplied")],
)
def test_what_is_no_refusal_is_raised_and_not_remembered(library, monkeypatch, error):
    def failing(*given, **more):
        raise error

    with pytest.raises(type(error), match=str(error)):
        search(failing, (64, 128, 8), torch.bfloat16, CPU)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "_cslt_compress", failing)
        with pytest.raises(type(error), match=str(error)):
            cusparselt.refusal(64, 128, torch.bfloat16, CPU)
    assert cusparselt.refusal(64, 128, torch.bfloat16, CPU) is None


def test_a_search_that_the_library_refuses_finds_nothing(library, monkeypatch):
    def refused(*given):
        raise RuntimeError("CUDA error: operation not supported when calling `cusparseLtMatmulSearch`")

    monkeypatch.setattr(torch._C._cusparselt, "mm_search", refused, raising=False)
    assert search(lambda one: torch.zeros(8, 64), (64, 128, 8), torch.bfloat16, CPU) is None


def test_algorithms_that_change_are_not_taken(library, monkeypatch):
    w, x = weight("bfloat16").t(), torch.randn(8, 128).to(torch.bfloat16)
    call = cusparselt._call(x, w, None)
    assert is_repeatable(call, Algorithm(0))
    assert not is_repeatable(call, Algorithm(3))
    # The one that changes would be the quickest.
    times = {3: 0.0, 5: 0.5}
    monkeypatch.setattr(cusparselt, "seconds", lambda call, one, device: times.get(one.alg_id, 1.0))
    assert search(call, (64, 128, 8), torch.bfloat16, CPU) == Algorithm(5)
    assert known("cpu", 64, 128, 7, "torch.bfloat16") == Algorithm(5)
    assert known("cpu", 64, 128, 9, "torch.bfloat16") is None
    assert known("cpu", 64, 128, 8, "torch.int8") is None
    cusparselt.forget()
    assert known("cpu", 64, 128, 8, "torch.bfloat16") == Algorithm(5)


def test_none_is_right(library, monkeypatch):
    monkeypatch.setattr(Probe, "is_exact", lambda self, algorithm: False)
    w, x = weight("bfloat16").t(), torch.randn(8, 128).to(torch.bfloat16)
    assert search(cusparselt._call(x, w, None), (64, 128, 8), torch.bfloat16, CPU) is None
    content = json.loads(cusparselt.file_of(CPU).read_text())
    assert content["found"] == {"64x128, rows <= 8, bfloat16": None}


@pytest.mark.parametrize(
    "text", ["{", '{"format": 9, "found": {}}', '{"format": 1, "found": {"a": ["b"]}}', "[]"]
)
def test_files_that_cannot_be_read_are_searched_again(text, library):
    path = cusparselt.file_of(CPU)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert known("cpu", 64, 128, 8, "torch.bfloat16") is None


@pytest.mark.parametrize(("scheme", "activation"), TAKEN)
def test_tune_searches_and_layers_follow(scheme, activation, library, monkeypatch):
    layer = torch.nn.Linear(128, 64, dtype=torch.bfloat16)
    layer.weight = torch.nn.Parameter(weight(scheme, activation), requires_grad=False)
    x = torch.randn(8, 128).to(torch.bfloat16)
    assert select_kernel(layer.weight.t(), torch.bfloat16, 8) == "dequantize"
    made = tune(layer, x)
    (choice,) = made.choices
    names = {one.kernel: one.reason for one in choice.candidates}
    dense_kernel = {"int8": "int8", "fp8_": "scaled_mm", "bflo": "fused"}[scheme[:4]]
    assert "stored as (out, in)" in names[dense_kernel]
    assert {"dequantize", "cusparselt"} <= set(names)
    assert known("cpu", 64, 128, 8, str(cusparselt.ELEMENTS[layer.weight.scheme.element])) is not None
    # A dense layer of these lengths keeps its own choices.
    dense = layer.weight.to_layout("plain") if scheme != "bfloat16" else None
    if dense is not None:
        assert select_kernel(dense.t(), torch.bfloat16, 8) != "cusparselt"


def test_nothing_is_searched_outside_of_tune(library):
    assert not cusparselt.searches()
    api._busy.append(True)
    try:
        assert cusparselt.searches()
    finally:
        api._busy.clear()


def test_compiled_programs(library, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(cusparselt, "known", lambda *key: Algorithm(0))
    w, x = weight("int8_rowwise", "int8_rowwise"), torch.randn(8, 128).to(torch.bfloat16)

    monkeypatch.setattr(select, "tuned", lambda *key: "cusparselt")
    linear = torch.nn.functional.linear
    with torch.no_grad():
        found = torch.compile(linear, fullgraph=True, backend="aot_eager")(x, w)
        assert library.calls == [0]
        assert same(found, linear(x, w))
    assert library.calls == [0, 0]
