"""A quantized model as torch multiplies it: what other readers of its files compute bit by bit."""

import copy

import torch

from ao_lab.tensor.quantized_tensor import QuantizedTensor


def by_torch(model):
    """A copy whose weights are dequantized and multiplied by torch, whatever the rows.

    Kernel "auto" of a CPU sums up to 64 rows in another order, within the same bound (tests/ao_lab/gemm).
    """
    model, made = copy.deepcopy(model), {}
    for module in model.modules():
        for name, value in list(module.named_parameters(recurse=False)):
            if isinstance(value, QuantizedTensor):
                known = made.setdefault(
                    id(value), torch.nn.Parameter(value.data.with_recipe(kernel="dequantize"), False)
                )
                setattr(module, name, known)
    return model
