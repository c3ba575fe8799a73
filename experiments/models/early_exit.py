"""A byte-level model whose first layers predict, too: layer dropout and losses of early exits, in the manner of LayerSkip
(arXiv 2404.16710; its abstract, the weights are ours).

Layer l of L is left out of a sequence with probability p (2^(l / (L - 1)) - 1): never the first, p the last. The loss is a mean
over exits, the shared norm and output layer after each layer: the last one counts L - 1, those before it `scale` times the sum
of their numbers, so that later exits count more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.data.corpus import Corpus
from experiments.harness.measuring import share
from experiments.models.llama import frequencies, rotary_tables
from experiments.models.pretraining import (
    LOOK,
    ByteLevelModel,
    PretrainSettings,
    adamw,
    sample,
    set_rate,
    take_step,
)
from experiments.models.train import Run, text_of


@dataclass(frozen=True)
class Exits:
    """How a training treats depth. dropout: p of the module text; scale: of the losses of early exits. 0 of both: as usual."""

    dropout: float = 0.1
    scale: float = 1.0

    def drop(self, layer: int, layers: int) -> float:
        """The probability with which a layer is left out of a sequence."""
        return self.dropout * (2 ** (layer / max(1, layers - 1)) - 1)

    def weights(self, layers: int) -> list[float]:
        """Weights of the exits after each layer; they add up to 1."""
        early = [self.scale * layer * (layer + 1) / 2 for layer in range(layers - 1)]
        last = max(1, layers - 1) + self.scale * (layers - 2) * (layers - 1) / 2
        found = [*early, last]
        return [one / sum(found) for one in found]


#: An ordinary training.
PLAIN = Exits(dropout=0.0, scale=0.0)


def exit_loss(model: nn.Module, tokens: Tensor, exits: Exits) -> Tensor:
    """The mean over exits of -ln p of the bytes 1 to time of (batch, time + 1), a 0-d float32 tensor. Which layers are left out
    is drawn by torch's generator of the device."""
    byte_model: Any = model
    ids, targets = tokens[:, :-1], tokens[:, 1:].flatten()
    layers, device = len(byte_model.model.layers), tokens.device
    positions = torch.arange(ids.shape[1], device=device)
    cosine, sine = rotary_tables(positions, frequencies(byte_model.config, device))
    total = torch.zeros((), device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
        x = byte_model.model.embed_tokens(ids)
        for number, (layer, weight) in enumerate(
            zip(byte_model.model.layers, exits.weights(layers), strict=True)
        ):
            after = layer(x, cosine, sine)
            if drop := exits.drop(number, layers):
                kept = torch.rand(len(ids), 1, 1, device=device) >= drop
                after = torch.where(kept, after, x)
            x = after
            if weight:
                logits = byte_model.lm_head(byte_model.model.norm(x))
                total = total + weight * functional.cross_entropy(logits.float().flatten(0, 1), targets)
    return total


def train_with_exits(settings: PretrainSettings, exits: Exits, corpus: Corpus, device: str) -> ByteLevelModel:
    """A model trained on the corpus until the budget of bytes is used, in evaluation mode."""
    torch.manual_seed(settings.seed)
    model = ByteLevelModel(settings.model).to(device).train()
    run = Run(model, [adamw(model, settings)], torch.Generator().manual_seed(settings.seed), [])
    text = text_of(corpus).to(device)
    with share(f"{settings.model.name}, {settings.method}") as report:
        while (done := settings.budget.fraction(len(run.losses) * settings.step_bytes, 0.0)) < 1:
            set_rate(run.optimizers[0], settings.rate_at(done))
            tokens = sample(text, settings, run.generator)
            run.losses.append(
                take_step(run, lambda net, ids: exit_loss(net, ids, exits), tokens, settings.clip)
            )  # type: ignore[arg-type]
            if len(run.losses) % LOOK == 0:
                report(done, f"loss {run.losses[-1].item():.3f}")
    return model.eval()


def as_transformers(model: ByteLevelModel) -> Any:
    """The same model as transformers' LlamaForCausalLM: names of parameters are the same."""
    import transformers

    c: Any = model.config
    config = transformers.LlamaConfig(
        vocab_size=c.vocabulary, hidden_size=c.width, intermediate_size=c.feed_forward, num_hidden_layers=c.layers,
        num_attention_heads=c.heads, num_key_value_heads=c.kv_heads, rms_norm_eps=c.epsilon, tie_word_embeddings=False,
        max_position_embeddings=4 * c.context,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_base},
    )  # fmt: skip
    llama = transformers.LlamaForCausalLM(config)
    llama.load_state_dict(model.state_dict())
    llama.generation_config.pad_token_id = 0
    return llama.eval().requires_grad_(False)
