"""`prune`, `compress`, `decompress` and `quantize_compressed` on a GPU, bit for bit.

Ties, NaN, both zeros, refused groups, shapes that no program fills, views, remembered calls. Outputs are poisoned beforehand.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import reference
from tests.gpu.harness.pool import Job
from tests.gpu.harness.run import Run, Settings, outcome
from tests.gpu.sparsity.inputs import PATTERNS, SHAPES, few_of_four, patterns

STORED = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "int16", "int32")
SCORES = ("float32", "bfloat16", "float16", "int8", "uint8", "int16", "int32")
CODES = ("fp8_rowwise", "fp8_rowwise_e5m2", "fp8_tensorwise", "fp8_tensorwise_e5m2")
#: No rows, hundreds of programs, rows of an odd number of groups, which the reference stores.
MORE = ((0, 64), (256, 14336), (5, 12))


def jobs(settings: Settings) -> list[Job]:
    """Family "sparsity"."""
    made = [Job("sparsity", f"masks {name}", "prune", masks_case, (name,), 8.0) for name in SCORES]
    made += [Job("sparsity", f"storage {name}", "compress", storage_case, (name,), 3.0) for name in STORED]
    return made + [
        Job("sparsity", f"codes {name}", "quantize_compressed", codes_case, (name,), 2.0) for name in CODES
    ]


def inputs(run: Run, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a dtype on the CPU, with labels."""
    shapes = (*SHAPES, *MORE) if run.settings.fraction > 0.1 else SHAPES
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
