"""The byte-level model as it is trained here: on a GPU in bfloat16, products and residual stream, with float32 parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.models.language_model import LanguageModel, ModelSettings, frequencies
from experiments.models.llama import LlamaConfig, rotary_tables


class RMSNorm(nn.RMSNorm):
    """RMSNorm whose weight takes the dtype of its input, so that its result has that dtype too; it computes in float32."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) to the same shape and dtype."""
        return functional.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class ByteLevelModel(LanguageModel):
    """A `LanguageModel` whose forward pass keeps activations in bfloat16 on a GPU, and in float32 on a CPU.

    Every matrix is an nn.Linear without bias with a float32 parameter: what converts linear layers converts this model. On a
    GPU it runs under autocast, so that layers that are not converted multiply in bfloat16.
    """

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__(settings)
        for module in list(self.modules()):
            for name, child in module.named_children():
                if isinstance(child, nn.RMSNorm):
                    setattr(module, name, norm_of(settings))

    def forward(self, tokens: Tensor, positions: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Tokens (batch, time) to logits (batch, time, 256); arguments as for `LanguageModel`."""
        device = tokens.device
        if positions is None:
            positions = torch.arange(tokens.shape[-1], device=device)
        cosine, sine = rotary_tables(positions, frequencies(self.config, device))
        on_gpu = device.type == "cuda"
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=on_gpu):
            x = self.model.embed_tokens(tokens)
            # Of the embedding's dtype, the residual stream would take twice the memory traffic of the products.
            x = x.to(torch.bfloat16) if on_gpu else x
            for layer in self.model.layers:
                x = layer(x, cosine, sine, mask).to(x.dtype)
            return self.lm_head(self.model.norm(x))


def norm_of(config: LlamaConfig) -> RMSNorm:
    """A norm of a model's width; its weight is 1."""
    return RMSNorm(config.width, eps=config.epsilon)


def mean_loss(model: LanguageModel, tokens: Tensor) -> Tensor:
    """The mean of -ln p of the bytes 1 to time of (batch, time + 1), a 0-d float32 tensor."""
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


__all__ = ["ByteLevelModel", "RMSNorm", "mean_loss"]
