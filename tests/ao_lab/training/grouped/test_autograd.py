"""Grouped linear layers within the bounds of `reference.grouped_linear`; what belongs to no expert reaches nothing."""

import pytest
import torch

import reference
from ao_lab.training.grouped import autograd, products
from ao_lab.training.grouped.autograd import grouped_linear
from reference import Quantized
from reference.matmul.linear import transposed
from reference.training.grouped import grouped_operands
from reference.training.recipe import RECIPES
from tests.support.grouped_cases import OFFSETS, E, K, N, T, offsets_of, poison, tensors
from tests.support.refusals import refused
from tests.support.traced import keys_without_origin


@pytest.fixture(autouse=True)
def fixed_seed(monkeypatch):
    monkeypatch.setattr(autograd, "new_seed", lambda recipe: 7)


def step(x, w, g, offsets, recipe, **options):
    """y, dx and dw."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, w)]
    y = grouped_linear(*leaves, offsets, RECIPES[recipe], **options)
    y.backward(g)
    return y.detach(), *(leaf.grad for leaf in leaves)


def bounds(name, offsets, dtype, x, w, g):
    """How far y, dx and dw may lie from the correctly rounded ones: float32 sums in any order, both lie within a bound."""
    found = [torch.zeros(shape, dtype=torch.float64) for shape in ((T, N), (T, K), (E, N, K))]
    starts = [0, *offsets.tolist()]
    for bound, which in zip(found, ("output", "input_grad", "weight_grad"), strict=True):
        for expert, pair in enumerate(grouped_operands(which, name, offsets, x=x, w=w, g=g, seed=7)):
            if pair is None:
                continue
            a, b = pair[0], transposed(pair[1]) if isinstance(pair[1], Quantized) else pair[1].T
            part = expert if which == "weight_grad" else slice(starts[expert], starts[expert + 1])
            bound[part] = sum(
                reference.matmul_error_bound(a, b, accumulation=tier, out_dtype=dtype)
                for tier in ("blocked", "exact")
            )
    return found


def assert_step(name, offsets, dtype="bfloat16"):
    x, w, g = tensors(getattr(torch, dtype))
    truth = [
        reference.grouped_linear(x, w, offsets, name),
        *reference.grouped_linear_vjp(g, x, w, offsets, name, seed=7),
    ]
    made = step(poison(x, offsets), w, poison(g, offsets), offsets, name)
    for found, want, bound in zip(made, truth, bounds(name, offsets, dtype, x, w, g), strict=True):
        assert found.dtype == want.dtype
        assert bool(((found.double() - want.double()).abs() <= bound).all())


@pytest.mark.parametrize("name", RECIPES)
def test_outputs_and_gradients(name):
    """Rows of no expert are NaN in x and in g; bounds are zero where results are."""
    assert_step(name, offsets_of("uneven"))


@pytest.mark.parametrize("case", [case for case in OFFSETS if case != "uneven"])
def test_other_groups(case):
    for name in ("rowwise", "mxfp8"):
        assert_step(name, offsets_of(case))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_dtypes(dtype):
    assert_step("tensorwise", offsets_of("uneven"), dtype)


@pytest.mark.parametrize("name", RECIPES)
def test_no_rows(name):
    x, w, g = tensors()
    y, dx, dw = step(x[:0], w, g[:0], offsets_of("no tokens at all"), name)
    assert y.shape == (0, N)
    assert dx.shape == (0, K)
    assert not dw.any()


@pytest.mark.parametrize("name", RECIPES)
def test_not_finite_stays_so_in_its_group_alone(name):
    """A NaN of a token or of a gradient: seen where it is multiplied, nowhere else."""
    offsets = offsets_of("uneven")
    x, w, g = tensors()
    clean = step(x, w, g, offsets, name)
    for bad in (float("nan"), float("inf")):
        broken = g.clone()
        broken[30, 5] = bad
        _, dx, dw = step(x, w, broken, offsets, name)
        assert not dx[30].isfinite().any()
        assert not dw[2, 5].isfinite().any()
        assert torch.equal(dx[:7], clean[1][:7])
        assert torch.equal(dx[60:], clean[1][60:])
        assert all(torch.equal(dw[expert], clean[2][expert]) for expert in (0, 1, 3))
        broken = x.clone()
        broken[30, 5] = bad
        y, _, dw = step(broken, w, g, offsets, name)
        assert not y[30].isfinite().any()
        assert torch.equal(y[:7], clean[0][:7])
        assert torch.equal(y[60:], clean[0][60:])
        assert all(torch.equal(dw[expert], clean[2][expert]) for expert in (0, 1, 3))


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "mxfp4"])
def test_what_other_groups_hold_does_not_matter(name):
    """Sizes and numbers of the tokens of other experts."""
    x, w, g = tensors()
    alone = step(x[:20], w, g[:20], torch.tensor([0, 20, 20, 20], dtype=torch.int32), name)
    beside = step(
        torch.cat([x[:20], 1e4 * x]),
        w,
        torch.cat([g[:20], g]),
        torch.tensor([0, 20, 50, 110], dtype=torch.int32),
        name,
    )
    assert torch.equal(beside[0][:20], alone[0])
    if not RECIPES[name].is_stochastic:
        assert torch.equal(beside[1][:20], alone[1])
        assert torch.equal(beside[2][1], alone[2][1])


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (False, False)])
def test_only_gradients_that_are_wanted(wanted):
    x, w, g = tensors()
    x, w = (t.requires_grad_(flag) for t, flag in zip((x, w), wanted, strict=True))
    y = grouped_linear(x, w, offsets_of("uneven"), RECIPES["rowwise"])
    if any(wanted):
        y.backward(g)
    assert [t.grad is not None for t in (x, w)] == list(wanted)


def test_inputs_are_kept_as_codes():
    """A byte an element, and nothing in 16 bits beside the weight."""
    x, w, _ = tensors()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        grouped_linear(x.requires_grad_(), w.requires_grad_(), offsets_of("uneven"), RECIPES["rowwise"])
    wide = [t for t in kept if t.dtype == torch.bfloat16 and t.shape != w.shape]
    assert not any(t.numel() for t in wide)
    assert [t.shape[0] for t in kept if t.dtype == torch.uint8] == [K]


def test_frozen_experts_keep_no_inputs():
    x, w, _ = tensors()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        grouped_linear(x.requires_grad_(), w, offsets_of("uneven"), RECIPES["rowwise"])
    assert not any(t.numel() for t in kept if t.dtype == torch.uint8)


def test_one_seed_a_step(monkeypatch):
    """Forward and backward share it, the next step has another."""
    seeds = []
    monkeypatch.setattr(autograd, "new_seed", lambda recipe: seeds.append(len(seeds)) or len(seeds))
    x, w, g = tensors()
    first, second = (step(x, w, g, offsets_of("uneven"), "mxfp4") for _ in range(2))
    assert len(seeds) == 2
    with torch.no_grad():
        grouped_linear(x, w, offsets_of("uneven"), RECIPES["mxfp4"])
    assert len(seeds) == 2
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])
    assert not torch.equal(first[2], second[2])


def test_checkpointing_repeats_the_same_bits():
    x, w, g = tensors()
    results = []
    for checkpoint in (False, True):
        leaves = [t.clone().requires_grad_() for t in (x, w)]
        given = (*leaves, offsets_of("uneven"), RECIPES["mxfp8"])
        run = torch.utils.checkpoint.checkpoint if checkpoint else lambda f, *args, use_reentrant: f(*args)
        run(grouped_linear, *given, use_reentrant=False).backward(g)
        results.append([leaf.grad for leaf in leaves])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_products_that_do_not_read_the_groups():
    """What emulation does on a GPU, where the host knows no group: the same sums."""
    offsets = offsets_of("uneven")
    generator = torch.Generator().manual_seed(0)
    whole = lambda *shape: torch.randint(-8, 9, shape, generator=generator).float()  # noqa: E731
    a, b = poison(whole(T, 16), offsets), whole(E, 8, 16)
    columns = poison(whole(T, 8), offsets).t(), a.t()
    for given, shape in ((products.Operands(a, b), (T, 8)), (products.Operands(*columns), (E, 8, 16))):
        found = products._emulated_unread(given, offsets, torch.zeros(shape))
        assert torch.equal(found, products._emulated(given, offsets, False))
        assert found.isfinite().all()


def test_rows_and_experts_that_torch_leaves_unwritten_become_zeros():
    offsets = offsets_of("uneven")
    y = products._with_zeros(torch.full((T, 3), float("nan")), offsets, rows=True)
    assert y[:83].isnan().all()
    assert not y[83:].any()
    dw = products._with_zeros(torch.full((E, 3, 2), float("nan")), offsets, rows=False)
    assert dw.isnan().all((1, 2)).tolist() == [True, False, True, True]


# torch's tracer makes an instance of the function, of which torch itself warns.
TRACED = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@TRACED
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("rowwise", torch.bfloat16),
        ("mxfp8", torch.float32),
        *(
            pytest.param(name, dtype, marks=pytest.mark.nightly)
            for name in ("bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8", "mxfp6")
            for dtype in (torch.bfloat16, torch.float32)
            if (name, dtype) not in (("rowwise", torch.bfloat16), ("mxfp8", torch.float32))
        ),
    ],
)
def test_compiled_in_one_graph(name, dtype):
    """The same bits for other groups of the same graph: nothing of them is read while tracing."""
    x, w, g = tensors(dtype)
    layer = lambda x, w, offsets: grouped_linear(x, w, offsets, RECIPES[name])  # noqa: E731
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for case in ("uneven", "even, rows of no expert"):
        results = []
        for function in (layer, compiled):
            leaves = [t.clone().requires_grad_() for t in (x, w)]
            y = function(*leaves, offsets_of(case))
            y.backward(g)
            results.append([y.detach(), *(leaf.grad for leaf in leaves)])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def traced(name, dtype):
    """Dynamo's graph of a layer."""
    graphs, (x, w, _) = [], tensors(dtype)
    layer = lambda x, w, offsets: grouped_linear(x, w, offsets, RECIPES[name])  # noqa: E731
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=lambda graph, _: graphs.append(graph) or graph, fullgraph=True)
    compiled(x.requires_grad_(), w.requires_grad_(), offsets_of("uneven"))
    return graphs[0]


@TRACED
@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "mxfp8", "nvfp4"])
def test_a_traced_layer_reads_no_key_of_a_record_without_origin(monkeypatch, name):
    """torch 2.11 cannot. Random words are zeros: the reference's are not traced in reasonable time."""

    def words(x, operand, *_):
        drawn = operand.scheme is not None and operand.scheme.rounding == "stochastic"
        return torch.zeros(x.shape, dtype=torch.uint32) if drawn else None

    monkeypatch.setattr(autograd, "words", words)
    read = keys_without_origin(monkeypatch)
    traced(name, torch.bfloat16)
    assert not read


@TRACED
@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.float32), ("mxfp8", torch.float32)])
def test_a_traced_layer_returns_the_product_itself(name, dtype):
    """No conversion that converts nothing stands between: torch 2.11 then takes the gradient for that of another tensor."""
    forward = traced(name, dtype).fwd_body_0
    (returned, *_), _ = forward.graph.output_node().args[0]
    assert returned.target is torch.ops.ao_lab.grouped_product.default


def test_wrong_calls():
    x, w, _ = tensors()
    offsets = offsets_of("uneven")
    for given, error, message in (
        ((x, w[0], offsets), ValueError, r"w \(E, N, K\)"),
        ((x, w, offsets[:2]), ValueError, r"offsets \(E,\)"),
        ((x[:, :5], w, offsets), ValueError, "got shapes"),
        ((x.float(), w, offsets), TypeError, "of one dtype"),
        ((x, w, offsets.float()), TypeError, "int32 offsets"),
    ):
        refused(error, message, grouped_linear, *given, RECIPES["rowwise"])
