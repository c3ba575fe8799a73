"""`prune_transposable` and `compress_transposable` on a GPU, bit for bit.

Ties, NaN, both zeros, sums that overflow or round to one value, shapes that no program fills, views, remembered calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import reference
from tests.gpu.harness.pool import Job
from tests.gpu.harness.run import Run, Settings, outcome
from tests.gpu.sparsity.inputs import generator, patterns

FLOATS = ("float32", "bfloat16", "float16")
#: Programs that are filled; those that are not, one block, a batch, tiles that the reference takes, and none.
SHAPES = {"whole": ((64, 128),), "cut": ((8, 8), (24, 72), (2, 8, 16), (12, 8), (0, 64))}
#: Hundreds of programs.
MORE = {"whole": ((512, 1024),), "cut": ((136, 264),)}
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


def jobs(settings: Settings) -> list[Job]:
    """Family "sparsity". A job compiles one kernel, of float32 another for addresses that are no multiples of 16: seconds
    each."""
    return [
        Job("sparsity", f"tiles {name} {part}", function, tiles_case, (name, function, part), weight)
        for function, weight in zip(FUNCTIONS, (8.0, 16.0), strict=True)
        for name in FLOATS
        for part in SHAPES
    ]


def inputs(run: Run, name: str, part: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a dtype on the CPU, with labels."""
    shapes = (*SHAPES[part], *MORE[part]) if run.settings.fraction > 0.1 else SHAPES[part]
    for shape in shapes:
        for kind in KINDS:
            yield f"{name} {shape} {kind}", tiles(getattr(torch, name), shape, kind)


def both(run: Run, function: str, label: str, w: torch.Tensor, **keywords: Any) -> None:
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
    for label, w in inputs(run, name, part):
        both(run, function, label, w)
    if part == "cut":
        return
    base = tiles(getattr(torch, name), (64, 128), "patterns")
    if function == "prune_transposable":
        both(run, function, f"{name} given", torch.zeros(64, 128), scores=base)
    placed = run.put(base)
    odd = placed.reshape(-1)[1 : 1 + 64 * 64].view(64, 64)
    cut = {"half": placed[:, 64:], "every other": placed[:, ::2], "turned": placed[:, :64].t(), "odd": odd}
    for label, view in cut.items():
        whole = view.cpu().contiguous()
        wanted = outcome(lambda whole=whole: flat(getattr(reference, function)(whole)))
        got = run.guarded(lambda view=view: flat(getattr(run.fast, function)(view)))
        run.compare(function, f"{name} {label}", got, wanted)
