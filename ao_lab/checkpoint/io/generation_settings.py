"""generation_config.json: how `generate()` of transformers goes on and ends with a model, beside its weights.

What is written is what transformers' own save_pretrained writes: the settings that differ from its defaults, and never the
compile_config, which holds functions. transformers refuses to write settings of which `generate()` ignores some, such as a
temperature without do_sample, unless they are unchanged since they were read. Here these are written and told of in a warning:
they do no harm, and weights that took hours to quantize are not to be lost over them.
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

from ao_lab.checkpoint.io.strict_json import read_object, shown
from ao_lab.install.extras import needed

SETTINGS = "generation_config.json"
#: What transformers leaves out of files.
COMPILED = "compile_config"


def settings_text(model: Any) -> str | None:
    """The JSON text of a model's generation settings; None for a model that has none.

    ValueError for settings with which transformers would not read the folder again, and for values that are no JSON. A
    UserWarning for those of which `generate()` ignores some.
    """
    given: Any = getattr(model, "generation_config", None)
    if not hasattr(given, "to_json_string"):
        return None
    config = copy.copy(given)
    config.compile_config = None
    try:
        config.validate()
        text: str = config.to_json_string(use_diff=True)
        changed = getattr(config, "_original_object_hash", None) != hash(config)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"model.generation_config cannot be saved, and nothing has been written: {error}; correct it, or delete what is "
            f"not to be saved, and save again"
        ) from error
    if changed:
        _warn_of_ignored(config)
    return text


def _warn_of_ignored(config: Any) -> None:
    """A UserWarning with what transformers says of settings that `generate()` ignores, if there are any."""
    try:
        config.validate(strict=True)
    except ValueError as error:
        warnings.warn(
            f"{SETTINGS} is written as model.generation_config is, but generate() ignores a part of it, and save_pretrained of "
            f"transformers would refuse it. {error}",
            UserWarning,
            stacklevel=5,  # the caller of save_pretrained
        )


def read_settings(folder: Path, model: Any) -> Any:
    """The generation settings of a folder, of the class of those that the model has; None where either has none.

    ValueError that names the file for what is no JSON, for values that transformers refuses, and for names that would hide a
    method of the class. A compile_config is left out: it names a compiler.
    """
    path = folder / SETTINGS
    kind: Any = type(getattr(model, "generation_config", None))
    return _settings(path, kind) if path.exists() and hasattr(kind, "from_dict") else None


def check_settings(folder: Path) -> None:
    """ValueError as `read_settings` for a dense folder, whose settings transformers reads itself: it would go on without those
    that are no JSON."""
    path = folder / SETTINGS
    if path.exists():
        _settings(path, needed("transformers").GenerationConfig)


def _settings(path: Path, kind: Any) -> Any:
    """Settings of a class; ValueError as `read_settings` says."""
    fields = read_object(path, nonfinite=True)
    fields.pop(COMPILED, None)
    if hidden := [name for name in fields if hasattr(kind, name)]:
        raise ValueError(f"{path}: {shown(hidden[0])} is no setting; fetch it again, or remove it")
    try:
        config: Any = kind.from_dict(fields)
        # As transformers notes it: what is unchanged since it was read may always be written again.
        config._original_object_hash = hash(config)
    except Exception as error:
        # transformers raises what it likes for values of another type.
        raise ValueError(
            f"{path} holds no generation settings that transformers can read: {type(error).__name__}: {shown(str(error))}; "
            "fetch it again, or remove it"
        ) from error
    return config


__all__ = ["SETTINGS", "check_settings", "read_settings", "settings_text"]
