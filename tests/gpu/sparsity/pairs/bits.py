"""Two products of one x in one launch of `sm90_sparse24_w4a16_gemv` on a GPU: the bits of each alone by the same variant, and
of `swiglu` of both; every 16-bit gate. Outputs are poisoned and lie between guards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

import torch

import fast
import reference
from fast.kernels.sm90_sparse24_w4a16_gemv.host import sm90_sparse24_w4a16_gemv
from fast.kernels.sm90_sparse24_w4a16_gemv.pair import (
    sm90_sparse24_w4a16_gemv_pair,
    sm90_sparse24_w4a16_gemv_swiglu,
)
from fast.kernels.sm90_sparse24_w4a16_gemv.select import MOST_ROWS
from fast.kernels.sm90_sparse24_w4a16_gemv.variants import GATED, ONE, TWO, Form, Variant, rows_of_tiles
from tests.gpu.harness.poison import poisoned
from tests.gpu.sparsity.products.int4_timing import sparse_weight
from tests.gpu.sparsity.products.skinny_bits import compile_all, variants
from tests.gpu.sparsity.progress import Progress

#: Rows of both weights, columns, group, variants that are compared: of models, then odd ones.
CASES = (
    ((4096, 1024), 4096, 64, 4), ((1024, 1024), 4096, 64, 4), ((14336, 14336), 4096, 64, 4), ((2048, 2048), 14336, 64, 2),
    ((277, 1001), 1024, 128, 1), ((5, 16), 512, 32, 1), ((130, 130), 768, 64, 1), ((100, 100), 2048, 256, 1),
)  # fmt: skip
DTYPES, AGAIN = (torch.bfloat16, torch.float16), 5
Weight = tuple[torch.Tensor, ...]


class Task(NamedTuple):
    """Two weights and what is asked of them. narrow: whether scales are bfloat16; most: variants that are compared."""

    rows: tuple[int, int]
    k: int
    group: int
    dtype: torch.dtype
    narrow: bool
    products: int
    most: int

    def form(self, products: int) -> Form:
        """Of variants of so many products."""
        return Form(self.group, self.narrow, self.dtype == torch.float16, products)

    def variants(self, count: int) -> list[Variant]:
        """The rule's, and those that it prefers next."""
        return variants(self.form(self.products), count, (rows_of_tiles(*self.rows), self.k), self.most)


def tasks() -> Iterator[Task]:
    """All of them; a gate and what it gates have one shape. Of odd ones scales are bfloat16 for float16 inputs."""
    for (rows, k, group, most), dtype, products in product(CASES, DTYPES, (TWO, GATED)):
        if products == TWO or rows[0] == rows[1]:
            narrow = rows[0] < 1000 and group < 256 and dtype == torch.float16
            yield Task(rows, k, group, dtype, narrow, products, most)


def weights(task: Task) -> list[Weight]:
    """Random ones."""
    made = [sparse_weight((n, task.k), task.group) for n in task.rows]
    return [(*w[:2], w[2].bfloat16()) if task.narrow else w for w in made]


def patterns(*made: torch.Tensor | None) -> list[torch.Tensor]:
    """Bits; none where a kernel did not take the product."""
    return [] if any(one is None for one in made) else [one.view(torch.int16) for one in made]  # type: ignore[union-attr]


def asked(task: Task, x: torch.Tensor, both: list[Weight], one: Variant) -> list[torch.Tensor]:
    """Bits of the launch."""
    if task.products == GATED:
        return patterns(sm90_sparse24_w4a16_gemv_swiglu(x, *both, task.group, one))
    return patterns(*(sm90_sparse24_w4a16_gemv_pair(x, *both, task.group, one) or (None,)))


def wrong_of(task: Task) -> Iterator[str]:
    """Variants and rows whose bits are not those of products alone, or others in another call."""
    both = weights(task)
    for count in range(1, MOST_ROWS + 1):
        x = torch.randn(count, task.k, device="cuda").to(task.dtype)
        for one in task.variants(count):
            alone = [sm90_sparse24_w4a16_gemv(x, *w, None, task.group, one) for w in both]
            with poisoned(0xA5):
                got = asked(task, x, both, one)
                torch.cuda.synchronize()
            wanted = patterns(fast.swiglu(*alone)) if task.products == GATED else patterns(*alone)
            again = [asked(task, x, both, one) for _ in range(AGAIN)]
            if not all(same(made, wanted) for made in (got, *again)):
                off = [int((a != b).sum()) for a, b in zip(got, wanted, strict=False)]
                yield f"{task} {count} rows {one}: {off} differ, or others in another call"
        if not task.variants(count):
            yield f"{task} {count} rows: no variant"


def same(made: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    """Whether there are results, and their bits are those."""
    return len(made) == len(wanted) > 0 and all(map(torch.equal, made, wanted))


def identity(k: int, code: int) -> Weight:
    """The weight (k, k) that is `code` times x: codes of a byte are a group of four columns, those kept 0 and 1, or 2 and 3."""
    at = torch.arange(k, device="cuda")
    codes = torch.zeros(k, k // 4, device="cuda", dtype=torch.uint8)
    codes[at, at // 4] = (code << at % 2 * 4).to(torch.uint8)
    pairs = torch.where(at % 4 < 2, 0b0100, 0b1110)[:, None].expand(k, k // 8)
    return codes, (pairs | pairs << 4).to(torch.uint8), torch.ones(k, k // 64, device="cuda")


def every_gate(dtype: torch.dtype) -> Iterator[str]:
    """All finite 16-bit gates in one call, three times each as what is gated."""
    x = torch.arange(1 << 16, dtype=torch.int32, device="cuda").to(torch.int16).view(dtype).view(16, 4096)
    x = torch.where(x.isfinite(), x, torch.zeros_like(x))
    both = [identity(4096, code) for code in (1, 3)]
    products, got = sm90_sparse24_w4a16_gemv_pair(x, *both, 64), sm90_sparse24_w4a16_gemv_swiglu(x, *both, 64)
    normal = x.abs() >= torch.finfo(dtype).tiny
    if products is None or got is None or not torch.equal(products[0][normal], x[normal]):
        yield f"every gate {dtype}: the identity is not taken, or is none"
        return
    wanted = reference.swiglu(*(one.cpu() for one in products))
    off = int((got.cpu().view(torch.int16) != wanted.view(torch.int16)).sum())
    if off:
        yield f"every gate {dtype}: {off} differ"


def compared(progress: Progress) -> list[str]:
    """All of it, as far as the time goes."""
    todo = list(tasks())
    chosen = {
        (v, task, p)
        for task in todo
        for n in (1, MOST_ROWS)
        for v in task.variants(n)
        for p in (ONE, task.products)
    }
    compile_all({(v, task.form(p)) for v, task, p in chosen}, progress)

    def told(find: Callable[[], Iterator[str]]) -> Callable[[], None]:
        def check() -> None:
            found = list(find())
            progress.check("; ".join(found[:3]), not found)

        return check

    for dtype in DTYPES:
        progress.attempt(f"every gate {dtype}", told(lambda dtype=dtype: every_gate(dtype)))
    for task in todo:
        progress.attempt(str(task), told(lambda task=task: wrong_of(task)))
    return progress.wrong


__all__ = ["compared"]
