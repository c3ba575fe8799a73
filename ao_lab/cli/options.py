"""Options and their values that several commands of `ao-lab` share, with the words of their help."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]


class Device(StrEnum):
    """Where a command computes."""

    CPU = "cpu"
    CUDA = "cuda"


MODEL_FOLDER = "Folder of a Hugging Face model, as save_pretrained writes it."
LENGTH = "Tokens per sequence."
CORPUS = "Folder of the corpus that holds a named text (ao-lab corpus prose)."
CALIBRATION = "Calibration"

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


class FileFormat(StrEnum):
    """Files of other programs."""

    GGUF = "gguf"
    ONNX = "onnx"


class Layout(StrEnum):
    """How quantized weights are stored."""

    AUTO = "auto"
    COMPRESSED_TENSORS = "compressed-tensors"
    OURS = "ao_lab"


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
