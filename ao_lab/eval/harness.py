"""Tasks of lm-evaluation-harness (lm_eval), by the options of its own command: `--num_fewshot`, `--batch_size`,
`--apply_chat_template`, `--include_path`."""

from __future__ import annotations

import contextlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ao_lab.install.extras import needed

BATCH_SIZE = re.compile(r"[1-9][0-9]*|auto(:[1-9][0-9]*)?", re.ASCII)


@dataclass(frozen=True)
class HarnessOptions:
    """Options of the harness; None and False are its defaults.

    num_fewshot: examples before each question, the task's own number by default. batch_size: requests at once, a number, "auto"
    or "auto:N", 1 by default. apply_chat_template: whether requests are put into the tokenizer's chat template, examples as
    turns of it. include_path: a folder of tasks beside those of the harness.
    """

    num_fewshot: int | None = None
    batch_size: str | None = None
    apply_chat_template: bool = False
    include_path: Path | None = None

    def given(self) -> list[str]:
        """The options that are not at their default, as the command spells them."""
        return [
            f"--{name.replace('_', '-')}" for name, value in vars(self).items() if value not in (None, False)
        ]


def check_options(options: HarnessOptions, tasks: list[str]) -> None:
    """ValueError for options without a task of the harness, values that it does not take, and a folder that is not there."""
    if options.given() and not tasks:
        raise ValueError(
            f"{', '.join(options.given())}: for tasks of lm-evaluation-harness alone, and --tasks names none"
        )
    if options.num_fewshot is not None and options.num_fewshot < 0:
        raise ValueError(f"--num-fewshot is a number of examples, 0 or more, got {options.num_fewshot}")
    if options.batch_size is not None and not BATCH_SIZE.fullmatch(options.batch_size):
        raise ValueError(
            f"--batch-size is 1 or more, auto or auto:N (looked for N times), got {options.batch_size!r}"
        )
    if options.include_path is not None and not options.include_path.is_dir():
        raise ValueError(
            f"--include-path {options.include_path} is no folder; give the one of the tasks' YAML files"
        )


@dataclass(frozen=True)
class Harness:
    """What a run needs beside the model: names or YAML files of tasks, options, the harness's `TaskManager`, a tokenizer."""

    tasks: list[str]
    options: HarnessOptions
    manager: Any
    tokenizer: Any


def prepared(tasks: list[str], options: HarnessOptions, folder: Path) -> Harness | None:
    """The harness for tasks on the model of a folder, before weights are read; None without tasks.

    ValueError as `check_options`, and for a folder without a tokenizer that the harness can work with.
    """
    check_options(options, tasks)
    if not tasks:
        return None
    tokenizer = tokenizer_of(folder, options.apply_chat_template)
    path = options.include_path
    manager = needed("lm_eval.tasks").TaskManager(include_path=None if path is None else str(path))
    return Harness(tasks, options, manager, tokenizer)


def tokenizer_of(folder: Path, by_template: bool) -> Any:
    """The tokenizer of a folder; ValueError where there is none, or no token that the harness can begin a text with.

    by_template: whether it has to have a chat template.
    """
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise ValueError(
            f"{folder} has no tokenizer, which tasks of lm-evaluation-harness need; copy that of the base model into it"
        )
    load: Any = needed("transformers").AutoTokenizer.from_pretrained
    tokenizer = load(folder, local_files_only=True, trust_remote_code=False)
    if by_template and tokenizer.chat_template is None:
        raise ValueError(
            f"--apply-chat-template: the tokenizer of {folder} has no chat template; leave it out, or copy chat_template.jinja "
            f"of the base model into the folder"
        )
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer of {folder} names neither bos_token nor eos_token, one of which lm-evaluation-harness begins "
            f"a text with; name one in tokenizer_config.json"
        )
    return tokenizer


def harness_results(model: nn.Module, run: Harness, limit: int) -> dict[str, Any]:
    """The numbers of each task ("tasks") and the conditions of the harness.

    limit: how many examples of each task. What the harness prints goes to stderr, because stdout may be one JSON document.
    """
    options = run.options
    harness, models = needed("lm_eval"), needed("lm_eval.models.huggingface")
    with contextlib.redirect_stdout(sys.stderr):
        wrapped = models.HFLM(pretrained=model, tokenizer=run.tokenizer, batch_size=options.batch_size or 1)
        result = harness.simple_evaluate(
            model=wrapped,
            tasks=run.tasks,
            limit=limit,
            num_fewshot=options.num_fewshot,
            apply_chat_template=options.apply_chat_template,
            task_manager=run.manager,
        )
    return {
        "tasks": {task: numbers(found) for task, found in result["results"].items()},
        "harness_limit": limit,
        "harness_num_fewshot": dict(result.get("n-shot", {})),
        "harness_chat_template": options.apply_chat_template,
        "harness_version": getattr(harness, "__version__", None),
    }


def numbers(found: dict[str, Any]) -> dict[str, float]:
    """The numbers among a task's results, without the name of a filter that filters nothing."""
    return {
        key.removesuffix(",none"): value for key, value in found.items() if isinstance(value, (int, float))
    }


def harness_note(results: dict[str, Any]) -> str | None:
    """What the numbers of the harness are of; None where there are none."""
    if "harness_limit" not in results:
        return None
    shots = results["harness_num_fewshot"]
    said = ", ".join(f"{task} {count}-shot" for task, count in shots.items())
    template = ", by the chat template" if results["harness_chat_template"] else ""
    return (
        f"tasks of lm-evaluation-harness: at most {results['harness_limit']} examples of each (--limit)"
        f"{f'; {said}' if said else ''}{template}"
    )


__all__ = ["Harness", "HarnessOptions", "harness_note", "harness_results", "prepared"]
