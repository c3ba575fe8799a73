"""quantize_pretrained of folders that hold quantized weights."""

import pytest
import torch

from ao_lab import (
    FqnToConfig,
    Int8WeightOnlyConfig,
    NF4WeightOnlyConfig,
    QuantizedTensor,
    explain,
    load_pretrained,
    quantize_,
    quantize_pretrained,
    save_pretrained,
)
from tests.ao_lab.checkpoint.formats.folders import compressed_folders as made
from tests.ao_lab.checkpoint.formats.folders.compressed_folders import INT4, group

pytest.importorskip("compressed_tensors")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
INT8 = Int8WeightOnlyConfig()
PACKED = {"group_0": {**group({**INT4, "strategy": "group", "group_size": 32}), "format": "pack-quantized"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of another library, its head and one projection dense; the weights as the library makes them."""
    path = tmp_path_factory.mktemp("packed")
    model = made.apply(made.tiny_llama(), PACKED, ("lm_head", "re:.*down_proj"))
    return path, made.compress(model, path)


def test_what_is_quantized_stays_and_the_rest_is_quantized(folder, tmp_path):
    path, wanted = folder
    model = quantize_pretrained(path, INT8)
    loaded = load_pretrained(path)
    for name, dense in wanted.items():
        assert made.same_bits(model.get_parameter(name).dequantize(), dense)
    same = loaded
    quantize_(same, INT8)
    rest = {name for name, p in model.named_parameters() if isinstance(p, QuantizedTensor)} - set(wanted)
    assert rest == {"lm_head.weight", "model.layers.0.mlp.down_proj.weight"}
    for name in rest:
        assert made.same_bits(model.get_parameter(name).dequantize(), same.get_parameter(name).dequantize())
    reasons = {layer.name: layer.reason for layer in explain(model).layers}
    assert all("compressed-tensors (pack-quantized)" in reasons[name] for name in wanted)
    assert all("Linear" in reasons[name] for name in rest)
    save_pretrained(model, tmp_path / "both")
    again = load_pretrained(tmp_path / "both")
    for name, p in model.named_parameters():
        if isinstance(p, QuantizedTensor):
            assert made.same_bits(again.get_parameter(name).dequantize(), p.dequantize())


def test_models_of_ones_own_are_quantized_further(folder):
    path, wanted = folder
    model = quantize_pretrained(path, INT8, build=made.tiny_llama, dtype=torch.bfloat16)
    assert {name for name, p in model.named_parameters() if isinstance(p, QuantizedTensor)} > set(wanted)


@pytest.mark.parametrize("first", [True, False])
def test_a_folder_with_nothing_left_says_what_it_holds(folder, tmp_path, first):
    path = folder[0]
    if not first:
        save_pretrained(quantize_pretrained(path, INT8), tmp_path)
        path = tmp_path
    names = "re:.*up_proj.weight" if first else "re:.*_proj.weight"
    with pytest.raises(
        ValueError, match=r"quantized already: .* weights in .*stay as they are.*none of them can be changed"
    ):
        quantize_pretrained(path, FqnToConfig({names: NF4WeightOnlyConfig()}))
    with pytest.raises(ValueError, match=r"quantized already: .*nowhere"):
        quantize_pretrained(path, FqnToConfig({"nowhere": INT8}))
