"""What is compared: dense weights, 2:4 by each score at once, 2:4 after sparse fine-tuning, each stored in three ways.

A method's name says how weights became 2:4; behind a plus it says how they are stored. Codes are symmetric, so that zero
stays zero: a weight that is 2:4 stays so when it is quantized. Here quantized 2:4 weights are dense codes with zeros, whose
values are those of the compressed ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import ao_lab
from ao_lab.config.base import Config
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from experiments.data.measures import stored

PATTERN = "2:4"
DENSE = "dense"
SCORES = ("magnitude", "wanda", "ria", "sparsegpt")
#: Weights in one group of 4-bit integers; it divides every layer of every model here.
GROUP = 32
#: How weights are stored: by its name what `quantize_` is told, None for float weights.
STORAGES: dict[str, Callable[[], Config] | None] = {
    "": None,
    "int4": lambda: ao_lab.IntxWeightOnlyConfig("int4", ao_lab.PerGroup(GROUP)),
    "fp8": lambda: ao_lab.Float8DynamicActivationFloat8WeightConfig(granularity=ao_lab.PerRow()),
}
#: Bits of a dense weight that is not quantized, as models are served: bfloat16. Of its place among four, where it is 2:4.
PLAIN_BITS, INDEX_BITS = 16, 1


@dataclass(frozen=True, kw_only=True)
class FineTuning:
    """One way to train on with 2:4 weights. pruned_by: the score that prunes the trained model first, "" for none."""

    name: str
    config: ao_lab.SparseTrainingConfig
    pruned_by: str = ""


#: SparseGPT, then training with its masks, is how Sparse-Llama-3.1-8B-2of4 was made; SR-STE (arXiv 2102.04010) prunes nothing
#: before.
FINE_TUNINGS = (
    FineTuning(
        name="fine-tuned, fixed masks",
        config=ao_lab.SparseTrainingConfig(pattern=PATTERN, masks="fixed", gradient="masked"),
        pruned_by="sparsegpt",
    ),
    FineTuning(
        name="fine-tuned, SR-STE",
        config=ao_lab.SparseTrainingConfig(pattern=PATTERN, masks="recomputed", gradient="sr-ste"),
    ),
)


def one_shot(score: str) -> str:
    """The method of a model that a score has pruned at once."""
    return f"one-shot, {score}"


def stored_as(method: str, storage: str) -> str:
    """The method with how its weights are stored."""
    return f"{method} + {storage}" if storage else method


def parts_of(method: str) -> tuple[str, str]:
    """How weights became 2:4, and how they are stored: the inverse of `stored_as`."""
    name, _, storage = method.partition(" + ")
    return name, storage


#: All methods without storage, in the order of tables.
METHODS = (DENSE, *map(one_shot, SCORES), *(one.name for one in FINE_TUNINGS))


def inside_blocks(module: nn.Module, name: str) -> bool:
    """The layers that are pruned and quantized: linear ones inside the blocks, as `sparsify_` chooses them."""
    return isinstance(module, nn.Linear) and name.startswith(("blocks.", "model.layers."))


def prune(model: nn.Module, score: str, calibration: Sequence[Tensor]) -> None:
    """Make the layers of a model 2:4 at once."""
    data: dict[str, Iterable[Tensor]] = {} if score == "magnitude" else {"calibration": calibration}
    ao_lab.sparsify_(model, ao_lab.SparsityConfig(PATTERN, score), inside_blocks, **data)


def store(model: nn.Module, storage: str) -> None:
    """Quantize the same layers."""
    config = STORAGES[storage]
    if config is not None:
        ao_lab.quantize_(model, config(), filter_fn=inside_blocks)


@torch.no_grad()
def sparse_layers(model: nn.Module) -> tuple[int, int]:
    """How many of the layers are 2:4, by their values, and how many there are."""
    found = [weight_of(module) for name, module in model.named_modules() if inside_blocks(module, name)]
    return sum(is_sparse(one) for one in found), len(found)


def is_sparse(weight: Tensor) -> bool:
    """Whether at most two of every four weights along the last axis are other than zero."""
    return bool(((weight != 0).unflatten(-1, (-1, 4)).sum(-1) <= 2).all())


def weight_of(layer: nn.Module) -> Tensor:
    """The values of a layer's weight."""
    weight = layer.weight
    return weight.dequantize() if isinstance(weight, QuantizedTensor) else weight.detach()


def bits_per_weight(model: nn.Module, *, sparse: bool) -> float:
    """Bits of these layers' weights as served, scales too; of 2:4 ones half the elements and two bits of index each."""
    total = count = 0
    for name, module in model.named_modules():
        if inside_blocks(module, name):
            weight, size, rest = module.weight, module.weight.numel(), 0
            bits = PLAIN_BITS
            if isinstance(weight, QuantizedTensor):
                found = stored(weight.quantized)
                bits, rest = weight.quantized.scheme.format.bits, found.total - found.elements
            total += (size * bits // 2 + size * INDEX_BITS if sparse else size * bits) + 8 * rest
            count += size
    return total / count
