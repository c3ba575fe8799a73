"""Kernels of 2:4 storage named in a configuration: asked about the weight as it will be stored, refused for a dense one.

The tests for a GPU are taken away where one has to be there; the reference computes then.
"""

import copy
import io
import warnings

import pytest
import torch
from torch import nn

from ao_lab import (
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerGroup,
    Recipe,
    SchemeConfig,
    SparseQuantizedTensor,
    SparseRecipe,
    SparsityConfig,
    explain,
    load_pretrained,
    quantize_,
    quantized,
    quantized_compressed,
    save_pretrained,
    sparsify_,
)
from ao_lab.config.recipe import KERNELS, SPARSE_KERNELS, changed_recipe
from ao_lab.gemm import sparse
from ao_lab.gemm.select import PRODUCTS
from ao_lab.quantization import report
from ao_lab.tensor.metadata import described, meta_from
from reference import SCHEMES
from tests.support.quantized_weights import pruned, same

BF16 = torch.bfloat16


@pytest.fixture
def gpu(monkeypatch):
    """Weights count as lying on a GPU that has the kernels."""
    for name in ("_device_reason", "_wgmma_device_reason"):
        monkeypatch.setattr(sparse, name, lambda w: None)


def model(lengths=(64, 128)):
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
    made, x = model(), torch.randn(3, 128).to(BF16)
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
        ValueError, match=rf"{kernel}' multiplies weights in 2:4 storage alone; give sparsity='2:4'"
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
    made = model(lengths)
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
    assert same(nn.functional.linear(x, stored), sparse.wgmma_run(x, stored.t(), None))


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
    with pytest.raises(ValueError, match="multiplies weights in 2:4 storage alone, this one's is 'plain'"):
        meta_from({**described(w.meta), "layout": "plain"})


def test_files_are_read_where_there_is_no_gpu(gpu, monkeypatch, tmp_path):
    made = model()
    quantize_(made, config("sparse_wgmma", sparsity="2:4"))
    save_pretrained(made, tmp_path, layout="ao_lab")
    monkeypatch.undo()
    other = load_pretrained(tmp_path, model())
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
        (Int4WeightOnlyConfig(group_size=32, sparsity="2:4"), "sparse_int4, up to 64 rows"),
        (Int4WeightOnlyConfig(scheme="int4_g32", sparsity="2:4"), "sparse_int4, up to 64 rows"),
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
    told = [str(one.message) for one in caught if "dequantized in every product" in str(one.message)]
    assert [one.split(",")[0] for one in told] == ["2 of 2 layers"] * slower
    assert all("Int4WeightOnlyConfig, Int8Dynamic" in one for one in told)
    assert all(one.filename == __file__ for one in caught if str(one.message) in told)
    if given.sparsity is not None:
        expected = kernel or "dequantize, slower than bfloat16"
        assert [layer.kernel for layer in explain(made).changed] == [expected] * 2


def test_a_cpu_is_not_told_of_kernels(recwarn):
    quantize_(model(), Int8WeightOnlyConfig(sparsity="2:4"))
    assert not [one for one in recwarn if "dequantized" in str(one.message)]
