"""Variants of `sm90_w4a16_gemv` that are checked and timed beside the rule's, and their cubins."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from itertools import product

import torch

from fast.kernels.linear_small import host
from fast.kernels.sm90_w4a16_gemv.select import TILES, choose
from fast.kernels.sm90_w4a16_gemv.variants import FACTORED, STEP, Direct, Form, Variant, fitted, sources
from fast.launch.nvrtc import cached_cubin
from tests.gpu.linear.small import weights

#: Elements whose programs are tall.
TALL = ("nf4", "e2m1", "e4m3_mx")
DTYPES = (torch.bfloat16, torch.float16)
#: Blocks, phases and programs of a multiprocessor of elements whose programs are tall.
SIZES = ((1, 4, 1), (1, 4, 2), (1, 2, 2), (2, 2, 1), (2, 3, 1), (4, 1, 1))


def form_named(scheme: str, dtype: torch.dtype) -> Form:
    """Of a scheme's weights, inputs and outputs in a dtype."""
    zero = scheme.endswith("asymmetric")
    return Form(*weights.KINDS[scheme], zero, dtype == torch.float16, str(dtype).removeprefix("torch."))


def dtypes(scheme: str) -> tuple[torch.dtype, ...]:
    """Of inputs that the kernel takes."""
    return DTYPES[:1] if weights.KINDS[scheme][0] in FACTORED else DTYPES


def variants(form: Form, count: int, shape: tuple[int, int]) -> list[Variant | Direct]:
    """The rule's first."""
    rule = choose(form, count, *shape)
    tall = form.element in TALL and not isinstance(rule, Direct)
    found = _tall(form, count, shape, rule) if tall else _others(form, count, shape)
    return [one for one in dict.fromkeys([rule, *_direct(form, count, shape), *found]) if one is not None]


def _direct(form: Form, count: int, shape: tuple[int, int]) -> Iterator[Direct]:
    """Words straight from memory: programs of one wave, and other warps and loads."""
    tokens = next(size for size in TILES if count <= size)
    for slabs, warps, loads in product(range(1, 17), (24, 28, 32), (4, 6)):
        one = Direct(tokens, slabs, max(1, warps // slabs), loads)
        if (
            shape[0] // 16 // slabs <= 132
            and slabs <= max(1, shape[0] // 1440)
            and one.takes(form, count, *shape)
        ):
            yield one


def _tall(form: Form, count: int, shape: tuple[int, int], rule: Variant | None) -> Iterator[Variant | None]:
    """The rule's with x the other way, and other tables; then other sizes, each with the parts of K that fill a device."""
    steps, tokens = shape[1] // STEP, next(size for size in TILES if count <= size)
    if rule is not None:
        sizes = tuple(rule[:4])
        yield fitted(form, sizes, count, steps, rule.at_once, streamed=not rule.streamed, tabled=rule.tabled)
        for tabled in (0, 4) if form.element == "nf4" else ():
            yield fitted(form, sizes, count, steps, rule.at_once, streamed=rule.streamed, tabled=tabled)
    for blocks, phases, at_once in SIZES:
        if shape[0] % (64 * blocks):
            continue
        fill = [splits for splits in (1, 2, 4, 8) if shape[0] // 64 // blocks * splits <= 132 * at_once]
        splits = next((one for one in fill[::-1] if steps // one >= 4), 1)
        one = fitted(form, (tokens, blocks, phases, splits), count, steps, at_once, streamed=count > 2)
        yield one if one is not None and one.stages > 1 else None


def _others(form: Form, count: int, shape: tuple[int, int]) -> Iterator[Variant | None]:
    """Of the other elements all sizes, x before or in stages, the weight asked for ahead or not."""
    steps, tokens = shape[1] // STEP, next(size for size in TILES if count <= size)
    ways = ((True, False), (True, True), (False, True))
    for blocks, phases, splits, at_once, way in product((1, 2), (2, 3, 4), (1, 2, 4), (1, 2), ways):
        programs = shape[0] // 64 // blocks * splits
        if steps // splits >= 2 and 60 <= programs <= 132 * at_once and blocks * phases in (3, 4):
            sizes, rest = (tokens, blocks, phases, splits), dict(zip(("streamed", "ahead"), way, strict=True))
            one = fitted(form, sizes, count, steps, at_once, **rest)
            yield one if one is not None and one.stages >= 2 else None


def compile_all(wanted: Iterable[tuple[Form, int, tuple[int, int]]]) -> None:
    """Variants into the cache of cubins, many at once: NVRTC lets other threads run."""
    began, todo = time.monotonic(), {(one, form) for form, *rest in wanted for one in variants(form, *rest)}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda pair: cached_cubin(*sources(*pair)), todo))
    print(f"compiled {len(todo)} variants in {time.monotonic() - began:.1f} s", flush=True)


def compile_peers(
    pool: Executor, schemes: Iterable[str], shapes: Iterable[tuple[int, int]], rows: Iterable[int]
) -> list[Future[str]]:
    """`linear_small` with its rule's tiles, into Triton's cache; nothing of it is said but by the calls that would fail."""
    tasks = {
        (scheme, shape, 16, host.tiling_of(*shape, *weights.KINDS[scheme], count), "bfloat16", False)
        for scheme, shape, count in product(schemes, shapes, rows)
    }
    return [pool.submit(weights.compiled, task) for task in tasks]
