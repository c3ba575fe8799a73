"""What lies beside the weights of a model's folder, and goes along into the quantized one: tokenizer, processor, settings.

The result is made to be handed on, so it holds files of the model's folder alone. A link that leads out of it is not followed:
whoever made the folder may have pointed it at any file of this machine. The Hub's cache, whose folders are links into blobs of
the same repository, counts as one folder. Code goes along only where a tokenizer or a processor names it; the model itself is
one of transformers' own classes. Whatever stays behind is told.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ao_lab.checkpoint.io.links import leads_out, resolved, roots
from ao_lab.checkpoint.io.strict_json import LARGEST_FILE, parsed, regular_size, shown

#: Files of the model's own folder that are made anew: its weights in any program's format, and results of evaluations.
REMADE = re.compile(
    r"(?:model|ao_lab|pytorch_model|tf_model|flax_model|consolidated|diffusion_pytorch_model)[^/]*\.(?:safetensors|bin|pth?|h5|"
    r"msgpack)|.*\.gguf|.*\.index\.json|eval\.json|.*\.safetensors"
)
#: Ends of other files that may be weights in a second format; small ones are voices, prompts, statistics.
HEAVY = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".onnx_data", ".ot")
LARGEST = 32 * 2**20
#: The file by which sentence-transformers names the sub-folders that it loads, with their weights.
MODULES = "modules.json"
#: The file whose code ao_lab and transformers do not need: the model is one of transformers' own classes.
MODEL_CONFIG = "config.json"


#: Settings that transformers reads, unknown entries too, and that are written with the result: the text of a link out of the
#: folder would go along.
SETTINGS = (MODEL_CONFIG, "generation_config.json")


def copy_the_rest(source: Path, target: Path) -> list[str]:
    """Copy what lies beside the weights, with sub-folders, where the result has no such file; what is left out, a line each."""
    places, parts = roots(source), _parts(source)
    code = _named_code(source)
    left: list[str] = []
    for name in _names(source, left, target, parts):
        file = source / name
        whole = name.parts[0] in parts and len(name.parts) > 1
        if (target / name).exists() or (len(name.parts) == 1 and REMADE.fullmatch(name.name)):
            continue
        reason = _reason(file, name, places, code, whole)
        if reason:
            left.append(f"left out: {shown(str(name))}, {reason}")
            continue
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target / name)
        if name.suffix == ".py":
            left.append(
                f"copied: {shown(str(name))}, code that a tokenizer or a processor names; transformers runs it where "
                "trust_remote_code=True is given, ao_lab never does"
            )
    return left


def _reason(file: Path, name: Path, places: tuple[Path, ...], code: set[str], whole: bool) -> str:
    """Why a file is left out; "" where it is not."""
    if leads_out(file, places):
        return "a link out of the model's folder; copy the file there if it belongs to the model"
    if not file.is_file():
        return "no regular file"
    if name.suffix == ".py" and name.name not in code:
        return "code that no tokenizer or processor names"
    heavy = name.name.endswith(HEAVY) and file.stat().st_size > LARGEST
    return "weights in another format" if heavy and not whole else ""


def _names(source: Path, left: list[str], target: Path, parts: set[str]) -> Iterator[Path]:
    """Files by their paths in the folder, in order.

    Hidden sub-folders (.git, .cache) are none of the model's, and neither is the result, nor what is a model of its own
    (another result). Those that the model loads (`parts`) are.
    """
    for folder, folders, files in os.walk(source):
        place = Path(folder)
        links = [name for name in folders if (place / name).is_symlink()]
        left += [
            f"left out: {shown(str((place / name).relative_to(source)))}, a link to a folder"
            for name in links
        ]
        names = [name for name in folders if name not in links and not name.startswith(".")]
        names = [name for name in names if resolved(place / name) != resolved(target)]
        models = [
            name
            for name in names
            if (place / name / MODEL_CONFIG).is_file()
            and any((place / name).glob("*.safetensors"))
            and str((place / name).relative_to(source)) not in parts
        ]
        left += [
            f"left out: {shown(str((place / name).relative_to(source)))}, a model of its own"
            for name in models
        ]
        folders[:] = sorted(set(names) - set(models))
        yield from ((place / name).relative_to(source) for name in sorted(files))


def _read(file: Path) -> Any:
    try:
        if regular_size(file) > LARGEST_FILE:
            return None
        return parsed(file.read_bytes(), str(file), nonfinite=True)
    except (OSError, ValueError):
        return None


def _parts(source: Path) -> set[str]:
    """Sub-folders that sentence-transformers loads."""
    modules = _read(source / MODULES)
    found = modules if isinstance(modules, list) else []
    return {str(one["path"]) for one in found if isinstance(one, dict) and one.get("path")}


def _named_code(source: Path) -> set[str]:
    """Files of code that the auto_map of a tokenizer or a processor names."""
    names: set[str] = set()
    for file in source.glob("*.json"):
        fields = _read(file) if file.name.endswith("config.json") and file.name != MODEL_CONFIG else None
        entries = fields.get("auto_map") if isinstance(fields, dict) else None
        values = entries.values() if isinstance(entries, dict) else ()
        for value in values:
            targets = value if isinstance(value, list) else [value]
            names |= {
                f"{one.partition('.')[0]}.py" for one in targets if isinstance(one, str) and "--" not in one
            }
    return names


__all__ = ["SETTINGS", "copy_the_rest"]
