"""Families that multiply rows by one preshuffled weight: `triton_small_m`, `sm90_w4a16_gemv`, `sm90_w4a16_gemm`.

Beside what every family is compared by: codes that come back from the order of storage; of the gemv results in float32, where
each code stands alone; of the gemm scales of rows of inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import astuple
from functools import partial
from itertools import product
from typing import Any

import torch

import fast
from fast.gemm import families
from fast.kernels.sm90_w4a16_gemm import host as gemm_host
from fast.kernels.sm90_w4a16_gemv import host as gemv_host
from fast.kernels.triton_small_m import host
from fast.kernels.triton_small_m.dense import arranged_dense
from fast.kernels.triton_small_m.layout import restored_codes
from fast.matmul.preshuffled import layout
from fast.scale_factors import SECOND, TERMS, ArrangedWeight, filled
from tests.gpu.harness.products import w4a16_gemm
from tests.gpu.harness.subject import Asked, Check, beyond, differs, in_processes, in_threads
from tests.gpu.harness.timing import Call, several
from tests.gpu.linear import weights
from tests.gpu.linear.family import (
    Family,
    Problem,
    allowance,
    by_torch,
    dense_weights,
    numbers,
    small_bias,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Shape = tuple[int, int]
SHAPES = ((14336, 4096), (4096, 14336), (4096, 4096), (1024, 4096))
#: Lengths that are no whole tiles, both dtypes, all elements.
ODD = tuple(
    Problem(name, shape, rows, dtype, dtype)
    for name, shape, rows, dtype in (
        ("int4_g128", (100, 384), 3, BF16), ("int4_g32", (70, 160), 17, FP16), ("int4_g64", (200, 320), 33, BF16),
        ("int4_g128_asymmetric", (129, 640), 1, FP16), ("int4_g32_asymmetric", (1000, 96), 9, BF16),
        ("int8_rowwise", (77, 992), 5, BF16), ("int8_rowwise_asymmetric", (300, 1024), 65, FP16),
        ("int8_g128", (64, 256), 128, BF16), ("fp8_rowwise", (333, 544), 2, BF16), ("fp8_tensorwise", (96, 128), 100, FP16),
        ("mxfp4", (100, 384), 3, BF16), ("mxfp4", (200, 320), 17, FP16), ("nvfp4", (333, 544), 33, BF16),
        ("nvfp4", (70, 160), 1, FP16), ("mxfp8_e4m3", (129, 640), 65, BF16), ("mxfp8_e4m3", (77, 992), 5, FP16),
        ("nf4", (100, 448), 3, BF16), ("nf4", (333, 576), 33, FP16), ("nf4", (200, 640), 65, BF16),
    )
)  # fmt: skip
#: Whole layers.
WHOLE = tuple(
    Problem(name, shape, rows)
    for name, shape in (
        ("int4_g128", (14336, 4096)), ("int4_g32", (4096, 4096)), ("int4_g128_asymmetric", (1024, 4096)),
        ("int8_rowwise", (4096, 4096)), ("fp8_rowwise", (1024, 4096)), ("int4_g128", (4096, 14336)),
        ("mxfp4", (14336, 4096)), ("nvfp4", (4096, 4096)), ("mxfp8_e4m3", (4096, 4096)), ("nvfp4", (4096, 14336)),
        ("nf4", (14336, 4096)), ("nf4", (4096, 4096)),
    )
    for rows in (1, 16, 32, 64, 128)
)  # fmt: skip


def small_m(x: Any, w: ArrangedWeight, bias: Any = None, tiling: Any = None, allocate: Any = None) -> Any:
    """The product by `triton_small_m`."""
    return host.linear_small(x, w, bias, tiling=tiling)


def small_m_variants(problem: Problem, every: bool) -> list[Any]:
    """Tilings, the rule's first; of odd shapes several are always compared."""
    rows, columns = map(filled, problem.shape)
    kind, odd = weights.KINDS[problem.scheme], rows * columns < 1 << 20
    found = host.candidates(rows, columns, *kind, problem.rows, 12 if every else 16 if odd else 4)
    return found[::4] if odd and not every else found


def plain_peers(scheme: str, shape: Shape, held: list[Any]) -> Any:
    """bfloat16, and the same scheme in the plain order."""
    first, dense = weights.drawn(scheme, shape)[0], dense_weights(shape)
    stored = several(lambda: weights.copied(first), first.codes.nbytes)
    return lambda x: {
        "bf16": by_torch(dense, x),
        "plain layout": [partial(fast.linear, x, w) for w in stored],
    }


def codes_come_back(asked: Asked) -> Iterator[Check]:
    """Of every scheme and shape."""
    for name, shape in dict.fromkeys((one.scheme, one.shape) for one in (*ODD, *WHOLE)):
        yield f"codes of {name} {shape}", partial(wrong_order, name, shape)


def wrong_order(name: str, shape: Shape) -> Iterator[str]:
    """Codes that are others after the way into the order of storage and back."""
    stored, _ = weights.drawn(name, shape)
    yield from differs("codes", restored_codes(weights.arranged_on_device(stored)), stored.codes)


SMALL_M = Family(
    families.TRITON_SMALL_M.name, families.TRITON_SMALL_M.about, small_m, small_m_variants,
    partial(in_processes, weights.compile_small_m), (*ODD, *WHOLE), weights.exact, weights.filled_weight, plain_peers,
    schemes=("int4_g128", "int8_rowwise", "int4_g32", "fp8_rowwise", "int4_g128_asymmetric"), shapes=SHAPES,
    rows=(1, 2, 4, 8, 16, 32, 64, 128), random=weights.random, named=lambda one: numbers(astuple(one)), more=codes_come_back,
)  # fmt: skip


# The gemv: up to 16 rows.

#: Elements whose programs are tall, and blocks, phases and programs of a multiprocessor of those.
TALL = ("nf4", "e2m1", "e4m3_mx")
SIZES = ((1, 4, 1), (1, 4, 2), (1, 2, 2), (2, 2, 1), (2, 3, 1), (4, 1, 1))
NEW = ("nf4", "nvfp4", "mxfp8_e4m3", "mxfp4")
SCHEMES = (*NEW, "int4_g128", "int4_g128_asymmetric", "int8_rowwise", "int4_g32", "fp8_rowwise", "int8_g128")
BITS = (*SCHEMES, "int4_g64", "int4_g32_asymmetric", "int8_rowwise_asymmetric", "fp8_tensorwise")
#: Of weights that are no layers: rows of inputs of one column each cover so many columns.
SMALL, COLUMNS = (256, 1024), 64


def form_of(scheme: str, dtype: torch.dtype, out: torch.dtype | None = None) -> Any:
    """Of a scheme's weights, inputs and outputs in a dtype."""
    zero, name = scheme.endswith("asymmetric"), str(out or dtype).removeprefix("torch.")
    return gemv_host.Form(*weights.KINDS[scheme], zero, dtype == FP16, name)


def dtypes_of(scheme: str) -> tuple[torch.dtype, ...]:
    """Of inputs that the kernel takes."""
    return (BF16,) if weights.KINDS[scheme][0] in gemv_host.FACTORED else (BF16, FP16)


def gemv(x: Any, w: ArrangedWeight, bias: Any = None, variant: Any = None, allocate: Any = None) -> Any:
    """The product by `sm90_w4a16_gemv`."""
    return gemv_host.sm90_w4a16_gemv(x, w, bias, variant=variant)


def all_gemv_variants(problem: Problem, every: bool = True) -> list[Any]:
    """The rule's first, words straight from memory, then tall programs or all sizes, by the element."""
    form = form_of(problem.scheme, problem.dtype)
    rule = gemv_host.choose(form, problem.rows, *problem.shape)
    tall = form.element in TALL and not isinstance(rule, gemv_host.Direct)
    others = tall_variants(form, problem, rule) if tall else other_variants(form, problem)
    found = [rule, *direct_variants(form, problem), *others]
    return [one for one in dict.fromkeys(found) if one is not None]


def direct_variants(form: Any, problem: Problem) -> Iterator[Any]:
    """Words straight from memory: programs of one wave, and other warps and loads."""
    n, _ = problem.shape
    tokens = next(size for size in gemv_host.TILES if problem.rows <= size)
    for tiles, warps, loads in product(range(1, min(16, max(1, n // 1440)) + 1), (24, 28, 32), (4, 6)):
        one = gemv_host.Direct(tokens, tiles, max(1, warps // tiles), loads)
        if n // 16 // tiles <= 132 and one.takes(form, problem.rows, *problem.shape):
            yield one


def tall_variants(form: Any, problem: Problem, rule: Any) -> Iterator[Any]:
    """The rule's with x the other way, and other tables; then other sizes, each with the parts of K that fill a device."""
    (n, k), count, fitted = problem.shape, problem.rows, gemv_host.fitted
    steps, tokens = k // gemv_host.STEP, next(size for size in gemv_host.TILES if count <= size)
    if rule is not None:
        sizes = tuple(rule[:4])
        yield fitted(form, sizes, count, steps, rule.at_once, streamed=not rule.streamed, tabled=rule.tabled)
        for tabled in (0, 4) if form.element == "nf4" else ():
            yield fitted(form, sizes, count, steps, rule.at_once, streamed=rule.streamed, tabled=tabled)
    for blocks, phases, at_once in SIZES:
        if n % (64 * blocks) == 0:
            fill = [splits for splits in (1, 2, 4, 8) if n // 64 // blocks * splits <= 132 * at_once]
            splits = next((one for one in fill[::-1] if steps // one >= 4), 1)
            one = fitted(form, (tokens, blocks, phases, splits), count, steps, at_once, streamed=count > 2)
            yield one if one is not None and one.stages > 1 else None


def other_variants(form: Any, problem: Problem) -> Iterator[Any]:
    """All sizes, x before or in stages, the weight asked for ahead or not."""
    (n, k), count = problem.shape, problem.rows
    steps, tokens = k // gemv_host.STEP, next(size for size in gemv_host.TILES if count <= size)
    ways = ((True, False), (True, True), (False, True))
    for blocks, phases, splits, at_once, (streamed, ahead) in product(
        (1, 2), (2, 3, 4), (1, 2, 4), (1, 2), ways
    ):
        programs = n // 64 // blocks * splits
        if steps // splits >= 2 and 60 <= programs <= 132 * at_once and blocks * phases in (3, 4):
            sizes = (tokens, blocks, phases, splits)
            one = gemv_host.fitted(form, sizes, count, steps, at_once, streamed=streamed, ahead=ahead)
            yield one if one is not None and one.stages >= 2 else None


def compile_gemv(pairs: Iterable[tuple[Problem, Any]], out: torch.dtype | None = None) -> None:
    """Into the cache of cubins."""
    tasks = [(one, form_of(problem.scheme, problem.dtype, out)) for problem, one in pairs if one is not None]
    in_threads(lambda task: gemv_host.KERNEL.cubin(*task), tasks)


def gemv_peers(scheme: str, shape: Shape, held: list[Any]) -> Any:
    """bfloat16 and `triton_small_m`."""
    dense = dense_weights(shape)
    return lambda x: {"bf16": by_torch(dense, x), "small_m": [partial(host.linear_small, x, w) for w in held]}


def single_codes(asked: Asked) -> Iterator[Check]:
    """Each code alone, in float32."""
    problems = [
        Problem(name, SMALL, 16, dtype) for name in asked.schemes or BITS for dtype in dtypes_of(name)
    ]
    compile_gemv(((one, variant) for one in problems for variant in all_gemv_variants(one)), FP32)
    for one in problems:
        yield f"single codes of {one}", partial(wrong_codes, one)


def wrong_codes(problem: Problem) -> Iterator[str]:
    """Variants of 16 rows of one column each whose results are not the elements times their scales; random codes."""
    if problem.scheme == "nf4":
        w = weights.filled_weight(problem.scheme, SMALL)
        values = level_values(w, problem.dtype)
    else:
        stored, exact = weights.drawn(problem.scheme, SMALL, seed=1)
        w, values = weights.arranged_on_device(stored), exact.float()
    eye = torch.eye(COLUMNS, SMALL[1], device="cuda", dtype=problem.dtype)
    for variant in all_gemv_variants(problem):
        got = [gemv_host.sm90_w4a16_gemv(rows, w, variant=variant, dtype=FP32) for rows in eye.split(16)]
        made = None if any(one is None for one in got) else torch.cat(got).t()  # type: ignore[arg-type]
        yield from differs(str(variant), made, values[:, :COLUMNS])


def level_values(w: ArrangedWeight, dtype: torch.dtype) -> torch.Tensor:
    """What NF4's words stand for in products of a dtype: both terms added in float32, times the scale."""
    stored = layout.all_rows(w.words, "nf4").long()
    codes = torch.stack([stored & 15, stored >> 4], -1).flatten(1)
    terms = torch.tensor(TERMS[str(dtype).removeprefix("torch.")], device="cuda", dtype=torch.int32)
    hi, mid = terms.to(torch.int16).view(dtype).double().unbind(-1)
    scale = w.scale[: w.columns // 64].view(FP32).t().repeat_interleave(64, 1)
    return (hi + SECOND * mid).float()[codes] * scale


GEMV = Family(
    families.SM90_W4A16_GEMV.name, families.SM90_W4A16_GEMV.about, gemv, all_gemv_variants, compile_gemv,
    (
        *(Problem(name, SMALL, rows, dtype, dtype) for name in BITS for rows in (1, 5, 16) for dtype in dtypes_of(name)),
        *(Problem(name, shape, rows, BF16, BF16) for name in (*NEW, "int4_g128", "int8_rowwise") for shape in SHAPES[:2]
          for rows in (1, 16)),
    ),
    weights.exact, weights.filled_weight, gemv_peers, SCHEMES, SHAPES, (1, 2, 4, 8, 16),
    random=weights.random, named=numbers, more=single_codes,
)  # fmt: skip


# The gemm: any number of rows.

#: Tiles ahead, pairs, splits; warpgroups that split K; tiles of two sizes; levels of a table: each way of multiplying.
GEMM_PROBLEMS = tuple(Problem(*one) for one in (
    ("int4_g128", (256, 512), 129, BF16, None), ("int4_g128", (384, 1024), 1000, BF16, BF16),
    ("int4_g64", (256, 640), 200, BF16, FP32), ("int4_g32", (128, 256), 130, BF16, None),
    ("int4_g128_asymmetric", (256, 768), 257, BF16, None), ("int4_g32_asymmetric", (640, 512), 300, FP16, BF16),
    ("int8_rowwise", (256, 512), 129, BF16, FP16), ("int8_g128", (384, 384), 511, FP16, None),
    ("int8_rowwise_asymmetric", (128, 1024), 192, BF16, None), ("fp8_rowwise", (256, 896), 385, BF16, BF16),
    ("fp8_tensorwise", (512, 128), 160, FP16, None), ("int4_g128", (1024, 4096), 2049, FP16, FP16),
    ("mxfp4", (256, 512), 129, BF16, None), ("mxfp4", (640, 896), 385, FP16, BF16), ("nvfp4", (256, 512), 129, BF16, BF16),
    ("nvfp4", (384, 1024), 1000, BF16, FP32), ("nvfp4", (640, 896), 300, FP16, None),
    ("mxfp8_e4m3", (256, 512), 129, BF16, FP16), ("mxfp8_e4m3", (384, 896), 511, FP16, None),
    ("mxfp4", (1024, 4096), 2049, BF16, BF16), ("int4_g128", (4096, 4096), 128, BF16, BF16),
    ("int4_g32", (1280, 2048), 40, FP16, None), ("int4_g128_asymmetric", (2048, 4096), 65, BF16, FP16),
    ("int8_rowwise", (896, 4096), 33, BF16, None), ("fp8_rowwise", (4096, 1792), 100, FP16, BF16),
    ("mxfp8_e4m3", (2048, 2048), 64, BF16, None), ("nvfp4", (1920, 2048), 96, BF16, BF16),
    ("int4_g128", (14336, 1024), 512, BF16, None), ("int8_g128", (6144, 1024), 1024, BF16, None),
    ("int4_g32_asymmetric", (4096, 2048), 700, BF16, None), ("int4_g128", (14336, 512), 64, BF16, BF16),
    ("int4_g128_asymmetric", (14336, 768), 90, FP16, None), ("int8_rowwise", (14336, 512), 100, BF16, None),
    ("fp8_rowwise", (28672, 384), 96, FP16, FP16), ("mxfp4", (14336, 384), 128, BF16, None),
    ("nvfp4", (28672, 256), 33, BF16, FP32), ("mxfp8_e4m3", (28672, 384), 120, BF16, None),
    ("int4_g32_asymmetric", (14336, 512), 65, BF16, None), ("int4_g128", (14336, 512), 1024, BF16, BF16),
    ("mxfp8_e4m3", (14336, 384), 1000, FP16, None), ("nvfp4", (28672, 256), 400, BF16, BF16),
    ("int4_g128_asymmetric", (6144, 512), 700, BF16, FP16), ("mxfp4", (28672, 384), 300, FP16, None),
    ("fp8_rowwise", (14336, 512), 1024, BF16, None), ("nf4", (256, 512), 129, BF16, FP16),
    ("nf4", (384, 1024), 1000, FP16, None), ("nf4", (1920, 2048), 96, BF16, BF16), ("nf4", (28672, 384), 33, FP16, FP32),
    ("nf4", (14336, 384), 128, BF16, None), ("nf4", (14336, 512), 1024, BF16, BF16), ("nf4", (1024, 4096), 2049, BF16, None),
))  # fmt: skip
#: Of scales of rows of inputs.
SCALED = tuple(Problem(*one) for one in (
    ("int4_g32", (256, 512), 129, BF16, BF16), ("int4_g128", (384, 1024), 1000, FP16, None),
    ("int8_g128", (4096, 4096), 128, BF16, FP32), ("int4_g32", (1280, 2048), 40, FP16, FP16),
    ("int4_g32_asymmetric", (14336, 512), 64, BF16, BF16), ("int4_g32", (14336, 512), 128, BF16, None),
    ("mxfp4", (28672, 384), 300, BF16, BF16), ("nf4", (14336, 512), 1024, BF16, FP16), ("nf4", (4096, 2048), 90, FP16, None),
))  # fmt: skip


def gemm(
    x: Any,
    w: ArrangedWeight,
    bias: Any = None,
    variant: Any = None,
    allocate: Any = None,
    x_scale: Any = None,
) -> Any:
    """The product by `sm90_w4a16_gemm`."""
    return w4a16_gemm(x, w, bias, variant, x_scale, allocate)


def gemm_variants_of(problem: Problem, every: bool) -> list[Any]:
    """The rule's, or the best ones of the model too, that first."""
    weight, (n, k) = weights.decoded(problem.scheme), problem.shape
    rule = gemm_host.choose(problem.rows, n, k, weight)
    others = gemm_host.candidates(problem.rows, k, weight) if every else ()
    ordered = sorted(others, key=lambda one: gemm_host.nanoseconds(one, problem.rows, n, k, weight))
    return [*dict.fromkeys([rule, *ordered[:4]])]


def compile_gemm(pairs: Iterable[tuple[Problem, Any]], scaled: bool = False) -> None:
    """Into the cache of cubins."""
    tasks = set()
    for problem, one in pairs:
        weight, dtype = weights.decoded(problem.scheme), str(problem.dtype).removeprefix("torch.")
        made = gemm_host.with_scales(one, weight) if scaled else one
        tasks.add((made, gemm_host.Problem(weight, dtype)))
    in_threads(lambda task: gemm_host.KERNEL.cubin(*task), tasks)


def gemm_peers(scheme: str, shape: Shape, held: list[Any]) -> Any:
    """bfloat16, the dense weight made for the call, and up to 128 rows `triton_small_m`."""
    dense = dense_weights(shape)

    def of(x: torch.Tensor) -> dict[str, list[Call]]:
        found = {"bf16": by_torch(dense, x), "dense": [partial(weights.by_dense, x, w) for w in held[:3]]}
        if len(x) <= host.MOST_ROWS:
            found["small_m"] = [partial(host.linear_small, x, w) for w in held]
        return found

    return of


def scales_of_rows(asked: Asked) -> Iterator[Check]:
    """Products that multiply sums by a scale of each row of inputs."""
    chosen = [one for one in SCALED if not asked.schemes or one.scheme in asked.schemes]
    compile_gemm(((one, variant) for one in chosen for variant in gemm_variants_of(one, False)), scaled=True)
    for one in chosen:
        yield f"scales of rows, {one}", partial(wrong_scaled, one)


def wrong_scaled(problem: Problem) -> Iterator[str]:
    """Of integers under powers of two, of each column of the weight times a scale, of codes by random weights."""
    x, w, bias, _ = weights.exact(problem)
    rows, dense = problem.rows, weights.drawn(problem.scheme, problem.shape)[1]
    scale = 2.0 ** torch.randint(-1, 2, (rows,), device="cuda").float()
    truth = (x.double() @ dense.t()) * scale.double()[:, None] + (0.0 if bias is None else bias.double())
    for _ in range(20):
        yield from differs("integers", gemm(x, w, bias, x_scale=scale), truth.float().to(problem.dtype))
    some, elements = weights.columns(problem)
    scale, bias = torch.randn(problem.shape[1], device="cuda"), small_bias(problem)
    sums = elements.t().float() * scale[:, None]
    wanted = (sums if bias is None else sums + bias.float()).to(problem.dtype)
    eye = torch.eye(problem.shape[1], device="cuda", dtype=problem.dtype)
    yield from differs("scaled elements", gemm(eye, some, bias, x_scale=scale), wanted)
    x = torch.randint(-127, 128, (rows, problem.shape[1]), device="cuda").to(problem.dtype)
    scale = torch.rand(rows, device="cuda") * 0.02 + 0.001
    values, by = arranged_dense(some, problem.dtype).double(), scale.double()[:, None]  # type: ignore[union-attr]
    truth, size = (x.double() @ values.t()) * by, (x.double().abs() @ values.abs().t()) * by
    allowed = allowance(truth, size, problem.shape[1] + 1, problem.dtype)
    yield from beyond("codes", gemm(x, some, x_scale=scale), truth, allowed)


GEMM = Family(
    families.SM90_W4A16_GEMM.name, families.SM90_W4A16_GEMM.about, gemm, gemm_variants_of, compile_gemm, GEMM_PROBLEMS,
    weights.exact, weights.filled_weight, gemm_peers,
    schemes=(
        "int4_g128", "int4_g128_asymmetric", "int4_g32", "int8_rowwise", "fp8_rowwise", "mxfp4", "mxfp8_e4m3", "nvfp4", "nf4",
    ),
    shapes=((14336, 4096), (4096, 14336), (6144, 4096)), rows=(32, 64, 96, 128, 256, 512, 1024, 2048, 8192),
    random=weights.random_scales, columns=weights.columns, named=lambda one: one.name, more=scales_of_rows,
)  # fmt: skip

SUBJECTS = tuple(one.subject for one in (SMALL_M, GEMV, GEMM))
