"""What a model does beside predicting a text: speed and memory of generating, and tasks of lm-evaluation-harness."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ao_lab.cli.terminal import say
from ao_lab.eval import Harness, HarnessOptions, harness_results, prepared
from ao_lab.measure.memory import Peak, by_transformers, tells_peak
from experiments.harness.measuring import Values

#: Tokens of the prompt.
SHORT = 16
#: Tokens of the call before the timed one.
WARM = 4
#: Examples of a task of lm-evaluation-harness (None: all), by scale.
EXAMPLES = {"quick": 20, "full": None}


def generation(model: nn.Module, prompt: Tensor, new: int) -> Values:
    """transformers' `generate()` as it is called, greedy, not compiled, batch 1: tokens a second, and peak memory (`Peak`),
    on a CPU of models of 100 MB and more in bfloat16 (`tells_peak`).

    prompt: token ids (1, length), of which the first SHORT are read, so that reading them counts for little; new: tokens, no
    fewer or more. The second of two calls is timed and its memory taken; the first is of few tokens and warms up.
    """
    device = next(model.parameters()).device
    ids, peak = prompt[:, :SHORT].to(device), Peak(device)
    by_transformers(model, ids, min(new, WARM))
    peak.begin()
    seconds, _ = by_transformers(model, ids, new)
    found: Values = {"tokens/s": (new / seconds, "1/s")}
    dense = 2 * sum(one.numel() for one in model.parameters())
    over = peak.over() if tells_peak(device, dense) else None
    return found if over is None else {**found, "memory of generating, over the weights": (over, "byte")}


@lru_cache(maxsize=8)
def tasks_of(names: tuple[str, ...], folder: Path) -> Harness:
    """What tasks of lm-evaluation-harness need, for the model of a folder: those whose data are on this machine.

    A task without its data is said to be missing, once, and the others go on. ValueError for a name that the harness does not
    know, and as `ao_lab.eval.prepared`.
    """
    harness = prepared(list(names), HarnessOptions(batch_size="8"), folder)
    if harness is None:
        raise ValueError("no task of lm-evaluation-harness was named")
    return replace(harness, tasks=[name for name in names if has_data(harness.manager, name)])


def has_data(manager: Any, name: str) -> bool:
    """Whether a task can be loaded; ValueError for one that the harness does not know."""
    try:
        manager.load([name])
    except KeyError as error:
        raise ValueError(f"--task {name}: lm-evaluation-harness has no such task ({error})") from error
    except Exception as error:  # noqa: BLE001
        # Data come from anywhere, and fail in as many ways; a run goes on without them.
        say(f"--task {name}: NOT MEASURED, its data are not on this machine: {type(error).__name__}: {error}")
        return False
    return True


def task_values(model: nn.Module, harness: Harness, examples: int | None) -> Values:
    """The numbers of each task as metrics such as "hellaswag: acc_norm"; nothing where no task is left, the reason
    where the harness raises."""
    if not harness.tasks:
        return {}
    try:
        found = harness_results(model, harness, examples)
    except Exception as error:  # noqa: BLE001
        # What was measured before is not lost by what a task's code, its data or a tokenizer raise.
        say(f"tasks of lm-evaluation-harness: NOT MEASURED: {type(error).__name__}: {error}")
        return {
            f"tasks: not measured: {type(error).__name__}: {' '.join(str(error).split())[:120]}": (0.0, "")
        }
    values: Values = {
        f"{task}: {name}": (value, "")
        for task, numbers in found["tasks"].items()
        for name, value in numbers.items()
    }
    return {**values, "tasks: examples of each (0: all)": (float(examples or 0), "")}
