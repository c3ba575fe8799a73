"""Two products of one input: bits, launches, kernels lane by lane, and the pass that joins them in a compiled graph."""

import platform
import warnings

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fast
from ao_lab.compile.fused_linears import FuseLinears, compile_options
from ao_lab.config.recipe import named
from ao_lab.testing.strategies import assert_same_bits
from tests.support.linear_cases import exact_inputs, exact_result, exact_weight

linux = pytest.mark.skipif(platform.system() != "Linux", reason="triton has no packages for this system")
CASES = [
    ("int4_g32", 37, 256), ("int4_g64_asymmetric", 33, 1536), ("torchao.int4_g64_tinygemm", 16, 512),
    ("int8_rowwise", 37, 512), ("int8_g128_asymmetric", 7, 2048), ("fp8_rowwise", 14, 1024), ("fp8_tensorwise", 6, 512),
]  # fmt: skip


def stored(name, rows, length):
    """A weight of small integers."""
    return exact_weight(named(name), rows, length)


def weights(name, rows, length):
    """Two weights that are stored alike and hold other numbers."""
    first = stored(name, rows, length)
    turned = {part: getattr(first, part) for part in ("codes", "scale", "zero")}
    turned = {part: None if v is None else v.flip(0) if v.dim() else v.clone() for part, v in turned.items()}
    return first, type(first)(**{**vars(first), **turned})


@linux
@pytest.mark.parametrize(("name", "rows", "length"), CASES)
def test_every_program_has_its_weight(name, rows, length):
    """The kernels' own code, by lanes: exact sums."""
    from fast.kernels.triton_gemv import gemv_w4a16, gemv_w8a16
    from fast.kernels.triton_gemv.select import pair_launch_for
    from tests.emulator.gluon_lanes import Pointer, body, host

    first, second = weights(name, rows, length)
    x, y = exact_inputs(1, length, torch.bfloat16), np.zeros((2, rows), ml_dtypes.bfloat16)
    launch = pair_launch_for(first.scheme, tuple(first.shape), first.axis, first.packed, x.dtype)
    kernel = launch.kernel.__name__
    given = [
        [None if v is None else Pointer(host(v)) for v in (w.codes, w.scale, w.zero)] for w in (first, second)
    ]
    module = gemv_w4a16 if kernel == "triton_gemv_w4a16_pair_kernel" else gemv_w8a16
    with np.errstate(over="ignore"):
        for program in range(launch.grid[0]):
            pointers = [Pointer(host(x)), *given[0], Pointer(y[0]), *given[1], Pointer(y[1])]
            body(module, kernel, program)(*pointers, *launch.tail)
    for w, made in zip((first, second), y, strict=True):
        assert (made == host(exact_result(x, w, None))).all()


def test_on_a_cpu_it_is_two_products():
    first, second = weights("int8_rowwise", 37, 512)
    x = exact_inputs(3, 512, torch.bfloat16)
    for made, w in zip(fast.linear_pair(x, first, second), (first, second), strict=True):
        assert_same_bits(made, fast.linear(x, w))
    other = stored("int4_g64", 9, 512)
    assert [tuple(y.shape) for y in fast.linear_pair(x, first, other)] == [(3, 37), (3, 9)]
    with pytest.raises(ValueError, match="linear"):
        fast.linear_pair(x[:, :256], first, second)


@linux
def test_launches():
    """As for one weight of twice as many rows; none where `linear` has none for one row."""
    from fast.kernels.triton_gemv import select as linear
    from fast.kernels.triton_gemv import select as pair_linear

    def launch(name, shape=(14336, 4096), dtype=torch.bfloat16):
        scheme = named(name)
        return pair_linear.pair_launch_for(scheme, shape, 1, scheme.format.bits < 8, dtype)

    nibbles, doubled = launch("int4_g64"), linear.weight_of(named("int4_g64"), (28672, 4096), 1, True)
    assert nibbles.grid == (1792, 1, 1)
    assert nibbles.warps == linear.gemv_w4a16_launch(doubled, "bfloat16").warps
    assert launch("int8_rowwise").grid == (7168, 1, 1)
    # Alone these would have more warps to a row, and fewer rows a program.
    assert launch("int4_g64", (5000, 4096)).warps == 4
    assert launch("int8_rowwise", (7168, 4096)).grid == (2 * 1792, 1, 1)
    assert launch("int4_g64", (1024, 4096)).warps == 8
    assert launch("mxfp4_rceil") is None
    assert launch("int8_rowwise", (16, 500)) is None
    assert launch("int4_g64", dtype=torch.float32) is None


def traced(count, rows=1, bias=False, names=("int8_rowwise",)):
    """A graph of products of one input, its views made anew for each, and the weights."""
    x = exact_inputs(rows, 512, torch.bfloat16)
    ws = [stored(names[i % len(names)], 16, 512) for i in range(count)]
    parts = [(w.codes, w.scale, w.zero) for w in ws]

    def products(x, parts):
        made, added = [], x.new_zeros(16) if bias else None
        for w, (codes, scale, zero) in zip(ws, parts, strict=True):
            q = type(w)(codes, scale, None, zero, w.shape, 1, w.scheme, w.packed)
            made.append(fast.linear(x.view(-1, 512), q, added))
        return made

    graph = make_fx(products, tracing_mode="fake")(x, parts)
    return graph, x, parts, products(x, parts)


def targets(graph):
    return [str(node.target) for node in graph.graph.nodes if "ao_lab" in str(node.target)]


@pytest.mark.parametrize(("count", "left"), [(1, "1"), (2, "2"), (3, "21"), (4, "22"), (5, "221")], ids=str)
def test_products_of_one_input_are_joined_two_and_two(count, left):
    graph, x, parts, wanted = traced(count)
    FuseLinears()(graph.graph)
    graph.recompile()
    names = {"1": "ao_lab.linear.default", "2": "ao_lab.linear_pair.default"}
    assert sorted(targets(graph)) == sorted(names[one] for one in left)
    for made, right in zip(graph(x, parts), wanted, strict=True):
        assert_same_bits(made, right)


@pytest.mark.parametrize(
    "case", [{"rows": 2}, {"bias": True}, {"names": ("int8_rowwise", "int4_g64")}], ids=str
)
def test_others_are_left(case):
    """Several rows, biases, weights that are stored in other ways."""
    graph, *_ = traced(2, **case)
    FuseLinears()(graph.graph)
    assert targets(graph) == ["ao_lab.linear.default"] * 2


def test_products_of_an_open_number_of_rows_are_left():
    first, second = weights("int8_rowwise", 16, 512)

    def both(x):
        return fast.linear(x, first), fast.linear(x, second)

    given = exact_inputs(3, 512, torch.bfloat16)
    graph = make_fx(both, tracing_mode="symbolic", _allow_non_fake_inputs=True)(given)
    FuseLinears()(graph.graph)
    assert targets(graph) == ["ao_lab.linear.default"] * 2


def test_products_of_other_inputs_and_later_weights_are_left():
    w = stored("int8_rowwise", 512, 512)
    x = exact_inputs(1, 512, torch.bfloat16)

    def chained(x, codes, scale):
        def product(x, codes):
            return fast.linear(x, type(w)(codes, scale, None, None, w.shape, 1, w.scheme, w.packed))

        first = product(x, codes)
        # Codes that are there only after the first product.
        return product(first, codes), product(x, codes + first.sum().to(torch.uint8))

    graph = make_fx(chained, tracing_mode="fake")(x, w.codes, w.scale)
    FuseLinears()(graph.graph)
    assert targets(graph) == ["ao_lab.linear.default"] * 3


def test_the_compilers_caches_know_the_pass():
    made = compile_options()["post_grad_custom_pre_pass"]
    assert made.uuid() == FuseLinears().uuid()
    assert len(made.uuid()) == 64


def test_the_compiler_takes_the_pass():
    """Inductor on a CPU: the same bits, and products that were joined."""
    first, second = weights("int8_rowwise", 16, 512)
    from torch._inductor.utils import fresh_cache

    x, seen = exact_inputs(1, 512, torch.bfloat16), []

    def both(x):
        return fast.linear(x, first), fast.linear(x.view(1, 512), second)

    options = compile_options()
    joined = options["post_grad_custom_pre_pass"]
    options["post_grad_custom_pre_pass"] = watched(joined, seen)
    # A program from the compiler's cache would not be seen by the pass again.
    with warnings.catch_warnings(), fresh_cache():
        warnings.simplefilter("ignore")
        made = torch.compile(both, options=options, fullgraph=True)(x)
    for y, wanted in zip(made, both(x), strict=True):
        assert_same_bits(y, wanted)
    assert seen == [["ao_lab.linear_pair.default"]]


def watched(join, seen):
    """A pass that notes which operators of ours it left."""

    class Watched(type(join)):
        def __call__(self, graph):
            super().__call__(graph)
            seen.append([str(node.target) for node in graph.nodes if "ao_lab" in str(node.target)])

    return Watched()
