"""Two products by preshuffled weights in one launch, and silu of one times the other: kernels compiled for Hopper without a
GPU, operators, and how a compiled graph comes to them.

Bits are compared in Triton's interpreter (`programs/products/linear_small.py`, through `test_linear_small.test_bits`).
"""

import platform
import re
from dataclasses import replace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import fast
import reference
from ao_lab.compile.fused_linears import FuseLinears
from ao_lab.testing.strategies import assert_same_bits
from fast.matmul.preshuffled import layout, pair
from fast.matmul.preshuffled.linear import linear_small
from fast.matmul.preshuffled.pair import linear_small_pair, linear_small_swiglu
from reference import SCHEMES
from tests.fast.kernels.compiling.kernel_samples import by_day, named
from tests.fast.linear.test_linear_pair import targets
from tests.fast.linear.test_linear_swiglu import compiled
from tests.support.linear_cases import exact_inputs, exact_weight, inputs, weight

linux = pytest.mark.skipif(platform.system() != "Linux", reason="triton has no packages for this system")
BF16, HALF = torch.bfloat16, torch.float16
SHAPE = 128, 256
ONE, PAIR, SWIGLU, SEVERAL = (
    f"ao_lab.linear_small{end}.default" for end in ("", "_pair", "_swiglu", "_several")
)


def weights(name, draw=exact_weight, shapes=(SHAPE, SHAPE)):
    """Preshuffled weights that hold different numbers."""
    return [layout.preshuffled(draw(SCHEMES[name], *shape, seed)) for seed, shape in enumerate(shapes)]


# The kernels, without a GPU. The form of the weight, rows, more, the tiles where they are not those of the rule.
COMPILED = [
    (("int4", 128, 1), {}, None), (("int4", 128, 16), {"zero": True, "dtype": HALF}, None),
    (("int4", 32, 2), {"zero": True}, None), (("int4", 128, 4), {}, (16, 128, 128, 2, 4, 4)),
    (("int8", 0, 1), {"zero": True}, None), (("int8", 128, 16), {}, None), (("e4m3", 0, 8), {"dtype": HALF}, None),
    (("e4m3", 128, 1), {}, (16, 256, 64, 1, 4, 8)),
]  # fmt: skip


@linux
@pytest.mark.parametrize(
    ("which", "more", "tiles"),
    by_day(
        COMPILED,
        lambda case: named(element=case[0][0], parts=bool(case[2]) and case[2][3], **case[1]),
    ),
)
def test_kernels_compile_as_those_of_one_weight(which, more, tiles):
    """From registers to the tensor core, which is waited for before they change; each read as wide as one weight's."""
    from fast.kernels.triton_small_m import host, pair
    from fast.kernels.triton_small_m.host import Tiling
    from tests.fast.kernels.compiling.kernel_compiler import launched
    from tests.fast.linear.preshuffled.test_linear_small import WGMMA, empty_weight, paired

    element, group, count = which
    w = empty_weight(14336, 4096, element, group, more.get("zero", False))
    x = torch.empty((count, 4096), dtype=more.get("dtype", BF16))
    tiling = Tiling(*tiles) if tiles else pair.pair_tiling(14336, 4096, element, group, count)
    one, *_ = launched(lambda: host.linear_small(x, w, tiling=tiling))
    for function in (pair.linear_small_pair, pair.linear_small_swiglu):
        product, *others = launched(lambda function=function: function(x, w, w, tiling=tiling))
        assert [m.kernel for m in others] == ["sum_pair_splits_kernel"] * (tiling.splits > 1)
        assert all((m.local, m.stack) == (0, 0) for m in (product, *others))
        pairs = list(paired(product))
        assert pairs
        assert all(pairs), "assembly decodes words together that are no neighbours"
        assert set(WGMMA.findall(product.ptx)) == {"{"}, "the weight is read from shared memory"
        assert set(re.findall(r"wgmma\.wait_group\.sync\.aligned (\d+)", product.ptx)) == {"0"}
        assert product.named("HGMMA") == one.named("HGMMA")
        assert reads(product) == reads(one)
        loop = product.order[: max(at for at, name in enumerate(product.order) if name.startswith("HGMMA"))]
        assert not any(name.startswith(("STS", "LDL", "STL")) for name in loop), "weights make a detour"
        if tiling.warps == 4 and tiling.splits == 1:
            assert product.named("STS") == one.named("STS"), "halves of the sums lie in different lanes"


def reads(machine):
    """How often the kernel asks for so many bytes ahead, sorted."""
    return sorted(re.findall(r"cp\.async\.c[ag]\.shared\.global [^;]*\], (0x[0-9a-f]+)", machine.ptx))


@linux
@pytest.mark.parametrize("element", ["int4", "int8", "e4m3"])
@pytest.mark.parametrize("group", [0, 32, 128])
def test_the_rule_fits_any_two_weights(element, group):
    """Whole tiles of both, no empty part of K, and of big weights at most two programs a multiprocessor, all at once."""
    from fast.kernels.triton_small_m.host import FULL, MOST_REGISTERS
    from fast.kernels.triton_small_m.pair import MOST_ROWS, pair_tiling

    for rows in (128, 384, 1024, 6144, 14336, 28672):
        for columns in (128, 384, 1152, 4096, 14336):
            for count in (1, 9, MOST_ROWS):
                tiling = pair_tiling(rows, columns, element, group, count)
                assert (tiling.block_m, tiling.block_n, tiling.early) == (16, 128, False)
                assert tiling.fits(2 * rows, columns, element, group)
                assert tiling.registers(element) <= 32 * tiling.warps * MOST_REGISTERS
                assert tiling.at_once(element, group) >= 2
                assert tiling.splits == 1 or tiling.programs(2 * rows, count) <= 2 * FULL


@linux
def test_what_other_kernels_take():
    """More rows, none, other floats, weights of two forms or shapes or with filler."""
    from fast.kernels.triton_small_m import pair as kernels
    from tests.fast.linear.preshuffled.test_linear_small import empty_weight

    w, x = empty_weight(*SHAPE, "int4", 128), torch.empty((17, 256), dtype=BF16)
    assert kernels.MOST_ROWS == pair.MOST_ROWS == 16
    others = (
        empty_weight(*SHAPE, "int4", 128, zero=True), empty_weight(*SHAPE, "int8", 128),
        empty_weight(*SHAPE, "int4", 64), empty_weight(256, 256, "int4", 128),
    )  # fmt: skip
    filled = empty_weight(100, 256, "int4", 128)
    for function in (kernels.linear_small_pair, kernels.linear_small_swiglu):
        for given in (x, x[:0], x[:2].float()):
            assert function(given, w, w) is None
        assert function(x[:1], filled, filled) is None
        for form in (("e2m1", 32), ("e2m1", 16), ("e4m3_mx", 32)):
            factored = empty_weight(*SHAPE, *form)
            assert function(x[:1], factored, factored) is None
        for other in others:
            assert function(x[:1], w, other) is None


@linux
def test_errors_of_kernels():
    from fast.kernels.triton_small_m.host import Tiling
    from fast.kernels.triton_small_m.pair import linear_small_pair, linear_small_swiglu
    from tests.fast.linear.preshuffled.test_linear_small import empty_weight

    w, x = empty_weight(*SHAPE, "int4", 128), torch.empty((2, 256), dtype=BF16)
    for function in (linear_small_pair, linear_small_swiglu):
        with pytest.raises(ValueError, match="the last axes must be the same"):
            function(x[:, :128], w, w)
        with pytest.raises(ValueError, match="move them to one device"):
            function(x, w, replace(w, words=w.words.to("meta")))
        for tiles in ((16, 64, 128, 1, 2, 4), (16, 128, 512, 1, 2, 4), (16, 128, 128, 1, 2, 4, True)):
            with pytest.raises(ValueError, match="take `pair_tiling`"):
                function(x, w, w, tiling=Tiling(*tiles))


# The operators


@pytest.mark.parametrize("name", ["int4_g128_asymmetric", "int8_rowwise", "fp8_rowwise"])
@pytest.mark.parametrize("rows", [1, 16, 20])
def test_on_a_cpu_they_are_separate_products(name, rows):
    """Of weights that are stored in different ways too."""
    for first, second in (weights(name, weight), (*weights(name)[:1], *weights("int4_g32")[:1])):
        x = inputs(rows, 256, BF16) / 64
        wanted = linear_small(x, first), linear_small(x, second)
        for got, right in zip(linear_small_pair(x, first, second), wanted, strict=True):
            assert_same_bits(got, right)
        assert_same_bits(linear_small_swiglu(x, first, second), reference.swiglu(*wanted))


def test_what_is_wrong_is_refused():
    gate, up = weights("int8_rowwise")
    other, x = weights("int8_rowwise", shapes=[(256, 256)])[0], inputs(2, 256, BF16)
    assert [y.shape[1] for y in linear_small_pair(x, gate, other)] == [128, 256]
    with pytest.raises(TypeError, match="bfloat16 or float16, for which silu has a rule"):
        linear_small_swiglu(x.float(), gate, up)
    with pytest.raises(ValueError, match="128"):
        linear_small_swiglu(x, gate, other)
    for function in (linear_small_pair, linear_small_swiglu):
        with pytest.raises(ValueError, match="256"):
            function(x[:, :128], gate, up)


def test_operators_are_described_to_torch():
    first, second = weights("int8_g32_asymmetric", weight)
    parts = [part for w in (first, second) for part in (w.codes, w.scale, w.zero)]
    operands = (inputs(2, 256, BF16), *parts, list(first.shape), first.scheme.key)
    for operator in (torch.ops.ao_lab.linear_small_pair, torch.ops.ao_lab.linear_small_swiglu):
        torch.library.opcheck(operator.default, operands, test_utils=("test_schema", "test_faketensor"))


def test_gradients():
    """Those of separate products."""
    first, second = weights("int8_rowwise", weight)
    made = []
    for together in (False, True):
        x = (inputs(3, 256, BF16) / 64).requires_grad_()
        apart = linear_small(x, first), linear_small(x, second)
        one, other = linear_small_pair(x, first, second) if together else apart
        gated = linear_small_swiglu(x, first, second) if together else fast.swiglu(*apart)
        total = one.float().sum() + 2 * other.float().sum()
        (from_pair,) = torch.autograd.grad(total, x, retain_graph=True)
        made.append((from_pair, *torch.autograd.grad(gated.float().sum(), x)))
    for got, wanted in zip(*made, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2**-6, atol=2**-6)
    scale = first.scale.clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="scales"):
        linear_small_pair(inputs(3, 256, BF16), replace(first, scale=scale), second)[0].sum().backward()


# Two or three of different rows


def attention_weights(name="int4_g64_asymmetric", sizes=(256, 128, 128)):
    return [layout.preshuffled(weight(SCHEMES[name], n, 256, seed)) for seed, n in enumerate(sizes)]


def of_several(x, ws):
    parts = [part for w in ws for part in (w.codes, w.scale, w.zero)]
    return torch.ops.ao_lab.linear_small_several(
        x, parts, [w.shape[0] for w in ws], ws[0].shape[1], ws[0].scheme.key
    )


def test_products_of_several_weights_are_those_of_each():
    x = inputs(2, 256, BF16)
    for sizes in ((256, 128, 128), (128, 256), (128, 256, 192)):
        ws = attention_weights(sizes=sizes)
        for got, w in zip(of_several(x, ws), ws, strict=True):
            assert_same_bits(got, linear_small(x, w))
    parts = [part for w in ws for part in (w.codes, w.scale, w.zero)]
    operands = (x, parts, [128, 256, 192], 256, ws[0].scheme.key)
    torch.library.opcheck(
        torch.ops.ao_lab.linear_small_several.default, operands, test_utils=("test_schema", "test_faketensor")
    )


def test_what_is_wrong_with_several_is_refused():
    x, ws = inputs(2, 256, BF16), attention_weights()
    for given in (ws[:1], ws * 2):
        with pytest.raises(ValueError, match="takes 2 to 3 weights"):
            of_several(x, given)
    with pytest.raises(ValueError, match="the last axes must be the same"):
        of_several(x[:, :128], ws)
    with pytest.raises(NotImplementedError, match="has no gradient"):
        of_several(x.requires_grad_(), ws)[0].sum().backward()


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ((256, 128, 128), [SEVERAL]), ((128, 256), [SEVERAL]), ((128, 128, 128), [ONE, PAIR]),
        ((128, 256, 128, 256, 128), [SEVERAL] * 2), ((256, 128, 128, 64), [ONE, SEVERAL]),
    ],
)  # fmt: skip
def test_weights_of_different_rows_are_joined(sizes, wanted):
    """Queries, keys and values; more than one operator takes."""
    ws, x = attention_weights(sizes=sizes), inputs(3, 256, BF16)

    def products(x, parts):
        given = [
            replace(w, codes=codes, scale=scale, zero=zero)
            for w, (codes, scale, zero) in zip(ws, parts, strict=True)
        ]
        return [linear_small(x.view(-1, 256), w) for w in given]

    parts = [(w.codes, w.scale, w.zero) for w in ws]
    graph = make_fx(products, tracing_mode="fake")(x, parts)
    FuseLinears()(graph.graph)
    graph.recompile()
    assert sorted(targets(graph)) == wanted
    for made, right in zip(graph(x, parts), products(x, parts), strict=True):
        assert_same_bits(made, right)


# What compiled programs have of them


def traced(count, rows=1, bias=False, names=("int8_rowwise",), dtype=BF16):
    """A graph of products of one input, its views made anew for each, and the weights."""
    x = exact_inputs(rows, 256, dtype)
    ws = [weights(names[i % len(names)])[0] for i in range(count)]

    def products(x, parts):
        added = x.new_zeros(128) if bias else None
        given = [replace(w, codes=codes, scale=scale) for w, (codes, scale) in zip(ws, parts, strict=True)]
        return [linear_small(x.view(-1, 256), w, added) for w in given]

    parts = [(w.codes, w.scale) for w in ws]
    graph = make_fx(products, tracing_mode="fake")(x, parts)
    FuseLinears()(graph.graph)
    graph.recompile()
    return graph, x, parts, products(x, parts)


@pytest.mark.parametrize(("count", "rows"), [(1, 1), (2, 1), (3, 16), (4, 2), (5, 7)])
def test_products_of_one_input_are_joined_two_and_two(count, rows):
    graph, x, parts, wanted = traced(count, rows)
    assert sorted(targets(graph)) == [ONE] * (count % 2) + [PAIR] * (count // 2)
    for made, right in zip(graph(x, parts), wanted, strict=True):
        assert_same_bits(made, right)


@pytest.mark.parametrize(
    "case", [{"rows": 17}, {"bias": True}, {"names": ("int8_rowwise", "int4_g64")}], ids=str
)
def test_others_are_left(case):
    """More rows, biases, weights that are stored in other ways."""
    assert targets(traced(2, **case)[0]) == [ONE] * 2


def test_products_of_an_open_number_of_rows_are_left():
    first, second = weights("int8_rowwise")
    graph = make_fx(
        lambda x: (linear_small(x, first), linear_small(x, second)),
        tracing_mode="symbolic",
        _allow_non_fake_inputs=True,
    )(exact_inputs(3, 256, BF16))
    FuseLinears()(graph.graph)
    assert targets(graph) == [ONE] * 2


GATE, UP = weights("int8_rowwise")
OTHER = weights("int4_g64")[0]


def plain(x):
    return functional.silu(linear_small(x, GATE)) * linear_small(x, UP)


def viewed(x):
    """As layers do it: rows of a matrix, then three axes again; up first."""
    rows = [linear_small(x.view(-1, 256), w).view(1, -1, 128) for w in (UP, GATE)]
    return rows[0] * functional.silu(rows[1])


@pytest.mark.parametrize(
    ("function", "rows", "dtype"), [(plain, 1, BF16), (viewed, 16, BF16), (plain, 4, HALF)]
)
def test_the_compiler_finds_silu_times_up(function, rows, dtype):
    """The bits of the layers by themselves, where what the compiler would write keeps more of silu's digits."""
    x = exact_inputs(rows, 256, dtype) / 64
    made, seen = compiled(function, x)
    assert seen == [SWIGLU]
    assert_same_bits(made.view(rows, 128), reference.swiglu(linear_small(x, GATE), linear_small(x, UP)))


def every_row_by_every_other(x):
    """As many numbers as one product has, but rows meet other rows."""
    return functional.silu(linear_small(x, GATE).view(2, 128)[:1]) * linear_small(x, UP)


def turned(x):
    """Rows become columns in between."""
    return functional.silu(linear_small(x, GATE).t()) * linear_small(x, UP).t()


def wide(x):
    """Every gate times every up."""
    return functional.silu(linear_small(x, GATE).view(2, 1, 128)) * linear_small(x, UP)


@pytest.mark.parametrize("function", [every_row_by_every_other, turned, wide])
def test_what_is_no_swiglu_stays_a_pair(function):
    assert compiled(function, exact_inputs(2, 256, BF16))[1] == [PAIR]


def mixed(x):
    return functional.silu(linear_small(x, GATE)) * linear_small(x, OTHER)


def stored_in_two_layouts(x):
    return functional.silu(linear_small(x, GATE)) * fast.linear(x, layout.restored(UP))


@pytest.mark.parametrize("function", [mixed, stored_in_two_layouts, plain])
def test_what_is_stored_otherwise_is_left(function):
    """Schemes that differ, layouts that differ; of one layout and scheme, more rows."""
    x = exact_inputs(17 if function is plain else 1, 256, BF16)
    assert compiled(function, x)[1].count(ONE) + (function is stored_in_two_layouts) == 2


def test_the_pass_is_known_by_the_most_rows_too(tmp_path, monkeypatch):
    before = FuseLinears().uuid()
    (tmp_path / "other.py").write_text("")
    monkeypatch.setattr(pair, "__file__", str(tmp_path / "other.py"))
    assert FuseLinears().uuid() != before
