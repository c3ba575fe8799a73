"""What commands refuse before they import torch: wrong folders, texts, tasks and numbers are said in less than a second.

The commands check the same again, and more, where they read what was given.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ao_lab.checkpoint.io.files import without
from ao_lab.checkpoint.io.strict_json import read_object
from ao_lab.install.extras import WrongInput, pip_install, wrong_input
from ao_lab.measure.asked import PROMPT, check_length, check_reach, check_reads, context_of

#: Names of texts that need a corpus: those of `ao_lab.eval.NAMED`.
NAMED_TEXTS = ("wikitext2",)


def check_model(folder: Path | None, writers: str) -> None:
    """WrongInput where a folder is not there or holds no config.json; writers: who writes such folders. None passes."""
    if folder is not None and not (folder / "config.json").is_file():
        raise WrongInput(without(folder, "no config.json", writers))


#: What `ao-lab choose` calls a layer that stays unquantized.
DENSE = "dense"
#: Files in which `ao-lab compare --out` and `ao-lab bench --out` keep what they have measured: FILE of their modules.
COMPARISON, BENCHMARK = "comparison.json", "benchmark.json"
#: Files that transformers, or ao_lab, reads weights from.
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")


#: How alike a mistyped name of a layer and a name of the files are, from 0 to 1.
ALIKE = 0.87


def check_weights(folder: Path) -> None:
    """WrongInput where a folder has no file of weights."""
    if not any(path for pattern in WEIGHTS for path in folder.glob(pattern)):
        raise WrongInput(f"{folder} has a config.json and no weights: no file named model.safetensors")


def check_quantize(folder: Path, config: str | None, activation: str | None, options: list[str]) -> None:
    """WrongInput for a folder without a model, and for a configuration and options that are none."""
    check_model(folder, "transformers' save_pretrained")
    check_weights(folder)
    check_configuration(config, activation, options)


def check_configuration(config: str | None, activation: str | None, options: list[str]) -> None:
    """WrongInput for a configuration of --config, --activation and --option that is none; None passes."""
    from ao_lab.cli.named_config import config_of, with_options

    if config is not None:
        name, given = with_options(config, options)
        config_of(name, activation, given)


def check_source(folder: Path, configs: Sequence[str], length: int | None, skip: Sequence[str]) -> None:
    """WrongInput for a folder without a model, configurations that are none, sequences that the model does not take, and a
    mistyped layer of --skip."""
    from ao_lab.cli.named_config import config_of, with_options

    check_model(folder, "ao-lab quantize or transformers")
    for text in configs:
        name, options = with_options(text, [])
        if name != DENSE:
            config_of(name, None, options)
    check_counts(length=length)
    check_tokens(folder, length)
    check_skip(folder, skip)


def check_methods(names: Sequence[str], calibration: str | None) -> None:
    """WrongInput for methods and options that are none, and for a method that reads a text where none is given."""
    from ao_lab.calibration.methods import named_method

    with wrong_input():
        methods = [named_method(text) for text in names]
    # Of several, whether they go together comes first, which the library knows.
    if calibration is None and len(methods) == 1 and methods[0].calibrates:
        raise WrongInput(
            f"--method {methods[0].name} needs calibration data; give --calibration TEXT, a text file"
        )


def check_counts(limit: int | None = None, length: int | None = None, new_tokens: int = 0) -> None:
    """WrongInput for no sequences, sequences of less than two tokens, and less than no new tokens."""
    if limit is not None and limit < 1:
        raise WrongInput(f"--limit {limit}: --limit is at least 1 sequence and --length at least 2 tokens")
    if length is not None and length < 2:
        raise WrongInput(f"--length {length}: --length is at least 2 tokens")
    if new_tokens < 0:
        raise WrongInput(f"--new-tokens {new_tokens}: give the tokens that generate() makes, or 0")


def check_tokens(folder: Path, length: int | None = None, new_tokens: int = 0) -> None:
    """WrongInput for more tokens than config.json says that the model takes."""
    most = context_of(fields_of(folder))
    check_length(length, most)
    if new_tokens:
        check_reach(PROMPT + new_tokens, most)


def check_tokenizer(folder: Path) -> None:
    """WrongInput for a folder without a tokenizer whose config.json has a number of tokens, and not that of bytes."""
    size = fields_of(folder).get("vocab_size")
    check_reads(folder, type(size) is not int or (folder / "tokenizer.json").is_file(), size)


def fields_of(folder: Path) -> dict[str, Any]:
    """config.json; WrongInput where it is no JSON object."""
    with wrong_input():
        return read_object(folder / "config.json", nonfinite=True)


def check_skip(folder: Path, names: Sequence[str]) -> None:
    """WrongInput, with the nearest, for a name of --skip that no layer of the files has and that is almost the name of one.

    What is not alike passes: transformers may have modules of other names than the files, and looks when it has the model.
    """
    from reference.arrays.namespace import and_nearest

    asked = [name for name in names if ":" not in name and "." not in name]
    parts = set(parts_of(folder)) if asked else set()
    if not parts or "experts" in parts:
        return
    for name in asked:
        known = {*parts, "lm_head"}
        near = and_nearest(name.replace("-", "_"), known, cutoff=ALIKE)
        if near and name not in known:
            raise WrongInput(f"--skip {name}: no layer or submodule has this name{near}")


def parts_of(folder: Path) -> Iterator[str]:
    """Parts between dots of the names of layers, as the folder's safetensors have them; none where they cannot be read."""
    try:
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            tensors = dict(read_object(index, huge=True)["weight_map"])
        else:
            with (folder / "model.safetensors").open("rb") as file:
                tensors = json.loads(file.read(min(int.from_bytes(file.read(8), "little"), 10**8)))
    except (OSError, ValueError, KeyError, TypeError):
        return
    for name in tensors:
        yield from name.split(".")[:-1]


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
