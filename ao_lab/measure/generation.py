"""transformers' `generate()` as users call it, timed: tokens a second, and the most memory that it takes."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from ao_lab.measure.memory import synchronize


def by_transformers(model: Any, prompt: Tensor, new: int, **options: Any) -> tuple[float, Tensor]:
    """Seconds of transformers' `generate()` as it is called, greedy, no fewer or more than `new` tokens, and these tokens.

    options: of `generate()`, beside those that make it greedy and of that length.
    """
    synchronize(prompt.device)
    started = time.perf_counter()
    made: Tensor = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=new,
        min_new_tokens=new,
        # Named since transformers else speaks of it at every call.
        pad_token_id=0,
        **options,
    )
    synchronize(prompt.device)
    return time.perf_counter() - started, made[:, prompt.shape[1] :]
