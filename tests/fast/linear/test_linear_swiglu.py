"""silu of one product times another: bits, launches, the kernels lane by lane, and how a compiled graph comes to it."""

import platform
import warnings

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import fast
import reference
from ao_lab.compile.fused_linears import FuseLinears, compile_options
from ao_lab.config.recipe import named
from ao_lab.testing.strategies import assert_same_bits
from tests.fast.linear.test_linear_pair import CASES, stored, targets, weights
from tests.support.linear_cases import exact_inputs, exact_result

linux = pytest.mark.skipif(platform.system() != "Linux", reason="triton has no packages for this system")
#: Half of them as float16.
DTYPES = (torch.bfloat16, torch.float16)


def inputs(length, dtype=torch.bfloat16):
    """Numbers whose products are small enough for silu to matter, and exact."""
    return exact_inputs(1, length, dtype) / 64


def separate(x, gate, up):
    """What two layers by themselves make."""
    return reference.swiglu(exact_result(x, gate, None), exact_result(x, up, None))


@linux
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_sixteen_bit_gate(dtype):
    """All patterns of a gate, times numbers of every size: the table, whatever the last bits of an exponential."""
    from fast.kernels.triton_gemv import gluon as lane_swiglu
    from tests.emulator.gluon_lanes import Tensor, body

    gate = torch.arange(1 << 16).to(torch.uint16).view(dtype)
    up = torch.cat([gate[::257], gate.flip(0)])[: 1 << 16]
    gated = body(lane_swiglu, "gated_sums", 0)
    with np.errstate(all="ignore"):
        made = gated(*(v.float().numpy().view(Tensor) for v in (gate, up)), str(dtype)[6:])
    assert_same_bits(torch.from_numpy(np.asarray(made).view(np.uint16)).view(dtype), fast.swiglu(gate, up))


@linux
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_are_rounded_before_silu(dtype):
    """Sums between two 16-bit numbers become what the products by themselves would be."""
    from fast.kernels.triton_gemv import gluon as lane_swiglu
    from tests.emulator.gluon_lanes import Tensor, body

    sums = torch.randn(2, 4096, generator=torch.Generator().manual_seed(1)) * 4
    made = body(lane_swiglu, "gated_sums", 0)(*(v.numpy().view(Tensor) for v in sums), str(dtype)[6:])
    wanted = reference.swiglu(*(v.to(dtype) for v in sums))
    assert_same_bits(torch.from_numpy(np.asarray(made).view(np.uint16)).view(dtype), wanted)


@linux
@pytest.mark.parametrize(("number", "case"), tuple(enumerate(CASES)), ids=str)
def test_every_program_has_rows_of_both_weights(number, case):
    """The kernels' own code, by lanes: exact sums."""
    from fast.kernels.triton_gemv import gemv_w4a16, gemv_w8a16
    from fast.kernels.triton_gemv.select import pair_launch_for
    from tests.emulator.gluon_lanes import Pointer, body, host

    name, rows, length = case
    (gate, up), dtype = weights(name, rows, length), DTYPES[number % 2]
    x, y = inputs(length, dtype), torch.full((1, rows), float("nan"), dtype=dtype)
    launch = pair_launch_for(gate.scheme, tuple(gate.shape), gate.axis, gate.packed, dtype, gated=True)
    kernel = launch.kernel.__name__
    module = gemv_w4a16 if kernel == "triton_gemv_w4a16_swiglu_kernel" else gemv_w8a16
    given = [
        Pointer(host(v)) if v is not None else None for w in (gate, up) for v in (w.codes, w.scale, w.zero)
    ]
    with np.errstate(all="ignore"):
        for program in range(launch.grid[0]):
            body(module, kernel, program)(Pointer(host(x)), *given, Pointer(host(y)), *launch.tail)
    assert_same_bits(y, separate(x, gate, up))


@linux
def test_launches():
    """As many programs as for one weight of twice as many rows; none for float32."""
    from fast.kernels.triton_gemv import select as pair_linear

    def launch(name, shape=(14336, 4096), dtype=torch.bfloat16):
        scheme = named(name)
        return pair_linear.pair_launch_for(scheme, shape, 1, scheme.format.bits < 8, dtype, gated=True)

    for name, programs in (("int4_g64", 1792), ("int8_rowwise", 7168), ("fp8_rowwise", 7168)):
        made = launch(name)
        assert made.grid == (programs, 1, 1)
        assert made.kernel.__name__.endswith("_swiglu_kernel")
    # Rows that are no multiple of what a program takes.
    assert launch("int4_g64", (33, 4096)).grid == (5, 1, 1)
    assert launch("int8_rowwise", (37, 4096)).grid == (37, 1, 1)
    assert launch("int8_rowwise", dtype=torch.float32) is None
    assert launch("mxfp4_rceil") is None


def test_on_a_cpu_it_is_three_calls():
    gate, up = weights("int8_rowwise", 37, 512)
    for x in (inputs(512), inputs(512, torch.float16), exact_inputs(3, 512, torch.bfloat16)):
        wanted = fast.swiglu(fast.linear(x, gate), fast.linear(x, up))
        assert_same_bits(fast.linear_swiglu(x, gate, up), wanted)
    other = stored("int4_g64", 37, 512)
    assert_same_bits(
        fast.linear_swiglu(x, gate, other), fast.swiglu(fast.linear(x, gate), fast.linear(x, other))
    )


def test_what_is_wrong_is_refused():
    gate, up = weights("int8_rowwise", 37, 512)
    x = inputs(512)
    with pytest.raises(TypeError, match="bfloat16 or float16, for which silu has a rule"):
        fast.linear_swiglu(x.float(), gate, up)
    with pytest.raises(ValueError, match=r"weights of \(37, 512\) and \(9, 512\)"):
        fast.linear_swiglu(x, gate, stored("int8_rowwise", 9, 512))
    with pytest.raises(ValueError, match="last axes"):
        fast.linear_swiglu(x[:, :256], gate, up)
    with pytest.raises(TypeError, match="Quantized weight"):
        fast.linear_swiglu(x, gate, x)


def compiled(function, *given):
    """What Inductor makes of a function on a CPU, and the operators of ours that are in its graph."""
    from torch._inductor.utils import fresh_cache

    seen, options = [], compile_options()
    base = type(options["post_grad_custom_pre_pass"])

    class Watched(base):
        def __call__(self, graph):
            super().__call__(graph)
            seen.extend(targets(graph.owning_module))

    options["post_grad_custom_pre_pass"] = Watched()
    with warnings.catch_warnings(), fresh_cache():
        warnings.simplefilter("ignore")
        torch.compiler.reset()
        return torch.compile(function, options=options, fullgraph=True)(*given), seen


GATE, UP = weights("int8_rowwise", 16, 512)
FUSED, PAIR = ["ao_lab.linear_swiglu.default"], ["ao_lab.linear_pair.default"]


def plain(x):
    return functional.silu(fast.linear(x, GATE)) * fast.linear(x, UP)


def viewed(x):
    """As layers do it: rows of a matrix, then three axes again; up first."""
    rows = [fast.linear(x.view(-1, 512), w).view(1, 1, 16) for w in (UP, GATE)]
    return rows[0] * functional.silu(rows[1])


@pytest.mark.parametrize("function", [plain, viewed])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_compiler_finds_silu_times_up(function, dtype):
    """The bits of the layers by themselves, where what the compiler would write keeps more of silu's digits."""
    x = inputs(512, dtype)
    made, seen = compiled(function, x)
    assert seen == FUSED
    assert_same_bits(made.view(1, 16), separate(x, GATE, UP))


def kept(x):
    """The gate itself is wanted too."""
    gate = fast.linear(x, GATE)
    return functional.silu(gate) * fast.linear(x, UP), gate


def other_gate(x):
    return functional.gelu(fast.linear(x, GATE)) * fast.linear(x, UP)


def sigmoid(x):
    return torch.sigmoid(fast.linear(x, GATE)) * fast.linear(x, UP)


def wide(x):
    """Every gate times every up."""
    return functional.silu(fast.linear(x, GATE).view(16, 1)) * fast.linear(x, UP)


def turned(x):
    """Rows become columns in between."""
    return functional.silu(fast.linear(x, GATE).view(4, 4).t()) * fast.linear(x, UP).view(4, 4)


def turned_both(x):
    gate, up = (fast.linear(x, w).view(4, 4).permute(1, 0) for w in (GATE, UP))
    return functional.silu(gate) * up


def turned_up(x):
    return functional.silu(fast.linear(x, GATE).view(4, 4)) * fast.linear(x, UP).view(4, 4).t()


def other_bits(x):
    """The same memory as another dtype."""
    gate, up = (fast.linear(x, w).view(torch.float16) for w in (GATE, UP))
    return functional.silu(gate) * up


def other_bits_between(x):
    gate = functional.silu(fast.linear(x, GATE).view(torch.float16)).view(torch.bfloat16)
    return gate * fast.linear(x, UP)


def other_bits_after(x):
    return functional.silu(fast.linear(x, GATE)).view(torch.float16) * fast.linear(x, UP).view(torch.float16)


NOT_GATED = (
    kept, other_gate, sigmoid, wide, turned, turned_both, turned_up, other_bits, other_bits_between, other_bits_after
)  # fmt: skip


# One of each reason by day: another use of a projection, another dtype, other order, other weights.
BY_DAY = (kept, wide, turned, other_bits)


@pytest.mark.parametrize(
    "function", [one if one in BY_DAY else pytest.param(one, marks=pytest.mark.nightly) for one in NOT_GATED]
)
def test_what_is_no_swiglu_stays_a_pair(function):
    assert compiled(function, inputs(512))[1] == PAIR


def masks(x):
    return (x > 0) * (x < 1)


def words(x):
    return x.view(torch.uint16) * x.view(torch.uint16)


@pytest.mark.parametrize("function", [masks, words])
def test_products_of_other_things_compile(function):
    x = inputs(512)
    made, seen = compiled(function, x)
    assert seen == []
    assert torch.equal(made.int(), function(x).int())


def test_products_with_open_sizes_compile():
    options = {"options": compile_options(), "fullgraph": True, "dynamic": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.compiler.reset()
        made = torch.compile(lambda x: x * x.shape[0], **options)(torch.ones(3, 4))
    assert torch.equal(made, torch.full((3, 4), 3.0))


def test_rows_and_wide_numbers_are_left():
    for x in (exact_inputs(2, 512, torch.bfloat16), inputs(512).float()):
        assert FUSED[0] not in compiled(plain, x)[1]


def test_other_inputs_are_left():
    def crossed(x, z):
        return functional.silu(fast.linear(x, GATE)) * fast.linear(z, UP)

    assert compiled(crossed, inputs(512), inputs(512))[1] == ["ao_lab.linear.default"] * 2


def test_the_operator_in_a_traced_program():
    """Weights that are stored in different ways are one operator too."""
    other = stored("int4_g64", 16, 512)

    def both(x, codes):
        gate = type(GATE)(codes, GATE.scale, None, None, GATE.shape, 1, GATE.scheme, GATE.packed)
        return fast.linear_swiglu(x, gate, other)

    x = inputs(512)
    graph = make_fx(both, tracing_mode="fake", _allow_non_fake_inputs=True)(x, GATE.codes)
    assert targets(graph) == FUSED
    assert_same_bits(graph(x, GATE.codes), separate(x, GATE, other))


def test_the_pass_is_known_by_both_its_files(tmp_path, monkeypatch):
    from ao_lab.compile import fused_linears as compiled_swiglu

    before = FuseLinears().uuid()
    (tmp_path / "other.py").write_text("")
    monkeypatch.setattr(compiled_swiglu, "__file__", str(tmp_path / "other.py"))
    assert FuseLinears().uuid() != before
