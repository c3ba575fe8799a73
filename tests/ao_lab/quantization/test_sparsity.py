"""`quantize_` of pruned models into 2:4 storage: the bits of the dense layers, or an error before anything changes.

Kernels of 2:4 storage named in a configuration: asked about the weight as it will be stored, refused for a dense one.

The tests for a GPU are taken away where one has to be there; the reference computes then.
"""

import copy
import io
import warnings

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
    IntxWeightOnlyConfig,
    NF4WeightOnlyConfig,
    PerGroup,
    PerRow,
    QATConfig,
    QuantizedTensor,
    Recipe,
    SchemeConfig,
    SparseQuantizedTensor,
    SparseRecipe,
    SparsityConfig,
    explain,
    linear_and_experts,
    load_pretrained,
    model_size,
    quantize_,
    quantized,
    quantized_compressed,
    save_pretrained,
    sparsify_,
    weight_size,
)
from ao_lab.config.recipe import KERNELS, SPARSE_KERNELS, changed_recipe
from ao_lab.gemm import sparse as sparse_products
from ao_lab.gemm.select import PRODUCTS
from ao_lab.quantization import report
from ao_lab.quantization.api import StreamedWeights
from ao_lab.quantization.plan import planned
from ao_lab.tensor.metadata import described, meta_from
from reference import SCHEMES
from tests.support.quantized_weights import pruned, same

BF16 = torch.bfloat16


@pytest.fixture
def gpu(monkeypatch):
    """Weights count as lying on a GPU that has the kernels."""
    for name in ("_device_reason", "_wgmma_device_reason"):
        monkeypatch.setattr(sparse_products, name, lambda w: None)


def kernel_model(lengths=(64, 128)):
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(lengths[1], lengths[0])).to(BF16)
    sparsify_(made, SparsityConfig())
    return made


def config(kernel, **options):
    if kernel == "sparse_int4":
        return SchemeConfig(scheme="int4_g32", kernel=kernel, **options)
    return Int8DynamicActivationInt8WeightConfig(kernel=kernel, **options)


def test_every_name_is_that_of_a_kernel():
    assert {*KERNELS, *SPARSE_KERNELS} == {"auto", *PRODUCTS}
    for name in SPARSE_KERNELS:
        assert "not in 2:4 storage" in PRODUCTS[name].unsupported_reason(
            quantized(pruned(64, 128), "int8_rowwise").t(), BF16
        )


@pytest.mark.parametrize("kernel", ["sparse_int4", "sparse_wgmma"])
def test_a_kernel_that_is_named_multiplies(kernel, gpu, monkeypatch):
    made, x = kernel_model(), torch.randn(3, 128).to(BF16)
    quantize_(made, config(kernel, sparsity="2:4"))
    weight = made[0].weight
    assert isinstance(weight, SparseQuantizedTensor)
    assert weight.recipe.kernel == kernel
    assert explain(made).layers[0].kernel.split(",")[0] == kernel
    with torch.no_grad():
        assert same(made(x), PRODUCTS[kernel].run(x, weight.t(), made[0].bias))
    # Its dense equivalent is multiplied as any other.
    assert weight.to_layout("plain").recipe.kernel == "auto"
    assert same(weight.to_layout("plain").dequantize(), weight.dequantize())


@pytest.mark.parametrize("kernel", SPARSE_KERNELS)
def test_a_kernel_of_24_storage_needs_it(kernel):
    with pytest.raises(
        ValueError, match=rf"{kernel}' supports weights in 2:4 storage only; give sparsity='2:4'"
    ):
        config(kernel)


@pytest.mark.parametrize(
    ("kernel", "lengths", "reason"),
    [
        (
            "sparse_wgmma",
            (64, 128),
            "for Nvidia GPUs, this weight is on cpu; these do: dequantize, reference",
        ),
        ("sparse_wgmma", (64, 48), "multiple of 32 terms, got 48"),
        ("sparse_int4", (64, 128), "for Nvidia GPUs"),
        ("cusparselt", (64, 128), "for Nvidia GPUs"),
    ],
)
def test_what_it_does_not_take_changes_nothing(kernel, lengths, reason):
    made = kernel_model(lengths)
    before = copy.deepcopy(made.state_dict())
    with pytest.raises(ValueError, match=f"kernel '{kernel}' does not take .*{reason}"):
        quantize_(made, config(kernel, sparsity="2:4"))
    assert type(made[0].weight.data) is torch.Tensor
    assert all(torch.equal(value, before[name]) for name, value in made.state_dict().items())


def test_a_dense_weight_is_refused_by_its_product(gpu):
    """A recipe may name the kernel before the weight is compressed."""
    recipe = SparseRecipe(
        weight=SCHEMES["int8_rowwise"], activation=SCHEMES["int8_rowwise"], kernel="sparse_wgmma"
    )
    dense, x = quantized(pruned(64, 128), recipe), torch.ones(2, 128, dtype=BF16)
    with pytest.raises(ValueError, match="the weight is not in 2:4 storage; these do: int8, "):
        nn.functional.linear(x, dense)
    stored = quantized_compressed(pruned(64, 128), recipe)
    assert same(nn.functional.linear(x, stored), sparse_products.wgmma_run(x, stored.t(), None))


def test_recipes_say_which_storage_their_kernel_takes():
    recipe = SparseRecipe(weight=SCHEMES["int8_rowwise"], kernel="cusparselt", accumulation="blocked")
    assert str(recipe) == "int8_rowwise"
    plain = changed_recipe(recipe, kernel="dequantize")
    assert (type(plain), plain.weight, plain.accumulation) == (Recipe, recipe.weight, "blocked")
    assert changed_recipe(plain, kernel="cusparselt") == recipe
    with pytest.raises(ValueError, match="sparse_wgmma"):
        changed_recipe(recipe, kernel="sparse")
    with pytest.raises(ValueError, match="kernel"):
        SparseRecipe(weight=SCHEMES["int8_rowwise"], kernel="auto")
    w = quantized_compressed(pruned(64, 128), recipe)
    assert w.with_recipe(kernel="auto").with_recipe(kernel="cusparselt").recipe == w.recipe


def test_embeddings_have_no_kernel(gpu):
    made = nn.Sequential(nn.Embedding(16, 128), nn.Linear(128, 64)).to(BF16)
    for weight in (made[0].weight, made[1].weight):
        weight.data = pruned(*weight.shape).to(BF16)
    quantize_(made, config("sparse_wgmma", sparsity="2:4"), filter_fn=lambda module, name: True)
    assert [one.weight.recipe.kernel for one in made] == ["auto", "sparse_wgmma"]


def test_pickles_and_broken_descriptions(gpu):
    w = quantized_compressed(
        pruned(64, 128), SparseRecipe(weight=SCHEMES["int8_rowwise"], kernel="cusparselt")
    )
    file = io.BytesIO()
    torch.save(w, file)
    file.seek(0)
    again = torch.load(file, weights_only=True)
    assert again.recipe == w.recipe
    assert torch.equal(again.codes, w.codes)
    with pytest.raises(ValueError, match="supports weights in 2:4 storage only, this one's is 'plain'"):
        meta_from({**described(w.meta), "layout": "plain"})


def test_files_are_read_where_there_is_no_gpu(gpu, monkeypatch, tmp_path):
    made = kernel_model()
    quantize_(made, config("sparse_wgmma", sparsity="2:4"))
    save_pretrained(made, tmp_path, layout="ao_lab")
    monkeypatch.undo()
    other = load_pretrained(tmp_path, kernel_model())
    assert other[0].weight.recipe.kernel == explain(other).layers[0].kernel == "sparse_wgmma"
    assert same(other[0].weight.dequantize(), made[0].weight.dequantize())
    with pytest.raises(ValueError, match=r"does not take .*for Nvidia GPUs"), torch.no_grad():
        other(torch.ones(1, 128, dtype=BF16))


@pytest.mark.parametrize(
    ("given", "kernel"),
    [
        (Int8WeightOnlyConfig(sparsity="2:4"), None),
        (IntxWeightOnlyConfig(weight_dtype=torch.int2, granularity=PerGroup(32), sparsity="2:4"), None),
        (Int4WeightOnlyConfig(group_size=128, sparsity="2:4"), None),  # of a length that no variant divides
        (Int4WeightOnlyConfig(group_size=32, sparsity="2:4"), "sparse_int4, up to 64 tokens"),
        (Int4WeightOnlyConfig(scheme="int4_g32", sparsity="2:4"), "sparse_int4, up to 64 tokens"),
        (Int8DynamicActivationInt8WeightConfig(sparsity="2:4"), "sparse_wgmma"),
        (Int8WeightOnlyConfig(), None),
    ],
)
def test_a_gpu_without_a_kernel_for_what_is_stored_is_said_once(given, kernel, gpu, monkeypatch):
    """By a warning with how many layers and what has kernels, and in the report."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(256, 64), nn.Linear(64, 256), nn.Linear(256, 64)).to(BF16)
    sparsify_(made, SparsityConfig())
    monkeypatch.setattr(report, "on_gpu", lambda weight: True)
    slower = kernel is None and given.sparsity is not None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quantize_(made, given, filter_fn=lambda module, name: name in ("0", "2"))
    told = [str(one.message) for one in caught if "dequantized in every forward pass" in str(one.message)]
    assert [one.split(",")[0] for one in told] == ["2 of 2 layers"] * slower
    assert all("Int4WeightOnlyConfig, Int8Dynamic" in one for one in told)
    assert all(one.filename == __file__ for one in caught if str(one.message) in told)
    if given.sparsity is not None:
        expected = kernel or "dequantize, slower than bfloat16"
        assert [layer.kernel for layer in explain(made).changed] == [expected] * 2


def test_a_cpu_is_not_told_of_kernels(recwarn):
    quantize_(kernel_model(), Int8WeightOnlyConfig(sparsity="2:4"))
    assert not [one for one in recwarn if "dequantized" in str(one.message)]


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
            "decode every value",
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
