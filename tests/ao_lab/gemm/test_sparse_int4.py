"""The product of 2:4 weights of int4 as they are stored: what it takes, that layers and `explain` choose it, and its numbers.

The test for a GPU is taken away here, so that the reference computes; the kernels are in
`tests/gpu/sparsity/int4.py`.

Kernels of 2:4 weights in the table of products, and what several of them ask.
"""

import platform
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import reference
from ao_lab import Recipe, explain, quantized, quantized_compressed, tune
from ao_lab.gemm import sparse
from ao_lab.gemm.choices import forget
from ao_lab.gemm.select import PRODUCTS, select_kernel
from ao_lab.gemm.sparse import device_reason, kind_of
from reference import SCHEMES, Zero
from reference.sparsity.linear_sparse_int4 import GROUPS
from tests.ao_lab.gemm.capability import set_capability
from tests.support.quantized_weights import pruned, same
from tests.support.runs import forks

BF16, F16 = torch.bfloat16, torch.float16
SCHEME = SCHEMES["int4_g32"]
STORED_BFLOAT16 = replace(
    SCHEME, name="int4_g32 stored as bfloat16", scale=replace(SCHEME.scale, storage="bfloat16", floor=None)
)
ASYMMETRIC = SCHEMES["int4_g32_asymmetric"]
BY_ROWS = replace(SCHEME, name="int4 by rows", scale=replace(SCHEME.scale, block=-1))
ASYMMETRIC_ROWS = replace(ASYMMETRIC, name="zeros by rows", scale=replace(ASYMMETRIC.scale, block=-1))
OF_EIGHT = replace(SCHEME, name="int4 in groups of 8", scale=replace(SCHEME.scale, block=8))


@pytest.fixture
def kernels(monkeypatch, tmp_path):
    """Weights count as lying on a GPU that has the kernel."""
    monkeypatch.setattr(sparse, "_device_reason", lambda w: None)
    monkeypatch.setenv("AO_LAB_CACHE", str(tmp_path))
    forget()
    yield
    forget()


def weight(scheme="int4_g32", activation=None, *, n=16, k=128):
    scheme = SCHEMES[scheme] if isinstance(scheme, str) else scheme
    inputs = None if activation is None else SCHEMES[activation]
    return quantized_compressed(pruned(n, k), Recipe(weight=scheme, activation=inputs))


def layer(scheme="int4_g32", *, bias=True, k=128):
    made = torch.nn.Linear(k, 16, bias, dtype=BF16)
    stored = quantized_compressed(pruned(16, k).to(BF16), Recipe(weight=SCHEMES[scheme]))
    made.weight = torch.nn.Parameter(stored, requires_grad=False)
    return made


@pytest.mark.parametrize(
    ("scheme", "k"),
    [
        ("int4_g32", 128), ("int4_g64", 128), ("int4_g128", 128), (STORED_BFLOAT16, 128), ("int4_g32_asymmetric", 256),
        ("int4_g128_asymmetric", 512), ("int4_g256_asymmetric", 1024), (BY_ROWS, 96), (ASYMMETRIC_ROWS, 768),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_what_it_takes(scheme, k, dtype, kernels):
    w = weight(scheme, k=k).t()
    assert sparse.int4_unsupported_reason(w, dtype) is None
    assert select_kernel(w, dtype) == select_kernel(w, dtype, 1) == "sparse_int4"


@pytest.mark.parametrize(
    ("w", "dtype", "reason"),
    [
        (lambda: quantized(pruned(16, 128), "int4_g32").t(), BF16, "not in 2:4 storage"),
        (lambda: weight("int4_g32", "int8_rowwise").t(), BF16, "must not be quantized"),
        (lambda: weight().t(), torch.float32, "must be bfloat16 or float16"),
        (lambda: weight("int8_g32").t(), BF16, "not int8"),
        (lambda: weight(OF_EIGHT).t(), BF16, "or each row, must have one float32 or bfloat16 scale"),
        (lambda: weight(BY_ROWS, k=80).t(), BF16, "a multiple of its group of 32, got 80"),
        (lambda: weight(), BF16, "stored as"),
        (lambda: weight().t(), BF16, "for Nvidia GPUs"),
    ],
)
def test_why_it_does_not_take_a_weight(w, dtype, reason):
    assert reason in sparse.int4_unsupported_reason(w(), dtype)
    assert select_kernel(w(), dtype) != "sparse_int4"


@pytest.mark.parametrize(
    ("scheme", "reason"),
    [
        (
            replace(SCHEMES["int4_g32_asymmetric"], zero=Zero(rule="value", storage="bfloat16")),
            "zero points must be integers subtracted from quantized values",
        ),
        (replace(SCHEME, dequantize="target"), "its quantized value times one scale"),
        (replace(SCHEME, scale=replace(SCHEME.scale, storage="float16", floor=None)), "in float16"),
        (replace(SCHEMES["nvfp4"], element="int4"), "its quantized value times one scale"),
    ],
)
def test_schemes_that_it_would_compute_wrongly(scheme, reason):
    """The rule alone: not every one of these has a 2:4 storage today."""
    assert reason in sparse._scheme_reason(scheme)


def test_lengths_and_gpus_that_it_does_not_take(kernels, monkeypatch):
    w = weight(
        replace(
            SCHEMES["int4_g128"], name="int4 cut", scale=replace(SCHEMES["int4_g128"].scale, partial=True)
        ),
        k=160,
    )
    assert "a multiple of its group of 128, got 160" in sparse.int4_unsupported_reason(w.t(), BF16)
    for scheme, k, step in (("int4_g32_asymmetric", 128, 256), ("int4_g128_asymmetric", 256, 512)):
        reason = sparse.int4_unsupported_reason(weight(scheme, k=k).t(), BF16)
        assert f"with zero points the length of its sums must be a multiple of {step}, got {k}" in reason
    monkeypatch.undo()
    for capability, taken in (((8, 9), ()), ((9, 0), (SCHEME, ASYMMETRIC)), ((10, 0), (SCHEME,))):
        set_capability(monkeypatch, capability)
        for scheme in (SCHEME, ASYMMETRIC):
            on_gpu = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0), scheme=scheme)
            assert (sparse._device_reason(on_gpu) is None) == (scheme in taken)


@pytest.mark.skipif(platform.system() != "Linux", reason="triton has no packages for this system")
@pytest.mark.parametrize("group", GROUPS)
def test_lengths_with_zero_points_are_those_that_have_a_variant(group):
    from fast.kernels.sm90_sparse24_w4a16_gemv.host import Form, choose

    form = Form(group, False, False, zeros=True)
    for k in range(group, 4097, group):
        assert (sparse.zero_points_reason(k, group) is None) == (choose(form, 1, 4096, k) is not None), k


@pytest.mark.parametrize(
    "scheme", ["int4_g32", STORED_BFLOAT16, ASYMMETRIC, BY_ROWS, ASYMMETRIC_ROWS], ids=str
)
@pytest.mark.parametrize("rows", [0, 1, 16, 65])
def test_products_are_those_of_the_dense_equivalent(scheme, rows, kernels):
    """`reference.linear` of it, bit for bit."""
    k = 128 if scheme in ("int4_g32", STORED_BFLOAT16) else 256
    w = weight(scheme, k=k)
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(1)).to(BF16)
    bias = torch.randn(16, generator=torch.Generator().manual_seed(2)).to(BF16)
    for added in (None, bias):
        found = torch.nn.functional.linear(x, w, added)
        assert same(found, reference.linear(x, w.quantized, added))
        assert same(found, PRODUCTS["sparse_int4"].run(x, w.t(), added))
    assert select_kernel(w.t(), BF16) == "sparse_int4"


def test_one_number_may_be_added_to_all_columns(kernels):
    w, x, bias = weight(), torch.randn(3, 128).to(BF16), torch.ones(1, dtype=BF16)
    assert same(torch.addmm(bias, x, w.t()), torch.addmm(bias.expand(16), x, w.t()))


def test_layers_explain_and_tune(kernels):
    made = layer()
    x = torch.randn(4, 128).to(BF16)
    assert explain(made).layers[0].kernel == "sparse_int4, up to 64 tokens"
    (choice,) = tune(made, x).choices
    # On a busy CPU one may take so long at first that it drops out.
    measured = [one.kernel for one in choice.candidates if not one.reason or one.reason.startswith("took ")]
    assert "sparse_int4" in measured
    assert "dequantize" in measured
    dense = made.weight.to_layout("plain")
    assert select_kernel(dense.t(), BF16, 4) != "sparse_int4"


def test_compiled_programs(kernels):
    torch._dynamo.reset()
    made, x = layer(), torch.randn(4, 128).to(BF16)
    with torch.no_grad():
        assert same(torch.compile(made, fullgraph=True, backend="aot_eager")(x), made(x))


def test_gradients_of_inputs(kernels):
    made, x = layer(), torch.randn(4, 128).to(BF16).requires_grad_()
    made(x).sum().backward()
    wanted = torch.ones(4, 16, dtype=BF16) @ made.weight.dequantize()
    assert torch.allclose(x.grad, wanted, atol=2**-6)


@pytest.mark.skipif(platform.system() != "Linux", reason="triton has no packages for this system")
def test_as_many_rows_as_the_kernel_takes():
    from fast.kernels.triton_sparse24_small_m import host

    assert sparse.MOST_ROWS == host.MOST_ROWS


def test_compiled_layers_of_one_input_are_joined(kernels):
    """A gate and what it gates as silu of one times the other, two others as a pair; the bits of the layers by themselves."""
    from tests.fast.linear.test_linear_swiglu import compiled

    layers, x = [layer(bias=False) for _ in range(4)], torch.randn(1, 4, 128).to(BF16)

    def step(x):
        gate, up, *others = (one(x) for one in layers)
        return torch.nn.functional.silu(gate) * up, *others

    with torch.no_grad():
        (gated, *others), seen = compiled(step, x)
        wanted = [one(x) for one in layers]
    names = {"ao_lab.linear_sparse_int4_pair.default", "ao_lab.linear_sparse_int4_swiglu.default"}
    assert (len(seen), set(seen)) == (2, names)
    assert same(gated, reference.swiglu(*wanted[:2]))
    assert all(map(same, others, wanted[2:]))


def test_compiled_layers_with_zero_points_are_left(kernels):
    """Two products at once take none."""
    from tests.fast.linear.test_linear_swiglu import compiled

    layers = [layer("int4_g32_asymmetric", bias=False, k=256) for _ in range(2)]
    x = torch.randn(1, 4, 256).to(BF16)
    with torch.no_grad():
        made, seen = compiled(lambda x: [one(x) for one in layers], x)
        assert all(map(same, made, [one(x) for one in layers]))
    assert seen == ["ao_lab.linear_sparse_int4.default"] * 2


def test_kernels_of_sparse_weights_stand_before_those_that_take_all_and_are_imported_for_such_a_weight():
    program = """
import sys, torch, ao_lab
from ao_lab.gemm.select import PRODUCTS, select_kernel
config = ao_lab.Int4WeightOnlyConfig(group_size=32)
w = ao_lab.quantized(torch.randn(64, 64), config.recipe())
assert list(PRODUCTS)[-5:] == ["sparse_int4", "sparse_wgmma", "dequantize", "reference", "cusparselt"]
reasons = {PRODUCTS[name].unsupported_reason(w.t(), torch.bfloat16) for name in ("sparse_int4", "sparse_wgmma", "cusparselt")}
print(reasons, "ao_lab.gemm.sparse" in sys.modules)
w = ao_lab.quantized_compressed(torch.randn(64, 32).repeat_interleave(2, 1) * torch.tensor([1, 0] * 32), config.recipe())
select_kernel(w.t(), torch.bfloat16)
import ao_lab.gemm.sparse
print(PRODUCTS["sparse_int4"] is ao_lab.gemm.sparse.INT4, PRODUCTS["sparse_wgmma"] is ao_lab.gemm.sparse.WGMMA)
print(torch.ops.ao_lab.cusparselt_mm)
"""
    done = forks.python("-c", program)
    told = ["{'the weight is not in 2:4 storage'} False", "True True", "ao_lab.cusparselt_mm"]
    assert done.stdout.splitlines() == told, done.stderr


@pytest.mark.parametrize(
    ("capability", "oldest", "later", "reason"),
    [
        ((9, 0), (9, 0), False, None),
        ((9, 0), (8, 9), True, None),
        ((10, 0), (9, 0), False, "for compute capability 9.0, this GPU has 10.0"),
        ((8, 0), (8, 9), True, "for compute capability 8.9 and later, this GPU has 8.0"),
    ],
)
def test_where_kernels_run(capability, oldest, later, reason, monkeypatch):
    set_capability(monkeypatch, capability)
    found = device_reason(SimpleNamespace(is_cuda=True, device=torch.device("cuda")), oldest, later=later)
    assert (found is None) if reason is None else (reason in found)
    host = SimpleNamespace(is_cuda=False, device=torch.device("cpu"))
    assert device_reason(host, oldest) == "it is for Nvidia GPUs, this weight is on cpu"


def test_what_elements_are_multiplied_with():
    names = ("fp8_rowwise", "fp8_e5m2_rowwise", "int8_rowwise", "int4_g32")
    found = [kind_of(SCHEMES[name]) for name in names if name in SCHEMES]
    assert found[0] == "float8"
    assert found[-2:] == ["int8", "int4"]
