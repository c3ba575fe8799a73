"""Linear layers of experts by every recipe on a GPU: operands bit for bit, products within bounds, steps, graphs, programs.

Operands are compared with those of the CPU, which tests compare with the reference; at sizes that train, those of kernels
with the same by torch operations around the block kernel: codes, scales and tables bit for bit, whatever is under them
before, weights that lie along either axis, sizes beyond 2^31 elements. Nothing may wait for the GPU, a CUDA graph serves
other groups, and torch.compile changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import reference
from ao_lab.training.grouped import autograd, products
from ao_lab.training.grouped.autograd import G_T, W_T, X_T, G, Layout, W, X, grouped_linear, layout_of
from ao_lab.training.grouped.experts import combine, dispatch, sort_by_expert
from ao_lab.training.products import values
from fast.kernels.grouped import kind_of
from fast.kernels.rowwise_colwise.host import batch_columns
from reference import Quantized
from reference.matmul.linear import transposed
from reference.training.grouped import group_step, padded_rows
from reference.training.recipe import RECIPES, Operand, Recipe
from tests.gpu.harness.subject import Asked, Check, Subject

SEED = 7
#: T, K, N and ends of the groups: none at the ends and between, one group of all, few rows, rows of no group, many groups.
CASES = (
    (90, 256, 128, (7, 7, 60, 83)), (96, 128, 256, (0, 96, 96)), (64, 256, 256, (0, 0, 0, 0)), (33, 128, 128, (1, 2, 3, 33)),
    (2048, 512, 384, tuple(range(100, 2001, 100))),
)  # fmt: skip
#: How the tensor core adds products of codes, and of bfloat16.
TIERS = {
    "scaled_grouped_mm": {"accumulation": "hopper_fp8"},
    "grouped_mm": {"accumulation": "hopper_fp8", "k_step": 16, "frac_bits": 25, "operand_formats": ("bfloat16", "bfloat16")},
    "emulate": {"accumulation": "blocked"},
}  # fmt: skip


def tensors(case: tuple[Any, ...], device: str) -> tuple[torch.Tensor, ...]:
    """x, w, g and offsets; NaN in rows of no group."""
    rows, k, n, ends = case
    generator = torch.Generator().manual_seed(rows)
    x, g = (torch.randn(rows, length, generator=generator) for length in (k, n))
    w = torch.randn(len(ends), n, k, generator=generator) / 20
    x[ends[-1] :], g[ends[-1] :] = float("nan"), float("inf")
    made = (t.bfloat16().to(device) for t in (x, w, g / 1000))
    return *made, torch.tensor(ends, dtype=torch.int32, device=device)


def operands(
    recipe: Recipe, x: Any, w: Any, g: Any, offsets: Any
) -> tuple[Layout, dict[str, tuple[Any, Any]]]:
    """Both operands of each product, as `GroupedLinear` makes them."""
    layout = layout_of(offsets, x.shape[0], group_step(recipe))
    rows = autograd.rows_operand(x, recipe.output.a, layout, SEED, X)
    found = {
        "output": (rows, autograd.weight_operand(w, recipe.output.b, SEED, W)),
        "input_grad": (
            autograd.rows_operand(g, recipe.input_grad.a, layout, SEED, G),
            autograd.weight_columns(w, recipe.input_grad.b, recipe.output.b, SEED, W_T),
        ),
        "weight_grad": (
            autograd.columns_operand(g, recipe.weight_grad.a, layout, SEED, G_T),
            autograd.token_columns(x, rows, recipe.weight_grad.b, recipe.output.a, layout, SEED, X_T),
        ),
    }
    return layout, found


def parts(operand: Any) -> list[torch.Tensor]:
    """The tensors of an operand, as integers."""
    matrix, table = (
        (operand.matrix, operand.table) if isinstance(operand, autograd.Columns) else (operand, None)
    )
    found = [matrix.codes, matrix.scale] if isinstance(matrix, Quantized) else [matrix]
    views = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return [t.cpu().contiguous().view(views[t.element_size()]) for t in (*found, table) if t is not None]


def check_operands(name: str, case: Any, device: str) -> list[str]:
    """Codes, scales and tables of the device and of the CPU."""
    _, here = operands(RECIPES[name], *tensors(case, device))
    _, there = operands(RECIPES[name], *tensors(case, "cpu"))
    same = {
        which: all(
            torch.equal(a, b)
            for one, two in zip(here[which], there[which], strict=True)
            for a, b in zip(parts(one), parts(two), strict=True)
        )
        for which in here
    }
    return [f"operands of {which} differ" for which, equal in same.items() if not equal]


def check_products(name: str, case: Any, device: str) -> list[str]:
    """Each group's product within its bound, zeros elsewhere, in memory that holds NaN before."""
    recipe, (x, w, g, offsets) = RECIPES[name], tensors(case, device)
    layout, found = operands(recipe, x, w, g, offsets)
    wrong = []
    for which, (a, b) in found.items():
        record, rows = getattr(recipe, which), which != "weight_grad"
        poison_free_memory(device)
        if rows:
            y = products.rows_product(a, b, offsets, record, torch.bfloat16)
            used = products.select_rows(a, b, offsets)
        else:
            y = products.columns_product(a, b, layout.ends, record, torch.bfloat16)
            used = products.select_columns(a, b, offsets)
        ends = (offsets if rows else layout.ends).tolist()
        if not within(y.cpu(), prepared(a, used), prepared(b, used), ends, used):
            wrong.append(f"{which} by {used} is outside its bound")
    return wrong


def prepared(operand: Any, used: str) -> Any:
    """An operand on the host as the function takes it: codes with their scales, or values."""
    columns = isinstance(operand, autograd.Columns)
    matrix, table = (operand.matrix, operand.table) if columns else (operand, None)
    if used == "scaled_grouped_mm":
        codes = replace(matrix, codes=matrix.codes.cpu(), scale=matrix.scale.cpu())
        return autograd.Columns(codes, table.cpu()) if columns else codes
    made = values(matrix, torch.bfloat16 if used == "grouped_mm" else torch.float32).cpu()
    return autograd.Columns(made) if columns else made


def group_of(operand: Any, expert: int, part: slice) -> Any:
    """What one group has of an operand: rows `part` of a matrix, or columns `part`, under the group's scale of each row."""
    columns = isinstance(operand, autograd.Columns)
    matrix = operand.matrix if columns else operand
    if not isinstance(matrix, Quantized):
        if matrix.dim() == 3:
            return matrix[expert]
        return matrix[:, part] if columns else matrix[part]
    if not columns:
        codes, scale, scheme = matrix.codes[part], matrix.scale[part], matrix.scheme
    else:
        codes, scale = matrix.codes[:, part].contiguous(), operand.table[expert][:, None]
        scheme = autograd.in_blocks(matrix.scheme.key, -1)
    return Quantized(codes, scale, None, None, tuple(codes.shape), 1, scheme)


def within(y: torch.Tensor, a: Any, b: Any, ends: list[int], used: str) -> bool:
    """Whether every group's result lies within the bound of the sum that its function computes, and the rest is zero."""
    good, start, rows = True, 0, not isinstance(a, autograd.Columns)
    for expert, end in enumerate(ends):
        part = slice(start, end)
        made = y[part] if rows else y[expert]
        if start == end:
            good &= rows or not made.any()
        else:
            height = products.rows_of_each(b, len(ends)) if rows else 0
            other = slice(expert * height, (expert + 1) * height) if rows else part
            left, right = group_of(a, expert, part), group_of(b, expert, other)
            right = transposed(right) if isinstance(right, Quantized) else right.T
            bound = reference.matmul_error_bound(left, right, out_dtype="bfloat16", **TIERS[used])
            truth = exact(left) @ exact(right)
            good &= bool(((made.double() - truth).abs() <= bound).all())
        start = end
    return good and not (y[start:].any() if rows else False)


def exact(matrix: Any) -> torch.Tensor:
    """The float64 values of a matrix."""
    return (reference.dequantize(matrix) if isinstance(matrix, Quantized) else matrix).double()


def poison_free_memory(device: str) -> None:
    """What is allocated next holds NaN."""
    if device != "cpu":
        kept = [
            torch.full((size,), float("nan"), device=device) for size in (1 << 12, 1 << 16, 1 << 20, 1 << 24)
        ]
        del kept


def step(x: Any, w: Any, g: Any, offsets: Any, recipe: Recipe) -> list[torch.Tensor]:
    """y, dx and dw."""
    x, w = (t.detach().requires_grad_() for t in (x, w))
    y = grouped_linear(x, w, offsets, recipe)
    return [y.detach(), *torch.autograd.grad(y, (x, w), g)]


def check_steps(name: str, case: Any, device: str) -> list[str]:
    """The layer's results are finite and the same at every call; with no rows of theirs experts and tails are zero."""
    autograd.new_seed = lambda recipe: SEED
    x, w, g, offsets = tensors(case, device)
    poison_free_memory(device)
    first = step(x, w, g, offsets, RECIPES[name])
    wrong = [] if all(t.isfinite().all() for t in first) else ["a result is not finite"]
    for _ in range(20):
        poison_free_memory(device)
        again = step(x, w, g, offsets, RECIPES[name])
        if not all(torch.equal(a, b) for a, b in zip(first, again, strict=True)):
            return [*wrong, "results differ from call to call"]
    return wrong


@contextmanager
def no_waiting() -> Any:
    """RuntimeError where the host waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_waiting(name: str, case: Any, device: str) -> list[str]:
    """Sorting, dispatch, layer, combination and gradients without a copy to the host or from it."""
    x, w, g, offsets = tensors(case, device)
    index = torch.randint(-1, w.shape[0], (x.shape[0], 2), device=device)
    weights = torch.rand(x.shape[0], 2, device=device)

    def run() -> None:
        step(x, w, g, offsets, RECIPES[name])
        order, ends, _ = sort_by_expert(index, w.shape[0])
        leaf = x.detach().requires_grad_()
        y = grouped_linear(dispatch(leaf, order, 2), w, ends, RECIPES[name])
        combine(y, order, weights).sum().backward()

    run()
    with no_waiting():
        run()
    return []


def check_graph(name: str, case: Any, device: str) -> list[str]:
    """A captured step, replayed for other groups."""
    if RECIPES[name].is_stochastic:
        return []
    x, w, g, offsets = tensors(case, device)
    x, g = (t.nan_to_num(0.5, 0.5, 0.5) for t in (x, g))
    static = offsets.clone()
    stream = torch.cuda.Stream()
    # Or it reads ends of groups that are not written yet.
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(x, w, g, static, RECIPES[name])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        made = step(x, w, g, static, RECIPES[name])
    wrong = []
    for others in (offsets, offsets // 2, torch.full_like(offsets, x.shape[0])):
        static.copy_(others)
        graph.replay()
        wanted = step(x, w, g, others, RECIPES[name])
        if not all(torch.equal(a, b) for a, b in zip(made, wanted, strict=True)):
            wrong.append(f"the graph's results differ for ends {others.tolist()}")
    return wrong


def check_compile(name: str, case: Any, device: str) -> list[str]:
    """One graph by Inductor, the same bits, zeros in rows of no group.

    No bound: casts and products, torch's own in bfloat16 too, are operators that Inductor calls as they are. What it compiles
    itself are maxima, copies and integers, whose order changes nothing.
    """
    if RECIPES[name].is_stochastic:
        return []
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, w, offsets: grouped_linear(x, w, offsets, RECIPES[name]), fullgraph=True
    )
    x, w, g, offsets = tensors(case, device)
    leaves = [t.detach().requires_grad_() for t in (x, w)]
    y = compiled(*leaves, offsets)
    found = [y.detach(), *torch.autograd.grad(y, leaves, g)]
    wrong = []
    for which, one, other in zip(
        ("y", "dx", "dw"), found, step(x, w, g, offsets, RECIPES[name]), strict=True
    ):
        if not torch.equal(one, other):
            apart = (one.double() - other.double()).abs().max().item()
            places = (one != other).sum().item()
            wrong.append(f"compiled {which} differs in {places} of {one.numel()} places, by at most {apart}")
    end = case[3][-1]
    if any(one[end:].any() for one in found[:2]):
        wrong.append("compiled rows of no group are not zeros")
    return wrong


#: T, K, N, E: sides of whole tiles and of parts, few and many groups, a batch of more than 2^31 elements.
CAST_CASES = ((16384, 4096, 2048, 8), (5000, 2048, 1536, 64), (999, 320, 384, 3), (256, 8192, 16384, 20))
CAST_NAMES = ("rowwise", "rowwise_with_gw_hp", "tensorwise", "blockwise", "mxfp8", "mxfp6")
#: How often each is compared: a race shows in some runs.
TURNS = 3


def cast_tensors(case: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """x, w and ends; groups without rows, an infinity, a column of zeros, NaN in rows of no group."""
    rows, k, n, experts = case
    generator = torch.Generator("cuda").manual_seed(rows)
    x = torch.randn(rows, k, device="cuda", generator=generator).to(dtype)
    w = torch.randn(experts, n, k, device="cuda", dtype=dtype, generator=generator)
    w *= torch.exp2(-(torch.arange(experts, device="cuda") % 5))[:, None, None].to(dtype)
    ends = torch.randint(rows, (experts,), device="cuda", generator=generator).sort().values.to(torch.int32)
    ends[0], ends[1] = 0, ends[2]
    x[int(ends[-1]) :], x[:, 7], x[rows // 3, 3], w[1, 5, 9] = float("nan"), 0, float("inf"), float("nan")
    return x, w, ends


def same_codes(found: Any, wanted: Any) -> bool:
    """Codes exactly, scales exactly but for the bits of NaN."""
    pairs = ((found.codes, wanted.codes), (found.scale, wanted.scale))
    return found.scheme == wanted.scheme and all(same_numbers(a, b) for a, b in pairs)


def same_numbers(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same numbers, NaN where NaN is."""
    return a.shape == b.shape and torch.equal(a.nan_to_num(-1), b.nan_to_num(-1))


def weights_of(recipe: Recipe, w: torch.Tensor) -> Iterator[str]:
    """w.T of w, and w of one that is stored transposed."""
    turned = w.transpose(1, 2)
    operand = recipe.input_grad.b
    if operand.scheme is None or batch_columns(w, operand.scheme) is None:
        yield "no kernel"
        return
    wanted = autograd._of_rows(turned, operand, None, 0)
    for _ in range(TURNS):
        poison_free_memory("cuda")
        if not same_codes(autograd.weight_operand(turned, operand), wanted):
            yield "w.T differs"
            return


def columns_of(recipe: Recipe, x: torch.Tensor, ends: torch.Tensor) -> Iterator[str]:
    """x.T, and the tables of the layout."""
    operand, step = recipe.weight_grad.b, group_step(recipe)
    if operand.scheme is None:
        return
    if not kind_of(x, operand.scheme, step):
        yield "no kernel"
        return
    tables = autograd._tables(ends, x.shape[0], step)
    places = padded_rows(x.shape[0], len(ends), step)
    owners = autograd._owners(tables[0], places, autograd.GRAIN)
    where = layout_of(ends, x.shape[0], step)
    if not all(
        torch.equal(a, b)
        for a, b in zip((where.ends, where.source, where.owners), (*tables, owners), strict=True)
    ):
        yield "layout differs"
    wanted = autograd._of_gathered(x, Operand(scheme=operand.scheme), where, None, 0)
    for _ in range(TURNS):
        poison_free_memory("cuda")
        found = autograd.columns_operand(x, operand, where)
        tabled = found.table is wanted.table or same_numbers(found.table, wanted.table)
        if not (same_codes(found.matrix, wanted.matrix) and tabled):
            yield "x.T differs"
            return


def wrong_casts(case: tuple[int, ...], dtype: torch.dtype) -> Iterator[str]:
    """Operands of every recipe at a size that trains."""
    x, w, ends = cast_tensors(case, dtype)
    for name in CAST_NAMES:
        yield from (f"{name}: {line}" for line in columns_of(RECIPES[name], x, ends))
        # A square that reaches into the next expert has no meaning here.
        if name != "blockwise" or not (case[1] % 128 or case[2] % 128):
            yield from (f"{name}: {line}" for line in weights_of(RECIPES[name], w))
    torch.cuda.empty_cache()


ANYWHERE: dict[str, Callable[[str, Any, str], list[str]]] = {
    "operands": check_operands, "products": check_products, "steps": check_steps
}  # fmt: skip
ON_GPU = {"waiting": check_waiting, "graph": check_graph, "compile": check_compile}


def checks(asked: Asked) -> Iterator[Check]:
    """By part, recipe and case."""
    for part, check in {**ANYWHERE, **(ON_GPU if asked.device != "cpu" else {})}.items():
        for name in asked.schemes or RECIPES:
            for case in CASES if part in ANYWHERE else CASES[:1]:
                yield (
                    f"{part} {name} {case[:3]} {len(case[3])} groups",
                    partial(check, name, case, asked.device),
                )
    for case in CAST_CASES if asked.device != "cpu" else ():
        for dtype in (torch.bfloat16, torch.float16):
            yield f"casts {case} {dtype}", partial(wrong_casts, case, dtype)


SUBJECTS = (
    Subject("grouped_training", "linear layers of experts in training, by recipe", checks, on_cpu=True),
)
