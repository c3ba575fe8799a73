"""What blocks hand to each other besides hidden states: the walk gives each block what the changed model would."""

import copy

import pytest
import torch
from torch import nn

import ao_lab
from ao_lab.calibration.blocks import find_blocks
from ao_lab.calibration.handed import is_cache, leaves, replaced
from ao_lab.calibration.walk import calibrating, captured, walk

WIDTH = 16


class Block(nn.Module):
    """Returns all that `result` makes of its hidden states, residual and a product of its own."""

    def __init__(self, result):
        super().__init__()
        self.linear, self.result = nn.Linear(WIDTH, WIDTH), result

    def forward(self, x, *others, **named):
        return self.result(self.linear(x), x, *others, **named)


class Model(nn.Module):
    """`run` calls blocks in their order."""

    def __init__(self, run, result, blocks=4):
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.run = nn.ModuleList(Block(result) for _ in range(blocks)), run

    def forward(self, x):
        return self.run(self.blocks, x * 1)


def added(y, x, residual=None):
    """Of an addition fused with the norm behind it: hidden states, and the sum that goes on."""
    total = x if residual is None else x + residual
    return y + torch.tanh(total), total


def run_added(blocks, x):
    residual = None
    for block in blocks:
        x, residual = block(x, residual)
    return x + residual


def added_in_place(y, x, residual=None):
    """As kernels do that write the sum over the residual."""
    if residual is None:
        return added(y, x)
    residual.add_(x)
    return y + torch.tanh(residual), residual


def run_in_place(blocks, x):
    x, residual = blocks[0](x)
    for block in blocks[1:]:
        x, residual = block(x, residual=residual)
    return x


def run_skips(blocks, x):
    """The outputs of earlier blocks as further arguments, latest first, in a list."""
    skips = []
    for index, block in enumerate(blocks):
        x = block(x, [skips.pop()] if index >= len(blocks) // 2 else [])
        if index < len(blocks) // 2 - 1 or index == len(blocks) // 2 - 1:
            skips.append(x)
    return x


def run_first_values(blocks, x):
    """What the first block returns, nested, goes to all others."""
    x, (first, _) = blocks[0](x)
    for block in blocks[1:]:
        x, _ = block(x, first=first)
    return x


def run_swapped(blocks, x):
    """The second output comes first."""
    residual = None
    for block in blocks:
        if residual is None:
            x, residual = block(x)
        else:
            x, residual = block(residual, x)
    return x


MODELS = {
    "hidden states and a residual": (run_added, added),
    "skips": (run_skips, lambda y, x, skips: y + sum(map(torch.sin, skips))),
    "values of the first block": (
        run_first_values,
        lambda y, x, first=None: (y if first is None else y * first, (torch.cos(y), None)),
    ),
    "in the other order": (run_swapped, added),
    "a residual that blocks write to": (run_in_place, added_in_place),
}


def arguments(model, x):
    """Tensors that each block is given, as copies."""
    seen = []
    handles = [
        block.register_forward_pre_hook(
            lambda m, args, kwargs: seen.append(copies(args, kwargs)), with_kwargs=True
        )
        for block in model.blocks
    ]
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    return seen


def copies(args, kwargs):
    values = [*leaves(args), *leaves(list(kwargs.values()))]
    return [value.clone() for value in values if isinstance(value, torch.Tensor)]


def walked(model, batches, **options):
    """The same in a walk that changes each block when it has run twice, of the last batch."""
    seen = []

    def visit(block):
        mine = []
        handle = block.module.register_forward_pre_hook(
            lambda m, args, kwargs: mine.append(copies(args, kwargs)), with_kwargs=True
        )
        block.run()
        block.run()
        handle.remove()
        assert len(mine) == 2 * len(batches)
        assert_same(mine[: len(batches)], mine[len(batches) :])
        seen.append(mine[-1])
        block.module.linear.weight.data.mul_(-0.5)

    with calibrating(model):
        walk(captured(model, batches, find_blocks(model), **options), visit)
    return seen


def assert_same(found, expected):
    assert [len(one) for one in found] == [len(one) for one in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_is_that_of_the_changed_model(name, offload):
    model = Model(*MODELS[name])
    batches = [torch.randn(3, WIDTH) for _ in range(2)]
    found = walked(model, batches, offload=offload)
    assert_same(found, arguments(model, batches[-1]))
    assert any(len(one) > 1 for one in found)


def test_writing_to_what_is_no_output_is_refused():
    """It would add up from run to run."""
    model = Model(lambda blocks, x: blocks[0](x, residual=x * 2), added_in_place, 2)
    with pytest.raises(
        ValueError, match=r"blocks.0 writes to an argument, float32 \(3, 16\), so that its second"
    ):
        walked(model, [torch.randn(3, WIDTH)])


@pytest.mark.parametrize("score", ["wanda", "sparsegpt"])
def test_masks_are_those_of_one_block_after_the_other(score):
    """A block is pruned in a model in which the ones before it are pruned already."""
    model = Model(run_added, added)
    batches = [torch.randn(8, WIDTH) for _ in range(3)]
    oracle = copy.deepcopy(model)
    config = ao_lab.SparsityConfig(score=score)
    for block in oracle.blocks:
        ao_lab.sparsify_(
            oracle, config, lambda m, name, b=block: m is b.linear, calibration=batches, blocks=""
        )
    ao_lab.sparsify_(model, config, calibration=batches)
    for mine, other in zip(model.blocks, oracle.blocks, strict=True):
        assert torch.equal(mine.linear.weight != 0, other.linear.weight != 0)


def changes(change):
    def run(blocks, x):
        residual = None
        for block in blocks:
            x, residual = block(x, None if residual is None else change(x, residual))
        return x

    return run


@pytest.mark.parametrize(
    "change",
    [
        lambda x, residual: x + residual,
        lambda x, residual: residual.add_(1),
        lambda x, residual: residual[:1],
    ],
)
def test_what_the_model_makes_of_outputs_in_between_is_refused(change):
    model = Model(changes(change), added)
    with pytest.raises(
        ValueError, match=r"argument 1 of blocks.1, float32 \(\d, 16\), may be made of.*blocks=''"
    ):
        walked(model, [torch.randn(3, WIDTH)])


def test_outputs_in_mappings_are_refused():
    def run(blocks, x):
        state = {}
        for block in blocks:
            x, state["residual"] = block(x, state=dict(state))
        return x

    model = Model(run, lambda y, x, state: added(y, x, state.get("residual")))
    with pytest.raises(ValueError, match=r"argument state of blocks.1 is a mapping with outputs of blocks"):
        walked(model, [torch.randn(3, WIDTH)])


def test_what_blocks_share_in_a_mapping_is_written_anew():
    """Keys and values of one block that another reads, as models do whose layers share them."""

    def result(y, x, shared, reads):
        if not reads:
            shared["values"] = torch.stack([y, x])
        return y + shared["values"].sum(0)

    def run(blocks, x):
        shared = {}
        for index, block in enumerate(blocks):
            x = block(x, shared, index > 1)
        return x

    model, x = Model(run, result), torch.randn(3, WIDTH)
    assert_same(walked(model, [x]), arguments(model, x))


def test_values():
    pair = (torch.ones(1), [None, 2])
    assert list(leaves([pair, 3])) == [pair[0], None, 2, 3]
    assert replaced(pair, lambda value: value) is pair
    assert replaced(pair, lambda value: 5 if value == 2 else value)[1] == [None, 5]
    assert not any(map(is_cache, [{}, set(), nn.Linear(1, 1), torch.ones(1), None, 3, "text", dict]))
