"""Low-rank residuals: what they leave of the error, what layers compute with them, their files, and what is refused."""

import copy
import re

import numpy as np
import pytest
import torch
from torch import nn

import ao_lab
import reference
from ao_lab import SchemeConfig, explain, load_pretrained, model_size, quantize_, save_pretrained
from ao_lab.calibration import layers
from ao_lab.calibration.methods import GPTQ, AutoRound, BiasCorrection, Clip, LowRank, Rotate
from ao_lab.cli.layout import select_layout
from ao_lab.cli.terminal import WrongInput
from ao_lab.clients.mlx import save_mlx
from ao_lab.transforms.low_rank import LowRankLinear, residual_layers
from fast.calibration.inputs import numpy_of
from tests.ao_lab.calibration.test_resume import run, stopping
from tests.ao_lab.calibration.test_run import INT4, assert_same, inputs, stack
from tests.support.quantized_weights import same

F = nn.functional
MXFP4 = SchemeConfig(scheme="mxfp4", activation_scheme="mxfp4")
SPARSE = SchemeConfig(scheme="int4_g32", sparsity="2:4")
EVERYTHING = (Rotate(), GPTQ(), LowRank(4), BiasCorrection())


def first_layer(config, methods, scale=1.0):
    """A model whose first layer alone is quantized, the line of its report, the dense layer, and its inputs (12, 16, 32): those
    of sequence 9 judge."""
    batches = [x * scale for x in inputs()]
    model, dense = stack(), stack()
    for one in (model, dense):  # an outlier in each block of a scale, which rotations spread
        one.blocks[0].one.weight.data[:, 0] *= 8
    report = quantize_(model, config, lambda m, n: n == "blocks.0.one", calibration=batches, methods=methods)
    (line,) = report.changed
    return model, line.calibrated, dense.blocks[0].one, dense.blocks[0].norm(torch.cat(batches)).detach()


@pytest.mark.parametrize("methods", [(), (Clip(), GPTQ())])
def test_factors_leave_the_least_output_error(methods):
    """Of all products of this rank, by Eckart and Young; two factors of bfloat16 leave a little more. The quantized weight is
    that without a residual, and the factors are the specification's.
    """
    model, result, dense, rows = first_layer(INT4, (*methods, LowRank(4)))
    layer = model.blocks[0].one
    assert result.method.endswith(" + lowrank")
    assert "rank 4: 4 more bits a weight" in result.notes[0]
    if methods:
        assert same(layer.weight, first_layer(INT4, methods)[0].blocks[0].one.weight)
    train = rows[torch.arange(12) != 9].reshape(-1, 32).double()
    h, w = (train.T @ train / len(train)).numpy(), dense.weight.detach()
    d = (w.double() - layer.weight.detach().dequantize(torch.float32).double()).numpy()
    factors = [x.detach().double().numpy() for x in (layer.residual_left, layer.residual_right)]
    rest = d - factors[0] @ factors[1]
    errors, whole = np.linalg.eigvalsh(d @ h @ d.T), np.trace(d @ h @ d.T)
    # Elements are off by 2^-9 of themselves: L, of 4 orthonormal columns, by a matrix of norm 2^-8, and R by 2^-9 of its norm.
    off = 2.0**-8 * whole**0.5 + 2.0**-9 * 1.01 * np.linalg.eigvalsh(h)[-1] ** 0.5 * np.linalg.norm(
        factors[1]
    )
    best = errors[:-4].sum()
    assert best * (1 - 1e-9) <= np.trace(rest @ h @ rest.T) <= (best**0.5 + off) ** 2 < 0.5 * whole
    q = numpy_of(layer.weight.detach().quantized)
    for one, other in zip(
        factors, reference.low_rank_residual(w.numpy(), q, h, 4, dtype="float64"), strict=True
    ):
        # R answers the rounded L.
        assert np.abs(one - other).max() <= 2.0**-7 * np.abs(other).max()


@pytest.mark.parametrize(
    ("config", "methods", "name"),
    [
        (INT4, (LowRank(4),), "rounding + lowrank"),
        (MXFP4, EVERYTHING, "rotate + gptq + lowrank"),
        pytest.param(INT4, (Clip(), LowRank(4, "float16")), "clip + lowrank", marks=pytest.mark.nightly),
    ],
)
def test_the_error_reported_is_that_of_the_layer(config, methods, name, monkeypatch):
    """Of what the layer puts out for held-out tokens: with quantized, rotated inputs too, which the residual does not see."""
    monkeypatch.setattr(layers, "_better", lambda plain, turned: turned)
    model, result, dense, rows = first_layer(config, methods)
    assert result.method.startswith(name)
    layer, held = model.blocks[0].one, rows[9]
    with torch.no_grad():
        error = (layer(held) - dense(held)).double().square().sum(-1).mean()
    assert float(error) == pytest.approx(result.error, rel=1e-3)
    assert result.error < result.rounding


def test_a_layer_adds_its_residual_and_trains_nothing():
    model, *_ = first_layer(INT4, (LowRank(4),))
    layer = model.blocks[0].one
    x = torch.randn(3, 5, 32, requires_grad=True)
    left, right = (p.detach().float() for p in (layer.residual_left, layer.residual_right))
    y = layer(x)
    assert torch.equal(y, F.linear(x, layer.weight, layer.bias) + F.linear(F.linear(x, right), left))
    y.sum().backward()
    torch.testing.assert_close(x.grad, layer.merged().sum(0).expand_as(x))
    assert not any(p.requires_grad for p in (layer.weight, layer.residual_left, layer.residual_right))
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), y)
    assert torch.equal(copy.deepcopy(layer)(x), y)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    assert "rank 4" in repr(layer)
    assert str(explain(model)).startswith("1 of 7 layers quantized\n")
    # 32 x 32 weights in 4 bits, 32 float32 scales, and two factors of 128 elements in 16 bits.
    dense = sum(p.nbytes for m in model.modules() if type(m) is nn.Linear for p in [m.weight])
    assert model_size(model).linear.bytes - dense == 512 + 128 + 512
    assert explain(model).bits == 8 * (512 + 128 + 512) / 32**2


def test_folders_hold_residuals(tmp_path):
    """Bit for bit; into a model that had none, or stays as it was where the folder is of another."""
    model, other, wrong = stack(), stack(1), stack(blocks=3)
    quantize_(model, INT4, calibration=inputs(), methods=(GPTQ(), LowRank(4)))
    with pytest.raises(ValueError, match=r"blocks.0.one: its low-rank residual of rank 4 .*layout='ao_lab'"):
        save_pretrained(model, tmp_path, layout="compressed-tensors")
    save_pretrained(model, tmp_path, layout="ao_lab")
    assert "| low-rank residuals | 6 |" in (tmp_path / "README.md").read_text()
    assert_same(load_pretrained(tmp_path, other), model)
    assert_same(load_pretrained(tmp_path, other), model)  # which has residuals already
    x = inputs()[0]
    assert torch.equal(other(x), model(x))
    with pytest.raises(ValueError, match="give the model that was saved"):
        load_pretrained(tmp_path, wrong)
    assert not residual_layers(wrong)
    quantize_(wrong, INT4, calibration=inputs(), methods=(LowRank(2),))
    before = copy.deepcopy(wrong)
    with pytest.raises(ValueError, match="give the model that was saved"):
        load_pretrained(tmp_path, wrong)
    assert_same(wrong, before)


def test_transformers_reads_residuals(tmp_path):
    transformers = pytest.importorskip("transformers")
    settings = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(settings).eval()
    tokens = torch.arange(64).reshape(2, 32)
    quantize_(model, INT4, calibration=[tokens, tokens + 0], methods=(LowRank(2),))
    save_pretrained(model, tmp_path, layout="ao_lab")
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert residual_layers(read).keys() == residual_layers(model).keys() != set()
    with torch.no_grad():
        y = model(tokens).logits
        assert torch.equal(read(tokens).logits, y)
        dense = read.dequantize()
        assert not residual_layers(dense)
        # The same sums in another order, of 64 terms and two layers: far within what 4 bits change.
        torch.testing.assert_close(dense(tokens).logits, y, rtol=0, atol=1e-4)
    with pytest.raises(
        ValueError, match=r"q_proj.* the format of mlx-lm has no place for a low-rank residual"
    ):
        save_mlx(model, tmp_path / "mlx")


def test_a_killed_call_goes_on_with_the_same_residuals(tmp_path):
    whole, killed, again = (stack() for _ in range(3))
    given = {"methods": (GPTQ(), LowRank(4))}
    report = run(whole, tmp_path / "whole", **given)
    with pytest.raises(KeyboardInterrupt):
        run(killed, tmp_path / "killed", progress=stopping(5), **given)
    assert str(run(again, tmp_path / "killed", **given)) == str(report)
    assert_same(again, whole)
    assert len(residual_layers(again)) == 6


def test_what_can_have_no_residual_says_so():
    model = stack()
    model.blocks[0].two.weight = model.blocks[0].one.weight
    report = quantize_(model, INT4, calibration=inputs(), methods=(GPTQ(), LowRank(16)))
    reasons = {layer.name: layer.reason for layer in report.layers}
    assert "no residual: it is for the weight of one nn.Linear" in reasons["blocks.0.one.weight"]
    assert (
        "its factors of rank 16 would have no fewer elements than the 32 x 32"
        in reasons["blocks.1.one.weight"]
    )
    assert not any(isinstance(m, LowRankLinear) for m in model.modules())


def test_refusals():
    with pytest.raises(ValueError, match="LowRank: rank is an integer of at least 1, got 0"):
        LowRank(0)
    with pytest.raises(ValueError, match="LowRank: dtype"):
        LowRank(dtype="float32")
    given = {"config": INT4, "calibration": inputs()}
    with pytest.raises(ValueError, match="AutoRound and LowRank do not go together: AutoRound learns"):
        quantize_(stack(), methods=(AutoRound(), LowRank()), **given)
    with pytest.raises(ValueError, match="lowrank needs calibration data"):
        quantize_(stack(), INT4, methods=(LowRank(),))
    pruned = stack()
    pruned.blocks[0].one.weight.data.view(-1, 4)[:, :2] = 0
    with pytest.raises(ValueError, match="lowrank would overwrite the zeros"):
        quantize_(
            pruned, SPARSE, lambda m, n: n == "blocks.0.one", calibration=inputs(), methods=("lowrank",)
        )
    with pytest.raises(ValueError, match="lowrank change more than a layer's weight"):
        ao_lab.choose_(stack(), inputs(), {"one": (INT4, (LowRank(),)), "none": None}, budget=ao_lab.Bits(8))


def test_the_command_line_writes_the_layout_that_holds_them():
    config = ao_lab.Int4WeightOnlyConfig(group_size=32)
    assert select_layout(config, "int4", "auto").layout == "compressed-tensors"
    plan = select_layout(config, "int4", "auto").for_methods(["gptq", "lowrank"])
    assert (plan.layout, plan.config) == ("ao_lab", config)
    assert "residual" in plan.reasons[0]
    wanted = config.for_layout("compressed-tensors")
    with pytest.raises(WrongInput, match=re.escape("--method lowrank: low-rank residuals have no place")):
        select_layout(wanted, "int4", "compressed-tensors").for_methods(["lowrank"])
