"""Functions of 2:4 weights on a GPU, bit for bit; outputs are poisoned beforehand, each call is made twice.

Masks, storage and quantized storage, transposable ones too: ties, NaN, both zeros, sums that overflow or round to one value,
refused groups, shapes that no program fills, views. `linear_sparse` and `linear_sparse_int4` where all sums are exact: one row
and many, whole tiles and cut ones, every dtype, the variants that they choose, canonical and arranged metadata.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import reference
from reference.sparsity.linear_sparse_int4 import sparse_int4_weight
from tests.gpu.harness.pool import Job
from tests.gpu.harness.run import Run, Settings, outcome
from tests.gpu.sparsity.cases import (
    EXACT,
    PATTERN_SHAPES,
    PATTERNS,
    as_tensors,
    case,
    exact_case,
    few_of_four,
    generator,
    patterns,
    wanted,
)
from tests.support.linear_cases import exact_result

STORED = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "int16", "int32")
SCORES = ("float32", "bfloat16", "float16", "int8", "uint8", "int16", "int32")
CODES = ("fp8_rowwise", "fp8_rowwise_e5m2", "fp8_tensorwise", "fp8_tensorwise_e5m2")
#: No rows, hundreds of programs, rows of an odd number of groups, which the reference stores.
MORE = ((0, 64), (256, 14336), (5, 12))


def jobs(settings: Settings) -> list[Job]:
    """All families of this module."""
    return [*storage_jobs(settings), *tile_jobs(settings), *product_jobs(settings)]


def storage_jobs(settings: Settings) -> list[Job]:
    """Family "sparsity"."""
    made = [Job("sparsity", f"masks {name}", "prune", masks_case, (name,), 8.0) for name in SCORES]
    made += [Job("sparsity", f"storage {name}", "compress", storage_case, (name,), 3.0) for name in STORED]
    return made + [
        Job("sparsity", f"codes {name}", "quantize_compressed", codes_case, (name,), 2.0) for name in CODES
    ]


def inputs(run: Run, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a dtype on the CPU, with labels."""
    shapes = (*PATTERN_SHAPES, *MORE) if run.settings.fraction > 0.1 else PATTERN_SHAPES
    for shape in shapes:
        yield f"{name} {shape}", patterns(getattr(torch, name), shape)


def both(run: Run, function: str, label: str, *args: Any, **keywords: Any) -> None:
    """Compare two calls: the first makes the plan, the second uses it. Expected values are the reference's of CPU tensors."""
    wanted = outcome(lambda: plain(getattr(reference, function)(*args, **keywords)))
    placed, options = run.put(args), {name: run.put(value) for name, value in keywords.items()}
    for call in ("first", "again"):
        got = run.guarded(lambda: plain(getattr(run.fast, function)(*placed, **options)))
        run.compare(function, f"{label} {call}", got, wanted)


def plain(made: Any) -> Any:
    """A pair of tensors as a tuple without names."""
    return tuple(made) if isinstance(made, tuple) else made


def masks_case(run: Run, name: str) -> None:
    """Patterns of every size; scores of another tensor; a view that is not contiguous."""
    if run.missing("prune"):
        return
    for label, scores in inputs(run, name):
        for pattern in PATTERNS:
            if scores.shape[-1] % int(pattern.split(":")[1]) == 0:
                both(run, "prune", f"{label} {pattern}", scores, pattern=pattern)
    scores = patterns(getattr(torch, name), (64, 128))
    both(run, "prune", f"{name} given", torch.zeros(64, 128), scores=scores)
    views(run, "prune", name, scores)


def storage_case(run: Run, name: str) -> None:
    """Every rule, back again, and refused groups."""
    if run.missing("compress"):
        return
    dtype = getattr(torch, name)
    for label, w in inputs(run, name):
        if name in SCORES:
            both(run, "compress", f"{label} 2:4", w, "2:4")
        mask, bits = few_of_four(tuple(w.shape)), w.view(getattr(torch, f"int{8 * w.itemsize}"))
        both(run, "compress", f"{label} mask", w, mask)
        sparse = torch.where(mask, bits, torch.zeros_like(bits)).view(dtype)
        both(run, "compress", f"{label} as it is", sparse)
        both(run, "decompress", label, *reference.compress(sparse))
        both(run, "compress", f"{label} dense", w)
        both(run, "compress", f"{label} all", w, torch.ones_like(mask))
    views(run, "compress", name, patterns(dtype, (64, 128)), few_of_four((64, 64)))


def codes_case(run: Run, name: str) -> None:
    """Both halves, usual scales and hard ones."""
    if run.missing("quantize_compressed"):
        return
    hard = torch.tensor([0.0173, 1.0, 0.0, 1e-40, -1.0, float("inf"), float("nan"), 3e38])
    for dtype in ("bfloat16", "float16", "float32"):
        for label, w in inputs(run, dtype):
            scale = hard[0]
            if "row" in name:
                rows = w.numel() // w.shape[-1]
                scale = hard.repeat(rows // len(hard) + 1)[:rows].reshape(*w.shape[:-1], 1)
            both(run, "quantize_compressed", f"{name} {label}", w, name, scale)


def views(run: Run, function: str, name: str, base: torch.Tensor, *others: torch.Tensor) -> None:
    """Half of the columns, every other column, a transpose, and a tensor that begins at an odd element."""
    placed, rest = run.put(base), run.put(others)
    odd = placed.reshape(-1)[1 : 1 + 64 * 64].view(64, 64)
    cut = {"half": placed[:, 64:], "every other": placed[:, ::2], "turned": placed[:, :64].t(), "odd": odd}
    for label, view in cut.items():
        wanted = outcome(
            lambda view=view: plain(getattr(reference, function)(view.cpu().contiguous(), *others))
        )
        got = run.guarded(lambda view=view: plain(getattr(run.fast, function)(view, *rest)))
        run.compare(function, f"{name} {label}", got, wanted)


INT4, LINEAR = "linear_sparse_int4", "linear_sparse"
#: Of values and of x.
PAIRS = (
    ("float8_e4m3fn", "float8_e4m3fn"), ("bfloat16", "bfloat16"), ("int8", "int8"), ("float16", "float16"),
    ("float8_e5m2", "float8_e4m3fn"), ("float8_e4m3fn", "float8_e5m2"),
)  # fmt: skip
#: Rows of x and of the weight, columns of the weight.
PRODUCT_SHAPES = ((3, 72, 160), (1, 256, 1024), (131, 331, 544), (300, 640, 2048))
FEW = 0.2


def product_jobs(settings: Settings) -> list[Job]:
    """Family "sparsity"."""
    few = settings.fraction <= FEW
    made = [
        Job("sparsity", f"int4 {shape}", INT4, int4_case, (shape, seed), 8.0)
        for seed, shape in enumerate(EXACT)
        if not (few and seed % 3)
    ]
    pairs = PAIRS[:4] if few else PAIRS
    return made + [
        Job("sparsity", f"product {pair[0]} x {pair[1]}", LINEAR, product_case, pair, 4.0) for pair in pairs
    ]


def int4_case(run: Run, shape: tuple[int, int, int, int], seed: int) -> None:
    """Both dtypes of x, one dtype of scales with each; a bias every other time."""
    if run.missing(INT4):
        return
    for at, dtype in enumerate(("bfloat16", "float16")):
        storage = ("float32", "bfloat16")[(seed // 2 + at) % 2]
        one = as_tensors(exact_case(*shape, dtype, storage, seed))
        one = one if seed % 2 else one._replace(bias=None)
        right = exact_result(one.x, sparse_int4_weight(*one[1:4]), one.bias)
        placed = [None if part is None else part.to(run.device) for part in one]
        for call in ("first", "again"):
            got = run.guarded(lambda placed=placed: run.fast.linear_sparse_int4(*placed))
            run.compare(INT4, f"{dtype} scales {storage} {call}", got, right)


def product_case(run: Run, values: str, x: str) -> None:
    """Every shape, results scaled and rounded to bfloat16, and the sums themselves."""
    if run.missing(LINEAR):
        return
    kinds = (getattr(torch, values), getattr(torch, x))
    for shape in PRODUCT_SHAPES if run.device.type == "cuda" else PRODUCT_SHAPES[:2]:
        torch.manual_seed(0)
        one = case(*shape, kinds, whole=True, device=run.device.type)
        for out in (torch.bfloat16, torch.int32 if values == "int8" else torch.float32):
            scaled = out != torch.int32
            right = wanted(one, out, scaled)
            extra = (one.bias, one.x_scale, one.scale) if scaled else (None, None, None)
            for call, metadata in (
                ("canonical", one.metadata),
                ("arranged", one.arranged),
                ("again", one.arranged),
            ):
                if metadata.dim() == 3 and run.device.type != "cuda":
                    continue
                got = run.guarded(lambda metadata=metadata, extra=extra, out=out, one=one: run.fast.linear_sparse(
                    one.x, one.values, metadata, extra[0], x_scale=extra[1], scale=extra[2], out_dtype=out
                ))  # fmt: skip
                run.compare(LINEAR, f"{shape} {out} {call}", got, right)


FLOATS = ("float32", "bfloat16", "float16")
#: Programs that are filled; those that are not, one block, a batch, tiles that the reference takes, and none.
TILE_SHAPES = {"whole": ((64, 128),), "cut": ((8, 8), (24, 72), (2, 8, 16), (12, 8), (0, 64))}
#: Hundreds of programs.
TILE_MORE = {"whole": ((512, 1024),), "cut": ((136, 264),)}
FUNCTIONS = ("prune_transposable", "compress_transposable")
KINDS = ("patterns", "normal", "few", "wide", "close", "special")


def tiles(dtype: torch.dtype, shape: tuple[int, ...], kind: str) -> torch.Tensor:
    """Any bits; normal numbers; few values, so ties; exponents far apart; sums that differ by less than they are
    rounded; NaN beside infinities."""
    if kind == "patterns":
        return patterns(dtype, shape)
    made = torch.randn(shape, generator=generator(11))
    if kind == "few":
        made = torch.randint(-2, 3, shape, generator=generator(12)).float()
    if kind == "wide":
        made = made * 2.0 ** torch.randint(-120, 127, shape, generator=generator(13)).float()
    if kind == "close":
        made = 2.0**24 * torch.randint(1, 3, shape, generator=generator(14)) + torch.randint(
            0, 5, shape, generator=generator(15)
        )
        made = made / 2.0**12
    if kind == "special":
        made = torch.tensor((1.0, torch.inf, torch.nan))[torch.randint(0, 3, shape, generator=generator(16))]
    return made.to(dtype)


def tile_jobs(settings: Settings) -> list[Job]:
    """Family "sparsity". A job compiles one kernel, of float32 another for addresses that are no multiples of 16: seconds
    each."""
    return [
        Job("sparsity", f"tiles {name} {part}", function, tiles_case, (name, function, part), weight)
        for function, weight in zip(FUNCTIONS, (8.0, 16.0), strict=True)
        for name in FLOATS
        for part in TILE_SHAPES
    ]


def tile_inputs(run: Run, name: str, part: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a dtype on the CPU, with labels."""
    shapes = (*TILE_SHAPES[part], *TILE_MORE[part]) if run.settings.fraction > 0.1 else TILE_SHAPES[part]
    for shape in shapes:
        for kind in KINDS:
            yield f"{name} {shape} {kind}", tiles(getattr(torch, name), shape, kind)


def tile_both(run: Run, function: str, label: str, w: torch.Tensor, **keywords: Any) -> None:
    """Compare two calls: the first makes the plan, the second uses it."""
    wanted = outcome(lambda: flat(getattr(reference, function)(w, **keywords)))
    placed, options = run.put(w), {name: run.put(value) for name, value in keywords.items()}
    for call in ("first", "again"):
        got = run.guarded(lambda: flat(getattr(run.fast, function)(placed, **options)))
        run.compare(function, f"{label} {call}", got, wanted)


def flat(made: Any) -> Any:
    """The parts of both orientations; a mask as it is."""
    return tuple(part for pair in made for part in pair) if isinstance(made, tuple) else made


def tiles_case(run: Run, name: str, function: str, part: str) -> None:
    """Inputs of whole or cut programs; of whole ones scores of another tensor, and views that are not contiguous."""
    if run.missing(function):
        return
    for label, w in tile_inputs(run, name, part):
        tile_both(run, function, label, w)
    if part == "cut":
        return
    base = tiles(getattr(torch, name), (64, 128), "patterns")
    if function == "prune_transposable":
        tile_both(run, function, f"{name} given", torch.zeros(64, 128), scores=base)
    placed = run.put(base)
    odd = placed.reshape(-1)[1 : 1 + 64 * 64].view(64, 64)
    cut = {"half": placed[:, 64:], "every other": placed[:, ::2], "turned": placed[:, :64].t(), "odd": odd}
    for label, view in cut.items():
        whole = view.cpu().contiguous()
        wanted = outcome(lambda whole=whole: flat(getattr(reference, function)(whole)))
        got = run.guarded(lambda view=view: flat(getattr(run.fast, function)(view)))
        run.compare(function, f"{name} {label}", got, wanted)
