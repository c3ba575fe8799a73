"""`AttentionSettings`: what `use_attention_` has set on a model."""

from __future__ import annotations

from dataclasses import dataclass

from reference.attention.quantized import AttentionRecipe

#: Where a model has what `use_attention_` set.
ATTRIBUTE = "_ao_lab_attention"


@dataclass(frozen=True)
class AttentionSettings:
    """What `use_attention_` has set; as a string, in a sentence.

    recipe: of attention. name: of its function among transformers'. before: the model's attention before.
    """

    recipe: AttentionRecipe
    name: str
    before: str | None

    def __str__(self) -> str:
        return f"prefill by attention {self.name} ({self.recipe}); before: {self.before}"


__all__ = ["ATTRIBUTE", "AttentionSettings"]
