"""AutoRound: a block's weights learned together, never worse on held-out tokens; the model as it was where nothing is won."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from ao_lab import SchemeConfig, quantize_
from ao_lab.calibration import autoround, tokens
from ao_lab.calibration.autoround import (
    ATTENTION,
    Learning,
    nodes_of,
    one_order,
    rotated,
    straight,
    without_cudnn,
)
from ao_lab.calibration.checks import LEAST_TOKENS
from ao_lab.calibration.methods import GPTQ, AutoRound, BiasCorrection, Clip, Rotate
from ao_lab.calibration.run import Job
from ao_lab.transforms.data import calibrating
from ao_lab.transforms.walk import captured, find_blocks, walk
from fast.calibration.hessian import add_products
from fast.layers.hadamard import hadamard
from reference import SCHEMES
from tests.ao_lab.calibration.test_run import (
    INT4,
    TOKENS,
    Block,
    assert_same,
    inputs,
    language_model,
    stack,
    weights,
)
from tests.support.quantized_weights import same

INT3 = SchemeConfig(scheme="int3_g32_asymmetric")


def block_errors(model, dense, batches, held=9):
    """The mean square of what each block's output is off by on the held-out sequence, of float inputs to the float model."""
    x, y, errors = batches[2][1:2], batches[2][1:2], []
    with torch.no_grad():
        for ours, theirs in zip(model.blocks, dense.blocks, strict=True):
            x, y = ours(x), theirs(y)
            errors.append(float((x - y).square().mean()))
    return errors


@pytest.mark.parametrize(
    ("config", "before"),
    [
        (INT3, ()),
        (INT3, (Clip(norm=2.0), GPTQ())),
        (SchemeConfig(scheme="mxfp4", activation_scheme="mxfp4"), (Rotate(), GPTQ())),
    ],
)  # fmt: skip
def test_blocks_come_out_better(config, before):
    dense, without, model = stack(), stack(), stack()
    if before:
        quantize_(without, config, calibration=inputs(), methods=before)
    else:
        quantize_(without, config)
    report = quantize_(
        model, config, calibration=inputs(), methods=(*before, AutoRound(steps=25, sequences=12))
    )
    taken = [
        layer
        for layer in report.changed
        if "autoround" in (layer.calibrated.method if layer.calibrated else "")
    ]
    if "blocks.0.one.weight" not in {layer.name for layer in taken}:
        assert config is not INT3
        assert same(model.blocks[0].one.weight, without.blocks[0].one.weight)
        return
    errors, plain = block_errors(model, dense, inputs()), block_errors(without, dense, inputs())
    share = float(re.search(r"held-out tokens is ([\d.]+) of that without", taken[0].reason)[1])
    assert share < 1
    assert errors[0] / plain[0] == pytest.approx(share, rel=0.02)
    assert all(isinstance(layer.calibrated.error, float) for layer in taken)


def test_the_same_call_has_the_same_bits_and_goes_on_after_a_kill(tmp_path):
    given = {"calibration": inputs(), "methods": (Clip(), AutoRound(steps=6))}

    def stop(name, done, total):
        if done == 4:
            raise KeyboardInterrupt

    one, two, killed, again = (stack() for _ in range(4))
    quantize_(one, INT3, **given)
    quantize_(two, INT3, **given)
    assert_same(one, two)
    with pytest.raises(KeyboardInterrupt):
        quantize_(killed, INT3, **given, resume=tmp_path, progress=stop)
    quantize_(again, INT3, **given, resume=tmp_path)
    assert_same(again, one)


def test_small_weights_are_evaluated_as_one_matrix_with_the_bits_of_each_alone(monkeypatch):
    """All but the down projection read as many channels: the 14 matrices of two blocks are 4."""
    models, calls = [], []
    unchecked = autoround.signround_unchecked
    monkeypatch.setattr(
        autoround, "signround_unchecked", lambda w, *a, **k: calls.append(len(w)) or unchecked(w, *a, **k)
    )
    for small, evaluated in ((1 << 24, 4), (0, 14)):
        monkeypatch.setattr(autoround, "SMALL", small)
        calls.clear()
        models.append(language_model())
        only = {"filter_fn": lambda m, n: n.startswith(("model.layers.0", "model.layers.1"))}
        quantize_(models[-1], INT3, calibration=TOKENS, methods=(AutoRound(steps=2),), **only)
        # Two steps, and the errors of the best and of the last state.
        assert len(calls) == 4 * evaluated
    assert_same(*models)
    assert len(weights(models[0])) == 14


def test_a_step_takes_nothing_from_the_host(monkeypatch):
    """Which would be a wait for the device in each."""
    devices = set()

    class Devices(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            devices.update(x.device.type for x in (*args, result) if isinstance(x, torch.Tensor))
            return result

    leaf = torch.zeros(4, device="meta", requires_grad=True)
    monkeypatch.setattr(Learning, "_squares", lambda self, batch, role: leaf.square().sum())
    with Devices():
        total = Learning(None, None, AutoRound(), [])._loss([0, 1])
    assert (total.dtype, devices) == (torch.float64, {"meta"})


def test_the_model_is_as_it_was_behind_an_error(monkeypatch):
    model = stack()
    model.blocks[0].one.weight.requires_grad_(False)
    before = copy.deepcopy(model)

    def fails(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr(autoround.Joined, "step", fails)
    with pytest.raises(MemoryError):
        quantize_(model, INT4, calibration=inputs(), methods=(AutoRound(steps=2),))
    assert not weights(model)
    for (name, ours), (_, theirs) in zip(model.named_parameters(), before.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name
        assert ours.requires_grad == theirs.requires_grad
        assert ours.grad is None
    assert all(not module._forward_pre_hooks for module in model.modules())


def test_what_is_not_better_is_not_taken():
    """Values on the grid have no error to learn from."""
    model = stack(blocks=1)
    for module in (model.blocks[0].one, model.blocks[0].two, model.blocks[0].three):
        w = torch.randint(-7, 8, (32, 32)) / 8
        w[:, 0] = 7 / 8
        module.weight.data.copy_(w)
    dense = copy.deepcopy(model)
    report = quantize_(model, INT4, calibration=inputs(), methods=(AutoRound(steps=3),))
    assert "autoround did not lower the block's error" in report.layers[0].reason
    for name in ("one", "two", "three"):
        ours, theirs = (getattr(m.blocks[0], name).weight for m in (model, dense))
        assert torch.allclose(ours.dequantize(), theirs, atol=1e-6)


def test_padding_and_held_out_tokens_are_no_part_of_it():
    padded = []
    for x in inputs():
        wide = torch.cat([torch.randn(4, 5, 32), x], 1)
        padded.append(
            {"x": wide, "attention_mask": torch.cat([torch.zeros(4, 5), torch.ones(4, 16)], 1).long()}
        )
    model, expected = stack(), stack()
    quantize_(model, INT3, calibration=padded, methods=(AutoRound(steps=4),))
    quantize_(expected, INT3, calibration=inputs(), methods=(AutoRound(steps=4),))
    for name, weight in weights(model).items():
        other = expected.get_parameter(name).dequantize()
        assert (weight.dequantize() - other).norm() < 0.05 * other.norm(), name  # sums of other lengths


def test_weights_that_share_an_outer_scale_go_on_sharing_it():
    model = language_model()
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data *= 4
    given = {"calibration": TOKENS, "filter_fn": lambda m, n: n.startswith("model.layers.0.self_attn")}
    report = quantize_(model, SchemeConfig(scheme="nvfp4_pow2"), methods=(AutoRound(steps=24),), **given)
    assert {layer.calibrated.method for layer in report.changed} == {"autoround"}
    weights = [layer.weight for layer in list(model.model.layers[0].self_attn.children())[:3]]
    assert len({float(weight.outer) for weight in weights}) == 1


class OfOneSequence(nn.Module):
    """A block with a layer whose inputs are no tokens of a batch that could be told."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return x + self.one(x) + self.two(x[0])


def test_products_of_inputs_are_summed_where_something_reads_them(monkeypatch):
    """Of held-out tokens, and of all of a layer that has none; errors and codes are those with all sums."""
    rows = []

    def counted(value, x):
        rows.append(len(x))
        return add_products(value, x)

    monkeypatch.setattr(tokens, "add_products", counted)
    given = {"calibration": inputs()}
    for block, expected in ((Block(), [16, 16]), (OfOneSequence(), None)):
        model = stack(blocks=1)
        model.blocks[0] = block
        other = copy.deepcopy(model)
        rows.clear()
        report = quantize_(model, INT3, methods=(AutoRound(steps=2),), **given)
        # Without those of the trial before anything changes.
        assert expected is None or [count for count in rows if count != LEAST_TOKENS] == expected
        with monkeypatch.context() as patch:
            patch.setattr(Job, "needs_products", lambda *_: True)
            theirs = quantize_(other, INT3, methods=(AutoRound(steps=2),), **given)
        assert_same(model, other)
        assert [one.calibrated for one in report.changed] == [one.calibrated for one in theirs.changed]


def test_the_walk_holds_what_the_model_as_it_was_makes():
    model, seen = stack(), []
    dense = copy.deepcopy(model)

    def visit(block):
        seen.append([held.taken() for held in block.originals])
        for parameter in block.module.parameters():
            parameter.data.mul_(0.5)

    with calibrating(model):
        walk(captured(model, inputs(), find_blocks(model)), visit, originals=True)
    with torch.no_grad():
        for number, x in enumerate(inputs()):
            for block, found in zip(dense.blocks, seen, strict=True):
                x = block(x)
                assert torch.equal(found[number], x)


def test_gradients_pass_what_layers_do_with_their_inputs():
    x = torch.randn(3, 64, requires_grad=True)
    assert torch.allclose(rotated(x, 32), hadamard(x.detach(), 32), atol=1e-5)
    straight(rotated(x, 32), SCHEMES["mxfp4"], None).sum().backward()
    expected = torch.autograd.functional.vjp(lambda y: rotated(y, 32).sum(), x.detach())[1]
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("given", [{"steps": 0}, {"steps": 2.5}, {"sequences": 0}])
def test_what_is_refused(given):
    with pytest.raises(ValueError, match=r"AutoRound: \w+ is an integer of at least 1"):
        AutoRound(**given)
    with pytest.raises(ValueError, match="AutoRound and BiasCorrection do the same"):
        quantize_(nn.Linear(8, 8), INT4, methods=(AutoRound(), BiasCorrection()))


@pytest.mark.parametrize(("before", "gone"), [((Clip(), GPTQ()), 1), ((), 0)])
def test_what_judges_at_the_end_is_on_the_host_while_gptq_needs_the_memory(monkeypatch, before, gone):
    """Queries, keys and values of an 8B model keep 0.13 GB each while the widest layer needs most."""
    moved, learn = [], Learning.run
    monkeypatch.setattr(tokens.SplitMoments, "judge_on", lambda self, device: moved.append(device))
    monkeypatch.setattr(Learning, "run", lambda self: (moved.append("learned"), learn(self))[1])
    quantize_(stack(blocks=1), INT3, calibration=inputs(), methods=(*before, AutoRound(steps=6)))
    assert moved[: gone + 1] == ["cpu"] * gone + ["learned"]
    assert set(moved[gone + 1 :]) <= {torch.device("cpu")}


class Attending(nn.Module):
    """Rows attend to each other, between two products."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
        #: Whether cuDNN's attention was allowed, of each call.
        self.cudnn = []

    def forward(self, x):
        self.cudnn.append((torch.is_grad_enabled(), torch.backends.cuda.cudnn_sdp_enabled()))
        q = self.one(x)[:, None]
        return self.two(nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)[:, 0])


class Modes(TorchDispatchMode):
    """How deterministic operations have to be, of each name."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.add((function.overloadpacket.__name__, torch.get_deterministic_debug_mode()))
        return function(*args, **(kwargs or {}))


def test_attention_is_learned_through_in_one_order_of_sums():
    """torch's flash and efficient attention add gradients of queries in any order by default; cuDNN's always does."""
    mode = 1
    model = nn.Module()
    model.blocks = nn.ModuleList([Attending()])
    model.forward = lambda x: model.blocks[0](x)
    torch.set_deterministic_debug_mode(mode)
    try:
        with Modes() as modes:
            quantize_(model, INT4, calibration=inputs(), methods=(AutoRound(steps=2),))
        assert torch.get_deterministic_debug_mode() == mode
    finally:
        torch.set_deterministic_debug_mode("default")
    backward = "_scaled_dot_product_flash_attention_for_cpu_backward"
    assert {one for one in modes.seen if one[1] != mode} - {("detach", 2)} == {(backward, 2)}
    assert (backward, mode) not in modes.seen
    assert set(model.blocks[0].cudnn) == {(True, False), (False, True)}
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_modes_are_what_they_were_behind_an_error():
    q = torch.randn(1, 2, 8, 16, requires_grad=True)

    def fails(*_):
        raise MemoryError

    loss = nn.functional.scaled_dot_product_attention(q, q, q).sum()
    next(one for one in nodes_of(loss) if one.name().startswith(ATTENTION)).register_hook(fails)
    with pytest.raises(MemoryError), one_order(loss):
        loss.backward()
    assert torch.get_deterministic_debug_mode() == 0
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), without_cudnn():
        assert torch.backends.cuda.cudnn_sdp_enabled()
