"""What a measurement asks of a model, and is refused before torch is imported: more tokens than config.json says that the model
takes, a text without a tokenizer, tasks that are none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from ao_lab.install.extras import WrongInput, pip_install

#: Tasks that need no extra, and those of them that compare with the model's base.
TASKS, PAIRED = ("perplexity", "accuracy", "agreement", "weights"), ("agreement", "weights")
#: Tokens of models that read bytes.
BYTES = 256
#: Tokens of a window where nothing else is said.
LENGTH = 512
#: Tokens of a prompt of generate(), which is timed.
PROMPT = 16
#: Libraries whose versions results name, where they are installed.
LIBRARIES = ("torch", "transformers", "compressed-tensors", "triton")
#: Names of the longest input in configurations, those of GPT-2 and MPT among them.
CONTEXT = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "n_ctx",
    "seq_length",
)


def as_fields(config: object) -> Mapping[str, Any]:
    """A configuration as a mapping; an empty one of anything else."""
    return config if isinstance(config, Mapping) else getattr(config, "__dict__", {})


def context_of(config: Mapping[str, Any]) -> int | None:
    """The longest input by the fields of a configuration, or by those of its text model; None where none says it."""
    given = [config.get(name) for name in CONTEXT]
    if found := [one for one in given if type(one) is int and one > 1]:
        return found[0]
    text = as_fields(config.get("text_config"))
    return context_of(text) if text else None


def check_length(length: int | None, most: int | None) -> None:
    """WrongInput for sequences of more tokens than the model takes; None: not given, not known."""
    if length is not None and most is not None and length > most:
        raise WrongInput(
            f"--length {length}: the model takes at most {most} tokens (its context); give a shorter one"
        )


def check_reach(tokens: int, most: int | None) -> None:
    """WrongInput where generate() cannot reach so many tokens, those of the prompt included."""
    if most is not None and tokens > most:
        raise WrongInput(
            f"--new-tokens: a prompt of {PROMPT} and the new tokens are {tokens}, and the model takes at most {most} (its "
            f"context); give fewer, or 0"
        )


def check_reads(folder: object, has_tokenizer: bool, size: object) -> None:
    """WrongInput for a folder without a tokenizer whose model, of `size` tokens, does not read bytes."""
    if not has_tokenizer and size != BYTES:
        raise WrongInput(
            f"{folder} has no tokenizer.json and its model has {size} tokens; copy the tokenizer of the base model into it "
            f"(models of {BYTES} tokens read bytes)"
        )


def check_tasks(tasks: Sequence[str], paired: bool) -> None:
    """WrongInput for a task that is none of ours where lm-evaluation-harness is not installed, and for one without its base."""
    for task in tasks:
        if task in PAIRED and not paired:
            raise WrongInput(
                f"{task} compares with the model's base; give its folder with --against (against= in Python)"
            )
    foreign = [task for task in tasks if task not in TASKS]
    if foreign and find_spec("lm_eval") is None:
        from reference.arrays.namespace import and_nearest

        if near := and_nearest(foreign[0], TASKS, cutoff=0.7):
            raise WrongInput(f"unknown task {foreign[0]!r}{near}")
        raise WrongInput(
            f"{', '.join(foreign)}: tasks of lm-evaluation-harness, which is not installed (so that names are not "
            f"checked); {pip_install('eval')}, or use {', '.join(TASKS)}, which need no extra"
        )


__all__ = [
    "BYTES", "LENGTH", "PAIRED", "PROMPT", "TASKS", "as_fields", "check_length", "check_reach", "check_reads", "check_tasks",
    "context_of",
]  # fmt: skip
