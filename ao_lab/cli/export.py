"""`ao-lab export`: a quantized folder as one file of another program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ao_lab.checkpoint.api import load_pretrained
from ao_lab.cli.terminal import WrongInput, check_writable, print_json, print_table, without_model
from ao_lab.clients.gguf.write import save_gguf
from ao_lab.install.extras import needed

FORMATS = ("gguf",)


def run_export(source: Path, target: Path, form: str | None, as_json: bool) -> None:
    """Write, and say what was written; WrongInput for a folder, a name or a scheme that cannot be."""
    form = form or target.suffix.removeprefix(".")
    if form not in FORMATS:
        raise WrongInput(f"{target.name} does not end in .{', .'.join(FORMATS)}; give --format {FORMATS[0]}")
    if target.exists():
        raise WrongInput(f"{target} is there already; choose another name")
    if not (source / "config.json").is_file():
        raise WrongInput(without_model(source, "ao-lab quantize"))
    check_writable(target.parent, "OUT_FILE")
    try:
        written = save_gguf(load_pretrained(source), target, tokenizer_of(source))
    except ValueError as error:
        raise WrongInput(str(error)) from error
    if as_json:
        print_json({"file": str(written.path), "bytes": written.bytes, "types": written.types})
        return
    cells = [[kind, str(count)] for kind, count in written.types.items()]
    print_table(f"{written.path.name}, {written.bytes:,} bytes", ["type", "tensors"], cells)


def tokenizer_of(source: Path) -> Any:
    """The folder's tokenizer; None where it has none."""
    transformers = needed("transformers")
    if not (source / "tokenizer.json").is_file():
        return None
    if (source / "tokenizer_config.json").is_file():
        return transformers.AutoTokenizer.from_pretrained(source, local_files_only=True)
    return transformers.PreTrainedTokenizerFast(tokenizer_file=str(source / "tokenizer.json"))


__all__ = ["run_export"]
