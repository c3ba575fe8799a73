"""Products by cuSPARSELt: what they ask of a GPU library, with that library's part played on the host; and by our own kernels,
in whose place the reference computes."""

from functools import partial

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import reference
from ao_lab import SparseTrainingConfig, sparsify_, step_sparsity_
from ao_lab.sparsity.training import products
from ao_lab.sparsity.training.layers import Rule, masked_linear
from ao_lab.sparsity.training.products import (
    PRODUCTS,
    cusparselt_linear,
    sparse_wgmma_gradients,
    sparse_wgmma_linear,
)
from fast.layers.column_sums import column_sums
from fast.layers.linear_gradients import weight_and_bias_gradients


@pytest.fixture
def library(monkeypatch):
    """torch's two functions as they are documented, strict about what the library reads wrongly; the calls that were made."""
    calls = []

    def compress(w):
        assert w.is_contiguous()
        assert w.shape[0] % 16 == w.shape[1] % 16 == 0
        assert int((w != 0).reshape(-1, 4).sum(-1).max()) <= 2
        calls.append(("compress", tuple(w.shape)))
        return w.clone()

    def multiply(compressed, dense, bias=None, *, transpose_result):
        assert transpose_result
        assert dense.t().is_contiguous()
        assert dense.shape[1] % 8 == 0
        assert compressed.dtype == dense.dtype
        assert bias is None or bias.dtype == dense.dtype
        calls.append(("multiply", tuple(dense.shape)))
        y = compressed.float() @ dense.float()
        y = y if bias is None else y + bias.float()[:, None]
        return y.to(dense.dtype).t().contiguous()

    monkeypatch.setattr(torch, "_cslt_compress", compress)
    monkeypatch.setattr(torch, "_cslt_sparse_mm", multiply)
    monkeypatch.setattr(products, "_check", lambda x, name: None)
    monkeypatch.setitem(
        PRODUCTS, "cusparselt", PRODUCTS["cusparselt"]._replace(unsupported_reason=lambda w: None)
    )
    return calls


def integers(*shape, seed=0, dtype=torch.bfloat16):
    """Sums of products of these are exact in float32, in any order."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_what_a_bias_gets(monkeypatch):
    """Torch's own sum with dense products, to the bit; `column_sums` with others; the layer asks its product."""
    g = torch.randn(300, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    monkeypatch.setattr("fast.layers.column_sums.summed", lambda *_: pytest.fail("another order"))
    assert torch.equal(PRODUCTS["dense"].bias_grad(g), g.sum(0))
    assert PRODUCTS["cusparselt"].bias_grad is PRODUCTS["sparse_wgmma"].bias_grad is column_sums
    monkeypatch.setitem(PRODUCTS, "dense", PRODUCTS["dense"]._replace(bias_grad=lambda g: 2 * g[0]))
    w, bias = torch.ones(16, 16).bfloat16(), torch.zeros(16).bfloat16().requires_grad_()
    y = masked_linear(torch.ones(300, 16).bfloat16(), w, w > 0, bias, Rule("masked", 0.0, "dense", False))
    assert torch.equal(torch.autograd.grad(y, bias, g)[0], 2 * g[0])


def test_what_weight_and_bias_get(monkeypatch):
    """Torch's own with dense products, to the bit; one call of others', where both are wanted; the layer asks its product."""
    g, x = (
        torch.randn(300, width, generator=torch.Generator().manual_seed(width)).bfloat16()
        for width in (16, 32)
    )
    monkeypatch.setattr("fast.layers.column_sums.summed", lambda *_: pytest.fail("another order"))
    made = PRODUCTS["dense"].both_grads(g, x)
    assert all(torch.equal(*pair) for pair in zip(made, (g.t().mm(x), g.sum(0)), strict=True))
    assert (
        PRODUCTS["cusparselt"].both_grads is PRODUCTS["sparse_wgmma"].both_grads is weight_and_bias_gradients
    )

    def both(rows, inputs):
        assert (rows.shape, inputs.shape) == ((300, 16), (300, 32))
        return 3 * rows.t().mm(inputs), 2 * rows[0]

    monkeypatch.setitem(PRODUCTS, "dense", PRODUCTS["dense"]._replace(both_grads=both))
    w, bias = (torch.ones(*shape).bfloat16().requires_grad_() for shape in ((16, 32), (16,)))
    y = masked_linear(x.view(3, 100, 32), w, w > 0, bias, Rule("straight-through", 0.0, "dense", False))
    dw, db = torch.autograd.grad(y, (w, bias), g.view(3, 100, 16), retain_graph=True)
    assert torch.equal(dw, 3 * g.t().mm(x))
    assert torch.equal(db, 2 * g[0])
    # One alone is computed alone.
    y = masked_linear(x, w, w > 0, None, Rule("straight-through", 0.0, "dense", False))
    assert torch.equal(torch.autograd.grad(y, w, g)[0], g.t().mm(x))


@pytest.mark.parametrize("by_library", [False, True])
def test_all_three_at_once(monkeypatch, by_library):
    """The weight is compressed for dx as what runs beside the library's product; without that it is one after the other."""
    told = []

    def beside(rows, inputs, work):
        told.append("beside")
        return (both(rows, inputs) if by_library else None), work()

    def both(rows, inputs):
        told.append("gradients")
        return rows.t().mm(inputs), rows.sum(0)

    def compressed(w, mask, transposed):
        told.append("compress")
        assert transposed
        return torch.where(mask, w, 0), None

    def multiplied(function, record, values, operands):
        told.append("multiply")
        return operands[0].mm(operands[1])

    monkeypatch.setattr(products, "beside_work", beside)
    monkeypatch.setattr(products, "weight_and_bias_gradients", both)
    monkeypatch.setattr(products, "compress_masked", compressed)
    monkeypatch.setattr(products, "execute", multiplied)
    x, w, g, b = (
        integers(6, 32),
        integers(16, 32, seed=1),
        integers(6, 16, seed=2),
        torch.zeros(16).bfloat16(),
    )
    x, w, b = (one.requires_grad_() for one in (x, w, b))
    mask = w.detach() > 0
    monkeypatch.setitem(
        PRODUCTS, "dense", PRODUCTS["dense"]._replace(all_grads=PRODUCTS["sparse_wgmma"].all_grads)
    )
    y = masked_linear(x, w, mask, b, Rule("straight-through", 0.0, "dense", True))
    dx, dw, db = torch.autograd.grad(y, (x, w, b), g)
    order = ["gradients", "compress", "multiply"] if by_library else ["compress", "multiply", "gradients"]
    assert told == ["beside", *order]
    assert torch.equal(dx, g.mm(torch.where(mask, w, 0)))
    assert torch.equal(dw, g.t().mm(x))
    assert torch.equal(db, g.sum(0))


def test_inputs_that_are_no_plain_matrices(library):
    """Slices and transposes, which the library would read as something else."""
    w = integers(16, 32)
    mask = torch.as_tensor(reference.prune(w))
    for x in (integers(8, 64)[:, 32:], integers(32, 8).t(), integers(16, 32)[::2]):
        expected = F.linear(x, torch.where(mask, w, 0))
        assert torch.equal(cusparselt_linear(x, w, mask, None), expected)


def test_dense_phases_have_dense_products(library):
    net = nn.Sequential(nn.Linear(16, 32)).bfloat16()
    sparsify_(net, SparseTrainingConfig(products="cusparselt", warmup=1, cooldown=1, steps=3))
    for expected in ([], ["compress", "multiply"], []):
        net(integers(8, 16)).sum().backward()
        assert [name for name, _ in library] == expected
        library.clear()
        step_sparsity_(net)


@pytest.fixture
def kernels(monkeypatch):
    """Inputs and weights count as lying on a Hopper GPU; how often weights were compressed."""
    calls = []
    compress = products.compress_masked

    def counted(w, mask, transposed):
        calls.append(tuple(w.t().shape if transposed else w.shape))
        return compress(w, mask, transposed)

    monkeypatch.setattr(products, "compress_masked", counted)
    monkeypatch.setattr(products, "_check", lambda x, name: None)
    monkeypatch.setitem(
        PRODUCTS, "sparse_wgmma", PRODUCTS["sparse_wgmma"]._replace(unsupported_reason=lambda w: None)
    )
    return calls


@pytest.mark.parametrize("transposable", [False, True])
@pytest.mark.parametrize("shape", [(8,), (3,), (2, 5), (0,)], ids=str)
@pytest.mark.parametrize(
    ("product", "dtype"),
    [("cusparselt", torch.bfloat16), ("sparse_wgmma", torch.bfloat16), ("sparse_wgmma", torch.float16)],
)
def test_outputs_and_gradients_of_integers(library, kernels, product, dtype, shape, transposable):
    x, w = integers(*shape, 32, dtype=dtype).requires_grad_(), integers(48, 32, seed=1, dtype=dtype)
    b = integers(48, seed=2, dtype=dtype)
    mask = torch.as_tensor((reference.prune_transposable if transposable else reference.prune)(w))
    w, b = w.requires_grad_(), b.requires_grad_()
    rule = Rule("masked", 0.0, product, transposable)
    ours, theirs = masked_linear(x, w, mask, b, rule), F.linear(x, torch.where(mask, w, 0), b)
    g = integers(*shape, 48, seed=3, dtype=dtype)
    assert ours.shape == theirs.shape
    assert torch.equal(ours, theirs)
    made, expected = (torch.autograd.grad(y, (x, w, b), g) for y in (ours, theirs))
    assert all(torch.equal(a, e) for a, e in zip(made, expected, strict=True))
    rows = torch.Size(shape).numel()
    compressed = ([(48, 32), (32, 48)] if transposable else [(48, 32)]) if rows else []
    if product == "cusparselt":
        padded = rows + -rows % 8
        calls = [[("compress", sides), ("multiply", (sides[1], padded))] for sides in compressed]
        assert library == [call for pair in calls for call in pair]
    else:
        assert kernels == compressed


def test_our_products_keep_what_the_mask_keeps(kernels):
    """Zeros among the kept, and pruned weights that are larger."""
    w = torch.tensor([[0.0, 0.0, 9.0, 9.0] * 4] * 16, dtype=torch.bfloat16)
    x, mask = integers(4, 16), torch.tensor([True, True, False, False] * 4).expand(16, 16)
    assert not sparse_wgmma_linear(x, w, mask, None, False).any()
    assert torch.equal(sparse_wgmma_linear(x, w, ~mask, None, False), F.linear(x, w))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
@pytest.mark.parametrize(
    ("product", "shape", "transposable"),
    [
        ("cusparselt", (3,), True),
        *(("sparse_wgmma", shape, both) for shape in ((3,), (2, 5), (0,)) for both in (False, True)),
    ],
)
def test_compiled(library, kernels, product, shape, transposable):
    torch.compiler.reset()
    net = nn.Sequential(nn.Linear(16, 32)).bfloat16()
    sparsify_(net, SparseTrainingConfig(products=product, transposable=transposable))
    with torch.no_grad():
        net[0].weight.copy_(integers(32, 16, seed=1))
    x, g = integers(*shape, 16).requires_grad_(), integers(*shape, 32, seed=2)
    expected = torch.autograd.grad(net(x), (x, *net.parameters()), g)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), net(x))
    made = torch.autograd.grad(compiled(x), (x, *net.parameters()), g)
    assert all(torch.equal(a, e) for a, e in zip(made, expected, strict=True))
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd:UserWarning")
def test_a_compiled_layer_multiplies_what_it_keeps(kernels):
    """Rows that one operator reads and backward keeps are one tensor of the graph, which a compiler writes once."""
    torch.compiler.reset()
    graphs = []
    partition = partial(min_cut_rematerialization_partition, compiler="inductor")

    def seen(graph, inputs):
        graphs.append(graph.graph)
        return make_boxed_func(graph.forward)

    net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).bfloat16()
    sparsify_(net, SparseTrainingConfig(products="sparse_wgmma", transposable=True))
    compiled = torch.compile(
        net, fullgraph=True, backend=aot_autograd(fw_compiler=seen, partition_fn=partition)
    )
    compiled(integers(2, 3, 16).requires_grad_()).sum().backward()
    forward, backward = graphs
    kept = next(node for node in forward.nodes if node.op == "output").args[0]
    products = [node for node in forward.nodes if node.target is torch.ops.ao_lab.sparse_wgmma_linear.default]
    assert len(products) == 2
    assert all(node.args[0] in kept for node in products)
    names = [str(node.target) for node in backward.nodes if "ao_lab" in str(node.target)]
    assert names == ["ao_lab.sparse_wgmma_gradients.default"] * 2
    torch.compiler.reset()


def test_the_operators(library):
    w, g = integers(16, 32), integers(3, 16, seed=2)
    mask = torch.as_tensor(reference.prune_transposable(w))
    calls = (
        (cusparselt_linear, (integers(3, 32), w, mask, integers(16))),
        (sparse_wgmma_linear, (integers(3, 32), w, mask, integers(16), False)),
        (sparse_wgmma_linear, (integers(2, 3, 16), w, mask, None, True)),
        (sparse_wgmma_gradients, (g, integers(3, 32), w, mask)),
    )
    for operator, arguments in calls:
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
    dx, dw, db = sparse_wgmma_gradients(*calls[3][1])
    assert torch.equal(dx, g.mm(torch.where(mask, w, 0)))
    assert torch.equal(dw, g.t().mm(integers(3, 32)))
    assert torch.equal(db, g.sum(0))


class Seen(TorchDispatchMode):
    """The operators that are dispatched."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.name())
        return function(*args, **(kwargs or {}))


def test_eager_calls_pass_the_operator_by(kernels, monkeypatch):
    """Where nothing listens; a mode sees one operator for each product."""
    x, w = integers(4, 32).requires_grad_(), integers(48, 32, seed=1).requires_grad_()
    mask = torch.as_tensor(reference.prune_transposable(w))
    rule = Rule("straight-through", 0.0, "sparse_wgmma", True)
    with Seen() as seen:
        masked_linear(x, w, mask, None, rule).sum().backward()
    assert seen.names.count("ao_lab::sparse_wgmma_linear") == 2
    monkeypatch.setattr(torch.ops.ao_lab, "sparse_wgmma_linear", None)
    masked_linear(x, w, mask, None, rule).sum().backward()
    assert torch.equal(x.grad, 2 * torch.ones(4, 48, dtype=x.dtype).mm(torch.where(mask, w, 0)))


@pytest.mark.parametrize("product", ["cusparselt", "sparse_wgmma"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_inputs_that_are_not_taken(product, dtype):
    w = torch.ones(16, 16, dtype=dtype)
    said = rf"products='{product}' takes float16 and bfloat16 inputs on CUDA, got {dtype} on cpu"
    with pytest.raises(TypeError, match=said):
        masked_linear(w, w, w > 0, None, Rule("masked", 0.0, product, False))
    assert "needs weights on CUDA, got cpu" in PRODUCTS[product].unsupported_reason(w)


@pytest.mark.parametrize(
    ("product", "capability", "said"),
    [("cusparselt", (7, 5), "Tesla T4 has no sparse matrix units"), ("sparse_wgmma", (10, 0), "compute capability 9.0")],
)  # fmt: skip
def test_weights_that_are_not_taken(monkeypatch, product, capability, said):
    reason = PRODUCTS[product].unsupported_reason

    class OnCuda:
        is_cuda, device, shape = True, "cuda:0", (24, 32)

    if product == "cusparselt":
        monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: False)
        assert "has no cuSPARSELt" in reason(OnCuda)
    monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert said in reason(OnCuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert "multiples of 16, got shape (24, 32)" in reason(OnCuda)
    OnCuda.shape = (32, 32)
    assert reason(OnCuda) is None
