"""`fast.linear_sparse_int4` of CPU tensors: the reference's bits, gradients by the dense weight, compiled programs."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import fast
import reference
from ao_lab.compile.fused_linears import FuseLinears
from ao_lab.testing.strategies import assert_same_bits
from fast.sparsity import linear_sparse_int4 as ops
from fast.sparsity import linear_sparse_int4 as pair
from fast.sparsity.linear_sparse_int4 import linear_sparse_int4_pair, linear_sparse_int4_swiglu
from reference.sparsity.linear_sparse_int4 import sparse_int4_weight
from tests.fast.linear.test_linear_pair import targets
from tests.fast.linear.test_linear_swiglu import compiled
from tests.gpu.sparsity.cases import as_tensors, exact_case, random_case, zero_points

# Two products by 2:4 weights of int4 at once, and silu of one times the other: on a CPU separate products, operators,
# gradients, and how a compiled graph comes to them.

BF16, F16 = torch.bfloat16, torch.float16
ONE, PAIR, SWIGLU = (f"ao_lab.linear_sparse_int4{end}.default" for end in ("", "_pair", "_swiglu"))


def operands(
    rows=(8, 8), count=3, groups=(64, 64), dtype="bfloat16", storages=("float32", "float32"), make=random_case
):
    """x / 64, and parts of weights."""
    cases = [
        as_tensors(make(count, n, 256, group, dtype, storage, seed))
        for seed, (n, group, storage) in enumerate(zip(rows, groups, storages, strict=True))
    ]
    return cases[0].x / 64, *(case[1:4] for case in cases)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("count", [1, 16, 20])
def test_on_a_cpu_they_are_separate_products(dtype, count):
    """Of weights that are stored in different ways too."""
    for given in ({}, {"groups": (64, 32)}, {"storages": ("float32", "bfloat16")}):
        x, first, second = operands(count=count, dtype=dtype, **given)
        wanted = [reference.linear_sparse_int4(x, *one) for one in (first, second)]
        for got, right in zip(linear_sparse_int4_pair(x, first, second), wanted, strict=True):
            assert_same_bits(got, right)
        assert_same_bits(linear_sparse_int4_swiglu(x, first, second), reference.swiglu(*wanted))


def test_what_is_wrong_is_refused():
    x, first, second = operands((8, 16))
    assert [y.shape[1] for y in linear_sparse_int4_pair(x, first, second)] == [8, 16]
    with pytest.raises(ValueError, match=r"two weights of one shape.*linear_sparse_int4_pair takes such"):
        linear_sparse_int4_swiglu(x, first, second)
    for function in (linear_sparse_int4_pair, linear_sparse_int4_swiglu):
        with pytest.raises(ValueError, match="the last axes must be the same"):
            function(x[:, :128], first, first)
        with pytest.raises(TypeError, match="takes x of dtype"):
            function(x.float(), first, first)
        with pytest.raises(ValueError, match=r"metadata of the second weight on meta"):
            function(x, first, [first[0], first[1].to("meta"), first[2]])


def test_operators_are_described_to_torch():
    x, first, second = operands(make=exact_case)
    given = (x.requires_grad_(), *first, *second)
    for operator in (torch.ops.ao_lab.linear_sparse_int4_pair, torch.ops.ao_lab.linear_sparse_int4_swiglu):
        assert set(torch.library.opcheck(operator.default, given).values()) == {"SUCCESS"}


def test_gradients():
    """Those of separate products."""
    x, first, second = operands((8, 8), make=exact_case)
    made = []
    for together in (False, True):
        x = x.detach().requires_grad_()
        apart = [fast.linear_sparse_int4(x, *one) for one in (first, second)]
        one, other = linear_sparse_int4_pair(x, first, second) if together else apart
        gated = linear_sparse_int4_swiglu(x, first, second) if together else fast.swiglu(*apart)
        (from_pair,) = torch.autograd.grad(one.float().sum() + 2 * other.float().sum(), x, retain_graph=True)
        made.append((from_pair, *torch.autograd.grad(gated.float().sum(), x)))
    for got, wanted in zip(*made, strict=True):
        assert_same_bits(got, wanted)
    scale = first[2].clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="linear_sparse_int4_pair has no gradient for the scales"):
        linear_sparse_int4_pair(x, [*first[:2], scale], second)[0].sum().backward()


def test_groups_of_two_sizes_are_two_products():
    """The kernel is not even asked."""
    x, first, second = operands(groups=(64, 32))
    for kernel in (pair._pair_kernel, pair._swiglu_kernel):
        assert kernel(None, (), (x, *first, *second), None) is None


@pytest.mark.parametrize("gated", [False, True])
def test_on_a_gpu_the_kernel_is_given_both_weights(monkeypatch, gated):
    from fast.kernels.sm90_sparse24_w4a16_gemv import host as kernels

    name = "sm90_sparse24_w4a16_gemv_swiglu" if gated else "sm90_sparse24_w4a16_gemv_pair"
    monkeypatch.setattr(kernels, name, lambda *given, key: (given, key))
    x, first, second = operands()
    kernel = pair._swiglu_kernel if gated else pair._pair_kernel
    (got_x, one, other, group), key = kernel(None, (), (x, *first, *second), "key")
    assert (got_x is x, group, key) == (True, 64, "key")
    assert all(a is b for a, b in zip((*one, *other), (*first, *second), strict=True))


# What compiled programs have of them


def traced(rows, count=1, bias=False, groups=None, storages=None):
    """A graph of products of one input, its views made anew for each, and the weights."""
    x, *parts = operands(
        rows, count, groups or (64,) * len(rows), storages=storages or ("float32",) * len(rows)
    )

    def products(x, parts):
        return [
            fast.linear_sparse_int4(x.view(-1, 256), *one, x.new_zeros(len(one[0])) if bias else None)
            for one in parts
        ]

    graph = make_fx(products, tracing_mode="fake")(x, parts)
    FuseLinears()(graph.graph)
    graph.recompile()
    return graph, x, parts, products(x, parts)


@pytest.mark.parametrize(("rows", "count"), [((8,), 1), ((8, 8), 1), ((16, 4, 4), 16), ((8, 5, 3, 2), 2)])
def test_products_of_one_input_are_joined_two_and_two(rows, count):
    """Whatever their rows."""
    graph, x, parts, wanted = traced(rows, count)
    assert sorted(targets(graph)) == [ONE] * (len(rows) % 2) + [PAIR] * (len(rows) // 2)
    for made, right in zip(graph(x, parts), wanted, strict=True):
        assert_same_bits(made, right)


@pytest.mark.parametrize(
    "case",
    [{"count": 17}, {"bias": True}, {"groups": (64, 32)}, {"storages": ("float32", "bfloat16")}],
    ids=str,
)
def test_others_are_left(case):
    """More rows than one launch takes, biases, weights that are stored in other ways."""
    assert targets(traced((8, 8), **case)[0]) == [ONE] * 2


def test_weights_of_which_nothing_is_known_are_left():
    graph = traced((8, 8), 17)[0]
    for node in graph.graph.nodes:
        if node.op == "placeholder" and "x" not in node.name:
            node.meta.pop("val", None)
    FuseLinears()(graph.graph)
    assert targets(graph) == [ONE] * 2


GATE, UP, OTHER = operands((8, 8, 8), groups=(64, 64, 32), storages=("float32",) * 3)[1:]
LARGER = operands((16, 16))[1]


def plain(x):
    return functional.silu(fast.linear_sparse_int4(x, *GATE)) * fast.linear_sparse_int4(x, *UP)


def viewed(x):
    """As layers do it: rows of a matrix, then three axes again; up first."""
    rows = [fast.linear_sparse_int4(x.view(-1, 256), *w).view(1, -1, 8) for w in (UP, GATE)]
    return rows[0] * functional.silu(rows[1])


@pytest.mark.parametrize(
    ("function", "rows", "dtype"), [(plain, 1, BF16), (viewed, 16, BF16), (plain, 4, F16)]
)
def test_the_compiler_finds_silu_times_up(function, rows, dtype):
    """The bits of the layers by themselves."""
    x = (torch.randn(rows, 256, generator=torch.Generator().manual_seed(1)) / 64).to(dtype)
    made, seen = compiled(function, x)
    assert seen == [SWIGLU]
    products = [fast.linear_sparse_int4(x, *one) for one in (GATE, UP)]
    assert_same_bits(made.view(rows, 8), reference.swiglu(*products))


def mixed(x):
    """Groups of two sizes."""
    return functional.silu(fast.linear_sparse_int4(x, *GATE)) * fast.linear_sparse_int4(x, *OTHER)


def of_two_shapes(x):
    """A product of as many numbers, of another shape."""
    two = fast.linear_sparse_int4(x[:1], *LARGER).view(2, 8)
    return functional.silu(fast.linear_sparse_int4(x, *GATE)) * two


@pytest.mark.parametrize(("function", "rows"), [(mixed, 1), (of_two_shapes, 2), (plain, 17)])
def test_what_is_no_swiglu_of_one_launch_is_left(function, rows):
    assert compiled(function, torch.ones(rows, 256, dtype=BF16))[1] == [ONE] * 2


def test_the_pass_is_known_by_the_most_rows_too(tmp_path, monkeypatch):
    before = FuseLinears().uuid()
    (tmp_path / "other.py").write_text("")
    monkeypatch.setattr(pair, "__file__", str(tmp_path / "other.py"))
    assert FuseLinears().uuid() != before


def test_as_many_rows_as_the_kernel_takes():
    pytest.importorskip("triton")
    from fast.kernels.sm90_sparse24_w4a16_gemv import host

    assert pair.MOST_ROWS == host.MOST_ROWS


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
def test_results_are_those_of_the_reference(dtype, storage):
    case = as_tensors(random_case(3, 8, 128, 64, dtype, storage))
    assert_same_bits(fast.linear_sparse_int4(*case), reference.linear_sparse_int4(*case))
    assert_same_bits(
        fast.linear_sparse_int4(case.x[0], *case[1:4]), reference.linear_sparse_int4(case.x[0], *case[1:4])
    )


def test_gradients_are_products_with_the_dense_weight():
    case = as_tensors(exact_case(3, 8, 128, 64))
    x, bias = case.x.requires_grad_(), case.bias.requires_grad_()
    y = fast.linear_sparse_int4(x, *case[1:4], bias)
    g = torch.randint(-2, 3, y.shape).to(y.dtype)
    y.backward(g)
    w = fast.dequantize(sparse_int4_weight(*case[1:4]))
    assert_same_bits(x.grad, (g.float() @ w).to(x.dtype))
    assert_same_bits(bias.grad, g.float().sum(0).to(bias.dtype))
    with pytest.raises(NotImplementedError, match="scales of a stored weight"):
        fast.linear_sparse_int4(x, *case[1:3], case.scale.requires_grad_()).sum().backward()


def test_zero_points():
    """The reference's bits, gradients by the dense weight, the operators, compiled programs."""
    case = exact_case(3, 8, 128, 64)
    case, zero = as_tensors(case), torch.from_numpy(zero_points(case))
    wanted = reference.linear_sparse_int4(*case, zero)
    assert_same_bits(fast.linear_sparse_int4(*case, zero=zero), wanted)
    run = torch.compile(
        lambda x: fast.linear_sparse_int4(x, *case[1:], zero), fullgraph=True, backend="eager"
    )
    assert_same_bits(run(case.x), wanted)
    w = fast.dequantize(sparse_int4_weight(*case[1:4], zero))
    assert_same_bits(torch.ops.ao_lab.sparse_int4_dense(*case[1:4], torch.bfloat16, zero), w.bfloat16())
    x = case.x.requires_grad_()
    y = fast.linear_sparse_int4(x, *case[1:], zero)
    g = torch.randint(-2, 3, y.shape).to(y.dtype)
    y.backward(g)
    assert_same_bits(x.grad, (g.float() @ w).to(x.dtype))
    operator = torch.ops.ao_lab.linear_sparse_int4
    assert set(torch.library.opcheck(operator, (x, *case[1:], zero)).values()) == {"SUCCESS"}


def test_compiled_programs():
    case = as_tensors(random_case(3, 8, 128, 64))
    run = torch.compile(lambda x: fast.linear_sparse_int4(x, *case[1:]) * 2, fullgraph=True, backend="eager")
    assert_same_bits(run(case.x), fast.linear_sparse_int4(*case) * 2)
    with pytest.raises(ValueError, match="the last axes must be the same"):
        fast.linear_sparse_int4(case.x[:, :64], *case[1:])
    with pytest.raises(TypeError, match="takes torch tensors"):
        fast.linear_sparse_int4(case.x.float().numpy(), *case[1:])


def test_operators_by_themselves():
    case = as_tensors(exact_case(3, 8, 128, 64))
    operator = torch.ops.ao_lab.linear_sparse_int4
    results = torch.library.opcheck(operator, (case.x.requires_grad_(), *case[1:]))
    assert set(results.values()) == {"SUCCESS"}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        given = (*case[1:4], dtype)
        assert set(torch.library.opcheck(torch.ops.ao_lab.sparse_int4_dense, given).values()) == {"SUCCESS"}
        wanted = fast.dequantize(sparse_int4_weight(*case[1:4])).to(dtype)
        assert_same_bits(torch.ops.ao_lab.sparse_int4_dense(*given), wanted)


def test_a_bias_in_float64_is_the_references():
    """On a GPU torch would round it to the input's dtype before it is added, which the reference does not."""
    case = as_tensors(random_case(3, 8, 128, 64))
    assert ops._kernel(None, (), (*case[:4], case.bias.double()), None) is None
