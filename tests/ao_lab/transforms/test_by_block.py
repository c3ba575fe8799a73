"""All batches through one block before the next: what the walk gets is what it gets of the whole model for each batch; where
that could not be so, batches run through the whole model, with a reason."""

from functools import partial

import pytest
import torch
from torch import nn

from ao_lab.transforms.by_block import ByBlock
from ao_lab.transforms.data import calibrating
from ao_lab.transforms.walk import captured, find_blocks
from tests.ao_lab.transforms.test_walk import TOKENS, WIDTH, Model, Stack, added, language_model, run_added


class Counts(nn.Module):
    """A block that counts its runs, and returns what `result` makes of its input and number."""

    def __init__(self, result=lambda y, x, run: y):
        super().__init__()
        self.linear, self.result, self.runs = nn.Linear(8, 8), result, 0

    def forward(self, x, **given):
        self.runs += 1
        return self.result(x + self.linear(x), x, self.runs)


def both(model, batches, waiting=1 << 20, **options):
    """The captures of the whole model for each batch, and of the blocks one after the other."""
    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    options = {"layers": layers, **options}
    said = []
    with calibrating(model):
        blocks = find_blocks(model)
        expected = captured(model, batches, blocks, **options)
        runs = [getattr(block, "runs", 0) for block in blocks.values()]
        make = partial(ByBlock, waiting=waiting, say=said.append)
        made = captured(model, batches, blocks, make=make, **options)
    counted = [
        getattr(block, "runs", 0) - before for block, before in zip(blocks.values(), runs, strict=True)
    ]
    assert not any(m._forward_pre_hooks or m._forward_hooks or "forward" in vars(m) for m in model.modules())
    return expected, made, said, counted


def assert_same_capture(one, two):
    """All that a walk takes, bit for bit."""
    assert (one.reached, one.shapes, one.autocasts) == (two.reached, two.shapes, two.autocasts)
    assert len(one.held) == len(two.held)
    for held, other in zip(one.held, two.held, strict=True):
        assert held.keys() == other.keys()
        assert all(torch.equal(held[key].value, other[key].value) for key in held)
    assert_equal(one.calls, two.calls)
    assert_equal(one.masks, two.masks)


def assert_equal(one, two):
    """Nested values."""
    assert type(one) is type(two)
    if isinstance(one, (list, tuple)):
        assert len(one) == len(two)
        for a, b in zip(one, two, strict=True):
            assert_equal(a, b)
    elif isinstance(one, dict):
        assert one.keys() == two.keys()
        assert_equal(list(one.values()), list(two.values()))
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, two)
    else:
        assert one == two


@pytest.mark.parametrize("offload", [False, True])
def test_a_language_model_is_captured_as_whole(offload):
    """With batches of different sizes, in one group."""
    batches = [*TOKENS, TOKENS[0][:1, :5]]
    expected, made, said, _ = both(language_model(), batches, offload=offload)
    assert_same_capture(expected, made)
    assert not made.reason
    assert said == [f"model.layers.{i}" for i in range(3)]


def test_blocks_that_return_two_tensors_and_take_those_of_others():
    batches = [torch.randn(3, WIDTH) for _ in range(3)]
    expected, made, said, _ = both(Model(run_added, added), batches)
    assert_same_capture(expected, made)
    assert (made.reason, len(said)) == (f"blocks.0 {GIVEN}", 1)

    def result(y, x, residual=None):
        return y + torch.tanh(x), (x if residual is None else x + residual) * 1

    expected, made, said, _ = both(Model(run_added, result), batches)
    assert_same_capture(expected, made)
    assert (made.reason, len(said)) == ("", 4)


def test_a_group_is_full_where_no_other_batch_may_wait():
    """Outputs and batches of 64 bytes each: two batches in 256, one where none may wait."""
    for waiting, groups in ((256, 2), (0, 4)):
        stack = Stack(Counts(), Counts())
        batches = [torch.randn(2, 8) for _ in range(5)]
        expected, made, said, runs = both(stack, batches, waiting)
        assert_same_capture(expected, made)
        assert (made.reason, said) == ("", ["blocks.0", "blocks.1"] * groups)
        assert runs == [5, 5]


GIVEN = "returns memory that it was given, or the same twice"


def in_place(y, x, run):
    """Writes to the input, which is no output."""
    x.add_(1)
    return y


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (lambda y, x, run: (y, "more"), "blocks.0 returns str, which is not like its input"),
        (lambda y, x, run: (y, y.sum(-1)), "blocks.0 returns float32 (2,), which is not like its input"),
        (lambda y, x, run: x, f"blocks.0 {GIVEN}"),
        (lambda y, x, run: (y, y), f"blocks.0 {GIVEN}"),
        (in_place, "blocks.0 writes to what it is given"),
    ],
)
def test_blocks_that_nothing_could_stand_in_for(result, said):
    expected, made, words, runs = both(
        Stack(Counts(result), Counts(result)), [torch.randn(2, 8) for _ in range(3)]
    )
    assert_same_capture(expected, made)
    assert made.reason == said
    assert words == [f"one batch after the other: {said}"]
    assert runs == [3, 3]


def test_a_block_that_returns_something_else_of_a_later_batch():
    """Whose group runs through the whole model then, and what follows."""
    stack = Stack(Counts(lambda y, x, run: y if run < 9 else (y, None)), Counts())
    expected, made, said, runs = both(stack, [torch.randn(2, 8) for _ in range(6)], 256)
    assert_same_capture(expected, made)
    assert made.reason == "blocks.0 returns another number of values than of the first batch"
    assert runs[0] > 6
    assert said[-1].endswith(made.reason)


class Reads(Stack):
    """A model that computes with what a block returns, of batches whose first value is negative."""

    def forward(self, x):
        negative = bool(x[0, 0] < 0)
        x = self.blocks[0](x * 1)
        if negative:
            assert x.sum().isfinite()
        return self.blocks[1](x)


def test_a_model_that_reads_outputs_in_between_is_run_as_whole():
    batches = [torch.full((2, 8), value) for value in (1.0, 2.0, -3.0, 4.0)]
    expected, made, said, runs = both(Reads(Counts(), Counts()), batches)
    assert_same_capture(expected, made)
    assert made.reason == "the model computes aten.sum.default of what a block returns, in between"
    # The batch that waited comes first.
    assert said == [f"one batch after the other: {made.reason}", "blocks.0", "blocks.1"]
    assert runs == [4, 4]


def test_mappings_are_written_by_blocks_in_the_order_of_the_model():
    class Shared(Stack):
        def forward(self, x):
            shared = {}
            for block in self.blocks:
                x = block(x * 1 if block is self.blocks[0] else x, shared=shared)
            return x

    expected, made, _, _ = both(Shared(Counts(), Counts()), [torch.randn(2, 8) for _ in range(3)])
    assert_same_capture(expected, made)
    assert made.reason == "blocks.0 is given a mapping"


def refused(stack, batches):
    """The error of either way."""
    errors = []
    for make in ({}, {"make": partial(ByBlock, waiting=1 << 20)}):
        with calibrating(stack), pytest.raises(ValueError, match=r".") as error:
            captured(stack, batches, find_blocks(stack), layers=[("one", stack.blocks[1].linear)], **make)
        errors.append([str(error.value), *error.value.__notes__])
    assert errors[0] == errors[1]
    return errors[1]


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (torch.full((2, 8), torch.inf), "batch 2 holds NaN or infinity where blocks.0 begins"),
        (torch.full((2, 8), 3e38), "blocks.0 makes NaN or infinity of batch 2"),
        (torch.full((2, 8), 1e30), "one is given values up to"),
    ],
)
def test_errors_name_the_batch_as_those_of_the_whole_model(batch, said):
    torch.manual_seed(0)
    stack = Stack(Counts(), Counts())
    for block in stack.blocks:
        nn.init.eye_(block.linear.weight)
    told = refused(stack, [torch.randn(2, 8), torch.randn(2, 8), batch, torch.randn(2, 8)])
    assert told[0].startswith(said)
    assert told[1].startswith("batch 2 of calibration is float32 (2, 8)")


def test_empty_batches_run_through_the_whole_model():
    batches = [torch.randn(2, 8), torch.ones(0, 8), torch.randn(2, 8)]
    expected, made, _, _ = both(Stack(Counts(), Counts()), batches)
    assert_same_capture(expected, made)
    assert made.reason == "a batch is empty"
