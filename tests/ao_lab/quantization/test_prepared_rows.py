"""Products of many rows that a weight keeps prepared: from their second call on, and torch's product of 8-bit floats too."""

import pytest
import torch
from torch import nn

import ao_lab
from ao_lab.tensor import matmul_ops
from ao_lab.tensor.matmul_ops import FIRST_ROWS, MOST_SHAPES
from fast.gemm import choose
from fast.kernels.sm90_s8_gemm import host as sm90_s8_gemm
from tests.fast.kernels.compiling.recorded_launches import Flat
from tests.support import cublaslt
from tests.support.models.gpu_layers import (
    DYNAMIC,
    PRESHUFFLED,
    ROWS,
    WIDTH,
    addresses_of,
    given,
    inputs,
    kept,
    layer,
    pretend,
    pretend_hopper,
    run,
)

#: A multiple of 16: products of blocks pad others, so that nothing is found of them.
MANY = 304
INPUTS_FIRST = tuple(f"{name}{PRESHUFFLED}" for name in DYNAMIC)
OURS = (
    f"symmetric int4{PRESHUFFLED}", f"int8{PRESHUFFLED}", f"mxfp4{PRESHUFFLED}", "int8 by int8", "static int8", *INPUTS_FIRST,
)  # fmt: skip
TORCHS = ("float8 by float8", "tensorwise", "static")


@pytest.fixture
def gpu(monkeypatch):
    """CPU tensors that pass for a Hopper GPU's."""
    recorded = pretend(monkeypatch, Flat)
    pretend_hopper(monkeypatch, recorded)
    return recorded


@pytest.fixture
def torchs(monkeypatch):
    """Arguments of torch's products of 8-bit floats, with the signature's defaults."""
    seen = []

    def scaled_mm(a, b, scale_a, scale_b, bias=None, scale_result=None, out_dtype=None, use_fast_accum=False):
        cublaslt.check(a, b, scale_a, scale_b, bias, scale_result, out_dtype, use_fast_accum)
        seen.append((a, b, scale_a, scale_b, bias, scale_result, out_dtype, use_fast_accum))
        return torch.zeros(a.shape[0], b.shape[1], dtype=out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    return seen


def fixed_of(one, x):
    """Addresses of what a call is given."""
    return {x.data_ptr(), *addresses_of(one)}


@pytest.mark.parametrize("name", [*OURS, "int8 by int8, Triton"])
@pytest.mark.parametrize("shape", [(MANY,), (2, MANY)])
@pytest.mark.parametrize("bias", [False, True])
def test_launches_are_those_of_the_call(gpu, monkeypatch, name, shape, bias):
    """The same kernels with the same arguments, but for memory that is made anew; looked up twice."""
    if name.endswith(", Triton"):
        name = name.removesuffix(", Triton")
        monkeypatch.setattr(sm90_s8_gemm, "choose", lambda *given: None)
    one, x = layer(name, bias), inputs(*shape)
    run(gpu, one, x)
    _, looked_up, ordinary = run(gpu, one, x)
    assert looked_up >= len(ordinary) - 1 > -1
    y, looked_up, launches = run(gpu, one, x)
    assert looked_up == 0
    assert (y.shape, y.dtype, y.is_contiguous()) == ((*shape, ROWS), x.dtype, True)
    fixed = fixed_of(one, x)
    prepared = ordinary[: len(launches)]  # behind them are those that prepared it
    assert [given(one, fixed) for one in launches] == [given(one, fixed) for one in prepared]
    assert y.data_ptr() in launches[-1]


@pytest.mark.parametrize("name", INPUTS_FIRST)
def test_inputs_in_a_scheme_are_multiplied_by_the_weight_as_it_is_stored(gpu, name):
    """What the first launches write is what the last one reads, beside the weight's own words: no dense weight is made."""
    one, x = layer(name), inputs(MANY)
    for _ in range(2):
        run(gpu, one, x)
    *first, last = run(gpu, one, x)[2]
    assert len(first) in (1, 2)
    assert last[0] < 1000  # programs, in the place of an address: `sm90_w4a16_gemm`
    assert one.weight.parts["codes"].data_ptr() in last
    assert all(one.weight.parts["codes"].data_ptr() not in launch for launch in first)
    assert last[1] in first[-1]  # its inputs
    assert last[1] != x.data_ptr()


@pytest.mark.parametrize("name", ["mxfp8 by int4", "float8 by int4"])
def test_few_rows_that_many_rows_kernel_multiplies_faster(gpu, monkeypatch, name):
    """Values that 16 bits hold are multiplied by it, and codes, with the scales of their rows."""
    monkeypatch.setattr(choose, "_gemm_is_faster", lambda p: p.rows == 96)
    one, x = layer(f"{name}{PRESHUFFLED}"), inputs(96)
    run(gpu, one, x)
    y, looked_up, launches = run(gpu, one, x)
    assert (looked_up, y.shape) == (0, (96, ROWS))
    assert sum(launch[0] < 1000 for launch in launches) == 1  # programs, in the place of an address


def test_int8_codes_of_inputs_are_those_that_are_multiplied(gpu):
    """What the first launch writes is what the second one reads, beside its scales."""
    one, x = layer("int8 by int8"), inputs(MANY)
    for _ in range(2):
        run(gpu, one, x)
    y, _, launches = run(gpu, one, x)
    fixed = fixed_of(one, x)
    made = [{v for v in launch if isinstance(v, int) and v > 1 << 32} - fixed for launch in launches]
    assert len(made) == 2
    assert made[0] == made[1] - {y.data_ptr()}
    assert len(made[0]) == 2


@pytest.mark.parametrize("name", TORCHS)
@pytest.mark.parametrize("bias", [False, True])
def test_torchs_product_has_the_arguments_of_the_call(gpu, torchs, name, bias):
    one, x = layer(name, bias), inputs(2, MANY)
    run(gpu, one, x)
    _, looked_up, ordinary = run(gpu, one, x)
    assert looked_up == 1
    y, looked_up, launches = run(gpu, one, x)
    assert looked_up == 0
    assert y.shape == (2, MANY, ROWS)
    fixed = fixed_of(one, x)
    assert [given(one, fixed) for one in launches] == [given(one, fixed) for one in ordinary]
    _, before, after = torchs
    assert [described(value, fixed) for value in after] == [described(value, fixed) for value in before]
    assert after[0].data_ptr() in launches[-1]
    assert name == "static" or after[2].data_ptr() in launches[-1]
    assert after[1].data_ptr() == one.weight.codes.data_ptr()


def described(value, fixed):
    """All that torch sees of an argument but where memory lies that a call makes."""
    if not isinstance(value, torch.Tensor):
        return value
    address = value.data_ptr()
    return value.shape, value.stride(), value.dtype, address if address in fixed else "made"


def test_weights_that_move_are_read_where_they_lie(gpu, torchs):
    """Torch's operands are views of a weight's memory."""
    one, x = layer("float8 by float8"), inputs(MANY)
    for _ in range(3):
        run(gpu, one, x)
    for part in ("codes", "scale"):
        tensor = getattr(one.weight, part)
        tensor.data = tensor.clone()
        assert run(gpu, one, x)[1] == 0
        _, codes, _, scale, *_ = torchs[-1]
        assert codes.data_ptr() == one.weight.codes.data_ptr()
        assert scale.data_ptr() == one.weight.scale.data_ptr()
    one.weight.codes.data = torch.cat([one.weight.codes] * 2, 1)[:, :WIDTH]
    assert kept(one)(x, None) is None
    assert run(gpu, one, x)[1] == 1


def test_weights_with_strides_go_the_ordinary_way(gpu, torchs):
    wide = nn.Sequential(nn.Linear(2 * WIDTH, ROWS)).bfloat16().requires_grad_(False)
    ao_lab.quantize_(wide, ao_lab.Float8DynamicActivationFloat8WeightConfig(granularity=ao_lab.PerRow()))
    one, x = layer("float8 by float8"), inputs(MANY)
    one.weight = nn.Parameter(wide[0].weight[:, :WIDTH], requires_grad=False)
    for _ in range(3):
        assert run(gpu, one, x)[1] <= 1
    assert kept(one)(x, None) is None
    assert len(torchs) == 3


@pytest.mark.parametrize("name", ["rows by one scale", "blocks"])
def test_scales_that_are_copied_are_not_kept(gpu, torchs, name):
    """One scale as one for each row, and those of blocks: torch takes a copy, which would stay what it was."""
    one, x = layer(name), inputs(MANY)
    for _ in range(3):
        _, looked_up, _ = run(gpu, one, x)
    assert looked_up == 1
    assert list(kept(one).programs.values()) == [None]


@pytest.mark.parametrize("name", [OURS[0], TORCHS[0]])
def test_inputs_at_odd_addresses_go_the_ordinary_way(gpu, torchs, name):
    one, x = layer(name), inputs(MANY)
    for _ in range(3):
        run(gpu, one, x)
    odd = torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)
    assert kept(one)(odd, None) is None
    assert run(gpu, one, odd)[0].shape == (MANY, ROWS)


@pytest.mark.parametrize("name", [OURS[3], TORCHS[0]])
def test_inputs_at_odd_addresses_prepare_nothing(gpu, torchs, name):
    """Their kernels are not those of programs, which later inputs of the shape then have all the same."""
    one, x = layer(name), inputs(MANY)
    odd = torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)
    for _ in range(3):
        run(gpu, one, odd)
    assert not kept(one).programs
    for _ in range(3):
        run(gpu, one, x)
    assert [made is not None for made in kept(one).programs.values()] == [True]


def test_the_second_call_prepares(gpu):
    """A prompt whose length never comes again costs its one call alone."""
    one = layer(OURS[0])
    for rows in (FIRST_ROWS + 1, FIRST_ROWS + 2):
        run(gpu, one, inputs(rows))
    assert not kept(one).programs
    run(gpu, one, inputs(FIRST_ROWS + 1))
    assert [shape[0] for shape, *_ in kept(one).programs] == [FIRST_ROWS + 1]
    run(gpu, one, inputs(FIRST_ROWS))
    assert [shape[0] for shape, *_ in kept(one).programs] == [FIRST_ROWS + 1, FIRST_ROWS]


def test_shapes_that_are_seen_are_few(gpu):
    """Neither kept nor remembered: prompts of ever new lengths."""
    one = layer(OURS[0])
    run(gpu, one, inputs(1))
    for rows in range(FIRST_ROWS + 1, FIRST_ROWS + 3 * MOST_SHAPES):
        run(gpu, one, inputs(rows))
        assert len(kept(one).seen) <= MOST_SHAPES
    assert len(kept(one).programs) == 1
    for rows in range(FIRST_ROWS + 1, FIRST_ROWS + 3 * MOST_SHAPES):
        run(gpu, one, inputs(rows))
        run(gpu, one, inputs(rows))
        assert len(kept(one).programs) + len(kept(one).seen) <= 2 * MOST_SHAPES


def test_nothing_is_prepared_while_a_graph_is_captured(gpu, monkeypatch):
    one, x = layer("int8 by int8"), inputs(MANY)
    run(gpu, one, x)
    monkeypatch.setattr(matmul_ops, "is_captured", lambda: True)
    for _ in range(2):
        _, looked_up, launches = run(gpu, one, x)
        assert (looked_up, len(launches)) == (2, 2)
    assert not kept(one).programs
