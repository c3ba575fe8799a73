"""Attention of one query of each head over a stored cache in CUDA C++: what is taken, compiled and launched.

Operands are those of `fast.kernels.attention.decode`, which multiplies where this does not take them. There
codes pass through shared memory, because that is how Triton gives them to the tensor core, and a step waits for all its warps;
here each warp reads them into the registers where they are multiplied, and decoding takes a fifth of the instructions.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fast.kernels.attention.append import static_of
from fast.kernels.attention.parts import parts_of
from fast.launch import cuda
from fast.launch.cuda import MULTIPROCESSORS, CudaLaunch, Kernel, is_served
from fast.launch.launcher import ALIGNMENT, FLOAT_NAMES
from fast.stored_tokens import StoredTokens
from reference.attention.window import ALL_STORED, Window

#: Pointers of a launch, and how its numbers lie.
POINTERS = (
    "q", "k", "k_scale", "k_zero", "v", "v_scale", "k_computed", "v_computed", "length", "mask", "y", "parts", "stats",
)  # fmt: skip
NUMBERS = "3qf8i4x"
#: Decoders, and who shares a scale, by the numbers that the source gives them.
KINDS = ("value", "fp8", "int8", "int4")
#: Bits of a channel.
BITS = {"value": 16, "fp8": 8, "int8": 8, "int4": 4}
SCALES = ("", "token", "tensor", "head", "channel")
WARPS = 4
#: Queries that may share a key head: columns of the tensor core's product.
COLUMNS = 8
#: Widths of heads, and the tokens of a warp's step by the bytes of a token: what of keys and of values 32 registers hold.
WIDTHS = (64, 128)
STEP_BYTES, MOST_TOKENS = 4096, 32
#: Parts that a warp of what adds them reads at once.
TOGETHER = (3, 9, 17)
#: Most programs of a cluster.
MOST_CLUSTER = 8
#: Share of the places for programs that is enough, and the most parts that are tried for it where no number of them fills one
#: round: so many keep four fifths of the places busy with any number of heads; of numbers up to 1000 the share with 96 of 100
#: where 264 programs fit, 92 where 528 do.
BUSY, MOST_PARTS = 0.9, 8


class Problem(NamedTuple):
    """What is multiplied: decoder, width, queries of a key head, their dtype, who shares a scale, whether keys have zero
    points, tokens of a group by channel, whether tokens as computed are beside, whether there is a mask."""

    kind: str
    width: int
    heads: int
    dtype: str
    scales: str
    zero: bool
    group: int
    window: bool
    masked: bool

    @property
    def row(self) -> int:
        """Bytes of a token."""
        return self.width * BITS[self.kind] // 8


class Variant(NamedTuple):
    """tile: tokens of a warp's step. resident: programs of a multiprocessor. cluster: programs of a cluster, all parts of a key
    head, which are added there, or 1."""

    tile: int
    resident: int
    cluster: int = 1

    @property
    def threads(self) -> int:
        """Threads of a program."""
        return 32 * WARPS


def _defines(variant: Variant, problem: Problem) -> dict[str, int]:
    return {
        "KIND": KINDS.index(problem.kind), "WIDTH": problem.width, "HEADS": problem.heads,
        "BF16": int(problem.dtype == "bfloat16"), "SCALES": SCALES.index(problem.scales), "ZERO": int(problem.zero),
        "GROUP": problem.group, "WINDOW": int(problem.window), "MASKED": int(problem.masked), "TILE": variant.tile,
        "RESIDENT": variant.resident, "CLUSTER": variant.cluster,
    }  # fmt: skip


KERNEL = Kernel(
    "sm90_decode",
    Path(__file__).parent,
    _defines,
    own=("softmax.cuh", "sm90_decode_codes.cuh", "sm90_decode_window.cuh", "sm90_decode_sums.cuh"),
    shared=(),
    programmatic=True,
    instead="Triton's kernel multiplies",
    fails_whole=True,
)


class Parts(NamedTuple):
    """What is added: width of heads, dtype of the result, tokens that parts are multiples of, parts that a warp has at once."""

    width: int
    dtype: str
    block: int
    together: int


class PartsVariant(NamedTuple):
    """The one there is."""

    @property
    def cluster(self) -> int:
        """Programs of a cluster."""
        return 1

    @property
    def threads(self) -> int:
        """Threads of a program."""
        return 32 * WARPS


#: Begins while the last programs of `KERNEL` end.
PARTS_KERNEL = Kernel(
    "sm90_decode_parts",
    Path(__file__).parent,
    lambda _, problem: {
        "WIDTH": problem.width,
        "BF16": int(problem.dtype == "bfloat16"),
        "BLOCK": problem.block,
        "AT_ONCE": problem.together,
    },
    own=("softmax.cuh",),
    shared=(),
    programmatic=True,
    instead="Triton's kernel multiplies",
    fails_whole=True,
)


def variant_of(problem: Problem) -> Variant:
    """Registers of a tile, sums and queries decide how many programs a multiprocessor has."""
    tile = min(MOST_TOKENS, STEP_BYTES // problem.row)
    return Variant(tile, 4 if BITS[problem.kind] == 4 else 2)


def refusal(q: torch.Tensor, k: StoredTokens) -> str | None:
    """Why Triton's kernel multiplies what `decode.refusal` lets through, or None."""
    return unfit(q, k) if is_served(q) else "it is for Hopper, with NVRTC"


def unfit(q: torch.Tensor, k: StoredTokens) -> str | None:
    """The same of sizes."""
    if q.shape[2] != 1 or q.shape[1] // k.shape[1] > COLUMNS:
        return f"it takes one query of each head, and {COLUMNS} heads that share a key head"
    if k.width not in WIDTHS:
        return f"it takes heads of {' or '.join(map(str, WIDTHS))} channels"
    if k.axis == 3 and not k.static and k.scale is not None and k.scale.shape[-1] != 1:
        return "it takes one scale of a token"
    return None


def span_of(problem: Problem) -> int:
    """Tokens that the warps of a program take a turn at: what parts are whole multiples of."""
    return WARPS * (problem.group if problem.scales == "channel" else variant_of(problem).tile)


@lru_cache(maxsize=256)
def _launch(problem: Problem, variant: Variant, programs: int, numbers: tuple[Any, ...]) -> CudaLaunch:
    # Of each warp and column the largest score, the sum of weights, and sums by channel; behind them queries and scales.
    by_channel = problem.scales == "channel"
    steps, rows = (problem.width // 32, problem.width // 2 + 6) if by_channel else (1, 1)
    shared = 4 * COLUMNS * (WARPS * (2 + problem.width + 4) + 2) + 16 * WARPS * (32 * steps + rows)
    return CudaLaunch(KERNEL, variant, problem, POINTERS, programs, shared, (NUMBERS, numbers))


def attention(
    q: torch.Tensor, k: StoredTokens, v: StoredTokens, length: torch.Tensor, mask: torch.Tensor | None, factor: float,
    kind: str, splits: int = 0, cluster: bool = False,
) -> torch.Tensor | None:  # fmt: skip
    """(B, H, 1, D), whose memory is (B, 1, H, D); None where the kernel does not compile or load.

    Operands as `refusal` lets through, channels of a query side by side. mask: uint8, of one sequence or of all. factor: of
    scores, times log2 e. splits: for measurements; else as `splits_of` says. cluster: whether parts lie in a cluster, at most
    `MOST_CLUSTER`.
    """
    q, mask = _aligned(q), None if mask is None else _aligned(mask)
    problem = problem_of(q, k, kind, mask)
    splits, variant, added = _planned(problem, q.shape[0] * k.shape[1], v.shape[2], splits, cluster)
    if not _is_loadable(problem, variant, added, q.get_device()):
        return None
    y = torch.empty((q.shape[0], 1, q.shape[1], k.width), dtype=q.dtype, device=q.device)
    parts = parts_of(y, splits) if added is not None else None
    launch(problem, variant, q, k, v, length, mask, factor, splits, (y, *(parts or (None, None))))
    if added is not None and parts is not None:
        add(added, *parts, length, y, splits, k.window if problem.window else ALL_STORED)
    return y.transpose(1, 2)


@lru_cache(maxsize=256)
def _planned(
    problem: Problem, pairs: int, room: int, splits: int, cluster: bool
) -> tuple[int, Variant, Parts | None]:
    """Parts, the variant, and what adds them, if something does; `pairs` and `room` as `splits_of` takes them."""
    splits = splits or splits_of(problem, pairs, room)
    variant = variant_of(problem)
    if cluster and 1 < splits <= MOST_CLUSTER:
        variant = variant._replace(cluster=splits)
    return splits, variant, parts_added(problem, splits) if splits > variant.cluster else None


def parts_added(problem: Problem, splits: int) -> Parts:
    """What adds so many parts: as many are read together as there are, or a warp's registers hold."""
    together = next((n for n in TOGETHER if n * WARPS >= splits), TOGETHER[-1])
    return Parts(problem.width, problem.dtype, span_of(problem), together)


def _is_loadable(problem: Problem, variant: Variant, added: Parts | None, device: int) -> bool:
    kernels: list[tuple[Kernel, Any, Any]] = [(KERNEL, variant, problem)]
    kernels += [(PARTS_KERNEL, PartsVariant(), added)] * (added is not None)
    return all(cuda.is_loadable(*one, device) for one in kernels)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Where a launch takes it, whose strides are numbers: others are copied before these are read."""
    return x.clone(memory_format=torch.contiguous_format) if x.data_ptr() % ALIGNMENT else x


def splits_of(problem: Problem, pairs: int, room: int) -> int:
    """Parts of the room of each of so many key heads: as few as keep 9 of 10 places of all multiprocessors busy, as programs
    run in whole rounds."""
    places = MULTIPROCESSORS * variant_of(problem).resident
    most = max(1, -(-room // span_of(problem)))
    if pairs < places:
        found = max(1, places // pairs)
        if pairs * found >= places * BUSY:
            return min(most, found)
    options = range(1, min(most, MOST_PARTS) + 1)
    busy = {n: pairs * n / (-(-pairs * n // places) * places) for n in options}
    return next((n for n in options if busy[n] >= BUSY), max(options, key=lambda n: (busy[n], -n)))


def problem_of(q: torch.Tensor, k: StoredTokens, kind: str, mask: torch.Tensor | None) -> Problem:
    """Of operands. kind: as `decode` names it."""
    scales = static_of(k) or ("" if k.scale is None else "channel" if k.axis == 2 else "token")
    return Problem(
        kind, k.width, q.shape[1] // k.shape[1], FLOAT_NAMES[q.dtype], scales, k.zero is not None,
        k.window.group if scales == "channel" else 1, k.computed is not None, mask is not None,
    )  # fmt: skip


def launch(
    problem: Problem, variant: Variant, q: torch.Tensor, k: StoredTokens, v: StoredTokens, length: torch.Tensor,
    mask: torch.Tensor | None, factor: float, splits: int, results: tuple[torch.Tensor | None, ...],
) -> None:  # fmt: skip
    """Write y (B, 1, H, D), or the parts and their statistics (`parts_of`).

    mask: uint8, the last axis contiguous, one line for all sequences or one each. factor: of scores, times log2 e.
    """
    window = k.window
    ring = (window.sinks, window.ring, window.residual, window.group) if problem.window else (0, 0, 0, 1)
    lines = 0 if mask is None or mask.shape[0] == 1 else mask.stride(0)
    numbers = (q.stride(0), q.stride(1), lines, factor, k.shape[1], k.shape[2], v.shape[2], splits, *ring)
    operands = (q, k.codes, k.scale, k.zero, v.codes, v.scale, k.computed, v.computed, length, mask, *results)
    _launch(problem, variant, q.shape[0] * k.shape[1] * splits, numbers).run(operands, q.get_device())


def add(
    added: Parts,
    parts: torch.Tensor,
    stats: torch.Tensor,
    length: torch.Tensor,
    y: torch.Tensor,
    splits: int,
    window: Window,
) -> None:
    """Write y (B, 1, H, D): the sum of its parts, of which those behind the last token are not read."""
    numbers = (splits, window.residual, window.group, int(window.slots > 0))
    _add_launch(added, y.numel() // added.width, numbers).run((parts, stats, length, y), y.get_device())


@lru_cache(maxsize=256)
def _add_launch(added: Parts, programs: int, numbers: tuple[int, ...]) -> CudaLaunch:
    shared, names = 4 * WARPS * added.width, ("parts", "stats", "length", "y")
    return CudaLaunch(PARTS_KERNEL, PartsVariant(), added, names, programs, shared, ("4i", numbers))


__all__ = [
    "KERNEL",
    "PARTS_KERNEL",
    "Parts",
    "Problem",
    "Variant",
    "add",
    "attention",
    "launch",
    "parts_added",
    "problem_of",
    "refusal",
    "span_of",
    "splits_of",
    "unfit",
    "variant_of",
]
