"""On a GPU: families of kernels that multiply, training, sparsity and models, compared with the reference and timed.

    PYTHONPATH=. python tests/gpu/validate.py [NAME ...] [--part bits times] [--only WORD] [--seconds 60] [--all]
        [--schemes int4_g128 ...] [--rows 1 16 ...] [--shapes 4096x4096 ...] [--device cpu] [--out FOLDER]
    PYTHONPATH=. python tests/gpu/validate.py --list

NAME: subjects, see --list; none: all, bits alone. --only: checks whose labels hold a word. --seconds: of each part of a
subject, after which nothing of it starts; what was not reached is named. --all: every variant of a kernel is compared, not
the rule's alone. --schemes (recipes), --rows, --shapes: of checks that have them, and of what is timed. --out (else $OUT):
a folder for NAME.json, written as results come; committed times under reports/data are such rows. `--device cpu` tries the
programs that need no GPU. Public functions are compared by `validate_kernels.py`, the reference by
`validate_reference.py`.

Exits with 1 where anything differs or raises, else with 2 where something was not reached.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.gpu.harness.subject import PARTS, Asked, Subject, perform

#: Modules of subjects, in the order in which all are looked at, and what each has.
MODULES: dict[str, tuple[str, ...]] = {
    "linear.preshuffled": ("triton_small_m", "sm90_w4a16_gemv", "sm90_w4a16_gemm"),
    "linear.experts": ("triton_small_m_experts", "sm90_w4a16_gemm_experts"),
    "linear.plain": ("sm90_intn_small_m", "sm90_s8_gemm", "triton_int_scaled_mm"),
    "linear.pairs": ("pairs",),
    "linear.layers": ("layers", "expert_layers", "dynamic_inputs"),
    "sparsity.int4": ("sm90_sparse24_w4a16_gemv", "triton_mma_sparse_small_m", "sparse_pairs"),
    "sparsity.gemm": ("sm90_sparse24_gemm",),
    "sparsity.layers": ("cusparselt", "sparse_wgmma", "sparsegpt"),
    "sparsity.training": ("sparse_training", "sparse_training_kernels", "linear_gradients"),
    "training.layers": ("layer_gradients", "training_operands"),
    "training.steps": ("training_steps",),
    "training.grouped": ("grouped_training",),
    "calibration.layers": ("gptq",),
    "calibration.memory": ("calibration_memory",),
    "models.qat": ("qat",),
    "models.quantize": ("quantize",),
    "models.checkpoints": ("checkpoints",),
    "models.experts_decoding": ("experts_decoding",),
    "models.distributed": ("distributed",),
    "models.torchtitan": ("torchtitan",),
}
NAMES = tuple(name for names in MODULES.values() for name in names)


def subject(name: str) -> Subject:
    """By its name; its module is imported."""
    module = next(module for module, names in MODULES.items() if name in names)
    found = importlib.import_module(f"tests.gpu.{module}").SUBJECTS
    return next(one for one in found if one.name == name)


def shape_of(text: str) -> tuple[int, ...]:
    """As arguments have it: 4096x14336."""
    return tuple(map(int, text.split("x")))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--list", action="store_true", help="the subjects, and what they are about")
    parser.add_argument("--part", nargs="+", choices=PARTS)
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--schemes", nargs="+", default=())
    parser.add_argument("--rows", nargs="+", type=int, default=())
    parser.add_argument("--shapes", nargs="+", type=shape_of, default=())
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT"))
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - {*NAMES}:
        parser.error(f"no subject is called {', '.join(sorted(unknown))}; --list names them")
    return options


def main(arguments: list[str] | None = None) -> int:
    """All subjects that were asked for; the exit code."""
    options = parse(arguments)
    if options.list:
        for name in NAMES:
            one = subject(name)
            times = ", times" if one.times is not None else ""
            sys.stdout.write(f"{name:28} {one.about}{times}{', on a CPU too' if one.on_cpu else ''}\n")
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.stdout.write(
            "validate: no CUDA device here; use --device cpu to try the programs that need none\n"
        )
        return 2
    asked = Asked(
        options.device, options.part or (PARTS if options.names else PARTS[:1]), options.only, options.seconds,
        options.schemes, options.rows, options.shapes, options.all, None if options.out is None else Path(options.out),
    )  # fmt: skip
    chosen = [subject(name) for name in options.names or NAMES]
    if options.device == "cpu":
        chosen = [one for one in chosen if one.on_cpu]
    codes = {one.name: perform(one, asked) for one in chosen}
    for code, word in ((1, "WRONG"), (2, "not all reached")):
        if found := [name for name, each in codes.items() if each == code]:
            sys.stdout.write(f"{word}: {', '.join(found)}\n")
    return 1 if 1 in codes.values() else 2 if 2 in codes.values() else 0


if __name__ == "__main__":
    sys.exit(main())
