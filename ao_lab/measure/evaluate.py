"""`evaluate`: perplexity, accuracy and distance from the base of a language model, and tasks of lm-evaluation-harness."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ao_lab.checkpoint.io.files import hub_name
from ao_lab.checkpoint.io.markdown import hub_name as name_in_card
from ao_lab.eval import (
    Harness,
    HarnessOptions,
    Text,
    changed_beside,
    check_text,
    harness_note,
    harness_results,
    measured,
    prepared,
    quantized_weights,
    results_of,
    text_of,
    told_values,
    weight_errors,
    with_halves,
)
from ao_lab.install.extras import WrongInput, needed, pip_install, wrong_input
from ao_lab.install.versions import __version__
from ao_lab.intervals import MEANING
from ao_lab.measure.asked import PAIRED, TASKS, check_tasks
from ao_lab.measure.base_weights import scaled_beside
from ao_lab.measure.folders import (
    check_folder,
    check_language_model,
    check_vocabulary,
    device_of,
    evaluating,
    loaded,
    windows_for,
)
from reference.arrays.namespace import lookup

Progress = Callable[[int, int], None]


def _silent(done: int, total: int) -> None:
    """Says nothing."""


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` found.

    tasks: numbers by task and name ("perplexity": {"token_perplexity": ..., "loss": ..., "loss_stderr": ...}, ...).
    conditions: what they hold for: text, windows, tokens, device, versions, options of the harness.
    """

    model: str
    tasks: dict[str, dict[str, float]]
    against: str | None = None
    conditions: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `ao-lab eval --json` prints them; of each 95% interval its two ends."""
        ends: dict[str, dict[str, tuple[float, float]]] = {}
        for task, name, value, half in with_halves(self.tasks, self.conditions.get("windows")):
            if half is not None:
                ends.setdefault(task, {})[name] = value - half, value + half
        told = {"model": self.model, "against": self.against, "tasks": self.tasks, "intervals_95": ends}
        return {**told, **self.conditions}

    def to_frame(self) -> Any:
        """A pandas DataFrame with the columns model, task, number and value."""
        rows = [
            {"model": self.model, "task": task, "number": name, "value": value}
            for task, numbers in self.tasks.items()
            for name, value in numbers.items()
        ]
        return needed("pandas").DataFrame(rows, columns=["model", "task", "number", "value"])

    def lines(self) -> list[tuple[str, str, str]]:
        """Task, name and value of each number as text; where it has a standard error, rounded, with half of its 95% interval.

        That is by Student's t over the windows, or over the examples of a task of lm-evaluation-harness.
        """
        return list(told_values(self.tasks, self.conditions.get("windows")))

    @property
    def notes(self) -> list[str]:
        """What the numbers compare with, what ± says, and how tasks of the harness were asked."""
        told = [f"comparable with {self.conditions['comparable']}"] if "comparable" in self.conditions else []
        meaning = [f"{MEANING} (Student's t)"] * any(" ± " in value for _, _, value in self.lines())
        note = harness_note(self.conditions)
        return [*told, *meaning, *filter(None, [note, self.conditions.get(LEFT_OUT)])]

    def __str__(self) -> str:
        lines = [f"{task:>12}  {name:<24}{value}" for task, name, value in self.lines()]
        return "\n".join([f"{self.model} on {self.conditions.get('text', 'tasks')}", *lines])


def evaluate(
    model: str | Path | nn.Module,
    *,
    text: str | Path | Text | None = None,
    corpus: str | Path | None = None,
    against: str | Path | nn.Module | None = None,
    tokenizer: str | Path | Any = None,
    tasks: Sequence[str] | None = None,
    limit: int = 32,
    length: int | None = None,
    harness: HarnessOptions | None = None,
    device: str | None = None,
    progress: Progress = _silent,
) -> Evaluation:
    """What a causal language model knows of a text, how far it is from its base, and how it does in tasks; nothing is fetched.

    model: a folder (ours, compressed-tensors, torchao or dense), or a model in memory, which stays where it is. against: the
    folder or model that it was made of, for the tasks "agreement" (KL divergence, share of equal first tokens, difference of
    the losses) and "weights" (not where scales moved between layers; notes say so). tokenizer: of a model in memory, a folder
    with tokenizer.json or a fast tokenizer of transformers; models of 256 tokens read bytes. text: "wikitext2" with `corpus`,
    the folder of the corpus prose; a file; None: the source of sympy. tasks: of "perplexity", "accuracy", "agreement" and
    "weights" (None: all that can be), and tasks of lm-evaluation-harness, of folders alone, with the options `harness`.
    limit: windows of text, and examples of each task of the harness. length: tokens of a window; None: 512, or the model's
    context where that is shorter. device: of a folder; None: cuda where there is a GPU. progress: called with windows done
    and of how many.

    Losses are means over windows, in nats per token, each with its standard error over windows, where there are two or more.
    ValueError for what is not there, does not fit, or is longer than the model's context (nothing is read then), and for
    "weights" alone where they are left out.
    """
    name = name_of(model)
    local, foreign = split_tasks(list(tasks or ()), against is not None)
    for one in (model, against):
        if isinstance(one, (str, Path)):
            check_folder(Path(one))
    where = device_of(device, model)
    run = harness_of(model, foreign, harness or HarnessOptions())
    source = source_of(text, corpus) if local else None
    result = Evaluation(name, {}, None, {"device": where})
    if source is not None:
        result = _local(model, local, limit, length, source, against, tokenizer, where, progress)
    if not result.tasks and run is None and (why := result.conditions.get(LEFT_OUT)):
        raise WrongInput(f'{why}; ask for other tasks, such as "agreement"')
    return result if run is None else _with_harness(result, model, run, limit, where)


def split_tasks(tasks: list[str], paired: bool) -> tuple[tuple[str, ...], list[str]]:
    """Our tasks and those of lm-evaluation-harness; WrongInput where the base or the harness is missing."""
    wanted = tasks or [task for task in TASKS if paired or task not in PAIRED]
    local = tuple(task for task in TASKS if task in wanted)
    foreign = [task for task in wanted if task not in TASKS]
    check_tasks(wanted, paired)
    return local, foreign


def harness_of(model: object, tasks: list[str], options: HarnessOptions) -> Harness | None:
    """What tasks of the harness need; WrongInput, with the nearest names, for tasks that it lacks (a YAML file is one)."""
    if tasks and not isinstance(model, (str, Path)):
        raise WrongInput(
            f"{tasks[0]}: tasks of lm-evaluation-harness take a folder; save_pretrained writes the model into one"
        )
    with wrong_input():
        run = prepared(tasks, options, Path(str(model)))
        for name in () if run is None else run.tasks:
            if run is not None and name not in run.manager.all_tasks and not Path(name).exists():
                lookup(name, {**dict.fromkeys(TASKS, ""), **dict.fromkeys(run.manager.all_tasks, "")}, "task")
    return run


def tasks_of(model: str | Path | nn.Module, tasks: Sequence[str], options: HarnessOptions) -> Harness | None:
    """What tasks of lm-evaluation-harness need, None without any; WrongInput for others, and where it is not installed."""
    asked = [tasks] if isinstance(tasks, str) else list(tasks)
    own, foreign = [one for one in asked if one in TASKS], [one for one in asked if one not in TASKS]
    if own:
        raise WrongInput(
            f"--tasks {own[0]}: compare takes tasks of lm-evaluation-harness; perplexity, KL divergence and agreement are "
            "measured without being named, and ao-lab eval has the errors of weights"
        )
    if foreign and importlib.util.find_spec("lm_eval") is None:
        raise WrongInput(
            f"--tasks {foreign[0]}: lm-evaluation-harness is not installed; {pip_install('eval')}, or leave --tasks out"
        )
    return harness_of(model, foreign, options)


def told_of(run: Harness, limit: int) -> dict[str, Any]:
    """What numbers of the harness hold for."""
    options = {name: value if value is None else str(value) for name, value in vars(run.options).items()}
    version = getattr(importlib.import_module("lm_eval"), "__version__", None)
    return {"names": list(run.tasks), "limit": limit, **options, "lm_eval": version}


def source_of(text: str | Path | Text | None, corpus: str | Path | None) -> Text:
    """The text of a name, of a file, or a `Text` itself; WrongInput where it is not there."""
    if isinstance(text, Text):
        return text
    given, folder = (None if text is None else str(text)), (None if corpus is None else Path(corpus))
    with wrong_input():
        check_text(given, folder)
        return text_of(given, folder)


def name_of(model: str | Path | nn.Module) -> str:
    """The name of a folder's model, without its owner, as the Hub's cache or the card of `ao-lab pretrained` has it, else the
    last part of the folder; or the class of a model in memory. TypeError for neither."""
    if not isinstance(model, (str, Path, nn.Module)):
        raise TypeError(
            f"the model is a folder or a torch.nn.Module, got {type(model).__name__}: {model!r:.60}"
        )
    if isinstance(model, nn.Module):
        return type(model).__name__
    folder = Path(model)
    return (hub_name(folder) or name_in_card(folder / CARD) or folder.resolve().name).rpartition("/")[2]


def _local(
    model: str | Path | nn.Module,
    tasks: tuple[str, ...],
    limit: int,
    length: int | None,
    source: Text,
    against: str | Path | nn.Module | None,
    tokenizer: Any,
    device: str,
    progress: Progress,
) -> Evaluation:
    """The results of our tasks and their conditions."""
    windows, reading = windows_for(model, tokenizer, source, limit, length)
    ready = in_memory(model, device)
    base = None if against is None or not set(tasks) & set(PAIRED) else base_of(against, model, device)
    check_vocabulary(ready, windows.ids, name_of(model))
    numbers: dict[str, dict[str, float]] = {}
    left_out = ""
    if set(tasks) - {"weights"}:
        check_language_model(ready, name_of(model))
        with evaluating(ready), nullcontext() if base is None else evaluating(base):
            sums = measured(ready, windows, base, progress)
        numbers = dict(results_of(sums, windows, tasks, words=not source.code))
    if "weights" in tasks and base is not None:
        some = next(quantized_weights(ready), None) is not None
        left_out = _left_out(changed_beside(ready, base), scaled_beside(ready, base)) if some else ""
        numbers |= {} if left_out else {"weights": weight_errors(ready, base)}
    conditions = {
        **conditions_of(source, windows, reading),
        "device": device,
        "versions": {"ao_lab": __version__, "torch": torch.__version__},
        **({LEFT_OUT: left_out} if left_out else {}),
    }
    return Evaluation(name_of(model), numbers, None if against is None else name_of(against), conditions)


#: The model card of a folder.
CARD = "README.md"
#: Where conditions say why errors of weights are not there.
LEFT_OUT = "weights_left_out"


def _left_out(names: Sequence[str], scaled: Sequence[str]) -> str:
    """Why errors of weights say nothing: unquantized parameters that differ from the base's, or quantized weights whose scales
    moved; "" where neither is."""
    if not names and not scaled:
        return ""
    if not names:
        return (
            f"errors of weights are left out: rows or columns of {len(scaled)} quantized weights ({scaled[0]} first) are "
            "scaled against the base's, as after AWQ or Smooth; the weights stand for others than the base's"
        )
    return (
        f"errors of weights are left out: {len(names)} unquantized parameters differ from the base's ({names[0]} first), as "
        "after AWQ, Smooth or Rotate, which scale or rotate channels between layers, or after training; the weights stand for "
        "others than the base's"
    )


def conditions_of(source: Text, windows: Any, reading: Any) -> dict[str, Any]:
    """What numbers on a text hold for."""
    return {
        "text": source.name,
        "comparable": source.compares,
        "tokenizer": reading.name,
        "windows_begin_with": "".join(reading.beginning) or None,
        "windows": len(windows.ids),
        "length": windows.ids.shape[1],
        "tokens": windows.predicted,
    }


#: Elements of each parameter, and pieces of each file of so many bytes, that tell weights apart.
SAMPLED, PIECES, PIECE = 64, 256, 4096


def fingerprint(model: str | Path | nn.Module) -> str:
    """What tells other weights of the same name apart: a hash of pieces of a folder's files, or of a model's parameters."""
    found = hashlib.sha256()
    if isinstance(model, nn.Module):
        for name, parameter in model.named_parameters():
            flat = parameter.detach().reshape(-1)
            sample = flat[:: max(1, flat.numel() // SAMPLED)].float().cpu().numpy()
            found.update(f"{name} {parameter.dtype}".encode() + sample.tobytes())
        return found.hexdigest()[:16]
    for path in sorted(Path(model).glob("*")):
        if path.is_file() and path.suffix in (".safetensors", ".bin", ".json"):
            size = path.stat().st_size
            found.update(f"{path.name} {size}".encode())
            with path.open("rb") as file:
                for start in range(0, size, max(PIECE, size // PIECES)):
                    file.seek(start)
                    found.update(file.read(PIECE))
    return found.hexdigest()[:16]


def digest_of(ids: Iterable[torch.Tensor]) -> str:
    """What tells texts of one name apart: a hash of the tokens that are read."""
    found = hashlib.sha256()
    for one in ids:
        found.update(str(tuple(one.shape)).encode() + one.cpu().numpy().tobytes())
    return found.hexdigest()[:16]


def in_memory(model: str | Path | nn.Module, device: str) -> nn.Module:
    """The model of a folder on a device, or the one that was given, where it is."""
    return loaded(Path(model), device) if isinstance(model, (str, Path)) else model


def base_of(against: str | Path | nn.Module, model: str | Path | nn.Module, device: str) -> nn.Module:
    """The base; WrongInput where it is the model itself."""
    folders = isinstance(against, (str, Path)) and isinstance(model, (str, Path))
    if against is model or (folders and Path(str(against)).resolve() == Path(str(model)).resolve()):
        raise WrongInput(f"--against {name_of(against)} is the model itself; give the folder of its base")
    return in_memory(against, device)


def _with_harness(
    found: Evaluation, model: str | Path | nn.Module, run: Harness, limit: int, device: str
) -> Evaluation:
    """The results of lm-evaluation-harness beside ours."""
    told = harness_results(in_memory(model, device), run, limit)
    tasks = {**found.tasks, **told.pop("tasks")}
    return Evaluation(found.model, tasks, found.against, {**found.conditions, **told})


__all__ = ["Evaluation", "HarnessOptions", "evaluate"]
