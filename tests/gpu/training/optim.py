"""The optimizer kernels on a GPU: their bits beside the reference and each other, roots, and which variants are the quickest.

    python -m tests.gpu.training.optim [--part bits classes roots size alike step tune] [--out FILE.csv]

A line a check; times in milliseconds a step of 470 million bfloat16 parameters (28 matrices of 4096 x 4096), medians of rounds
in which all settings follow each other. Times beside others: `ao-lab reproduce optimizers --only speed --scale full`.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
import triton.language as tl

from ao_lab import optim
from fast.kernels.optim import host, kernel, sm90_step
from fast.kernels.optim.sm90_step import KERNEL, Problem, Variant
from reference.arrays.bridges import to_numpy
from reference.optim.states import STATES
from reference.optim.update import Key, begin, update
from tests.gpu.harness.timing import captured, elapsed, rate
from tests.support.optim import CASES, Case, compared, slots_of

PARTS = ("bits", "classes", "roots", "size", "alike", "step", "tune")
#: Cases of the kernel in CUDA C++ that others do not have.
MORE = (
    Case("4bit"),
    Case("4bit", "adam", master="24bit"),
    Case("4bit", block=512),
    Case("8bit", "adam", block=64),
)
SHAPES = ((64, 4096), (128, 512), (37, 1000), (100_001,), (3, 5, 640), (16, 8, 3, 3), (8192,), (2, 3))
COUNT, SIDE = 28, 4096
ELEMENTS = COUNT * SIDE * SIDE
ROUNDS, STEPS = 4, 3
#: Elements of a tile, warps, tiles of a program, stages.
GRID = (
    (2048, 4, 4, 1),
    (2048, 4, 16, 2),
    (1024, 2, 8, 2),
    (1024, 2, 32, 2),
    (1024, 2, 16, 3),
    (512, 1, 16, 2),
    (512, 1, 64, 2),
)
#: Of the kernel in CUDA C++: warps, turns, programs of a multiprocessor, stages.
VARIANTS = tuple(
    Variant(*one)
    for one in (
        (1, 16, 24, 3), (1, 16, 24, 2), (1, 16, 20, 3), (1, 16, 20, 2), (1, 16, 22, 3), (1, 8, 24, 3), (1, 12, 24, 3),
        (1, 24, 24, 3), (1, 16, 16, 4), (1, 16, 21, 3), (2, 16, 12, 3), (1, 16, 28, 2),
    )
)  # fmt: skip
#: What it is compiled for of each of TUNED.
PROBLEMS = {
    "8bit": Problem(8, 256, False, False, 0), "4bit": Problem(4, 128, False, False, 0),
    "24-bit master": Problem(8, 256, False, False, 8),
}  # fmt: skip
#: Optimizers whose launches are tuned.
TUNED = {
    "8bit": optim.AdamW8bit, "4bit": optim.AdamW4bit, "24-bit master": partial(optim.AdamW8bit, master="24bit"),
}  # fmt: skip
#: Optimizers whose steps are in graphs.
KEPT: list[torch.optim.Optimizer] = []
#: Bytes an element that must move, read and written, of 8-bit states.
FLOOR = 10.06


def bits() -> None:
    """Every case on many shapes, three steps; by Triton's kernel, and where the one in CUDA C++ takes it by that one."""
    for (name, around), case in product({"Triton": by_triton, "as taken": by_cuda}.items(), (*CASES, *MORE)):
        rule, slots, stored = slots_of(case, torch.device("cuda"), np.random.default_rng(0), SHAPES)
        try:
            with around():
                count = compared(case, rule, slots, stored, steps=3)
            print(f"bits {case.name}, {name}: {count} values agree", flush=True)
        except AssertionError as error:
            print(f"bits {case.name}, {name}: DIFFERENT: {error}", flush=True)


def classes() -> None:
    """Three steps of the classes beside those on a CPU: gradients with other strides; copies on the host, gradients clipped
    after backward or freed there; an empty shard."""
    for name, kind, options in (
        ("strides", optim.AdamW8bit, {}),
        ("offload, clipped", optim.CPUOffloadOptimizer, {}),
        ("offload, freed", optim.CPUOffloadOptimizer, {"offload_gradients": True}),
    ):
        p, empty = (torch.nn.Parameter(torch.randn(rows, 1000, device="cuda")) for rows in (512, 0))
        other = torch.nn.Parameter(p.detach().cpu())
        one, plain = kind([p, empty], lr=1e-2, **options), optim.AdamW8bit([other], lr=1e-2)
        for _ in range(3):
            g = torch.randn(1000, 512, device="cuda").t()
            one.zero_grad()
            if name == "strides":
                p.grad, empty.grad = g, torch.zeros_like(empty)
            else:
                ((p * g).sum() + empty.sum()).backward()
            if name == "offload, clipped":
                torch.nn.utils.clip_grad_norm_([p], 1.0)
            other.grad = (g if p.grad is None else p.grad).cpu().contiguous()
            one.step()
            plain.step()
        differ = int((p.detach().cpu() != other).sum())
        print(
            f"classes {name}: {differ} of {p.numel()} differ, {int(one.state[empty]['step'])} steps of no rows",
            flush=True,
        )


@triton.jit
def roots_kernel(x, y, z, SIZE: tl.constexpr):
    """Square roots and reciprocals by the sequences of the kernel."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    v = tl.load(x + at)
    tl.store(y + at, kernel.square_root_rn(v, True))
    tl.store(z + at, kernel.inverse_rn(v, True))


def roots() -> None:
    """All significands at even and odd exponents, at both ends of the range and in the middle, beside float64."""
    for low in (-101, -92, -2, 60, 122):
        first = (low + 127) << 23
        x = torch.arange(first, first + (2 << 23), dtype=torch.int32, device="cuda").view(torch.float32)
        y, z = torch.empty_like(x), torch.empty_like(x)
        roots_kernel[(x.numel() // 1024,)](x, y, z, 1024, enable_fp_fusion=False)
        # A float64 root rounded to float32 is the correctly rounded one: 53 >= 2 * 24 + 2.
        wrong = int((y != x.double().sqrt().float()).sum()), int((z != (1 / x.double()).float()).sum())
        print(
            f"roots 2^{low}: {x.numel()} values, {wrong[0]} square roots and {wrong[1]} reciprocals differ",
            flush=True,
        )


def parameters() -> list[torch.nn.Parameter]:
    """470 million parameters with gradients."""
    result = []
    for _ in range(COUNT):
        p = torch.nn.Parameter(torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) * 0.02)
        p.grad = torch.randn_like(p) * 1e-3
        result.append(p)
    return result


Step = Callable[[], object]


def graphed(step: Step) -> Step:
    """The step as a captured CUDA graph."""
    return captured([step])[0].replay


def milliseconds(step: Step) -> float:
    """Of one step, by events around some."""
    return elapsed(lambda: [step() for _ in range(STEPS)]) / STEPS / 1e3


def timed(steps: dict[str, Step], rows: list[dict[str, object]]) -> None:
    """Median, least and largest of each; its memory's floor."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            found[name].append(milliseconds(step))
    for name, values in found.items():
        floor = FLOOR * ELEMENTS / rate() / 1e3
        median = statistics.median(values)
        rows.append({"method": name, "ms": round(median, 4), "least": round(min(values), 4), "most": round(max(values), 4),
                     "floor": round(floor, 3)})  # fmt: skip
        print(
            f"time {name}: {median:.3f} ms ({min(values):.3f} to {max(values):.3f}), floor {floor:.2f}",
            flush=True,
        )


def tune(rows: list[dict[str, object]]) -> None:
    """Tiles, warps, tiles of a program and stages of Triton's kernel, by kind of states."""
    ps = parameters()
    for kind, make in TUNED.items():
        settings = {
            f"{kind}, tiles of {one[0]}, {one[1]} warps, {one[2]} a program, {one[3]} stages": one
            for one in GRID
        }
        steps: dict[str, Step] = {}
        for name, setting in settings.items():
            one = make(ps, lr=1e-4, nonfinite="propagate")
            KEPT.append(one)
            with by_triton(), mock.patch.dict(host.PLANS, dict.fromkeys(host.PLANS, host.Plan(*setting))):
                steps[name] = graphed(one.step)
        timed(steps, rows)
        best = min((row for row in rows if row["method"] in settings), key=lambda row: row["ms"])["method"]
        print("best:", best, flush=True)
        KEPT.clear()


def by_triton() -> Any:
    """Triton's kernel steps everything."""
    return mock.patch.object(sm90_step, "taken", return_value=None)


def by_cuda() -> Any:
    """The kernel in CUDA C++ steps all that it takes, states in 8 bits too."""
    return mock.patch.object(sm90_step, "QUICKER", {4, 8})


def alike() -> None:
    """Both kernels at full size, three steps from the same states: all that they write, bit for bit."""
    for kind, make in TUNED.items():
        steps = []
        for around in (by_triton, by_cuda):
            torch.manual_seed(0)
            ps = parameters()
            one = make(ps, lr=1e-3, nonfinite="propagate")
            with around():
                for _ in range(3):
                    one.step()
            used = any(tables.problem is not None for tables in one._updates._launches.tables.values())
            steps.append((used, [t for p in ps for t in (p.detach(), *one.state[p].values())]))
        (_, theirs), (used, mine) = steps
        wrong = sum(int((a != b).sum()) for a, b in zip(mine, theirs, strict=True))
        count = sum(a.numel() for a in mine)
        print(
            f"alike {kind}: {wrong} of {count} values differ, CUDA C++ {used}, Triton's {not steps[0][0]}",
            flush=True,
        )


def compile_all() -> None:
    """All variants at once, so that none is compiled while others wait."""
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda one: KERNEL.cubin(*one), product(VARIANTS, PROBLEMS.values())))


def step(rows: list[dict[str, object]]) -> None:
    """Variants of the kernel in CUDA C++ beside Triton's and torch's fused AdamW, in turn."""
    compile_all()
    ps = parameters()
    for kind, make in TUNED.items():
        steps: dict[str, Step] = {}
        for variant in (None, *VARIANTS):
            one = make(ps, lr=1e-4, nonfinite="propagate")
            KEPT.append(one)
            around = by_triton() if variant is None else mock.patch.dict(
                sm90_step.VARIANTS, dict.fromkeys(sm90_step.VARIANTS, variant)
            )  # fmt: skip
            with around, by_cuda():
                steps[f"{kind}, {'Triton' if variant is None else tuple(variant)}"] = graphed(one.step)
        if kind == "4bit":
            one = torch.optim.AdamW(ps, lr=1e-4, fused=True, capturable=True)
            KEPT.append(one)
            steps["torch fused"] = graphed(one.step)
        timed(steps, rows)
        KEPT.clear()


def check(ps: list[torch.nn.Parameter]) -> None:
    """One step of all parameters; the last rows of the first and of the last one beside the reference."""
    before = [p.detach()[-2:].cpu().clone() for p in (ps[0], ps[-1])]
    one = optim.AdamW8bit(ps, lr=1e-2, nonfinite="propagate", bf16_stochastic_round=True)
    one.step()
    torch.cuda.synchronize()
    states, first = STATES["8bit"], (SIDE - 2) * SIDE // 256
    for number, p, old in zip((0, COUNT - 1), (ps[0], ps[-1]), before, strict=True):
        stored = update(
            begin(to_numpy(old), states), to_numpy(p.grad[-2:].cpu()), states, step=1, lr=1e-2, weight_decay=1e-2,
            stochastic_round=True, key=Key(0, number, first),
        )  # fmt: skip
        state = one.state[p]
        found = {
            "p": (p.detach()[-2:].view(torch.int16), stored.p.view(np.int16)),
            "first": (state["exp_avg_codes"][-2:], stored.first.codes),
            "second": (state["exp_avg_sq_codes"][-2:], stored.second.codes),
            "second scale": (state["exp_avg_sq_scale"][-2:], stored.second.scale),
        }
        wrong = {name: int((a.cpu().numpy() != b).sum()) for name, (a, b) in found.items()}
        print(f"check of parameter {number} of 470M: differences {wrong}", flush=True)


def size() -> None:
    """At full size."""
    check(parameters())


def main() -> None:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--out")
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    print(torch.cuda.get_device_name(), torch.__version__, triton.__version__, flush=True)
    for part in options.part:
        begin = time.perf_counter()
        if part in ("tune", "step"):
            {"tune": tune, "step": step}[part](rows)
        else:
            {"bits": bits, "classes": classes, "roots": roots, "size": size, "alike": alike}[part]()
        print(f"part {part}: {time.perf_counter() - begin:.0f} s", flush=True)
    if options.out:
        with Path(options.out).open("w", newline="") as file:
            writer = csv.DictWriter(file, ["method", "ms", "least", "most", "floor"])
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
