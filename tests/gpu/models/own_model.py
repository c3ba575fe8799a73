"""On a GPU: `compare` and `benchmark` as the command line calls them, on a small Llama with random weights.

    PYTHONPATH=. python tests/gpu/models/own_model.py [--device cuda] [--width 1024] [--layers 2] [--out FOLDER]

compare: each row is measured, has the loss that a CPU finds to within 0.02 nats, memory at least that of its weights; nothing
stays allocated. bench: every layer in eager mode and from a CUDA graph, or the reason why no graph holds it; the name of what
multiplies; generate() eager and compiled; shapes without a model. A line each, and rows in FOLDER/own_model.csv (else $OUT);
exit code 1 where something is not so. With --device cpu the same without graphs and compilation. About 60 s on an H200, most of
them compiling.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import ao_lab
from ao_lab.measure.comparison import Comparison
from ao_lab.measure.times import Timed
from tests.gpu.harness.lines import differs, say, write_rows

CONFIGS = [
    "Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "Float8DynamicActivationFloat8WeightConfig",
    "Int4WeightOnlyConfig", "nf4", "nvfp4",
]  # fmt: skip
#: One with inputs that are multiplied as they are, and one whose inputs are quantized: as compiled generate() is timed.
COMPILED = ["Int4WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"]
NATS = 0.02
TEXT = "The quick brown fox jumps over the lazy dog, and low precision keeps what it needs of it. " * 200


def model_folder(folder: Path, width: int, layers: int) -> Path:
    """A Llama that reads bytes, so that it needs no tokenizer."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=width // 64, num_key_value_heads=width // 128, max_position_embeddings=512,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "model")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    return folder / "model"


def compared(model: Path, device: str, new_tokens: int) -> Comparison:
    """A comparison of all configurations."""
    text = model.parent / "text.txt"
    return ao_lab.compare(
        model, CONFIGS, text=text, limit=2, length=128, new_tokens=new_tokens, device=device
    )


def compare(model: Path, device: str) -> None:
    """Rows on a device beside those of a CPU."""
    cuda = device.startswith("cuda")
    before = torch.cuda.memory_allocated() if cuda else 0
    found, host = compared(model, device, 8), compared(model, "cpu", 0)
    for row, other in zip(found.rows, host.rows, strict=True):
        far = abs((row.loss or 0.0) - (other.loss or 0.0)) if row.status == other.status == "ok" else 9.0
        fits = (row.peak_bytes or 0) >= (row.bytes or 1)
        say("compare", row.name, far, "nats from a CPU", ok=far <= NATS and fits, status=row.reason or row.status,
            speedup=row.speedup, peak=row.peak_bytes, bytes=row.bytes)  # fmt: skip
    say(
        "compare",
        found.conditions["device"],
        len(found.notes),
        "notes",
        ok=len(found.rows) == 1 + len(CONFIGS),
    )
    left = (torch.cuda.memory_allocated() if cuda else 0) - before
    say("compare", "left on the device", left, "bytes", ok=left < 1 << 20)


def times(rows: list[Timed], cuda: bool) -> None:
    """A line for each time; a layer's graph may be refused, with the reason."""
    for row in rows:
        refused = row.mode == "CUDA graph" and row.reason.startswith("no CUDA graph")
        named = row.what == "generate" or row.name == "bfloat16" or bool(row.kernel)
        say("bench", f"{row.what} {row.name} {row.mode} {'x'.join(map(str, row.shape))}", 1e6 * (row.seconds or 0.0), "us",
            ok=(row.status == "ok" or refused) and named, speedup=row.speedup, kernel=row.kernel,
            status=row.reason or row.status)  # fmt: skip
    modes = {row.mode for row in rows if row.what == "linear"}
    say("bench", "modes of layers", len(modes), "modes", ok=len(modes) == (2 if cuda else 1))


def bench(model: Path, device: str, width: int) -> None:
    """Layers and generate() of the model, then shapes alone."""
    cuda = device.startswith("cuda")
    layers = ao_lab.benchmark(model, configs=CONFIGS, batch=[1, 16], new_tokens=0, device=device)
    whole = ao_lab.benchmark(model, configs=COMPILED, batch=[1], new_tokens=8, device=device)
    shapes = ao_lab.benchmark(shapes=[(256, 4 * width, width)], configs=CONFIGS, device=device)
    times([*layers.rows, *whole.of("generate"), *shapes.rows], cuda)
    modes = {row.mode for row in whole.of("generate")}
    say(
        "bench",
        "modes of generate()",
        len(modes),
        "modes",
        ok=modes == ({"eager", "compiled"} if cuda else {"eager"}),
    )


def main() -> int:
    """Both; 1 where something is not as it should be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--out")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = model_folder(Path(folder), given.width, given.layers)
        try:
            compare(model, given.device)
            bench(model, given.device, given.width)
        finally:
            write_rows("own_model.csv", given.out)
    return int(differs())


if __name__ == "__main__":
    sys.exit(main())
