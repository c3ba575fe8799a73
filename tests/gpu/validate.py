"""On a GPU: families of kernels that multiply, training, sparsity and models, compared with the reference and timed.

    PYTHONPATH=. python tests/gpu/validate.py [NAME ...] [--part bits times] [--only WORD] [--seconds 60] [--all]
        [--schemes int4_g128 ...] [--rows 1 16 ...] [--shapes 4096x4096 ...] [--device cpu] [--out FOLDER]
        [--workers 16]
    PYTHONPATH=. python tests/gpu/validate.py --list

NAME: subjects, see --list; none: all, bits alone. --only: checks whose labels hold a word. --seconds: of each part of a
subject, after which nothing of it starts; what was not reached is named. --all: every variant of a kernel is compared, not
the rule's alone. --schemes (recipes), --rows, --shapes: of checks that have them, and of what is timed. --out (else $OUT):
a folder for NAME.json, written as results come; committed times under reports/data are such rows. `--device cpu` tries the
programs that need no GPU. --workers: processes at a time, each with a share of a subject's checks (bits alone: times want a
GPU for themselves); --seconds then holds for all of it. Public functions are compared by `validate_kernels.py`, the
reference by `validate_reference.py`.

Exits with 1 where anything differs or raises, else with 2 where something was not reached.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
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
    "models.torchtitan": ("torchtitan",),
}
#: Seconds after its time that a share has to end its last check.
GRACE = 45
NAMES = tuple(name for names in MODULES.values() for name in names)


#: Shares of a subject's checks on several processes; of others TWO.
SHARES = {
    "triton_small_m": 8, "sm90_w4a16_gemv": 4, "sm90_w4a16_gemm": 4, "sm90_sparse24_gemm": 8, "sm90_sparse24_w4a16_gemv": 4,
    "pairs": 5, "layers": 8, "expert_layers": 6, "dynamic_inputs": 8, "training_operands": 16, "training_steps": 6,
    "sparse_training": 4, "layer_gradients": 8, "cusparselt": 4, "gptq": 1, "calibration_memory": 1,
}  # fmt: skip
TWO = 2
#: Subjects whose shares take longest, which begin first; all others begin in the order of MODULES.
HEAVY = ("triton_small_m", "layers", "expert_layers", "pairs")


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
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--shard", type=int, nargs=2, default=(0, 1), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - {*NAMES}:
        parser.error(f"no subject is called {', '.join(sorted(unknown))}; --list names them")
    if options.workers > 1 and "times" in (options.part or (PARTS if options.names else ())):
        parser.error("times are not measured beside other processes: --part bits, or --workers 1")
    return options


def in_shards(names: list[str], options: argparse.Namespace) -> dict[str, int]:
    """Shares of subjects on processes of their own, HEAVY first; the worst exit code of each subject."""
    shares = [(name, at, SHARES.get(name, TWO)) for name in names for at in range(SHARES.get(name, TWO))]
    shares.sort(key=lambda share: share[0] not in HEAVY)
    end = time.monotonic() + options.seconds
    codes: dict[str, int] = {}
    with ThreadPoolExecutor(options.workers) as pool:
        for (name, *_), code in zip(
            shares, pool.map(lambda share: one_share(share, options, end), shares), strict=True
        ):
            codes[name] = min({codes.get(name, 0), code} - {0}, default=0)
    return codes


def one_share(share: tuple[str, int, int], options: argparse.Namespace, end: float) -> int:
    """A share of a subject's checks on a process of its own; what it prints is shown when it ends. 1 where it died."""
    name, at, count = share
    if (left := end - time.monotonic()) <= 0:
        sys.stdout.write(f"{name}: NOT REACHED, no time: share {at + 1} of {count}\n")
        return 2
    command = [
        sys.executable, __file__, name, "--part", "bits", "--only", options.only, "--seconds", f"{left:.0f}",
        "--device", options.device, "--shard", str(at), str(count),
    ]  # fmt: skip
    command += ["--all"] if options.all else []
    for flag, values in (("--schemes", options.schemes), ("--rows", options.rows)):
        command += [flag, *map(str, values)] if values else []
    command += ["--shapes", *("x".join(map(str, one)) for one in options.shapes)] if options.shapes else []
    command += ["--out", str(options.out)] if options.out is not None else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=left + GRACE
        )
        printed, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as late:
        printed = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        printed, code = f"{printed}{name}: no end {GRACE} s after its time\n", 2
    sys.stdout.write(printed)
    sys.stdout.flush()
    return code if code in (0, 1, 2) else 1


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
    out = None if options.out is None else Path(options.out)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    asked = Asked(
        options.device, options.part or (PARTS if options.names else PARTS[:1]), options.only, options.seconds,
        options.schemes, options.rows, options.shapes, options.all, out, tuple(options.shard),
    )  # fmt: skip
    chosen = [subject(name) for name in options.names or NAMES]
    if options.device == "cpu":
        chosen = [one for one in chosen if one.on_cpu]
    if options.workers > 1:
        codes = in_shards([one.name for one in chosen], options)
    else:
        codes = {one.name: perform(one, asked) for one in chosen}
    for code, word in ((1, "WRONG"), (2, "not all reached")):
        if found := [name for name, each in codes.items() if each == code]:
            sys.stdout.write(f"{word}: {', '.join(found)}\n")
    return 1 if 1 in codes.values() else 2 if 2 in codes.values() else 0


if __name__ == "__main__":
    sys.exit(main())
