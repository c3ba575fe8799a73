"""What `torch.distributed.checkpoint.async_save` copies of quantized weights, before it writes."""

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint._state_dict_stager import StateDictStager

import ao_lab
from ao_lab import SparseQuantizedTensor
from ao_lab.tensor import libraries

CONFIGS = {
    "int4": lambda: ao_lab.Int4WeightOnlyConfig(group_size=32),
    "tensorwise": lambda: ao_lab.Float8DynamicActivationFloat8WeightConfig(),
    "two scales": lambda: ao_lab.NVFP4WeightOnlyConfig(),
    "flat": lambda: ao_lab.NF4WeightOnlyConfig(),
    "2:4": lambda: ao_lab.Int8WeightOnlyConfig(sparsity="2:4"),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_staged_weights_are_copies(config):
    """Of both kinds, once where two names hold one, in the memory of the checkpoint before, and without a change of theirs."""
    torch.manual_seed(0)
    model, stager = nn.Sequential(nn.Linear(64, 64)), StateDictStager()
    ao_lab.sparsify_(model, ao_lab.SparsityConfig("2:4"))
    ao_lab.quantize_(model, config())
    weight, wanted = model[0].weight, model[0].weight.dequantize()
    staged = stager.stage({"weight": weight, "tied": weight, "bias": model[0].bias})
    assert type(staged["weight"]) is type(weight.data)
    assert staged["weight"] is staged["tied"]
    with torch.no_grad():
        weight.copy_(torch.zeros(64, 64))
    assert torch.equal(staged["weight"].dequantize(), wanted)
    again = stager.stage({"weight": weight})["weight"]
    assert again.codes.data_ptr() == staged["weight"].codes.data_ptr()
    assert not again.dequantize().any()
    assert isinstance(weight, SparseQuantizedTensor) == (config is CONFIGS["2:4"])


def test_a_second_registration_changes_nothing():
    changed = StateDictStager._offload_tensor
    libraries.register_async_checkpoints()
    assert StateDictStager._offload_tensor is changed
