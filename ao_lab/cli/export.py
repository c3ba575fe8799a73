"""`ao-lab export`: a quantized folder as one file of another program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ao_lab.checkpoint.api import load_pretrained
from ao_lab.cli.terminal import WrongInput, check_writable, print_json, print_table
from ao_lab.clients.gguf.write import GgufFile, save_gguf
from ao_lab.clients.onnx import OnnxFile, export_onnx
from ao_lab.install.extras import needed
from ao_lab.measure.folders import without_model

FORMATS = ("gguf", "onnx")


def run_export(
    source: Path, target: Path, form: str | None, as_json: bool, embedding: str | None = None
) -> None:
    """Write, and say what was written; WrongInput for a folder, a name or a scheme that cannot be."""
    form = form or target.suffix.removeprefix(".")
    if form not in FORMATS:
        raise WrongInput(f"{target.name} does not end in .{', .'.join(FORMATS)}; give --format {FORMATS[0]}")
    if target.exists():
        raise WrongInput(f"{target} is there already; choose another name")
    if not target.parent.is_dir():
        raise WrongInput(f"{target}: there is no folder {target.parent}; make it, or choose another")
    if not (source / "config.json").is_file():
        raise WrongInput(without_model(source, "ao-lab quantize"))
    if embedding is not None and form != "gguf":
        raise WrongInput(f"--embedding {embedding}: an option of GGUF; {form} has the embedding in float32")
    check_writable(target.parent, "OUT_FILE")
    written: GgufFile | OnnxFile
    try:
        written = save_as_gguf(source, target, embedding) if form == "gguf" else save_as_onnx(source, target)
    except ValueError as error:
        raise WrongInput(str(error)) from error
    kind, counts = ("types", "tensors") if form == "gguf" else ("operators", "nodes")
    found: dict[str, int] = getattr(written, kind)
    if as_json:
        print_json({"file": str(written.path), "bytes": written.bytes, kind: found})
        return
    cells = [[name, str(count)] for name, count in found.items()]
    print_table(f"{written.path.name}, {written.bytes:,} bytes", [kind.removesuffix("s"), counts], cells)


def save_as_gguf(source: Path, target: Path, embedding: str | None = None) -> GgufFile:
    """The folder's model and tokenizer."""
    return save_gguf(load_pretrained(source), target, tokenizer_of(source), embedding=embedding)


class Logits(nn.Module):
    """A causal language model without its cache: token numbers (batch, tokens) to logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """(batch, tokens) int64 to (batch, tokens, vocabulary) float32."""
        logits: torch.Tensor = self.model(input_ids=input_ids, use_cache=False).logits
        return logits


def save_as_onnx(source: Path, target: Path) -> OnnxFile:
    """The folder's language model in float32, for any number of texts and tokens."""
    model = Logits(load_pretrained(source, dtype=torch.float32).eval())
    ids, any_size = torch.zeros((2, 3), dtype=torch.int64), torch.export.Dim.DYNAMIC
    shapes = {"input_ids": {0: any_size, 1: any_size}}
    return export_onnx(model, (ids,), target, dynamic_shapes=shapes, output_names=["logits"])


def tokenizer_of(source: Path) -> Any:
    """The folder's tokenizer; None where it has none."""
    transformers = needed("transformers")
    if not (source / "tokenizer.json").is_file():
        return None
    if (source / "tokenizer_config.json").is_file():
        return transformers.AutoTokenizer.from_pretrained(source, local_files_only=True)
    return transformers.PreTrainedTokenizerFast(tokenizer_file=str(source / "tokenizer.json"))


__all__ = ["run_export"]
