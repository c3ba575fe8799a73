"""What commands refuse before they import torch: wrong folders, texts, tasks and numbers are said in less than a second.

The commands check the same again, and more, where they read what was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from ao_lab.checkpoint.io.files import without
from ao_lab.install.extras import WrongInput, pip_install

#: Names of texts that need a corpus: those of `ao_lab.eval.NAMED`.
NAMED_TEXTS = ("wikitext2",)


def check_model(folder: Path | None, writers: str) -> None:
    """WrongInput where a folder is not there or holds no config.json; writers: who writes such folders. None passes."""
    if folder is not None and not (folder / "config.json").is_file():
        raise WrongInput(without(folder, "no config.json", writers))


#: Names of methods: those of `ao_lab.calibration.methods`; and of those that read no data.
METHODS = ("rotate", "smooth", "awq", "clip", "hqq", "gptq", "autoround", "lowrank", "bias", "kv")
WITHOUT_DATA = ("rotate", "hqq")
#: Files in which `ao-lab compare --out` and `ao-lab bench --out` keep what they have measured: FILE of their modules.
COMPARISON, BENCHMARK = "comparison.json", "benchmark.json"
#: Files that transformers, or ao_lab, reads weights from.
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")


def check_weights(folder: Path) -> None:
    """WrongInput where a folder has no file of weights."""
    if not any(path for pattern in WEIGHTS for path in folder.glob(pattern)):
        raise WrongInput(f"{folder} has a config.json and no weights: no file named model.safetensors")


def check_quantize(folder: Path, config: str | None, activation: str | None, options: list[str]) -> None:
    """WrongInput for a folder without a model, and for a configuration and options that are none."""
    from ao_lab.cli.named_config import config_of, with_options

    check_model(folder, "transformers' save_pretrained")
    check_weights(folder)
    if config is not None:
        name, given = with_options(config, options)
        config_of(name, activation, given)


def check_methods(names: Sequence[str], calibration: str | None) -> None:
    """WrongInput for methods of calibration that are none, and for one that reads a text where none is given."""
    from ao_lab.cli.listings import known

    for name in names:
        known(name, dict.fromkeys(METHODS), "method")
    # Of several, whether they go together comes first, which the library knows.
    if calibration is None and len(names) == 1 and names[0] not in WITHOUT_DATA:
        raise WrongInput(f"--method {names[0]} needs calibration data; give --calibration TEXT, a text file")


def check_counts(limit: int | None = None, length: int | None = None, new_tokens: int = 0) -> None:
    """WrongInput for no sequences, sequences of less than two tokens, and less than no new tokens."""
    if limit is not None and limit < 1:
        raise WrongInput(f"--limit {limit}: --limit is at least 1 sequence and --length at least 2 tokens")
    if length is not None and length < 2:
        raise WrongInput(f"--length {length}: --limit is at least 1 sequence and --length at least 2 tokens")
    if new_tokens < 0:
        raise WrongInput(f"--new-tokens {new_tokens}: give the tokens that generate() makes, or 0")


def check_texts(**texts: str | None) -> None:
    """WrongInput for a text, by the name of its option, that is neither a file nor a name."""
    for option, given in texts.items():
        if given is not None and given not in NAMED_TEXTS and not Path(given).is_file():
            raise WrongInput(
                f"--{option} {given} is no file; give one with some thousand words, or a name: {', '.join(NAMED_TEXTS)}"
            )


def check_harness(tasks: Sequence[str]) -> None:
    """WrongInput for tasks of lm-evaluation-harness where it is not installed."""
    if tasks and find_spec("lm_eval") is None:
        raise WrongInput(
            f"--tasks {tasks[0]}: lm-evaluation-harness is not installed; {pip_install('eval')}, or leave --tasks out"
        )
