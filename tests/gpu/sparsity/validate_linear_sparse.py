"""On a GPU: `fast.linear_sparse` bit for bit, then its variants' times beside dense products and other libraries' sparse ones.

    PYTHONPATH=. python tests/gpu/sparsity/validate_linear_sparse.py [--seconds 110] [--only NAME] [--dtype bf16,fp8,int8]
        [--shapes 128x4096x14336,...] [--no-times | --no-checks] [--again]
    PYTHONPATH=. python tests/gpu/sparsity/validate_linear_sparse.py --model --seconds 60

--only: variants whose name contains it (t128, c2, t16g1p2). --serial: each stage waits for the one before; where results are
right with it and wrong without, something that products still use was overwritten, such as registers of metadata. --again: a
variant that is wrong is run so in the same call. A variant that fails is reported by a line and left out of the times; others
go on. At the end counts of wrong ones by what they have in common; checks go to linear_sparse_checks.json, rows of times to
linear_sparse.json, in the folder of the variable OUT, else of --out. --model: in place of all that, three variants of each of
twelve shapes (16 to 8192 tokens), fp8 and bf16, compared with the dense product and timed, for the model of the choice:
linear_sparse_model.json, which `fit_linear_sparse.py` reads. Exits with 1 on any difference.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import fast
from fast.kernels.sm90_sparse24_gemm import host
from fast.kernels.sm90_sparse24_gemm.select import candidates, choose, cycles
from fast.kernels.sm90_sparse24_gemm.variants import ELEMENTS, Variant, sources
from fast.launch.nvrtc import cached_cubin, library
from tests.gpu.sparsity.products import exact, peers
from tests.gpu.sparsity.products.checks import Check, counts, found_by, write
from tests.gpu.sparsity.products.inputs import Case, case
from tests.gpu.sparsity.products.timing import COLD, Method, host_time, prepare, times
from tests.gpu.sparsity.wgmma import model_times
from tests.gpu.sparsity.wgmma.report import Report

DTYPES = {
    "fp8": ("float8_e4m3fn",) * 2,
    "bf16": ("bfloat16",) * 2,
    "int8": ("int8",) * 2,
    "fp16": ("float16",) * 2,
}
MIXES = (("float8_e4m3fn", "float8_e5m2"), ("float8_e5m2", "float8_e4m3fn"), ("float8_e5m2",) * 2)
SHAPES = (*((m, 4096, 14336) for m in (128, 16, 2048, 64, 16384, 32)), (8192, 8192, 8192))
#: Variants of the model's order that are timed.
TIMED = 5


Job = tuple[Variant, tuple[str, str], str]


def compiled(job: Job) -> str | None:
    """Compile one variant to the folder of cubins; what NVRTC says where it refuses."""
    try:
        cached_cubin(*sources(job[0], ELEMENTS[job[1]], job[2]))
    except Exception as error:  # noqa: BLE001  others go on
        return f"{job[0].name} {job[1]}: {str(error)[:500]}"
    return None


def compile_all(report: Report, pool: ProcessPoolExecutor, jobs: list[Job]) -> None:
    """Compile in parallel what will be needed. Failures show again where a variant is used."""
    started, jobs = time.monotonic(), list(dict.fromkeys(jobs))
    failed = [text for text in pool.map(compiled, jobs) if text]
    report.say(f"{len(jobs)} cubins in {time.monotonic() - started:.1f} s, {len(failed)} not compiled")
    for text in failed[:3]:
        report.say(text)


def planned(options: argparse.Namespace) -> list[tuple[Variant, tuple[str, str]]]:
    """What is checked: all tiles with all clusters for fp8 and bf16, some for the others; small clusters first, so that a short
    run has seen something of each tile and dtype."""
    step = {"fp8": 1, "bf16": 1, "int8": 4, "fp16": 5}
    jobs = [
        (v, DTYPES[name])
        for name in options.dtype
        for v in list(exact.variants(ELEMENTS[DTYPES[name]].bits, False))[:: step[name]]
    ]
    if "fp8" in options.dtype:
        jobs += [(v, DTYPES["fp8"]) for v in list(exact.variants(8, True))[::3]]
        jobs += [(v, mix) for mix in MIXES for v in list(exact.variants(8, False))[::9]]
    jobs = [(v._replace(serial=options.serial), pair) for v, pair in jobs if options.only in v.name]
    return sorted(jobs, key=lambda job: (job[0].cluster, job[0].pair, job[0].tokens))


def outputs(pair: tuple[str, str]) -> tuple[str, str]:
    """Dtypes of the output that are checked."""
    return "bfloat16", "int32" if pair[0] == "int8" else "float32"


def ordered(options: argparse.Namespace, shape: tuple[int, int, int], name: str) -> list[Variant]:
    """Variants that are timed, in the model's order."""
    m, n, k = shape
    bits = ELEMENTS[DTYPES[name]].bits
    found = sorted(candidates(m, bits, False), key=lambda v: cycles(v, m, n, k * bits // 8, bits, 132))
    return [v._replace(serial=options.serial) for v in found if options.only in v.name][: options.variants]


def checks(report: Report, jobs: list[tuple[Variant, tuple[str, str]]], share: float) -> None:
    """Until a share of the time is over."""
    stop = time.monotonic() + share * report.left()
    for done, job in enumerate(jobs):
        if time.monotonic() > stop:
            report.say(f"no time for {len(jobs) - done} of {len(jobs)} checks")
            break
        one = Check(*job, found_by(job, lambda text: _stop_if_lost(report, text)))
        report.checks.append(one)
        if one.wrong is not None:
            report.broken.add(f"{one.variant.name} {one.dtypes[0]}")
            report.say(one.line())


def again(report: Report, pool: ProcessPoolExecutor) -> None:
    """Wrong ones serially, until a third of the time that is left is over."""
    wrong = [one for one in report.checks if one.wrong is not None and not one.variant.serial]
    jobs = [(one.variant._replace(serial=True), one.dtypes) for one in wrong]
    stop = time.monotonic() + report.left() / 3
    if jobs:
        compile_all(report, pool, [(*job, out) for job in jobs for out in outputs(job[1])])
    for one, job in zip(wrong, jobs, strict=True):
        if time.monotonic() < stop:
            one.serially = found_by(job, lambda text: _stop_if_lost(report, text))
            one.again = True


def summary(report: Report) -> None:
    """Counts of what was wrong."""
    report.say(f"{len(report.checks)} checks, {report.wrong} wrong")
    for line in counts(report.checks):
        report.say(line)


def _stop_if_lost(report: Report, text: str) -> None:
    """After an illegal access nothing of this process runs any more."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        report.say(f"the device is lost: {text}; go on with --only and another variant")
        raise SystemExit(1) from None


def own(cases: list[Case], variant: Variant, scaled: bool) -> Method:
    """A variant as a method."""

    def operands(i: int) -> tuple[Any, ...]:
        one = cases[i]
        return (
            one.x,
            one.values,
            one.arranged,
            None,
            *((one.x_scale, one.scale) if scaled else (None, None)),
        )

    call = host.product("bfloat16", True, operands(0), variant)
    return Method(f"ours {variant.name}", lambda i: call(*operands(i)))


def methods(
    report: Report, shape: tuple[int, int, int], name: str, cases: list[Case], options: argparse.Namespace
) -> Iterator[Method]:
    """Peers, then our variants, the model's first choice first."""
    scaled = name == "fp8"
    makers: list[Any] = [lambda: peers.dense(cases), lambda: peers.cusparselt(cases, options.search)]
    makers += [lambda: peers.torchao(cases)] if name == "fp8" else []
    order = [v for v in ordered(options, shape, name) if f"{v.name} {DTYPES[name][0]}" not in report.broken]
    makers += [lambda v=v: own(cases, v, scaled) for v in order]
    for make in makers:
        try:
            yield make()
        except Exception as error:  # noqa: BLE001
            report.say(f"    left out: {type(error).__name__}: {str(error)[:200]}")


def measure(
    report: Report, shape: tuple[int, int, int], name: str, options: argparse.Namespace, seconds: float
) -> None:
    """One table."""
    m, n, k = shape
    kinds = tuple(getattr(torch, one) for one in DTYPES[name])
    size = kinds[0].itemsize * (m * k + n * k // 2) + m * n * 2
    count = max(2, min(8, COLD // size + 1))
    cases = [case(m, n, k, kinds, whole=False) for _ in range(count)]
    found = list(methods(report, shape, name, cases, options))
    for method in found:
        prepare(method, count)
        if method.error:
            report.say(f"    {method.name}: {method.error}")
    result = times(found, count, seconds)
    chosen = choose(m, n, k * kinds[0].itemsize, 8 * kinds[0].itemsize, False).name
    report.say(f"{m}x{n}x{k} {name}, {count} buffers (the model chooses {chosen})")
    for method in found:
        if method.name in result:
            median, low, high = result[method.name]
            rate = 2e-6 * m * n * k / median
            report.say(
                f"    {method.name:32s} {median:9.2f} us [{low:.2f}, {high:.2f}] {rate:7.0f} TFLOP/s {method.how}"
            )
            report.rows.append(
                {"shape": shape, "dtype": name, "method": method.name, "us": median, "low": low, "high": high,
                 "tflops": rate, "how": method.how, "buffers": count, "chosen": method.name == f"ours {chosen}",
                 "device": torch.cuda.get_device_name()}
            )  # fmt: skip
    if m <= 128 and report.left() > 2:
        one = cases[0]
        took = host_time(lambda: fast.linear_sparse(one.x, one.values, one.arranged, x_scale=one.x_scale, scale=one.scale,
                                                    out_dtype=torch.bfloat16))  # fmt: skip
        report.say(f"    host: {took:.1f} us a call of fast.linear_sparse")
        report.rows.append({"shape": shape, "dtype": name, "method": "host", "us": took})


def model(report: Report, options: argparse.Namespace, folder: Path) -> int:
    """Times for the model of the choice."""
    names = [name for name in options.dtype if name in model_times.BITS]
    library()
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1), mp_context=get_context("fork")) as pool:
        compile_all(report, pool, [(v, DTYPES[name], "bfloat16") for v, name in model_times.jobs(names)])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "linear_sparse_model.json"
    right = model_times.measured(report.say, report.left, path, names)
    report.say(f"{path}: {'all right' if right else 'some are WRONG'}")
    return int(not right)


def main(arguments: list[str] | None = None) -> int:
    """Check, then time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=110.0)
    parser.add_argument(
        "--search", type=float, default=1.0, help="seconds for cuSPARSELt's algorithms of a table"
    )
    parser.add_argument("--only", default="")
    parser.add_argument("--dtype", default="fp8,bf16,int8,fp16", type=lambda text: text.split(","))
    parser.add_argument(
        "--shapes", type=lambda text: [tuple(map(int, one.split("x"))) for one in text.split(",")]
    )
    parser.add_argument("--variants", type=int, default=TIMED)
    parser.add_argument("--serial", action="store_true")
    parser.add_argument("--again", action="store_true", help="wrong variants serially, too")
    parser.add_argument("--model", action="store_true", help="times for the model of the choice alone")
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--no-times", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("build"))
    options = parser.parse_args(arguments)
    report = Report(options.seconds)
    folder = Path(os.environ.get("OUT", options.out))
    if options.model:
        return model(report, options, folder)
    tables = [
        (shape, name)
        for shape in options.shapes or SHAPES
        for name in ("fp8", "bf16")
        if name in options.dtype
    ]
    tables = [] if options.no_times else tables
    jobs = [] if options.no_checks else planned(options)
    needed = [(v, pair, out) for v, pair in jobs for out in outputs(pair)]
    needed += [(v, DTYPES[name], "bfloat16") for shape, name in tables for v in ordered(options, shape, name)]
    library()
    # Workers begin before CUDA does: they are forks.
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1), mp_context=get_context("fork")) as pool:
        compile_all(report, pool, needed)
        report.say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
        try:
            checks(report, jobs, 1.0 if options.no_times and not options.again else 0.5)
            if options.again:
                again(report, pool)
        finally:
            write(report.checks, folder)
            summary(report)
    for at, (shape, name) in enumerate(tables):
        if report.left() < 2:
            report.say(f"no time for {len(tables) - at} of {len(tables)} tables")
            break
        try:
            measure(report, shape, name, options, min(2.0, report.left() / (len(tables) - at) / 3))
        except Exception as error:  # noqa: BLE001
            report.say(f"{shape} {name}: {type(error).__name__}: {str(error)[:300]}")
        torch.cuda.empty_cache()
    (folder / "linear_sparse.json").write_text("\n".join(json.dumps(row) for row in report.rows) + "\n")
    report.say("agreed" if not report.wrong else f"{report.wrong} variants wrong")
    return int(bool(report.wrong))


if __name__ == "__main__":
    raise SystemExit(main())
