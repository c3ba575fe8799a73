"""What a model does beside predicting a text: speed and memory of generating, and tasks of lm-evaluation-harness."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ao_lab.eval import Harness, HarnessOptions, harness_results, prepared
from experiments.harness.measuring import Values

#: Tokens of the prompt.
SHORT = 16
#: Examples of a task of lm-evaluation-harness (None: all), by scale.
EXAMPLES = {"quick": 20, "full": None}


def generation(model: nn.Module, prompt: Tensor, new: int) -> Values:
    """transformers' `generate()` as it is called, greedy, not compiled, batch 1: tokens a second and, on a GPU, peak memory.

    prompt: token ids (1, length), of which the first SHORT are read, so that reading them counts for little; new: tokens, no
    fewer or more. The second of two calls is timed.
    """
    device = next(model.parameters()).device
    ids = prompt[:, :SHORT].to(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    timed(model, ids, new)
    found: Values = {"tokens/s": (new / timed(model, ids, new), "1/s")}
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) - before
        found["memory of generating, over the weights"] = (peak, "byte")
    return found


def timed(model: Any, ids: Tensor, new: int) -> float:
    """Seconds of a call that makes so many tokens."""
    mask = torch.ones_like(ids)
    if ids.is_cuda:
        torch.cuda.synchronize(ids.device)
    started = time.perf_counter()
    # The padding token is named since transformers else speaks of it at every call.
    model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=new, min_new_tokens=new, pad_token_id=0
    )
    if ids.is_cuda:
        torch.cuda.synchronize(ids.device)
    return time.perf_counter() - started


def tasks_of(names: Sequence[str], folder: Path) -> Harness:
    """What tasks of lm-evaluation-harness need, for the model of a folder; ValueError as `ao_lab.eval.prepared`."""
    harness = prepared(list(names), HarnessOptions(batch_size="8"), folder)
    if harness is None:
        raise ValueError("no task of lm-evaluation-harness was named")
    return harness


def task_values(model: nn.Module, harness: Harness, examples: int | None) -> Values:
    """The numbers of each task as metrics such as "hellaswag: acc_norm"; tasks' data are local, nothing is fetched."""
    found = harness_results(model, harness, examples)
    values: Values = {
        f"{task}: {name}": (value, "")
        for task, numbers in found["tasks"].items()
        for name, value in numbers.items()
    }
    return {**values, "tasks: examples of each (0: all)": (float(examples or 0), "")}
