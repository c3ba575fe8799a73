"""`quantize_` of pruned models into 2:4 storage: the bits of the dense layers, or an error before anything changes."""

import copy

import pytest
import torch
from torch import nn

from ao_lab import (
    Float8DynamicActivationFloat8WeightConfig,
    Float8WeightOnlyConfig,
    FqnToConfig,
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8StaticActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    NF4WeightOnlyConfig,
    PerRow,
    QATConfig,
    QuantizedTensor,
    SchemeConfig,
    SparseQuantizedTensor,
    SparsityConfig,
    explain,
    linear_and_experts,
    model_size,
    quantize_,
    sparsify_,
    weight_size,
)
from ao_lab.quantization.api import StreamedWeights
from ao_lab.quantization.plan import planned
from tests.support.quantized_weights import same

CONFIGS = {
    "int8 both": Int8DynamicActivationInt8WeightConfig(),
    "fp8 both": Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()),
    "int8": Int8WeightOnlyConfig(),
    "fp8": Float8WeightOnlyConfig(),
    "int4": Int4WeightOnlyConfig(scheme="int4_g32"),
    "int4 asymmetric": Int4WeightOnlyConfig(group_size=32),
    "mxfp4": SchemeConfig(scheme="mxfp4"),
}


def model(dtype=torch.bfloat16, pruned=True):
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32, bias=False)).to(dtype)
    if pruned:
        sparsify_(made, SparsityConfig())
    return made


def sparse(config):
    return config.__class__(**{**config.__getstate__(), "sparsity": "2:4"})


@pytest.mark.parametrize("name", CONFIGS)
def test_layers_are_those_of_dense_storage(name):
    dense, ours = model(), model()
    quantize_(dense, CONFIGS[name])
    report = quantize_(ours, sparse(CONFIGS[name]))
    for a, b, layer in zip((dense[0], dense[2]), (ours[0], ours[2]), report.layers, strict=True):
        assert isinstance(b.weight, SparseQuantizedTensor)
        assert same(a.weight.dequantize(), b.weight.dequantize())
        assert (layer.sparsity, layer.storage) == ("2:4 by magnitude", "compressed")
        assert layer.bytes == sum(part.nbytes for part in b.weight.parts.values() if part is not None)
        assert layer.bytes < sum(part.nbytes for part in a.weight.parts.values() if part is not None)
        assert layer.scheme.startswith(f"{a.weight.scheme.name}_2:4")
    assert "compressed" in str(explain(ours))
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    quantize_(
        reference := model(),
        CONFIGS[name].__class__(**{**CONFIGS[name].__getstate__(), "kernel": "dequantize"}),
    )
    with torch.no_grad():
        assert same(ours(x), reference(x))


def test_static_scales_of_inputs():
    config = Int8StaticActivationInt8WeightConfig(act_quant_scale=torch.tensor(0.02))
    dense, ours = model(), model()
    quantize_(dense, config)
    quantize_(ours, Int8StaticActivationInt8WeightConfig(act_quant_scale=torch.tensor(0.02), sparsity="2:4"))
    assert torch.equal(dense[0].weight.input_scale, ours[0].weight.input_scale)
    assert same(dense[0].weight.dequantize(), ours[0].weight.dequantize())
    watched = model()
    config = Int8StaticActivationInt8WeightConfig(sparsity="2:4")
    quantize_(watched, config, forward_loop=lambda m: m(torch.ones(2, 64, dtype=torch.bfloat16)))
    assert isinstance(watched[0].weight, SparseQuantizedTensor)
    assert watched[0].weight.input_scale is not None


def test_a_dense_layer_among_them_changes_nothing():
    made = model()
    with torch.no_grad():
        made[2].weight[0, :4] = 1
    before = copy.deepcopy(made.state_dict())
    with pytest.raises(
        ValueError, match=r"2\.weight: .*1 of 768 groups.*sparsify_.*changed nothing.*filter_fn"
    ):
        quantize_(made, Int8WeightOnlyConfig(sparsity="2:4"))
    assert not any(isinstance(p, QuantizedTensor) for p in made.parameters())
    assert all(torch.equal(value, before[name]) for name, value in made.state_dict().items())


@pytest.mark.parametrize(
    ("length", "config", "message"),
    [
        (66, Int8WeightOnlyConfig(sparsity="2:4"), r"0\.weight: .*multiple of 4, got shape \(8, 66\)"),
        (48, SchemeConfig(scheme="int4_g32", sparsity="2:4"), r"0\.weight: .*not divisible"),
    ],
)
def test_lengths_that_cannot_be_stored(length, config, message):
    made = nn.Sequential(nn.Linear(length, 8))
    nn.init.zeros_(made[0].weight)
    with pytest.raises(ValueError, match=message):
        quantize_(made, config)
    assert not isinstance(made[0].weight, QuantizedTensor)


def test_what_is_compressed_already():
    made = model()
    quantize_(made, Int8WeightOnlyConfig(sparsity="2:4"))
    weight = made[0].weight
    for config in (Int8WeightOnlyConfig(sparsity="2:4"), Int8WeightOnlyConfig()):
        with pytest.raises(ValueError, match="already quantized"):
            quantize_(made, config)
    with pytest.raises(ValueError, match="in 2:4 storage already"):
        sparsify_(made, SparsityConfig())
    assert made[0].weight is weight
    plain = model(pruned=False)
    sparsify_(plain, SparsityConfig(storage="compressed"))
    with pytest.raises(ValueError, match=r"0\.weight is in 2:4 storage already.*storage='dense'"):
        quantize_(plain, Int8WeightOnlyConfig())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NF4WeightOnlyConfig(sparsity="2:4"), "flattened"),
        (lambda: SchemeConfig(scheme="torchao.int4_g32_tinygemm", sparsity="2:4"), "floating-point numbers"),
        (lambda: Int8WeightOnlyConfig(sparsity="4:8"), "sparsity"),
        (lambda: Int8DynamicActivationInt8WeightConfig(kernel="int8", sparsity="2:4"), "_int_mm"),
        (lambda: Float8DynamicActivationFloat8WeightConfig(kernel="scaled_mm", sparsity="2:4"), "_scaled_mm"),
        (
            lambda: Int4WeightOnlyConfig(scheme="int4_g32", kernel="fused", sparsity="2:4"),
            "decode every code",
        ),
    ],
)
def test_configurations_that_cannot_be_stored(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("step", ["prepare", "convert"])
def test_training_fills_zeros(step):
    with pytest.raises(ValueError, match="for inference; leave sparsity out"):
        quantize_(model(), QATConfig(Int4WeightOnlyConfig(scheme="int4_g32", sparsity="2:4"), step=step))


def test_one_layer_by_name():
    made = model()
    quantize_(made, FqnToConfig({"0": Int8WeightOnlyConfig(sparsity="2:4"), "2": Int8WeightOnlyConfig()}))
    assert [type(layer.weight) for layer in (made[0], made[2])] == [SparseQuantizedTensor, QuantizedTensor]


def test_experts_that_sum_along_another_axis():
    class Experts(nn.Module):
        is_transposed = True

        def __init__(self):
            super().__init__()
            self.up = nn.Parameter(torch.zeros(2, 64, 32))

    with pytest.raises(ValueError, match=r"up: .*last axis, got axis -2"):
        quantize_(Experts(), Int8WeightOnlyConfig(sparsity="2:4"), linear_and_experts)
    Experts.is_transposed = False
    made = Experts()
    quantize_(made, Int8WeightOnlyConfig(sparsity="2:4"), linear_and_experts)
    assert made.up.codes.shape == (2, 64, 16)


def test_weights_that_arrive_one_by_one():
    """Their values are seen when they come; the error names the weight then."""
    with torch.device("meta"):
        skeleton = nn.Sequential(nn.Linear(64, 96))
    plan = planned(skeleton, Int8WeightOnlyConfig(sparsity="2:4"), None, streamed=True)
    loading = StreamedWeights(plan, {}, None, None)
    found = loading.parameter("0.weight", model()[0].weight.detach())
    assert isinstance(found, nn.Parameter)
    assert isinstance(found, SparseQuantizedTensor)
    with pytest.raises(ValueError, match=r"0\.weight: .*prune first"):
        loading.parameter("0.weight", torch.ones(96, 64))


def test_sizes_before_and_after():
    made = model()
    config = Int4WeightOnlyConfig(scheme="int4_g32", sparsity="2:4")
    before = model_size(made, config).linear
    quantize_(made, config)
    assert model_size(made).linear == before
    dense = sum(weight_size(shape, "int4_g32").codes for shape in ((96, 64), (32, 96)))
    assert before.codes == dense // 2 + (96 * 64 + 32 * 96) // 8


def test_on_the_meta_device():
    with torch.device("meta"):
        made = nn.Sequential(nn.Linear(64, 96))
    quantize_(made, Int8WeightOnlyConfig(sparsity="2:4"))
    assert isinstance(made[0].weight, SparseQuantizedTensor)
    assert made[0].weight.codes.shape == (96, 32)
    quantize_(whole := nn.Sequential(model()[0]), Int8WeightOnlyConfig(sparsity="2:4"))
    made.load_state_dict(whole.state_dict(), assign=True)
    assert torch.equal(made[0].weight, whole[0].weight)


def test_weights_that_were_multiplied_by_a_mask():
    """Negative zeros among what was pruned, which float8 has codes for: 2:4 storage has one zero."""
    ours, dense = model(pruned=False), model()
    with torch.no_grad():
        for layer in (0, 2):
            ours[layer].weight.mul_(dense[layer].weight != 0)
    assert ((ours[0].weight == 0) & ours[0].weight.signbit()).any()
    quantize_(ours, Float8WeightOnlyConfig(sparsity="2:4"))
    quantize_(dense, Float8WeightOnlyConfig())
    assert same(ours[0].weight.dequantize(), dense[0].weight.dequantize())
