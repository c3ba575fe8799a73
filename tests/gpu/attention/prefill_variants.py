"""On a GPU: forms of `sm90_attention` beside cuDNN's attention in bfloat16, and what it takes without one of its parts.

`prefill.py --part variants [--sizes 1x8192 1x16384 1x32768] [--seconds 60]`: causal and not, 32 query heads over 8 key heads of
128 channels, all calls of a size in turn from CUDA graphs. A line a form: microseconds of the matmuls alone (median, 20 and 80
percent), TFLOP/s, over cuDNN's time alone and with quantization, whether the result is the first form's, bit for bit, and that
of the next call, and its cosine. `whole, FORM` is all of a call, quantization by the form's kernels included; those that make
codes of keys in CUDA C++ are compared with the first one of these, as their mean key is a sum in another order. Ablations
change the source: results are wrong, times say what a part costs.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ao_lab.measure.turns import CudaWatch, Plan, Span, Timing, interleaved, prepare, summary
from experiments.kv_cache.decode_attention import Heads, Size
from experiments.prefill_attention.speed import operations, states
from fast.kernels.attention import prefill, sm90
from fast.kernels.attention.quantize_heads import quantize_heads
from fast.kernels.attention.sm90 import Problem, Variant
from fast.launch import cuda
from reference.attention.quantized import ATTENTION_RECIPES
from tests.gpu.harness.lines import say

HEADS = Heads(32, 8, 128)
RECIPE = "int8_block"
PEER, QUANTIZATION = "SDPA, cuDNN", "quantization"
VARIANTS = {
    "one unit": Variant(), "two units": Variant(units=2), "two units, three stages": Variant(3, units=2),
}  # fmt: skip
#: Forms of all of a call.
WHOLE = {
    "two units": Variant(units=2), "codes in CUDA C++": Variant(units=2, heads=True),
    "queries by tokens, ring": Variant(units=2, heads=True, token_major=True),
}  # fmt: skip
LOADS = (
    ("expect_bytes(bar, K_BYTES + SCALE_BYTES);", "expect_bytes(bar, 0);"),
    ("expect_bytes(ring.full_v + 8 * at.stage, V_BYTES);", "expect_bytes(ring.full_v + 8 * at.stage, 0);"),
    ("      copy_box(maps.k,", "      if (tile < 0) copy_box(maps.k,"),
    ("      copy_box(maps.v,", "      if (tile < 0) copy_box(maps.v,"),
)  # fmt: skip
EXPONENTIALS = (('asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));', "y = x;"),)
VALUES = (
    (
        "  const u64 b = descriptor(v, KEYS);\n",
        "  for (int i = 0; i < SUMS; i++) asm volatile(\"\" : \"=f\"(d[i]));\n  return commit();\n"
        "  const u64 b = descriptor(v, KEYS);\n",
    ),
)  # fmt: skip
LARGEST = (("most[r] = float(largest(s, r));", "most[r] = 1.0f;"),)
#: Changes of the source.
ABLATIONS = {
    "no copies": LOADS, "no exponentials": EXPONENTIALS, "no weights by values": VALUES, "no largest scores": LARGEST,
    "no exponentials, no weights by values": EXPONENTIALS + VALUES,
}  # fmt: skip
ROUNDS = Plan(rounds=15, warmup=1, span=1e-9)


def changed(kernel: cuda.Kernel, changes: tuple[tuple[str, str], ...], folder: Path) -> cuda.Kernel:
    """A kernel whose source, in another folder, has pieces replaced."""
    text = (kernel.folder / f"{kernel.name}.cu").read_text()
    for old, new in changes:
        found = text.count(old)
        if found != 1:
            raise ValueError(
                f"an ablation replaces a piece that stands once in {kernel.name}.cu, not {found} times: {old!r}"
            )
        text = text.replace(old, new)
    (folder / f"{kernel.name}.cu").write_text(text)
    for header in kernel.own:
        (folder / header).write_text((kernel.folder / header).read_text())
    return replace(kernel, folder=folder)


@contextmanager
def forms(names: list[str] | None = None) -> Iterator[dict[str, tuple[cuda.Kernel, Variant]]]:
    """Kernels and variants by name, compiled by as many processes as there are processors."""
    with tempfile.TemporaryDirectory() as folder:
        made = {name: (sm90.KERNEL, variant) for name, variant in VARIANTS.items()}
        for at, (name, changes) in enumerate(ABLATIONS.items()):
            place = Path(folder) / str(at)
            place.mkdir()
            made[name] = changed(sm90.KERNEL, changes, place), Variant()
        yield made if names is None else {name: one for name, one in made.items() if name in names}


def compile_all(made: Mapping[str, tuple[cuda.Kernel, Variant]]) -> None:
    """Cubins of all forms, causal and not; of ablations causal ones."""
    element = ATTENTION_RECIPES[RECIPE].schemes[0].element
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = [
            pool.submit(_compile_in, str(kernel.folder), variant, Problem(element, "bfloat16", False, causal))
            for causal in (True, False)
            for name, (kernel, variant) in made.items()
            if causal or name not in ABLATIONS
        ]
        for job in jobs:
            job.result()
    print(f"{len(jobs)} cubins", flush=True)


def _compile_in(folder: str, variant: Variant, problem: Problem) -> int:
    return len(replace(sm90.KERNEL, folder=Path(folder)).cubin(variant, problem))


def by_cudnn(q: Any, k: Any, v: Any, causal: bool) -> torch.Tensor:
    """torch's attention by cuDNN alone."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def measure(
    size: Size, causal: bool, made: Mapping[str, tuple[cuda.Kernel, Variant]], seconds: float
) -> None:
    """Lines of a size."""
    torch.manual_seed(0)
    record, watch, plan = ATTENTION_RECIPES[RECIPE], CudaWatch(), replace(ROUNDS, seconds=seconds)
    q, k, v = states(size, HEADS, "cuda")
    heads = quantize_heads(q, k, v, record)
    calls: dict[str, Any] = {
        PEER: partial(by_cudnn, q, k, v, causal),
        QUANTIZATION: partial(quantize_heads, q, k, v, record),
    }
    for name, (kernel, variant) in made.items():
        calls[name] = partial(_attended, kernel, heads, q, record, causal, size.tokens, variant)
    whole = {f"whole, {name}": variant for name, variant in WHOLE.items()}
    for name, variant in whole.items():
        calls[name] = partial(
            prefill.attention, q, k, v, record, scale=128**-0.5, causal=causal, plan=variant
        )
    expected = calls[PEER]().float().flatten()
    spans: dict[str, Span] = {}
    notes: dict[str, dict[str, Any]] = {}
    firsts: dict[bool, torch.Tensor] = {}
    for name, call in calls.items():
        print(f"... {size.tokens} {name}", flush=True)
        if name in whole or (name in made and name not in ABLATIONS):
            y = call()
            first = firsts.setdefault(name in whole and whole[name].heads, y)
            cosine = torch.nn.functional.cosine_similarity(expected, y.float().flatten(), 0).item()
            same, again = torch.equal(first, y), torch.equal(y, call())
            notes[name] = {"same": same, "again": again, "cosine": round(cosine, 6), "ok": same and again}
        spans[name] = prepare(watch, [call], plan)
    times = {name: summary(one) for name, one in interleaved(watch, spans, plan).items()}
    _lines(size, causal, times, notes)


def _attended(
    kernel: cuda.Kernel, heads: Any, q: Any, record: Any, causal: bool, keys: int, variant: Variant
) -> Any:
    with mock.patch.object(sm90, "KERNEL", kernel):
        y = sm90.attended(heads, q, record, 128**-0.5, causal, None, keys, variant)
    if y is None:
        raise RuntimeError(f"{variant} does not compile or load")
    return y


def _lines(
    size: Size, causal: bool, times: Mapping[str, Timing], notes: Mapping[str, Mapping[str, Any]]
) -> None:
    count = operations(size, HEADS) * (1 if causal else 2 * size.tokens / (size.tokens + 1))
    peer, quantization = times[PEER].median, times[QUANTIZATION].median
    for name, found in times.items():
        us = found.median * 1e6
        more = {"low": round(found.low * 1e6, 1), "high": round(found.high * 1e6, 1)}
        if name.startswith("whole"):
            more |= {"whole": round(peer / found.median, 3)}
        elif name != QUANTIZATION:
            more |= {"TFLOPs": round(count / us / 1e6, 1), "alone": round(peer / found.median, 3)}
            more |= {"whole": round(peer / (found.median + quantization), 3)}
        say(
            "variants",
            f"{size.tokens} {'causal' if causal else 'all'} {name}",
            us,
            "us",
            **more,
            **notes.get(name, {}),
        )


def quantization(sizes: list[Size], calls: int = 10) -> None:
    """What each kernel of quantization takes in the forms of all of a call, by torch's profiler; and copies of queries, which
    read and write their bytes: of the view of (B, T, heads, width) that they are, and of the same in one piece."""
    for size in sizes:
        q, k, v = states(size, HEADS, "cuda")
        for form, variant in WHOLE.items():
            call = partial(prefill.operands, q, k, v, ATTENTION_RECIPES[RECIPE], None, variant)
            _profiled(f"{size.tokens} {form}", call, calls)
        whole = q.contiguous()
        _profiled(f"{size.tokens} copy of the view", q.contiguous, calls)
        _profiled(f"{size.tokens} copy in one piece", whole.clone, calls)


def _profiled(what: str, call: Any, calls: int) -> None:
    """A line for each kernel of a call."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    for one in profile.key_averages():
        if one.device_time_total:
            name = f"{what}: {one.key[:40]}"
            say("quantization", name, one.device_time_total / calls, "us", count=one.count // calls)


def variants(sizes: list[Size], seconds: float, names: list[str] | None = None) -> None:
    """All forms at all sizes in about so many seconds, besides compiling; ablations at the second size."""
    with forms(names) as made:
        compile_all(made)
        for causal in (True, False):
            for size in sizes:
                ablated = causal and size == sizes[len(sizes) // 2]
                tried = {name: one for name, one in made.items() if ablated or name not in ABLATIONS}
                measure(size, causal, tried, seconds / (2 * len(sizes)))


__all__ = ["ABLATIONS", "VARIANTS", "WHOLE", "changed", "quantization", "variants"]
