"""The walk over blocks: the same computation as the model's, from outputs of changed blocks, and nothing left behind."""

import copy
import re
from collections import Counter
from itertools import chain

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ao_lab
from ao_lab.transforms.data import calibrating, leaves, replaced
from ao_lab.transforms.walk import block_lists, captured, find_blocks, is_cache, walk
from experiments.models.llama import LanguageModel, ModelSettings

# What blocks hand to each other besides hidden states: the walk gives each block what the changed model would.

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


def recorded(blocks, run):
    """Copies of the tensors that blocks are given while `run()` runs: a list for each, call by call."""
    calls, handles = [[] for _ in blocks], []
    for block, mine in zip(blocks, calls, strict=True):
        handles.append(
            block.register_forward_pre_hook(
                lambda m, args, kwargs, mine=mine: mine.append(copies(args, kwargs)), with_kwargs=True
            )
        )
    with torch.no_grad():
        run()
    for handle in handles:
        handle.remove()
    return calls


def copies(args, kwargs):
    values = [*leaves(args), *leaves(list(kwargs.values()))]
    return [value.clone() for value in values if isinstance(value, torch.Tensor)]


def of_model(model, blocks, batches):
    """What each block is given when the model runs."""
    return recorded(blocks, lambda: [model(batch) for batch in batches])


def walked(model, batches, change=lambda block: None, blocks=None, **options):
    """What each block is given in a walk, twice the same, before `change` changes it."""
    seen = []

    def visit(block):
        (first,), (again,) = (recorded([block.module], block.run) for _ in range(2))
        assert_same([again], [first])
        seen.append(first)
        change(block)

    with calibrating(model):
        walk(captured(model, batches, find_blocks(model, blocks), **options), visit)
    return seen


def assert_same(ours, theirs):
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert [len(call) for call in mine] == [len(call) for call in other] != []
        for a, b in zip(chain(*mine), chain(*other), strict=True):
            assert torch.equal(a, b)


def halve(block):
    for parameter in block.module.parameters():
        parameter.data.mul_(-0.5)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_is_that_of_the_changed_model(name, offload):
    model = Model(*MODELS[name])
    batches = [torch.randn(3, WIDTH) for _ in range(2)]
    ours = walked(model, batches, halve, offload=offload)
    assert_same(ours, of_model(model, model.blocks, batches))
    assert any(len(call) > 1 for calls in ours for call in calls)


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
    assert_same(walked(model, [x], halve), of_model(model, model.blocks, [x]))


def test_values():
    pair = (torch.ones(1), [None, 2])
    assert list(leaves([pair, 3])) == [pair[0], None, 2, 3]
    assert replaced(pair, lambda value: value) is pair
    assert replaced(pair, lambda value: 5 if value == 2 else value)[1] == [None, 5]
    assert not any(map(is_cache, [{}, set(), nn.Linear(1, 1), torch.ones(1), None, 3, "text", dict]))


TOKENS = [torch.arange(i, i + 24).reshape(2, 12) for i in (0, 50, 100)]


def language_model(layers=3):
    torch.manual_seed(0)
    return LanguageModel(ModelSettings(layers=layers, width=64, feed_forward=128))


class Residual(nn.Module):
    """A block that may return a tuple, or write to its input."""

    def __init__(self, tupled=False, writes=False):
        super().__init__()
        self.linear, self.tupled, self.writes = nn.Linear(8, 8), tupled, writes

    def forward(self, x, factor=1.0):
        y = x.add_(self.linear(x)) if self.writes else x + factor * self.linear(x)
        return (y, "more") if self.tupled else y


class Stack(nn.Module):
    """Blocks by `order`, with something in between."""

    def __init__(self, *blocks, between=lambda x: x, order=None):
        super().__init__()
        self.blocks, self.between, self.order = nn.ModuleList(blocks), between, order
        self.config = type("Config", (), {"use_cache": True})()

    def forward(self, x, **kwargs):
        x = x * 1
        for i in self.order or range(len(self.blocks)):
            x = self.blocks[i](self.between(x), **{key: value[i] for key, value in kwargs.items()})
            x = x[0] if isinstance(x, tuple) else x
        return x


class Casting(Stack):
    """A model that enters autocast in its own forward, for two of three blocks."""

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.blocks[1](self.blocks[0](x))
        return self.blocks[2](x)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("change", [lambda block: None, halve])
def test_inputs_are_those_of_the_model(change, offload):
    """Of the changed model, at every block."""
    model = language_model()
    ours = walked(model, TOKENS, change, offload=offload)
    assert_same(ours, of_model(model, model.model.layers, TOKENS))
    assert all(not m._forward_pre_hooks and not m._forward_hooks for m in model.modules())


def test_every_block_has_its_own_arguments():
    """As models whose layers alternate between masks give them."""
    stack, x = Stack(Residual(), Residual(), Residual()), torch.randn(4, 8)
    batch = {"x": x, "factor": [1.0, 2.0, 3.0]}
    found = walked(stack, [batch])
    with torch.no_grad():
        second = x * 1 + stack.blocks[0].linear(x * 1)
        third = second + 2.0 * stack.blocks[1].linear(second)
    assert_same(found, [[[x]], [[second]], [[third]]])


@pytest.mark.parametrize("options", [{"tupled": True}, {"writes": True}])
def test_blocks_that_return_tuples_or_write_to_their_input(options):
    stack, x = Stack(Residual(**options), Residual(**options)), torch.randn(4, 8)
    assert_same(walked(stack, [x]), of_model(stack, stack.blocks, [x]))


def test_the_whole_model_as_one_block():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    assert_same(
        walked(model, [torch.ones(2, 8), torch.zeros(1, 8)], blocks=""),
        [[[torch.ones(2, 8)], [torch.zeros(1, 8)]]],
    )


def test_modes_and_caches_come_back():
    stack = Stack(Residual(), Residual())
    stack.blocks[1].eval()
    stack.train(True).blocks[1].eval()
    inside = []

    def visit(block):
        inside.append((stack.training, stack.config.use_cache, torch.is_grad_enabled()))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), calibrating(stack):
        walk(captured(stack, [torch.ones(2, 8)], find_blocks(stack)), visit)
    assert inside == [(False, False, False)]
    assert (stack.training, stack.blocks[0].training, stack.blocks[1].training) == (True, True, False)
    assert stack.config.use_cache is True
    assert torch.is_grad_enabled()


def refused(stack, batches=None, blocks=None):
    with calibrating(stack):
        return captured(stack, [torch.ones(2, 8)] if batches is None else batches, find_blocks(stack, blocks))


SHARED = Residual()  # as models that share all layers have it


@pytest.mark.parametrize(
    ("stack", "said"),
    [
        (Stack(Residual(), Residual(), order=[1, 0]), "blocks.1 was called where block 0 of 2 was next"),
        (Stack(Residual(), Residual(), order=[0, 0, 1]), "blocks.0 was called where block 1 of 2 was next"),
        (Stack(Residual(), Residual(), order=[0]), "blocks.1 was not called by the model's forward"),
        (Stack(Residual(), Residual(), order=[0, 1, 1]), "blocks.1 was called where the end of all blocks was next"),
        (Stack(SHARED, SHARED, SHARED), "blocks.0 was called where the end of all blocks was next"),
        (Stack(Residual(), Residual(), between=lambda x: x + 1), "the input of blocks.1 is not the output of blocks.0"),
        (Stack(Residual(), Residual(), between=lambda x: x.add_(1)), "the input of blocks.1 is not the output of blocks.0"),
    ],
)  # fmt: skip
def test_what_is_no_walk_is_refused(stack, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        refused(stack)
    assert all(not m._forward_pre_hooks and not m._forward_hooks for m in stack.modules())


def test_what_stands_behind_the_blocks_runs_for_the_first_batch_alone():
    model, heads = language_model(), []
    model.lm_head.register_forward_hook(lambda *args: heads.append(1))
    refused(model, TOKENS)
    assert heads == [1]


def test_what_is_not_finite_is_refused():
    stack = Stack(Residual(), Residual())
    with pytest.raises(ValueError, match=r"batch 1 holds NaN or infinity where blocks.0 begins"):
        refused(stack, [torch.ones(2, 8), torch.full((2, 8), torch.nan)])
    stack.blocks[1].linear.weight.data[0, 0] = torch.inf
    with pytest.raises(ValueError, match=r"blocks.1 makes NaN or infinity of batch 0"):
        refused(stack)


def seen(stack, *batches):
    """What is captured of a whole model, whose layers are watched."""
    layers = [(name, m) for name, m in stack.named_modules() if isinstance(m, nn.Linear)]
    with calibrating(stack):
        return captured(stack, batches, find_blocks(stack, ""), layers=layers)


def test_what_is_not_finite_inside_of_a_block_is_refused():
    """Where a layer is given it, whatever the block makes of it."""
    stack = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.ReLU())
    assert seen(stack, torch.ones(2, 8), torch.ones(0, 8)).reached == {"0", "1"}
    assert seen(stack, torch.ones(0, 8)).reached == set()
    stack[0].bias.data[1] = -torch.inf
    with pytest.raises(ValueError, match=r"1 is given NaN or infinity by batch 0; drop the batch, or look"):
        seen(stack, torch.ones(2, 8))
    assert all(not m._forward_pre_hooks and not m._forward_hooks for m in stack.modules())


class Waits(TorchDispatchMode):
    """Counts ranges that are looked for, and values that the host waits for one by one."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_the_host_waits_once_a_block_for_all_that_is_looked_at():
    """Ranges of four inputs, those of queries and of gates shared, and of an output."""
    model = language_model()
    layers = [(name, m) for name, m in model.model.layers.named_modules() if isinstance(m, nn.Linear)]
    with calibrating(model), Waits() as waits:
        captured(model, TOKENS[1:], find_blocks(model), layers=layers)
    blocks = len(model.model.layers) * len(TOKENS[1:])
    assert waits.counts["aminmax"] == 5 * blocks
    assert waits.counts["stack"] == blocks


def test_a_layer_behind_the_blocks_is_looked_at_too():
    stack = nn.Sequential(nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]), nn.Linear(8, 8))
    stack.forward = lambda x: stack[1](stack[0][1](stack[0][0](x)) * torch.inf)
    with calibrating(stack), pytest.raises(ValueError, match=r"1 is given NaN or infinity by batch 0"):
        captured(stack, [torch.ones(2, 8)], find_blocks(stack, "0"), layers=[("1", stack[1])])


def test_inputs_whose_squares_overflow_are_refused():
    stack = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(
        ValueError, match=r"0 is given values up to 1e\+20 by batch 1, whose squares overflow"
    ):
        seen(stack, torch.full((2, 8), 1e19), torch.full((2, 8), 1e20))


@pytest.mark.parametrize(
    ("batch", "error", "said"),
    [
        (torch.ones(4, 12), RuntimeError, r"is float32 \(4, 12\); .*at 0, float32 \(8, 16\), with an input of"),
        (torch.ones(4, 16, dtype=torch.int64), RuntimeError, r"is int64 \(4, 16\); .*weights are float32 on cpu"),
        (torch.ones(4, 16, device="meta"), RuntimeError, r"is float32 \(4, 16\) on meta"),
        ({"foo": torch.ones(4, 16)}, TypeError, r"is foo: float32 \(4, 16\); Sequential takes \(input\)"),
        ((torch.ones(1, 16), *range(9)), TypeError, r"is float32 \(1, 16\), (int, ){7}\.\.\.; Sequential takes"),
    ],
)  # fmt: skip
def test_batches_that_a_model_does_not_take(batch, error, said):
    """The error is the model's; a note says which batch it is, and what the model takes."""
    with pytest.raises(error) as caught:
        seen(nn.Sequential(nn.Linear(16, 8)), torch.ones(4, 16), batch)
    assert re.match(f"batch 1 of calibration {said}", caught.value.__notes__[0])
    assert caught.value.__notes__[0].endswith("Nothing has changed")


class Grows:
    """Keys and values of earlier runs, as a library of another year may name them."""

    def update(self, keys, values):
        return keys, values


@pytest.mark.parametrize(
    ("name", "value"),
    [("past_key_values", object()), ("cache", object()), ("memory", Grows()), ("states", (None, [Grows()]))],
)
def test_caches_are_refused(name, value):
    """By their value, whatever they are called, and by the names under which models hand on plain tuples."""
    stack = Stack(Residual())
    stack.blocks[0].forward = lambda x, **named: x
    with pytest.raises(ValueError, match=rf"blocks.0 was given {name}, which grows.*use_cache=False"):
        refused(stack, [{"x": torch.ones(2, 8), name: [value]}])


def test_caches_without_a_name_are_refused():
    stack = Stack(Residual(), between=lambda x: x)
    stack.forward = lambda x: stack.blocks[0](x, Grows())
    with pytest.raises(ValueError, match=r"blocks.0 was given a Grows, which grows with every run"):
        refused(stack)


def test_batches():
    stack, x = Stack(Residual(), Residual()), torch.ones(2, 8)
    for batches in ([x], [(x,)], [[x]], [{"x": x}], iter([x])):
        assert len(refused(stack, batches).held) == 1
    for wrong in (x, {"x": x}, "text", 3):
        with pytest.raises(
            TypeError, match=rf"calibration is an iterable of batches.*got {type(wrong).__name__}"
        ):
            refused(stack, wrong)
    with pytest.raises(TypeError, match=r"a batch of calibration is a tensor.*got int"):
        refused(stack, [3])
    with pytest.raises(ValueError, match=r"calibration has no batches"):
        refused(stack, [])


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        ({"input_ids": [3, 4]}, "input_ids is a list, and the model takes tensors"),
        ({"input_ids": torch.full((1, 4), 50)}, "input_ids has token 50, and the model has tokens 0 to 49"),
        ({"input_ids": torch.full((1, 4), -1)}, "input_ids has token -1, and"),
        ({"input_ids": torch.ones(1, 4)}, r"input_ids are token numbers, int64, got float32 \(1, 4\)"),
        (
            {"input_idz": torch.ones(1, 4).long()},
            "it has no input_ids, and the model does not know input_idz",
        ),
    ],
)
def test_batches_that_a_language_model_cannot_take_are_told_in_its_words(batch, reason):
    """Not in those of the kernel that failed; the error of that is the cause."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 50, "num_hidden_layers": 1}
    net = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=2))
    with pytest.raises(ValueError, match=f"^batch 1 of calibration: {reason}") as found:
        refused(net, [{"input_ids": torch.ones(1, 4).long()}, batch])
    assert found.value.__cause__ is not None


def test_blocks_are_called_under_the_autocast_that_their_model_enters():
    """In what is multiplied in bfloat16 and what is not, the walk is the model; weights that changed are cast anew."""
    torch.manual_seed(0)
    model = Casting(Residual(), Residual(), Residual())
    batches = [torch.randn(4, 8) for _ in range(2)]
    assert_same(walked(model, batches), of_model(model, model.blocks, batches))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = walked(model, batches, halve)
    assert_same(ours[1:2], of_model(model, model.blocks, batches)[1:2])
    assert not torch.is_autocast_enabled("cpu")


def test_weights_that_changed_multiply_inside_the_callers_autocast():
    """What is cast once is kept until autocast ends, also of weights that the walk has changed."""
    torch.manual_seed(0)
    model, x = Stack(Residual(), Residual()), torch.randn(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        walked(model, [x], halve)
        inside = model(x)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        assert torch.equal(model(x), inside)


# Where the blocks are: the longest list of one class, by name, or the whole model.


class Listed(nn.Module):
    def __init__(self, experts=0):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(experts))


def model_of(**lists):
    return nn.ModuleDict({name: nn.ModuleList(modules) for name, modules in lists.items()})


def test_blocks_of_a_language_model():
    model = LanguageModel(ModelSettings(layers=3))
    found = find_blocks(model)
    assert list(found) == ["model.layers.0", "model.layers.1", "model.layers.2"]
    assert list(found.values()) == list(model.model.layers)


def test_the_longest_list_wins_and_experts_inside_blocks_do_not():
    model = model_of(few=[Listed()], blocks=[Listed(experts=8), Listed(experts=8)])
    assert list(block_lists(model)) == ["few", "blocks"]
    assert list(find_blocks(model)) == ["blocks.0", "blocks.1"]


def test_lists_of_layers_and_of_mixed_classes_are_none():
    model = model_of(
        heads=[nn.Linear(4, 4)] * 5, norms=[nn.LayerNorm(4)] * 5, mixed=[Listed(), nn.Sequential(Listed())]
    )
    with pytest.raises(ValueError, match=r"has no nn.ModuleList of blocks.*blocks=''"):
        find_blocks(model)
    assert list(find_blocks(model, "mixed")) == ["mixed.0", "mixed.1"]


def test_of_two_equal_lists_one_is_named():
    model = model_of(encoder=[Listed(), Listed()], decoder=[Listed(), Listed()])
    with pytest.raises(
        ValueError, match=r"encoder and decoder are lists of 2 blocks each.*name it with blocks="
    ):
        find_blocks(model)
    assert list(find_blocks(model, "decoder")) == ["decoder.0", "decoder.1"]


def test_names():
    model = nn.Sequential(nn.Sequential(Listed(), Listed()), nn.Linear(4, 4))
    assert list(find_blocks(model, "0")) == ["0.0", "0.1"]
    assert find_blocks(model, "") == {"": model}
    with pytest.raises(ValueError, match=r"blocks='1' is a Linear of 0 of this model"):
        find_blocks(model, "1")
    with pytest.raises(ValueError, match=r"blocks='layer' is no module.*\(here layers\)"):
        find_blocks(model_of(layers=[Listed()]), "layer")
    with pytest.raises(TypeError, match=r"blocks is the name of a list of modules, got int: 3"):
        find_blocks(model, 3)
