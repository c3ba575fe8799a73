"""Options and their values that several commands of `ao-lab` share, with the words of their help."""

from __future__ import annotations

from contextlib import suppress
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from ao_lab.cli.completion import models_and_folders

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]


class Device(StrEnum):
    """Where a command computes."""

    CPU = "cpu"
    CUDA = "cuda"


MODEL_FOLDER = (
    "Folder of a Hugging Face model, as save_pretrained writes it; or the name of one in the Hub's cache, or of one that "
    "ao-lab pretrained made."
)
LENGTH = "Tokens per sequence. Default: 512, or the model's context if shorter."
CORPUS = "Folder of the corpus that holds a named text (ao-lab corpus prose)."
CALIBRATION = "Calibration"


def model_folder(given: str) -> Path:
    """The folder of a model: as it is given where it is there, else that of a name. Nothing is fetched.

    A name is owner/name, of which the Hub's cache has the latest revision that was fetched, or one that a registered package
    knows (entry points of the group "ao_lab.models"). What is neither is returned as it is: commands say what is wrong with it.
    BadParameter for a name whose folder has not been made, with the command that makes it.
    """
    folder = Path(given)
    if folder.exists():
        return folder
    try:
        return cached(given) or made(given) or folder
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def cached(name: str) -> Path | None:
    """The snapshot of owner/name in the Hub's cache; None where it is not there."""
    from ao_lab.checkpoint.io.files import ON_HUB

    if not ON_HUB.fullmatch(name) or find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def made(name: str) -> Path | None:
    """The folder of a name that a registered package knows; None where none does."""
    from ao_lab.cli.plugins import MODELS, load, registered

    # A path of several parts, or a file's name, is no name of a model.
    for target in registered(group=MODELS).values() if len(Path(name).parts) == 1 else ():
        with suppress(ImportError):
            if (found := load(target)(name)) is not None:
                return Path(found)
    return None


ModelDir = Annotated[
    Path,
    typer.Argument(
        help=MODEL_FOLDER, parser=model_folder, metavar="MODEL_DIR", autocompletion=models_and_folders
    ),
]

Skip = Annotated[
    list[str] | None,
    typer.Option(
        help="Layers or submodules to leave unquantized, by name or re:PATTERN, such as lm_head or vision_tower; repeatable."
    ),
]
CorpusPath = Annotated[Path | None, typer.Option(help=CORPUS)]
OnDevice = Annotated[Device | None, typer.Option(help="Default: cuda if a GPU is available, else cpu.")]


class Launches(StrEnum):
    """How a tuned model runs."""

    EAGER = "eager"
    GRAPH = "graph"


GgufEmbedding = Annotated[
    str | None,
    typer.Option(
        metavar="SCHEME",
        help="GGUF: scheme of the embedding, and of a head that shares its weight, such as int8_g32_f16 (Q8_0), as llama.cpp's "
        "own files have it. Default: its own dtype.",
    ),
]


class FileFormat(StrEnum):
    """Files of other programs."""

    GGUF = "gguf"
    ONNX = "onnx"


class Layout(StrEnum):
    """How quantized weights are stored."""

    AUTO = "auto"
    COMPRESSED_TENSORS = "compressed-tensors"
    OURS = "ao_lab"


FormatOfFile = Annotated[
    FileFormat | None, typer.Option(help="File format. Default: by the suffix of OUT_FILE.")
]

#: Options of lm-evaluation-harness, as its own command has them.
NumFewshot = Annotated[
    int | None, typer.Option(help="Harness: few-shot examples. Default: that of the task.")
]
BatchSize = Annotated[
    str | None, typer.Option(help="Harness: batch size, a number, auto or auto:N. Default: 1.")
]
ChatTemplate = Annotated[
    bool, typer.Option("--apply-chat-template", help="Harness: apply the tokenizer's chat template.")
]
IncludePath = Annotated[Path | None, typer.Option(help="Harness: folder with additional tasks (YAML).")]
