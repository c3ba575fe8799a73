"""The product of 2:4 weights by sparse tensor cores: what it takes, where it is the default, what is kept, and its numbers.

The test for a GPU is taken away here, so that the reference computes; the kernels are in
`tests/gpu/sparsity/gemm.py`."""

import copy
import io
from types import SimpleNamespace

import pytest
import torch

import fast
import reference
from ao_lab import Recipe, explain, quantized, quantized_compressed, tune
from ao_lab.gemm import select, sparse
from ao_lab.gemm.choices import forget
from ao_lab.gemm.operand import ARRANGED
from ao_lab.gemm.select import PRODUCTS, select_kernel
from reference import SCHEMES
from tests.ao_lab.gemm.capability import set_capability
from tests.support.quantized_weights import pruned, same

BF16, F16 = torch.bfloat16, torch.float16
#: Weight, input, and the dtype of inputs.
TAKEN = [
    ("bfloat16", None, BF16), ("float16", None, F16), ("int8_rowwise", "int8_rowwise", BF16),
    ("fp8_rowwise", "fp8_rowwise", BF16), ("fp8_tensorwise", "fp8_tensorwise", F16),
    ("fp8_rowwise", "fp8_tensorwise", torch.float32),
]  # fmt: skip


@pytest.fixture
def kernels(monkeypatch, tmp_path):
    """Weights count as lying on a GPU that has the kernel."""
    monkeypatch.setattr(sparse, "_wgmma_device_reason", lambda w: None)
    monkeypatch.setenv("AO_LAB_CACHE", str(tmp_path))
    forget()
    yield
    forget()


def weight(scheme, activation=None, *, n=64, k=128, seed=0, **options):
    inputs = None if activation is None else SCHEMES[activation]
    dense = pruned(n, k, seed=seed)
    if scheme in sparse.PLAIN:
        dense = dense.to(sparse.PLAIN[scheme])
        stored = quantized_compressed(dense[:1], scheme).scheme
    else:
        stored = SCHEMES[scheme]
    return quantized_compressed(dense, Recipe(weight=stored, activation=inputs, **options))


def layer(scheme="int8_rowwise", activation="int8_rowwise", **options):
    made = torch.nn.Linear(128, 64, dtype=BF16)
    made.weight = torch.nn.Parameter(weight(scheme, activation, **options), requires_grad=False)
    return made


def inputs(rows, dtype=BF16):
    return torch.randint(-3, 4, (rows, 128), generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize(("scheme", "activation", "dtype"), TAKEN)
def test_what_it_takes_and_that_it_is_the_default(scheme, activation, dtype, kernels):
    """Of any number of rows; schemes that it does not take stay with "dequantize", dense weights with their own."""
    w = weight(scheme, activation).t()
    assert sparse.wgmma_unsupported_reason(w, dtype) is None
    assert {select_kernel(w, dtype, rows) for rows in (None, 1, 16, 8192)} == {"sparse_wgmma"}
    assert select_kernel(weight("int8_g32", "int8_rowwise").t(), BF16) == "dequantize"
    assert select_kernel(quantized(pruned(64, 128), SCHEMES["int8_rowwise"]).t(), BF16) != "sparse_wgmma"


def test_it_is_no_default_elsewhere(monkeypatch):
    """Of a CPU, of another GPU, and where there is no compiler for it."""
    w = weight("int8_rowwise", "int8_rowwise").t()
    assert select_kernel(w, BF16) == "dequantize"
    on_gpu = SimpleNamespace(is_cuda=True, device=torch.device("cuda"))
    for capability, missing in (((9, 0), None), ((10, 0), None), ((9, 0), "no NVRTC")):
        set_capability(monkeypatch, capability)
        monkeypatch.setattr(sparse, "missing_compiler", lambda found=missing: found)
        taken = capability == (9, 0) and missing is None
        assert (sparse._wgmma_device_reason(on_gpu) is None) == taken


def test_gradients_of_inputs_pass_it_by(kernels):
    """As those of every kernel: the sum of a gradient does not run along the blocks."""
    made, x = layer(), inputs(4).requires_grad_()
    made(x).sum().backward()
    wanted = torch.ones(4, 64, dtype=BF16) @ made.weight.dequantize()
    assert same(x.grad, wanted)


@pytest.mark.parametrize(
    ("w", "dtype", "reason"),
    [
        (lambda: quantized(pruned(64, 128), "int8_rowwise").t(), BF16, "not in 2:4 storage"),
        (lambda: weight("bfloat16").t(), F16, "must be bfloat16 themselves"),
        (lambda: weight("bfloat16", "int8_rowwise").t(), BF16, "must be bfloat16 themselves"),
        (lambda: weight("int8_rowwise").t(), BF16, "inputs of int8 weights must be int8 too"),
        (lambda: weight("int8_rowwise", "fp8_rowwise").t(), BF16, "inputs of int8 weights must be int8 too"),
        (lambda: weight("fp8_rowwise", "int8_rowwise").t(), BF16, "must be float8 too"),
        (lambda: weight("int4_g32").t(), BF16, "not int4"),
        (lambda: weight("int8_g32", "int8_rowwise").t(), BF16, "one float32 scale"),
        (lambda: weight("int8_rowwise", "int8_rowwise_asymmetric").t(), BF16, "neither operand a zero point"),
        (lambda: weight("fp8_rowwise", "fp8_rowwise").t(), torch.float64, "does not write"),
        (lambda: weight("bfloat16"), BF16, "stored as"),
        (lambda: weight("bfloat16", k=120).t(), BF16, "multiple of 16 terms"),
        (lambda: weight("int8_rowwise", "int8_rowwise", k=112).t(), BF16, "multiple of 32 terms"),
        (lambda: weight("bfloat16").t(), BF16, "for Nvidia GPUs"),
    ],
)
def test_why_it_does_not_take_a_weight(w, dtype, reason):
    assert reason in sparse.wgmma_unsupported_reason(w(), dtype)


@pytest.mark.parametrize(("scheme", "activation", "dtype"), TAKEN)
@pytest.mark.parametrize("rows", [0, 1, 5, 32])
def test_products_are_those_of_the_dense_layer(scheme, activation, dtype, rows, kernels):
    """Integers bit for bit as kernel "int8" of the dense weight; others one rounding of the same sums, which may
    fall apart by a unit."""
    w, x = weight(scheme, activation), inputs(rows, dtype)
    bias = torch.randn(64, generator=torch.Generator().manual_seed(2)).to(dtype)
    for added in (None, bias):
        found = sparse.wgmma_run(x, w.t(), added)
        assert (found.shape, found.dtype) == ((rows, 64), dtype)
        if scheme.startswith("int8"):
            assert same(found, PRODUCTS["int8"].run(x, w.to_layout("plain").t(), added))
        elif rows:
            exact = PRODUCTS["reference"].run(x, w.t(), added).double()
            assert ((found.double() - exact).abs() <= 2**-7 * exact.abs() + 2**-12).all()


def test_sums_are_promoted_where_the_recipe_accumulates_in_blocks(kernels, monkeypatch):
    asked = []
    plain = fast.linear_sparse
    monkeypatch.setattr(
        fast, "linear_sparse", lambda *a, **kw: asked.append(kw["fast_sums"]) or plain(*a, **kw)
    )
    for accumulation in ("exact", "blocked"):
        sparse.wgmma_run(inputs(2), weight("fp8_rowwise", "fp8_rowwise", accumulation=accumulation).t(), None)
    assert asked == [True, False]


def test_metadata_is_arranged_once_and_again_after_a_change(kernels, monkeypatch):
    made = []
    arrange = fast.arrange_sparse_metadata
    monkeypatch.setattr(fast, "arrange_sparse_metadata", lambda *a: made.append(1) or arrange(*a))
    w, x = weight("bfloat16"), inputs(8)
    first = sparse.wgmma_run(x, w.t(), None)
    assert same(sparse.wgmma_run(x, w.t(), None), first)
    assert len(made) == 1
    other = weight("bfloat16", seed=1)
    w.copy_(other)
    assert same(sparse.wgmma_run(x, w.t(), None), x @ other.dequantize().t())
    assert len(made) == 2


def test_what_is_kept_is_not_saved(kernels):
    w = weight("int8_rowwise", "int8_rowwise")
    before = io.BytesIO()
    torch.save(w, before)
    sparse.wgmma_run(inputs(1), w.t(), None)
    assert w.codes.__dict__[ARRANGED].keys() == {"sparse_wgmma"}
    after = io.BytesIO()
    torch.save(w, after)
    assert len(after.getvalue()) == len(before.getvalue())
    after.seek(0)
    for other in (torch.load(after, weights_only=True), w.clone()):
        assert ARRANGED not in other.codes.__dict__
        assert same(other.dequantize(), w.dequantize())


def test_deep_copies_keep_their_own(kernels):
    w, other = weight("bfloat16"), weight("bfloat16", seed=1)
    wanted = sparse.wgmma_run(inputs(2), w.t(), None)
    copied = copy.deepcopy(w)
    w.copy_(other)
    assert same(sparse.wgmma_run(inputs(2), copied.t(), None), wanted)


def test_it_is_not_arranged_during_capture(kernels, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ValueError, match="once, outside of CUDA graphs; run the layer before capture"):
        sparse.wgmma_run(inputs(1), weight("bfloat16").t(), None)


def test_tune_measures_it_and_explain_lists_it(kernels):
    made = layer()
    assert explain(made).layers[0].kernel == "sparse_wgmma"
    (choice,) = tune(made, inputs(8)).choices
    # On a busy CPU one may take so long at first that it drops out.
    measured = [one.kernel for one in choice.candidates if not one.reason or one.reason.startswith("took ")]
    assert "sparse_wgmma" in measured
    assert explain(made).layers[0].tuned
    dense = made.weight.to_layout("plain")
    assert select_kernel(dense.t(), BF16, 8) != "sparse_wgmma"


def test_compiled_programs(kernels, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(select, "tuned", lambda *key: "sparse_wgmma")
    linear = torch.nn.functional.linear
    for scheme, activation in (("int8_rowwise", "int8_rowwise"), ("bfloat16", None)):
        w, x = weight(scheme, activation), inputs(8)
        with torch.no_grad():
            found = torch.compile(linear, fullgraph=True, backend="aot_eager")(x, w)
            assert same(found, linear(x, w))
        assert "sparse_wgmma" in w.codes.__dict__[ARRANGED]


def test_the_operator():
    """Of bfloat16: torch's check compares with functions that float8 does not have."""
    w, x = weight("bfloat16"), inputs(4)
    scales = (torch.ones(4, 1), torch.full((64, 1), 0.5))
    arguments = (x, w.codes, w.metadata, "bfloat16", torch.ones(64), *scales, torch.float32, True)
    torch.library.opcheck(
        torch.ops.ao_lab.sparse_wgmma_mm.default, arguments, test_utils=("test_schema", "test_faketensor")
    )
    wanted = reference.linear_sparse(
        x,
        w.codes.view(BF16),
        w.metadata,
        torch.ones(64),
        x_scale=scales[0],
        scale=scales[1],
        out_dtype="float32",
    )
    assert same(torch.ops.ao_lab.sparse_wgmma_mm(*arguments), wanted)
