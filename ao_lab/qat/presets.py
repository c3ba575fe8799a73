"""Published schemes of quantization-aware training, as configurations of whole models.

`llama32_qat` is that of the quantized Llama 3.2 models: in the blocks 4-bit weights in groups of 32 and 8-bit activations per
token, found for each input; in the classifier 8-bit weights per channel and 8-bit activations per token; in the embedding 8
bits per channel. They were trained in two rounds:

    quantize_(model, llama32_qat())                                # QAT of dense weights
    quantize_(model, llama32_qat(step="convert"))                  # the frozen backbone
    quantize_(model, llama32_qat(lora=LoRA(rank=16)))              # adapters in the blocks' linear layers alone
    quantize_(model, llama32_qat(step="convert"))                  # merged, or leave this out and serve the adapters
"""

from __future__ import annotations

from ao_lab.config.base import Config
from ao_lab.config.fqn import FqnToConfig
from ao_lab.config.granularity import ROWS, PerGroup
from ao_lab.config.integer import Int8DynamicActivationIntxWeightConfig, IntxWeightOnlyConfig
from ao_lab.qat.config import QATConfig
from ao_lab.qat.lora import LoRA

#: Modules by the names that transformers and the authors' own code give them.
BLOCKS = r"re:(?:.*\.)?layers\.\d+\..+"
CLASSIFIER = r"re:(?:.*\.)?(?:lm_head|output)"
EMBEDDING = r"re:(?:.*\.)?(?:embed_tokens|tok_embeddings)"


def llama32_configs(group_size: int = 32) -> dict[str, Config]:
    """What the layers become, by patterns of names; activations have a zero point per token, weights have none."""
    blocks = Int8DynamicActivationIntxWeightConfig(
        weight_dtype="int4", weight_granularity=PerGroup(group_size)
    )
    classifier = Int8DynamicActivationIntxWeightConfig(weight_dtype="int8", weight_granularity=ROWS)
    embedding = IntxWeightOnlyConfig(weight_dtype="int8", granularity=ROWS)
    return {BLOCKS: blocks, CLASSIFIER: classifier, EMBEDDING: embedding}


def llama32_qat(
    step: str = "prepare", *, lora: LoRA | None = None, group_size: int = 32, learn_scales: bool = False
) -> FqnToConfig:
    """The Llama 3.2 scheme for `quantize_`, in either step; every one of the three patterns must match something.

    lora: the second round. Blocks get adapters; classifier and embedding are quantized and frozen alone. A classifier that is
    tied to the embedding stays tied in both rounds: one weight, 8-bit per row of the vocabulary, which both have.
    """

    def of(name: str, config: Config) -> QATConfig:
        adapters = lora if lora is None or name == BLOCKS else LoRA(rank=0, rounds=lora.rounds)
        return QATConfig(config, step=step, lora=adapters, learn_scales=learn_scales)

    return FqnToConfig({name: of(name, config) for name, config in llama32_configs(group_size).items()})


__all__ = ["llama32_configs", "llama32_qat"]
