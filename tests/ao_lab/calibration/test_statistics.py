"""Sums over inputs: the reference's square sums bit for bit, Hessians, and layers that share one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import reference
from ao_lab import AbsMax, MinMax, MovingAverage, Percentile
from ao_lab.calibration.static import NAMES
from ao_lab.calibration.statistics import (
    PIECE,
    STATISTICS,
    Hessian,
    InputScales,
    SquareSums,
    Statistics,
    square_sums,
)
from ao_lab.config.recipe import named
from ao_lab.transforms.data import watching

# Running statistics: the scales of everything seen, as `reference.choose_scales` gives them of all of it at once.

#: One scale for all inputs, of every kind that we and others have.
SCHEMES = [
    "int8_tensorwise", "int8_tensorwise_asymmetric", "int4_tensorwise_asymmetric", "int8_tensorwise_bf16",
    "int1_tensorwise", "fp8_tensorwise", "fp8_tensorwise_e5m2",
    *sorted(name for name, scheme in reference.SCHEMES.items()
            if "." in name and scheme.scale.block == "tensor" and scheme.outer is None),
]  # fmt: skip
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@st.composite
def pieces(draw, dtype):
    """Tensors of any bits, zeros and equal values among them, in pieces of any size."""
    width = 32 if dtype == torch.float32 else 16
    bits = st.integers(-(2 ** (width - 1)), 2 ** (width - 1) - 1)
    special = st.sampled_from([0, -(2 ** (width - 1)), 1, 1 - 2 ** (width - 1)])
    lists = draw(st.lists(st.lists(bits | special, max_size=8), min_size=1, max_size=5))
    carrier = torch.int32 if width == 32 else torch.int16
    made = [torch.tensor(values, dtype=carrier).view(dtype) for values in lists]
    made = [torch.where(x.isfinite(), x, torch.zeros_like(x)) for x in made]
    return made if any(len(x) for x in made) else [torch.ones(1, dtype=dtype)]


def same(a, b):
    pairs = [(getattr(a, name), getattr(b, name)) for name in ("scale", "zero")]
    return all(
        x is y or (x.dtype == y.dtype and x.shape == y.shape and x.numpy().tobytes() == y.numpy().tobytes())
        for x, y in pairs
    )


def watched(scheme, statistic, tensors):
    observer = InputScales(named(scheme), statistic)
    for x in tensors:
        observer.observe("layer", None, x)
    return observer


@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [
        # By day every scheme in one dtype, the default ones in all.
        pytest.param(scheme, dtype, marks=[pytest.mark.nightly] * ("." in scheme and dtype != torch.bfloat16))
        for scheme in SCHEMES
        for dtype in DTYPES
    ],
    ids=str,
)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_minmax_gives_the_scales_of_all_data_at_once(scheme, dtype, data):
    tensors = data.draw(pieces(dtype))
    whole = torch.cat(tensors)
    assert same(watched(scheme, MinMax(), tensors).scales(), reference.choose_scales(whole, named(scheme)))


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_absmax_gives_the_scales_of_symmetric_schemes(data):
    tensors = data.draw(pieces(torch.bfloat16))
    made = watched("fp8_tensorwise", AbsMax(), tensors).scales()
    assert same(made, reference.choose_scales(torch.cat(tensors), "fp8_tensorwise"))


def test_absmax_is_as_wide_on_both_sides():
    x = torch.tensor([-1.0, 7.0])
    made = watched("int8_tensorwise_asymmetric", AbsMax(), [x])
    assert made.statistic.sample().tolist() == [-7.0, 7.0]
    assert same(
        made.scales(), reference.choose_scales(torch.tensor([-7.0, 7.0]), named("int8_tensorwise_asymmetric"))
    )


def test_dtypes_are_promoted_as_cat_does():
    tensors = [torch.tensor([1.1], dtype=torch.bfloat16), torch.tensor([1.1], dtype=torch.float32)]
    assert same(
        watched("int8_tensorwise", MinMax(), tensors).scales(),
        reference.choose_scales(torch.cat(tensors), named("int8_tensorwise")),
    )


def test_a_moving_average_moves_by_its_constant():
    made = watched(
        "int8_tensorwise",
        MovingAverage(0.25),
        [torch.tensor([-4.0, 8.0]), torch.tensor([0.0, 16.0]), torch.ones(2)],
    )
    # -4 -> -3 -> -2 and 8 -> 10 -> 7.75.
    assert made.statistic.sample().tolist() == [-2.0, 7.75]
    # torch.ao's observer of that name.
    theirs = torch.ao.quantization.MovingAverageMinMaxObserver(averaging_constant=0.25)
    for x in (torch.tensor([-4.0, 8.0]), torch.tensor([0.0, 16.0]), torch.ones(2)):
        theirs(x)
    assert [theirs.min_val.item(), theirs.max_val.item()] == [-2.0, 7.75]


@pytest.mark.parametrize("percent", [100, 99.9, 97, 50, 1])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_percentile_drops_as_many_at_both_ends(percent, data):
    tensors = data.draw(pieces(torch.bfloat16))
    tensors = [x for x in tensors if len(x)]
    statistic = Percentile(percent)
    for x in tensors:
        statistic.update(x)
    found = torch.cat(tensors).to(torch.float32).sort().values
    dropped = int(len(found) * (100 - percent) / 200)
    assert statistic.sample().tolist() == [found[dropped].item(), found[-1 - dropped].item()]


def test_a_percentile_of_all_is_minmax_in_bfloat16():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 3
    one, two = Percentile(100), MinMax()
    one.update(x)
    two.update(x.to(torch.bfloat16))
    assert torch.equal(one.sample(), two.sample())


@pytest.mark.parametrize("name", sorted(STATISTICS))
@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_an_obstacle(name, bad):
    made = watched("int8_tensorwise", STATISTICS[name](), [torch.ones(3), torch.tensor([bad]), torch.ones(3)])
    assert made.unsupported_reason() == "NaN or infinity was seen"


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_is_no_outlier(bad, dtype):
    """One among so many that a percentile leaves it out; the largest float32 is one."""
    x = torch.linspace(-1, 1, 100_000).to(dtype)
    x[7] = bad
    made = watched("int8_tensorwise", Percentile(), [x])
    assert made.unsupported_reason() == "NaN or infinity was seen"
    x[7] = torch.finfo(dtype).max
    assert watched("int8_tensorwise", Percentile(), [x]).unsupported_reason() is None
    assert (
        watched("int8_tensorwise", Percentile(100), [x]).statistic.sample()[1]
        == torch.finfo(torch.bfloat16).max
    )


def test_nothing_seen_is_an_obstacle():
    made = watched("int8_tensorwise", MinMax(), [torch.empty(0, 8)])
    assert made.unsupported_reason() == "no input was seen"
    with pytest.raises(ValueError, match="no input was seen"):
        made.scales()
    assert tuple(STATISTICS) == NAMES
    for name in STATISTICS:
        with pytest.raises(ValueError, match="nothing was seen"):
            STATISTICS[name]().sample()


def test_scales_seen_in_inference_mode_are_ordinary_tensors():
    with torch.inference_mode():
        made = watched("int8_tensorwise_asymmetric", MinMax(), [torch.randn(4)])
        scales = made.scales()
    assert not scales.scale.is_inference()
    assert not scales.zero.is_inference()


@pytest.mark.parametrize(
    ("kind", "value"), [(MovingAverage, 0), (MovingAverage, 1.5), (Percentile, 0), (Percentile, 101)]
)
def test_parameters_out_of_range_are_refused(kind, value):
    with pytest.raises(ValueError, match="lies in"):
        kind(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 3), (7, 5), (2, 6, 4), (0, 4), (2 * PIECE + 3, 2)])
def test_square_sums_are_those_of_the_reference(shape, dtype):
    torch.manual_seed(0)
    x = (torch.randn(shape) * torch.logspace(-3, 3, shape[-1])).to(dtype)
    assert torch.equal(square_sums(x), reference.square_sums(x))


def test_square_sums_of_extremes():
    x = torch.tensor([[1e-23, 3e38, 1e-38, 0.0], [3e-23, 3e38, -1e-38, -0.0], [2e-23, 1.0, 1.0, 0.0]])
    found = square_sums(x)
    assert torch.equal(found, reference.square_sums(x))
    assert 0 < found[0] < 2.0**-126
    assert found[1] == torch.inf


def test_calls_are_added_in_their_order():
    torch.manual_seed(0)
    sums, before = SquareSums(), None
    for x in torch.randn(5, 3, 8) * 10:
        sums.update(x)
        before = reference.square_sums(x, before)
    assert torch.equal(sums.value, before)


def test_a_hessian_is_the_sum_of_outer_products():
    torch.manual_seed(0)
    x = torch.randn(3, 40, 8, dtype=torch.bfloat16)
    hessian = Hessian()
    for batch in x:
        hessian.update(batch)
    rows = x.reshape(-1, 8).double()
    assert hessian.value.dtype == torch.float64
    torch.testing.assert_close(hessian.value, rows.T @ rows, rtol=1e-14, atol=1e-14 * 120)


class Block(nn.Module):
    """q and k with one input, o with another, and one with a copy of the first."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.o, self.other = (nn.Linear(8, 8) for _ in range(4))
        self.copies = False

    def forward(self, x):
        q, k = self.q(x), self.k(x.clone() if self.copies else x)
        return self.o(q * k) + self.other(x.clone())


def statistics_of(block, batches, make=SquareSums):
    found = Statistics(make)
    with torch.no_grad(), watching((name, module, found) for name, module in block.named_children()):
        for x in batches:
            block(x)
    return found


def test_layers_with_one_input_share_a_statistic():
    torch.manual_seed(0)
    block, batches = Block(), torch.randn(3, 5, 8)
    found = statistics_of(block, batches)
    assert found.layers["q"] is found.layers["k"]
    assert len({id(shared) for shared in found.layers.values()}) == 3
    before = None
    for x in batches:
        before = reference.square_sums(x, before)
    for name in ("q", "k", "other"):
        assert torch.equal(found.layers[name].statistic.value, before)
        assert found.layers[name].tokens == 15
    assert not torch.equal(found.layers["o"].statistic.value, before)
    found.forget_inputs()
    assert all(shared.last is None for shared in found.layers.values())


def test_an_input_that_was_written_to_is_another_one():
    block, found, x = Block(), Statistics(SquareSums), torch.ones(2, 8)
    with torch.no_grad(), watching([("q", block.q, found), ("k", block.k, found)]):
        block.q(x)
        x.mul_(2)
        block.k(x)
    assert torch.equal(found.layers["q"].statistic.value, torch.full((8,), 2.0))
    assert torch.equal(found.layers["k"].statistic.value, torch.full((8,), 8.0))


def test_layers_that_stop_sharing_are_an_error():
    block = Block()
    found = statistics_of(block, torch.randn(1, 5, 8))
    block.copies = True
    said = "k had the input of q at first and has another one now"
    layers = list(block.named_children())
    with watching((name, module, found) for name, module in layers), pytest.raises(ValueError, match=said):
        block(torch.randn(5, 8))


def test_layers_that_are_seen_late_do_not_share_what_they_have_missed():
    """An expert that the first batch does not reach has the inputs of later ones alone."""
    block, found = Block(), Statistics(SquareSums)
    with torch.no_grad(), watching([("q", block.q, found), ("k", block.k, found)]):
        block.q(torch.ones(2, 8))
        x = torch.full((2, 8), 2.0)
        block.q(x)
        block.k(x)
    assert torch.equal(found.layers["q"].statistic.value, torch.full((8,), 10.0))
    assert torch.equal(found.layers["k"].statistic.value, torch.full((8,), 8.0))


def test_a_name_of_two_layers_sums_both():
    block, found, x = Block(), Statistics(SquareSums), torch.ones(2, 8)
    with watching([("tied", block.q, found), ("tied", block.k, found)]):
        block.q(x)
        block.k(x)
    assert torch.equal(found.layers["tied"].statistic.value, torch.full((8,), 4.0))


def test_layers_that_skip_an_input_of_others_are_an_error():
    """The sums that they share hold what only one of them has seen."""
    block, found = Block(), Statistics(SquareSums)
    with torch.no_grad(), watching([("q", block.q, found), ("k", block.k, found)]):
        for reached in (True, False):
            x = torch.randn(2, 8)
            block.q(x)
            if reached:
                block.k(x)
        block.q(x := torch.randn(2, 8))
        with pytest.raises(ValueError, match="k had the input of q at first"):
            block.k(x)


@pytest.mark.parametrize("statistic", [SquareSums, Hessian])
def test_sums_that_are_of_no_use(statistic):
    """NaN, infinity, and more than float32 holds, each in one channel."""
    for value, usable in ((torch.nan, False), (torch.inf, False), (1.5e19, False), (1e19, True)):
        statistics, x = Statistics(statistic), torch.ones(2, 4)
        assert statistic().is_usable()
        x[:, 2] = value
        for name, seen in (("good", torch.ones(2, 4)), ("bad", x), ("too", x)):
            statistics.observe(name, nn.Linear(4, 4), seen)
        assert statistics.unusable() == ([] if usable else ["bad", "too"])
