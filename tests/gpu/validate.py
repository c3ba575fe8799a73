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
GPU for themselves); --seconds then holds for all of it, which ends 20 seconds later at most. Public functions are compared
by `validate_kernels.py`, the reference by `validate_reference.py`.

Exits with 1 where anything differs or raises, else with 2 where something was not reached.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ao_lab.cli.terminal import TERMINATED, Terminated, heeding_sigterm
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
    "models.generate_captured": ("generate_captured",),
    "models.torchtitan": ("torchtitan",),
}
#: Seconds after the end of the time in which checks that have begun may end; what has not is killed, and not reached.
GRACE = 15
NAMES = tuple(name for names in MODULES.values() for name in names)
#: Gigabytes of the GPU that processes may take together, and that one takes of which COSTS says nothing.
MEMORY, GIGABYTES = 134, 2
#: Seconds between looks at a process.
POLL = 0.1


@dataclass(frozen=True)
class Cost:
    """Of a subject's checks: core-seconds as an H200 and 16 cores had them, processes that share them, gigabytes of each."""

    seconds: int
    shares: int = 1
    gigabytes: int = GIGABYTES


COSTS = {
    "triton_small_m": Cost(361, 8), "sm90_w4a16_gemv": Cost(228, 6), "sm90_w4a16_gemm": Cost(144, 4),
    "triton_small_m_experts": Cost(34, 2), "sm90_w4a16_gemm_experts": Cost(194, 4), "sm90_intn_small_m": Cost(119, 3),
    "sm90_s8_gemm": Cost(20), "triton_int_scaled_mm": Cost(14), "pairs": Cost(252, 5), "layers": Cost(280, 8),
    "expert_layers": Cost(257, 6), "dynamic_inputs": Cost(141, 4), "sm90_sparse24_w4a16_gemv": Cost(277, 7),
    "triton_mma_sparse_small_m": Cost(79, 2), "sparse_pairs": Cost(142, 4), "sm90_sparse24_gemm": Cost(262, 7),
    "cusparselt": Cost(91, 3), "sparse_wgmma": Cost(48, 2), "sparsegpt": Cost(4), "sparse_training": Cost(140, 4),
    "sparse_training_kernels": Cost(153, 4), "linear_gradients": Cost(42, 2), "layer_gradients": Cost(51, 2),
    "training_operands": Cost(130, 4), "training_steps": Cost(150, 5), "grouped_training": Cost(190, 5, 8),
    "gptq": Cost(120, 4), "calibration_memory": Cost(200, 5, 20), "qat": Cost(56, 2), "quantize": Cost(65, 2, 20),
    "checkpoints": Cost(120, 4), "experts_decoding": Cost(100, 1, 66), "torchtitan": Cost(60),
    "generate_captured": Cost(100, 3),
}  # fmt: skip


@dataclass(frozen=True)
class Share:
    """Some of a subject's checks: those whose number leaves `at` when it is divided by `count`."""

    name: str
    at: int
    count: int

    @property
    def cost(self) -> Cost:
        """Of the subject."""
        return COSTS[self.name]


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
    parser.add_argument("--end", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--shard", type=int, nargs=2, default=(0, 1), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - {*NAMES}:
        parser.error(f"no subject is called {', '.join(sorted(unknown))}; --list names them")
    if options.workers > 1 and "times" in (options.part or (PARTS if options.names else ())):
        parser.error("times are not measured beside other processes: --part bits, or --workers 1")
    return options


def in_this_process(chosen: list[Subject], options: argparse.Namespace, out: Path | None) -> dict[str, int]:
    """One subject after the other; their exit codes."""
    # Of a process among several: until a time, imports included.
    seconds = options.end - time.time() if options.end else options.seconds
    parts = options.part or (PARTS if options.names else PARTS[:1])
    asked = Asked(
        options.device, parts, options.only, seconds, options.schemes, options.rows, options.shapes, options.all, out,
        tuple(options.shard),
    )  # fmt: skip
    return {one.name: perform(one, asked) for one in chosen}


def in_shards(names: list[str], options: argparse.Namespace, end: float) -> dict[str, int]:
    """Shares of subjects on processes of their own, those that take longest first, as many as cores and the GPU's memory
    have room for; the worst exit code of each subject."""
    waiting = [Share(name, at, COSTS[name].shares) for name in names for at in range(COSTS[name].shares)]
    waiting.sort(key=lambda share: -share.cost.seconds / share.count)
    codes, running, stop = dict[str, int](), dict[Future[int], Share](), Event()
    with ThreadPoolExecutor(options.workers) as pool, stopping(stop):
        while waiting or running:
            for share in beside([*running.values()], waiting, options.workers):
                waiting.remove(share)
                running[pool.submit(one_share, share, options, end, stop)] = share
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                name = running.pop(future).name
                codes[name] = min({codes.get(name, 0), future.result()} - {0}, default=0)
    return codes


@contextmanager
def stopping(stop: Event) -> Iterator[None]:
    """Set where the body raises, as it does for Ctrl-C and SIGTERM: processes in sessions of their own end with this one."""
    try:
        yield
    except BaseException:
        stop.set()
        raise


def beside(running: list[Share], waiting: list[Share], workers: int) -> list[Share]:
    """Which of the shares that wait may begin; the first one in any case where nothing runs."""
    begun: list[Share] = []
    for share in waiting:
        taken = sum(one.cost.gigabytes for one in [*running, *begun])
        if len(running) + len(begun) < workers and (not taken or taken + share.cost.gigabytes <= MEMORY):
            begun.append(share)
    return begun


def one_share(share: Share, options: argparse.Namespace, end: float, stop: Event) -> int:
    """A share of a subject's checks on a process of its own; what it prints is shown when it ends. 1 where it died."""
    if time.time() >= end:
        sys.stdout.write(f"{share.name}: NOT REACHED, no time: share {share.at + 1} of {share.count}\n")
        return 2
    printed, code = run_until(command_of(share, options, end), end + GRACE, stop)
    if code is None:
        printed += f"{share.name}: NOT REACHED, no end {GRACE} s after its time: share {share.at + 1} of {share.count}\n"
        code = 2
    sys.stdout.write(printed)
    sys.stdout.flush()
    return code if code in (0, 1, 2) else 1


def command_of(share: Share, options: argparse.Namespace, end: float) -> list[str]:
    """This program for one share."""
    command = [
        sys.executable, __file__, share.name, "--part", "bits", "--only", options.only, "--end", f"{end:.1f}",
        "--device", options.device, "--shard", str(share.at), str(share.count),
    ]  # fmt: skip
    command += ["--all"] if options.all else []
    for flag, values in (("--schemes", options.schemes), ("--rows", options.rows)):
        command += [flag, *map(str, values)] if values else []
    command += ["--shapes", *("x".join(map(str, one)) for one in options.shapes)] if options.shapes else []
    return command + (["--out", str(options.out)] if options.out is not None else [])


def run_until(command: list[str], end: float, stop: Event) -> tuple[str, int | None]:
    """What a program printed, and its exit code; None where it was killed with all that it had started, at a time or as
    this program is stopped."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as printed:
        program = subprocess.Popen(
            command, env=environment, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True
        )
        while (code := program.poll()) is None and time.time() < end and not stop.is_set():
            time.sleep(POLL)
        if code is None:
            os.killpg(program.pid, signal.SIGKILL)
            program.wait()
        printed.seek(0)
        return printed.read(), code


def main(arguments: list[str] | None = None) -> int:
    """All subjects that were asked for; the exit code. SIGTERM, as `timeout` sends it, ends processes of its own too."""
    try:
        with heeding_sigterm():
            return validated(arguments)
    except Terminated:
        sys.stdout.write("validate: stopped\n")
        return TERMINATED


def validated(arguments: list[str] | None = None) -> int:
    """The same where nothing ends it."""
    options = parse(arguments)
    end = time.time() + options.seconds
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
    names = [*(options.names or NAMES)]
    if options.device == "cpu":
        names = [name for name in names if subject(name).on_cpu]
    if options.workers > 1:
        codes = in_shards(names, options, end)
    else:
        codes = in_this_process([subject(name) for name in names], options, out)
    for code, word in ((1, "WRONG"), (2, "not all reached")):
        if found := [name for name, each in codes.items() if each == code]:
            sys.stdout.write(f"{word}: {', '.join(found)}\n")
    return 1 if 1 in codes.values() else 2 if 2 in codes.values() else 0


if __name__ == "__main__":
    sys.exit(main())
