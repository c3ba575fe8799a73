"""Which bytes make the loss on texts of another kind: bits of bytes that the training text has, and of those it hardly has.

    PYTHONPATH=. python tests/gpu/training/bits_by_byte.py PROSE_DIR [--recipes bf16 tensorwise rowwise mxfp8 --seeds 2]

Trains the 30m model of `fp8_training` as its paired trainings do, and evaluates it on held-out books and WikiText-2. A byte is
rare where the training text has it at most RARE times: WikiText-2 has `<unk>`, `@-@` and straight quotes, books have not.
Prints a line for each training and text; if OUT is set, all are in $OUT/bits_by_byte.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any

import torch

from experiments.data.corpora import load
from experiments.data.corpus import evaluation_texts
from experiments.fp8_training.convergence import converter
from experiments.fp8_training.methods import BASE, PAIRED, PLANS
from experiments.models.pretraining import BATCH, pretrain, windows
from experiments.models.train import text_of

RARE = 10


@torch.inference_mode()
def bits_of_bytes(model: Any, text: bytes, context: int) -> torch.Tensor:
    """Bits of all targets by their byte, float64 (256,)."""
    found = torch.zeros(256, dtype=torch.float64, device="cuda")
    parts = [one.cuda().split(BATCH) for one in windows(text, context)]
    for inputs, targets, counted in zip(*parts, strict=True):
        likelihood = torch.log_softmax(model(inputs.long()).float(), dim=-1)
        bits = -likelihood.gather(-1, targets.long().unsqueeze(-1)).squeeze(-1).double() * counted
        found += torch.bincount(targets.flatten().long(), bits.flatten(), 256)
    return found.cpu() / math.log(2)


def split(bits: torch.Tensor, text: bytes, rare: torch.Tensor) -> dict[str, float]:
    """Bits a byte of all, of frequent bytes and of rare ones, and the share of these."""
    counts = torch.bincount(
        torch.frombuffer(bytearray(text), dtype=torch.uint8).long(), minlength=256
    ).double()
    few, many = counts[rare].sum(), counts[~rare].sum()
    return {
        "all": float(bits.sum() / counts.sum()),
        "frequent": float(bits[~rare].sum() / many),
        "rare": float(bits[rare].sum() / few) if few else 0.0,
        "share of rare": float(few / counts.sum()),
    }


def main() -> None:
    """Each recipe and seed in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--recipes", nargs="+", default=[BASE, "tensorwise", "rowwise", "mxfp8"])
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    corpus, plan, rows = load("prose", args.folder), PLANS["full"], []
    rare = torch.bincount(text_of(corpus).long().cpu().flatten(), minlength=256)[:256] <= RARE
    for recipe in args.recipes:
        for seed in range(args.seeds):
            trial = plan.trial(PAIRED, plan.paired, recipe, plan.budget, seed)
            made = pretrain(trial.settings, corpus, "cuda", converter(recipe))
            for name in ("heldout", "wikitext2-test"):
                found = evaluation_texts(corpus).items()
                text = b"".join(one for key, one in found if key.startswith(name))
                bits = bits_of_bytes(made.model, text, trial.settings.model.context)
                rows.append({"recipe": recipe, "seed": seed, "text": name, **split(bits, text, rare)})
                print(json.dumps(rows[-1]), flush=True)
    if os.environ.get("OUT"):
        Path(os.environ["OUT"], "bits_by_byte.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
