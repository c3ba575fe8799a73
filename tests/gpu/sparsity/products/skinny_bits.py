"""`sm90_sparse24_w4a16_gemv` on a GPU: every element by one-hot rows, exact on integers, the same bits in a hundred calls,
within bounds.

Outputs are poisoned and lie between guards. Weights are drawn in place; what they stand for is made by torch alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import NamedTuple

import torch

from fast.kernels.sm90_sparse24_w4a16_gemv.host import sm90_sparse24_w4a16_gemv
from fast.kernels.sm90_sparse24_w4a16_gemv.select import MOST_ROWS, candidates, choose
from fast.kernels.sm90_sparse24_w4a16_gemv.variants import Form, Variant, sources
from fast.launch.nvrtc import cached_cubin
from reference.sparsity.linear_sparse_int4 import sparse_int4_weight
from tests.gpu.harness.poison import poisoned
from tests.gpu.sparsity.products.decode_bar import dense_of
from tests.gpu.sparsity.products.int4_cases import as_tensors, random_case
from tests.gpu.sparsity.products.int4_timing import PAIRS, bytes_of
from tests.gpu.sparsity.progress import Progress
from tests.support.linear_cases import outside

#: Rows and columns of weights: odd rows, few, those of models.
SMALL, LARGE = ((277, 1024), (5, 512), (1001, 2304), (130, 768)), ((14336, 4096), (4096, 14336), (1024, 4096))
GROUPS, COUNTS, REPEATS, AGAIN = (128, 32, 64, 256), (1, 5, 8, 16), 100, 5
DTYPES = (torch.bfloat16, torch.float16)
#: Times of the model that are looked at, over the least, and variants of a family.
BEST = 2


class Task(NamedTuple):
    """A product. narrow: whether scales are bfloat16; most: variants that are compared."""

    shape: tuple[int, int]
    count: int
    group: int
    narrow: bool
    dtype: torch.dtype
    most: int

    @property
    def form(self) -> Form:
        """Of its variants."""
        return Form(self.group, self.narrow, self.dtype == torch.float16)


def variants(form: Form, count: int, shape: tuple[int, int], most: int) -> list[Variant]:
    """The rule's first, and asking late; then those that it prefers next, of each stage, parts of K and programs at once."""
    families: dict[tuple[int, ...], list[Variant]] = {}
    for one in candidates(form, count, *shape):
        families.setdefault((one.splits, one.at_once, one.columns), []).append(one)
    chosen = choose(form, count, *shape)
    late = [] if chosen is None else [chosen._replace(early=False)]
    others = [one for rank in range(BEST) for family in families.values() for one in family[rank : rank + 1]]
    return [one for one in dict.fromkeys([chosen, *late, *others]) if one is not None][:most]


def compile_all(pairs: Iterable[tuple[Variant, Form]], progress: Progress) -> None:
    """Variants into the cache of cubins, many at once: NVRTC lets other threads run."""
    began, todo = time.monotonic(), set(pairs)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda pair: cached_cubin(*sources(*pair), name="sm90_sparse24_w4a16_gemv"), todo))
    progress.say(f"compiled {len(todo)} variants in {time.monotonic() - began:.1f} s")


def exact_weight(task: Task) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, metadata of every pair, scales that are 1/2, 1 and 2."""
    n, k = task.shape
    pairs = torch.tensor(PAIRS, device="cuda", dtype=torch.uint8)
    low, high = (pairs[torch.randint(0, 6, (n, k // 8), device="cuda")] for _ in range(2))
    scale = 2.0 ** torch.randint(-1, 2, (n, k // task.group), device="cuda")
    return bytes_of((n, k // 4)), low | high << 4, scale.bfloat16() if task.narrow else scale.float()


def one_hot(task: Task) -> Iterator[str]:
    """Elements of the weight, a column a row of x, that are not what they stand for."""
    w, k = exact_weight(task), task.shape[1]
    dense = dense_of(*w[:2], w[2].float()).to(task.dtype)
    eye = torch.eye(k, device="cuda", dtype=task.dtype)
    with poisoned(0xA5):
        parts = [sm90_sparse24_w4a16_gemv(x, *w, None, task.group) for x in eye.split(MOST_ROWS)]
        torch.cuda.synchronize()
    if any(part is None for part in parts):
        yield f"one-hot {task}: not taken"
        return
    off = int((torch.cat(parts).t() != dense).sum())  # type: ignore[arg-type]
    if off:
        yield f"one-hot {task}: {off} of {dense.numel()} differ"


def integers(task: Task) -> Iterator[str]:
    """Variants whose sums of integers are not exact, or not the same in a call of many."""
    w, (n, k) = exact_weight(task), task.shape
    x = torch.randint(-2, 3, (task.count, k), device="cuda").to(task.dtype)
    bias = (torch.arange(n, device="cuda") % 7 - 3).to(task.dtype)
    wanted = (x.double() @ dense_of(*w[:2], w[2].float()).double().t() + bias.double()).float().to(task.dtype)
    for at, one in enumerate(variants(task.form, task.count, task.shape, task.most)):
        with poisoned(0xA5):
            got = sm90_sparse24_w4a16_gemv(x, *w, bias, task.group, one)
            torch.cuda.synchronize()
        if got is None or not torch.equal(got, wanted):
            off = -1 if got is None else int((got != wanted).sum())
            yield f"{task} {one}: {off} of {wanted.numel()} differ"
            continue
        again = [
            sm90_sparse24_w4a16_gemv(x, *w, bias, task.group, one) for _ in range(AGAIN if at else REPEATS)
        ]
        if not all(torch.equal(other, got) for other in again):  # type: ignore[arg-type]
            yield f"{task} {one}: other bits in another call"


def bounded(task: Task) -> Iterator[str]:
    """Products of random numbers beyond `reference.linear_error_bound`; inputs and weight are made on the CPU."""
    names = [str(task.dtype).removeprefix("torch."), "bfloat16" if task.narrow else "float32"]
    case = as_tensors(random_case(task.count, *task.shape, task.group, *names))
    given = [None if part is None else part.cuda() for part in case]
    got = sm90_sparse24_w4a16_gemv(*given, task.group)  # type: ignore[arg-type]
    off = -1 if got is None else outside(got.cpu(), case.x, sparse_int4_weight(*case[1:4]), case.bias)
    if off:
        yield f"bound {task}: {off} beyond it"


def tasks() -> Iterator[tuple[str, Task]]:
    """What is compared, in its order: names of the functions above, what they compare."""
    for group, dtype, narrow in product(GROUPS, DTYPES, (False, True)):
        yield "one_hot", Task((277, 1024), MOST_ROWS, group, narrow, dtype, 1)
    for shape, count, group in product(SMALL, COUNTS, GROUPS):
        dtype, narrow = DTYPES[(count + group // 32) % 2], bool(count % 2)
        yield "integers", Task(shape, count, group, narrow, dtype, 2)
    for shape, count in product(LARGE, (1, 2, 16, 8)):
        yield "integers", Task(shape, count, 128, False, torch.bfloat16, 6)
    for group, count in product(GROUPS, (1, 16)):
        yield "bounded", Task((61, 2048), count, group, count > 1, DTYPES[group == 64], 1)


def compared(progress: Progress) -> list[str]:
    """All of them, as far as the time goes."""
    todo = [(kind, task) for kind, task in tasks() if variants(task.form, task.count, task.shape, task.most)]
    compile_all(((v, t.form) for _, t in todo for v in variants(t.form, t.count, t.shape, t.most)), progress)
    functions = {"one_hot": one_hot, "integers": integers, "bounded": bounded}
    for kind, task in todo:
        if progress.left() < 0:
            progress.left_out.append(f"{kind} {task}")
            continue
        for line in functions[kind](task):
            progress.check(line, False)
        progress.done += 1
    progress.say(
        f"{progress.done} comparisons, {len(progress.wrong)} wrong, {len(progress.left_out)} not reached"
    )
    return progress.wrong


__all__ = ["compared", "compile_all", "variants"]
