"""From the file of a pretrained model to a folder that transformers loads.

* GGUF: transformers' own loader dequantizes it (by `gguf` and `accelerate`) and builds the tokenizer. Values are rounded once,
  to bfloat16, in which the models were trained and are evaluated.
* zip: the folder as it is inside an archive; names in it are not trusted as paths.
* safetensors: copied.
* CTranslate2 (Whisper): `experiments.models.ctranslate2`.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from ao_lab.install.extras import needed
from experiments.models.ctranslate2 import save_whisper


class Source(Protocol):
    """What a converter is told of a file, beside its content.

    beginning: whether a text begins with the tokenizer's BOS. checked: the file of an archive beside which all others lie.
    """

    @property
    def title(self) -> str:
        """The model's name."""

    @property
    def beginning(self) -> bool:
        """See above."""

    @property
    def checked(self) -> str:
        """See above."""


Convert = Callable[[Source, Path, Path], None]


def converter(kind: str) -> Convert:
    """The function that converts files of a kind; ValueError for a kind without one."""
    if kind not in CONVERTERS:
        raise ValueError(f"files of kind {kind!r} are not converted; kinds are {', '.join(CONVERTERS)}")
    return CONVERTERS[kind]


def from_gguf(record: Source, file: Path, folder: Path) -> None:
    """A causal language model of a GGUF file, in bfloat16, with its tokenizer."""
    transformers: Any = needed("transformers")
    needed("gguf")
    needed("accelerate")
    given = {"gguf_file": file.name, "local_files_only": True}
    with quietly():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent,
            dtype=torch.bfloat16,
            quantization_config=transformers.GgufConfig(dequantize=True),
            **given,
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, **given)
        plain(model, transformers).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    say_beginning(record, folder, model.config.max_position_embeddings)


def plain(model: Any, transformers: Any) -> Any:
    """The same model without the mark of its file's format, with which it would not be saved."""
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config._name_or_path = ""
    result = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    result.load_state_dict(model.state_dict())
    return result


def say_beginning(record: Source, folder: Path, longest: int) -> None:
    """Write into the tokenizer's configuration whether a text begins with BOS, which the conversion does not say, and the
    longest input in place of 10^30."""
    path = folder / "tokenizer_config.json"
    fields = json.loads(path.read_text(encoding="utf-8"))
    fields |= {"add_bos_token": record.beginning, "model_max_length": longest}
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def from_zip(record: Source, file: Path, folder: Path) -> None:
    """The files beside `record.checked` in an archive."""
    with zipfile.ZipFile(file) as archive:
        files = [one for one in archive.infolist() if not one.is_dir()]
        inner = next(
            (one.filename for one in files if one.filename.rpartition("/")[2] == record.checked), None
        )
        if inner is None:
            raise ValueError(f"the archive of {record.title} holds no {record.checked}")
        root = inner.removesuffix(record.checked)
        folder.mkdir()
        for one in files:
            name = one.filename.removeprefix(root)
            # Only what lies beside the weights, by its bare name: paths of an archive are not followed.
            if one.filename.startswith(root) and "/" not in name and "\\" not in name:
                with archive.open(one) as source, (folder / name).open("wb") as target:
                    shutil.copyfileobj(source, target)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without the bars and the messages of transformers, whose loader speaks of every tensor, and of GGUF files by a bar of its
    own."""
    said: Any = needed("transformers").utils.logging
    gguf: Any = needed("transformers.modeling_gguf_pytorch_utils")
    bars, level, bar = said.is_progress_bar_enabled(), said.get_verbosity(), gguf.tqdm
    gguf.tqdm = lambda tensors, **_: tensors
    said.disable_progress_bar()
    said.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        gguf.tqdm = bar
        said.set_verbosity(level)
        if bars:
            said.enable_progress_bar()


def from_safetensors(record: Source, file: Path, folder: Path) -> None:
    """The weights as they are; what lies beside them is the record's to name."""
    folder.mkdir()
    shutil.copyfile(file, folder / "model.safetensors")


def from_ctranslate2(record: Source, file: Path, folder: Path) -> None:
    """Whisper, in the dtype of the file."""
    with quietly():
        save_whisper(file, folder)


CONVERTERS: dict[str, Convert] = {
    "gguf": from_gguf,
    "zip": from_zip,
    "ctranslate2": from_ctranslate2,
    "safetensors": from_safetensors,
}
