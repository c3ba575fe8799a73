"""Families that multiply rows by int4 in 2:4 storage, with zero points and without: `sm90_sparse24_w4a16_gemv` and Triton's
`triton_sparse24_small_m_kernel`; two products of one input in one launch; gradients of the public function.

A scheme is named by the columns of a scale and what differs from float32 scales without zero points: "g128", "g64 bf16 zeros".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch

import fast
import reference
from fast.kernels.sm90_sparse24_w4a16_gemv import host as gemv
from fast.kernels.sm90_sparse24_w4a16_gemv.host import (
    GATED,
    ONE,
    TWO,
    Form,
    Variant,
    rows_of_tiles,
    sm90_sparse24_w4a16_gemv_pair,
    sm90_sparse24_w4a16_gemv_swiglu,
)
from fast.kernels.triton_small_m.host import linear_small
from fast.kernels.triton_small_m.pair import linear_small_pair, linear_small_swiglu
from fast.kernels.triton_sparse24_small_m import host as mma
from fast.kernels.triton_sparse24_small_m.host import Tiling
from reference.sparsity.linear_sparse_int4 import sparse_int4_weight
from tests.gpu.harness.poison import poisoned
from tests.gpu.harness.subject import Asked, Check, Row, Subject, differs, in_threads, same_bits
from tests.gpu.harness.timing import Call, measured, rate, several
from tests.gpu.linear.family import Family, Problem, by_torch, dense_weights, exact_product, numbers
from tests.gpu.linear.weights import filled_weight
from tests.gpu.sparsity.cases import EXACT, PAIRS, as_tensors, exact_case, random_case
from tests.support.linear_cases import distance_allowed

BF16, FP16 = torch.bfloat16, torch.float16
Shape = tuple[int, int]
#: Layers of an 8-billion-parameter model, the last two as they are joined.
SHAPES = ((14336, 4096), (4096, 14336), (4096, 4096), (1024, 4096), (6144, 4096), (28672, 4096))


class Weight(NamedTuple):
    """Codes, metadata, scales, zero points or None."""

    codes: torch.Tensor
    metadata: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None = None


def group_of(scheme: str) -> int:
    """Columns of a scale."""
    return int(scheme.split()[0][1:])


def drawn(scheme: str, shape: Shape, exact: bool = True) -> Weight:
    """All codes and pairs of places; scales 1/2, 1 and 2, or random ones."""
    (n, k), group = shape, group_of(scheme)
    pairs = torch.tensor(PAIRS, device="cuda", dtype=torch.uint8)
    low, high = (pairs[torch.randint(0, 6, (n, k // 8), device="cuda")] for _ in range(2))
    scale = torch.rand(n, k // group, device="cuda") * 0.01
    if exact:
        scale = 2.0 ** torch.randint(-1, 2, scale.shape, device="cuda")
    codes = torch.randint(0, 256, (n, k // 4), device="cuda", dtype=torch.uint8)
    zero = torch.randint(-8, 8, scale.shape, device="cuda", dtype=torch.int8) if "zeros" in scheme else None
    return Weight(codes, low | high << 4, scale.to(BF16 if "bf16" in scheme else torch.float32), zero)


def dense_of(w: Weight) -> torch.Tensor:
    """The dense weight in float32, by operations of torch alone."""
    kept = torch.stack([w.codes & 15, w.codes >> 4], -1).float()
    kept = torch.where(kept > 7, kept - 16, kept)
    width = 4 * w.codes.shape[1] // w.scale.shape[1]
    if w.zero is not None:
        kept = kept - w.zero.float().repeat_interleave(width // 4, 1)[..., None]
    pairs = torch.stack([w.metadata & 15, w.metadata >> 4], -1).flatten(1)
    index = torch.stack([pairs & 3, pairs >> 2], -1).long()
    dense = kept.new_zeros((*w.codes.shape, 4)).scatter_(2, index, kept).flatten(1)
    return dense * w.scale.float().repeat_interleave(width, 1)


def exact(problem: Problem) -> tuple[Any, ...]:
    """Operands whose sums are exact, and the result."""
    w = drawn(problem.scheme, problem.shape)
    x, bias, wanted = exact_product(problem, dense_of(w).double())
    return x, w, bias, wanted


def columns(problem: Problem) -> tuple[Weight, torch.Tensor]:
    """A weight and its elements."""
    w = drawn(problem.scheme, problem.shape)
    return w, dense_of(w).to(problem.dtype)


def random(problem: Problem) -> tuple[Any, ...] | None:
    """Random numbers of the host and the reference's bound; of small weights without zero points."""
    if problem.shape[0] > 100 or "zeros" in problem.scheme:
        return None
    names = [str(problem.dtype).removeprefix("torch."), "bfloat16" if "bf16" in problem.scheme else "float32"]
    case = as_tensors(random_case(problem.rows, *problem.shape, group_of(problem.scheme), *names))
    truth, allowed = distance_allowed(case.x, sparse_int4_weight(*case[1:4]), None)
    return case.x.cuda(), Weight(*(part.cuda() for part in case[1:4])), truth, allowed


def filled(scheme: str, shape: Shape) -> Weight:
    """A weight to be timed."""
    return drawn(scheme, shape, exact=False)


# The gemv.


def form_of(problem: Problem, products: int = ONE) -> Form:
    """Of its variants."""
    narrow, zeros = "bf16" in problem.scheme, "zeros" in problem.scheme
    return Form(group_of(problem.scheme), narrow, problem.dtype == FP16, products, zeros)


def by_gemv(x: Any, w: Weight, bias: Any = None, variant: Any = None, allocate: Any = None) -> Any:
    """The product by `sm90_sparse24_w4a16_gemv`."""
    group = 4 * w.codes.shape[1] // w.scale.shape[1]
    return gemv.sm90_sparse24_w4a16_gemv(x, *w[:3], bias, group, variant, w.zero)


def gemv_variants(problem: Problem, every: bool) -> list[Variant]:
    """The rule's, and asking late; then those that it prefers next, of each stage, parts of K and programs at once."""
    n, k = problem.shape
    most = 14 if every else 6 if n * k > 1 << 24 else 2
    return preferred(form_of(problem), problem.rows, (n, k), most)


def preferred(form: Form, count: int, shape: Shape, most: int) -> list[Variant]:
    """See `gemv_variants`; of more than 16 rows the rule's alone."""
    chosen = gemv.choose(form, count, *shape)
    if count > gemv.MOST_ROWS or chosen is None:
        return [] if chosen is None else [chosen]
    groups: dict[tuple[int, ...], list[Variant]] = {}
    for one in gemv.candidates(form, count, *shape):
        groups.setdefault((one.splits, one.at_once, one.columns), []).append(one)
    others = [one for place in range(2) for each in groups.values() for one in each[place : place + 1]]
    return [*dict.fromkeys([chosen, chosen._replace(early=False), *others])][:most]


def compile_forms(pairs: Iterable[tuple[Variant | None, Form]]) -> None:
    """Into the cache of cubins."""
    tasks = [(one, form) for one, form in pairs if one is not None]
    in_threads(lambda task: gemv.KERNEL.cubin(*task), tasks)


def gemv_peers(scheme: str, shape: Shape, held: list[Weight]) -> Callable[[Any], dict[str, list[Call]]]:
    """bfloat16, int4 alone in the preshuffled order, Triton's kernel, and the dense weight made for the call."""
    dense, group = dense_weights(shape), group_of(scheme)
    first = filled_weight(f"int4_g{group}", shape)
    stored = several(lambda: filled_weight(f"int4_g{group}", shape), first.nbytes)

    def by_dense(x: torch.Tensor, w: Weight) -> torch.Tensor:
        return torch.nn.functional.linear(x, torch.ops.ao_lab.sparse_int4_dense(*w[:3], x.dtype, w.zero))

    def of(x: torch.Tensor) -> dict[str, list[Call]]:
        found: dict[str, list[Call]] = {"bf16": by_torch(dense, x)}
        if len(x) <= 128:
            found["int4"] = [partial(linear_small, x, w) for w in stored]
        if len(x) <= mma.MOST_ROWS and held[0].zero is None:
            found["mma_sparse"] = [partial(by_mma, x, w) for w in held]
        if len(x) >= gemv.MOST_ROWS:
            found["dense"] = [partial(by_dense, x, w) for w in held]
        return found

    return of


#: Odd rows, few, and those of models; then chunks of rows, every group, dtype and storage of scales, zero points and not.
GEMV_PROBLEMS = (
    *(
        Problem(f"g{group}{narrow}", (277, 1024), 16, dtype)
        for group, dtype, narrow in product((128, 32, 64, 256), (BF16, FP16), ("", " bf16"))
    ),
    *(
        Problem(f"g{group}{' bf16' * (count % 2)}", shape, count, dtype, dtype)
        for shape, count, group in product(((277, 1024), (5, 512), (1001, 2304), (130, 768)), (1, 5, 8, 16), (128, 32, 64, 256))
        for dtype in ((BF16, FP16)[(count + group // 32) % 2],)
    ),
    *(Problem("g128", shape, count, BF16, BF16) for shape, count in product(SHAPES[:2] + SHAPES[3:4], (1, 2, 16, 8))),
    *(
        Problem(f"g{group}{narrow}{zeros}", (200, 2048), count, dtype, None if count % 2 else dtype)
        for group, narrow, dtype, zeros in product((32, 64, 128, 256), ("", " bf16"), (BF16, FP16), ("", " zeros"))
        for count in (1, 8, 16, 17, 24, 40, 64)
    ),
    *(
        Problem(f"g{group}{' bf16' * (count > 1)}", (61, 2048), count, (BF16, FP16)[group == 64])
        for group, count in product((128, 32, 64, 256), (1, 16))
    ),
)  # fmt: skip


def one_problem(problem: Problem) -> bool:
    """Whether a variant is there."""
    return gemv.choose(form_of(problem), problem.rows, *problem.shape) is not None


GEMV = Family(
    "sm90_sparse24_w4a16_gemv", "up to 64 rows by int4 in 2:4 storage", by_gemv, gemv_variants,
    lambda pairs: compile_forms((one, form_of(problem)) for problem, one in pairs),
    tuple(filter(one_problem, GEMV_PROBLEMS)), exact, filled, gemv_peers,
    schemes=("g128", "g128 zeros"), shapes=SHAPES, rows=(1, 2, 4, 8, 16, 17, 32, 48, 64), random=random, columns=columns,
    most=gemv.MOST_ROWS, named=numbers,
)  # fmt: skip


# Triton's kernel.

#: Tiles to try: row tiles, column tiles, warps along K, turns at once, one step before, inputs arranged, reads of two turns.
TILINGS = (
    (1, 1, 4, 2, 0), (1, 1, 8, 1, 0), (1, 1, 8, 2, 0), (1, 1, 4, 4, 0), (2, 1, 4, 1, 0), (2, 1, 4, 2, 0), (2, 1, 8, 1, 0),
    (2, 1, 8, 2, 0), (2, 1, 4, 1, 1), (1, 1, 4, 2, 1), (1, 1, 8, 2, 1), (1, 1, 16, 1, 0), (4, 1, 4, 1, 0),
    (2, 1, 4, 2, 0, 0, 1), (1, 1, 8, 2, 0, 0, 1), (1, 1, 4, 4, 0, 0, 1), (1, 1, 16, 2, 0, 0, 1),
)  # fmt: skip
TILINGS_16 = (
    (1, 2, 4, 1, 0), (1, 2, 8, 1, 0), (2, 2, 4, 1, 0), (2, 2, 4, 2, 0), (2, 2, 8, 1, 0), (4, 2, 4, 1, 0), (1, 1, 8, 1, 0),
    (2, 1, 4, 2, 0), (2, 2, 4, 1, 1), (2, 2, 4, 1, 0, 1), (1, 2, 4, 2, 0, 1), (1, 2, 8, 1, 0, 1), (4, 2, 4, 1, 0, 1),
)  # fmt: skip


def by_mma(x: Any, w: Weight, bias: Any = None, tiling: Any = None, allocate: Any = None) -> Any:
    """The product by Triton's kernel."""
    group = 4 * w.codes.shape[1] // w.scale.shape[1]
    tiling = tiling or mma.tiling_of(w.codes.shape[0], x.shape[1], group, len(x))
    return mma.linear_sparse_int4(x, *w[:3], bias, group, None, tiling)


def choices(problem: Problem) -> list[Tiling]:
    """The tiles of the rule, and those of all that it chooses among: X as it is or arranged first, reads of one turn or two."""
    (n, k), count, group = problem.shape, problem.rows, group_of(problem.scheme)
    given = (n, k, group, count)
    found: list[Tiling | None] = [mma.tiling_of(*given), mma.in_place(*given)]
    if count <= mma.C.few_rows:
        found.append(mma.widened(mma.weight_bound(*given), k, group, count))
    if count > 1:
        found.append(mma.arranged_bound(*given))
    if count > mma.C.few_rows:
        found.append(replace(mma.input_bound(*given), arranged=True))
    return [one for one in dict.fromkeys(found) if one is not None]


def mma_variants(problem: Problem, every: bool) -> list[Tiling]:
    """The rule's; all that it chooses among; the tables too."""
    table = (TILINGS if problem.rows <= 8 else TILINGS_16) if every else ()
    tried = [Tiling(*one[:4], *map(bool, one[4:])) for one in table]
    fits = [
        one for one in tried if not one.wide or mma.is_wide(problem.shape[1], group_of(problem.scheme), one)
    ]
    return [*dict.fromkeys([*choices(problem), *fits])]


def gradients(asked: Asked) -> Iterator[Check]:
    """Of the public function, and the public function where sums are exact."""
    yield "gradients", partial(wrong_gradients, asked.device)
    for seed, (count, n, k, group) in enumerate(EXACT):
        yield (
            f"dense weight of {(n, k)} g{group}",
            partial(wrong_dense, asked.device, (count, n, k, group), seed),
        )


def wrong_gradients(device: str) -> Iterator[str]:
    """Gradients that are not products with the dense weight."""
    case = as_tensors(exact_case(3, 64, 256, 64))
    x, *weight, bias = (part.to(device) for part in case)
    x, bias = x.requires_grad_(), bias.requires_grad_()
    fast.linear_sparse_int4(x, *weight, bias).sum().backward()
    wanted = fast.dequantize(sparse_int4_weight(*case[1:4])).sum(0).expand(3, -1).to(x.dtype)
    yield from differs("x", x.grad.cpu(), wanted)
    yield from differs("bias", bias.grad.cpu(), torch.full_like(case.bias, 3))


def wrong_dense(device: str, sizes: tuple[int, ...], seed: int) -> Iterator[str]:
    """The dense weight that larger products have made for them."""
    for dtype in ("bfloat16", "float16"):
        case = as_tensors(exact_case(*sizes, dtype, "float32", seed))
        made = torch.ops.ao_lab.sparse_int4_dense(
            *(part.to(device) for part in case[1:4]), case.x.dtype, None
        )
        yield from differs(dtype, made.cpu(), reference.dequantize(sparse_int4_weight(*case[1:4]), dtype))


MMA = Family(
    "triton_mma_sparse_small_m", "up to 64 rows by int4 in 2:4 storage, on other GPUs", by_mma, mma_variants, lambda pairs:
    None, ( *(Problem(f"g{group}", (n, k), count, BF16, BF16) for count, n, k, group in EXACT if count <= mma.MOST_ROWS),
    *(Problem("g128", shape, count) for shape in SHAPES for count in (1, 2, 4, 8, 16)), Problem("g128", (4104, 1024), 1),
    Problem("g128", (144, 1152), 16), ), exact, filled, gemv_peers, schemes=("g128",), shapes=SHAPES, rows=(1, 2, 4, 8, 16,
    32, 64), random=random, named=lambda one: numbers(astuple(one)), more=gradients, )  # fmt: skip


# Two products of one input in one launch of the gemv.

#: Rows of both weights, columns, group, variants that are compared: of models, then odd ones.
PAIR_CASES = (
    ((4096, 1024), 4096, 64, 4), ((1024, 1024), 4096, 64, 4), ((14336, 14336), 4096, 64, 4), ((2048, 2048), 14336, 64, 2),
    ((277, 1001), 1024, 128, 1), ((5, 16), 512, 32, 1), ((130, 130), 768, 64, 1), ((100, 100), 2048, 256, 1),
)  # fmt: skip


class Task(NamedTuple):
    """Two weights and what is asked of them; most: variants that are compared."""

    rows: tuple[int, int]
    k: int
    scheme: str
    dtype: torch.dtype
    products: int
    most: int

    def form(self, products: int) -> Form:
        """Of variants of so many products."""
        return form_of(Problem(self.scheme, (1, self.k), 1, self.dtype), products)

    def variants(self, count: int) -> list[Variant]:
        """The rule's, and those that it prefers next."""
        return preferred(self.form(self.products), count, (rows_of_tiles(*self.rows), self.k), self.most)

    def weights(self) -> list[tuple[torch.Tensor, ...]]:
        """Random ones."""
        return [drawn(self.scheme, (n, self.k), exact=False)[:3] for n in self.rows]


def tasks() -> Iterator[Task]:
    """A gate and what it gates have one shape. Of odd ones scales are bfloat16 for float16 inputs."""
    for (rows, k, group, most), dtype, products in product(PAIR_CASES, (BF16, FP16), (TWO, GATED)):
        if products == TWO or rows[0] == rows[1]:
            narrow = rows[0] < 1000 and group < 256 and dtype == FP16
            yield Task(rows, k, f"g{group}{' bf16' * narrow}", dtype, products, most)


def launched(
    products: int, x: torch.Tensor, both: Any, group: int, one: Variant | None = None
) -> tuple[torch.Tensor, ...]:
    """What one launch gives; nothing where a kernel does not take it."""
    if products == GATED:
        made = sm90_sparse24_w4a16_gemv_swiglu(x, *both, group, one)
        return () if made is None else (made,)
    return sm90_sparse24_w4a16_gemv_pair(x, *both, group, one) or ()


def pair_checks(asked: Asked) -> Iterator[Check]:
    """Every gate, then all tasks."""
    todo = list(tasks())
    compile_forms(
        (one, task.form(products))
        for task in todo
        for count in (1, gemv.MOST_ROWS)
        for one in task.variants(count)
        for products in (ONE, task.products)
    )
    for dtype in (BF16, FP16):
        yield f"every gate {dtype}", partial(wrong_gates, dtype)
    for task in todo:
        yield str(task), partial(wrong_pair, task)


def wrong_pair(task: Task) -> Iterator[str]:
    """Variants and rows whose bits are not those of products alone, and of `swiglu` of both, or others in another call."""
    both, group = task.weights(), group_of(task.scheme)
    for count in range(1, gemv.MOST_ROWS + 1):
        x = torch.randn(count, task.k, device="cuda").to(task.dtype)
        found = task.variants(count)
        for one in found:
            alone = [gemv.sm90_sparse24_w4a16_gemv(x, *w, None, group, one) for w in both]
            wanted = (fast.swiglu(*alone),) if task.products == GATED else tuple(alone)
            with poisoned(0xA5):
                got = launched(task.products, x, both, group, one)
                torch.cuda.synchronize()
            again = [launched(task.products, x, both, group, one) for _ in range(5)]
            for made in (got, *again):
                if len(made) != len(wanted) or not all(map(same_bits, made, wanted)):
                    yield f"{count} rows {one}: other bits than products alone, or than in another call"
                    break
        if not found:
            yield f"{count} rows: no variant"


def wrong_gates(dtype: torch.dtype) -> Iterator[str]:
    """All finite 16-bit gates in one call, three times each as what is gated, by weights that are 1 and 3 times x.

    Codes of a byte are a group of four columns, those kept 0 and 1, or 2 and 3.
    """
    k = 4096
    x = torch.arange(1 << 16, dtype=torch.int32, device="cuda").to(torch.int16).view(dtype).view(16, k)
    x, at = torch.where(x.isfinite(), x, torch.zeros_like(x)), torch.arange(k, device="cuda")
    both = []
    for code in (1, 3):
        codes = torch.zeros(k, k // 4, device="cuda", dtype=torch.uint8)
        codes[at, at // 4] = (code << at % 2 * 4).to(torch.uint8)
        pairs = torch.where(at % 4 < 2, 0b0100, 0b1110)[:, None].expand(k, k // 8)
        both.append((codes, (pairs | pairs << 4).to(torch.uint8), torch.ones(k, k // 64, device="cuda")))
    products, gated = launched(TWO, x, both, 64), launched(GATED, x, both, 64)
    normal = x.abs() >= torch.finfo(dtype).tiny
    if not products or not gated or not torch.equal(products[0][normal], x[normal]):
        yield "the identity is not taken, or is none"
    elif not same_bits(gated[0], reference.swiglu(*(one.cpu() for one in products))):
        yield "silu of a gate times another differs"


def pair_times(asked: Asked) -> Iterator[Row]:
    """One launch, a launch each, one weight with the rows of both; gated; beside int4 alone in the preshuffled order."""
    k, group = 4096, 64
    for rows in asked.shapes or ((14336, 14336), (4096, 1024), (1024, 1024)):
        sparse = several(
            lambda rows=rows: [drawn(f"g{group}", (n, k), exact=False)[:3] for n in rows],
            0.44 * sum(rows) * k,
        )
        joined = [[torch.cat(parts) for parts in zip(*both, strict=True)] for both in sparse]
        stored = several(
            lambda rows=rows: [filled_weight(f"int4_g{group}", (n, k)) for n in rows], 0.56 * sum(rows) * k
        )
        for count in asked.rows or (1, 2, 4, 8, 16):
            x = torch.randn(count, k, device="cuda", dtype=BF16)

            def two(both: Any, x: torch.Tensor = x) -> list[Any]:
                return [gemv.sm90_sparse24_w4a16_gemv(x, *w, None, group) for w in both]

            calls: dict[str, list[Call]] = {
                "two": [partial(two, both) for both in sparse],
                "pair": [partial(launched, TWO, x, both, group) for both in sparse],
                "one weight": [partial(gemv.sm90_sparse24_w4a16_gemv, x, *w, None, group) for w in joined],
                "int4 two": [lambda both=both, x=x: [linear_small(x, w) for w in both] for both in stored],
            }
            if rows[0] == rows[1]:
                calls |= {
                    "two and swiglu": [lambda both=both, two=two: fast.swiglu(*two(both)) for both in sparse],
                    "swiglu": [partial(launched, GATED, x, both, group) for both in sparse],
                    "int4 pair": [partial(linear_small_pair, x, *both) for both in stored],
                    "int4 swiglu": [partial(linear_small_swiglu, x, *both) for both in stored],
                }
            floor = round(sum(part.nbytes for part in joined[0]) / rate(), 2)
            yield {"shape": (*rows, k), "rows": count, "floor": floor, **measured(calls)}


PAIRS_SUBJECT = Subject(
    "sparse_pairs", "two products of one input by int4 in 2:4 storage in one launch", pair_checks, pair_times
)
SUBJECTS = (GEMV.subject, MMA.subject, PAIRS_SUBJECT)
