"""Attention in 8 bits in CUDA C++: what is taken, what is compiled for it, and what is launched.

Operands are those of `fast.kernels.attention.prefill`, which multiplies where this does not take them. How its warp groups
share the tensor core and the special unit: `sm90_attention.cu`.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from fast.kernels.attention.quantize_heads import Heads, padded, tokens_of_scale
from fast.kernels.hopper.wgmma import product
from fast.launch import cuda
from fast.launch.cuda import KINDS, CudaLaunch, Kernel, Maps, is_served
from fast.launch.driver import tensor_map
from fast.launch.launcher import FLOAT_NAMES, Call
from reference.attention.quantized import LOG2E, AttentionRecipe

#: Channels of a head; queries and keys of a tile; rows of ones behind a tile of values.
WIDTH, QUERIES, KEYS, ONES = 128, 128, 128, 8
#: Pointers of a launch, of which the first three are read through their tensor maps.
POINTERS = ("k", "v", "q", "q_scale", "k_scale", "v_scale", "y")
#: Numbers of the source's `Problem`.
NUMBERS = "f10i4x"
#: Bytes of keys and values, of all sequences, that programs at work read together: half of the second-level cache.
TOGETHER = 24 << 20


class Variant(NamedTuple):
    """stages: of the ring of keys and values. units: of queries that lie in shared memory, a power of two: where there is one,
    no keys of the next unit come before all have multiplied this one's. heads: whether codes come from `sm90_heads`; what that
    does not take is made by Triton's kernels. token_major: see `sm90_heads.quantized`.
    """

    stages: int = 4
    units: int = 1
    heads: bool = False
    token_major: bool = False

    @property
    def cluster(self) -> int:
        """Programs of a cluster."""
        return 1

    @property
    def threads(self) -> int:
        """Threads of a program."""
        return 384

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory: queries, the ring with scales of keys, barriers, alignment."""
        stage = KEYS * WIDTH + (WIDTH + ONES) * KEYS + 4 * KEYS
        return self.units * (QUERIES * WIDTH + 16) + self.stages * (stage + 32) + 1024


class Problem(NamedTuple):
    """What is multiplied: element of queries and keys, dtype of the result, whether each key has a scale, whether causal."""

    element: str
    out: str
    by_token: bool
    causal: bool


def _defines(variant: Variant, problem: Problem) -> dict[str, int]:
    return {
        "STAGES": variant.stages, "OUT": KINDS.index(problem.out), "BY_TOKEN": int(problem.by_token),
        "CAUSAL": int(problem.causal), "Q_STAGES": variant.units,
        "INTEGER": int(problem.element == "int8"), "BF16": int(problem.out == "bfloat16"),
    }  # fmt: skip


def _generated(variant: Variant, problem: Problem) -> dict[str, str]:
    """Queries by keys, both in shared memory; weights, in registers, by values."""
    integer = problem.element == "int8"
    kind, signs = ("s8", "") if integer else ("e4m3", ", 1, 1")
    scores = _products(
        "Score", KEYS, f"{kind}.{kind}", "u64 a, u64 b", "{0}, {1}, MORE" + signs, '"l"(a), "l"(b)', integer
    )
    sums = _products(
        "float", WIDTH + ONES, "e4m3.e4m3", "u32 a, u32 b, u32 c, u32 e, u64 values",
        "{{{0}, {1}, {2}, {3}}}, {4}, MORE, 1, 1", '"r"(a), "r"(b), "r"(c), "r"(e), "l"(values)', False,
    )  # fmt: skip
    text = f"""
typedef {"int" if integer else "float"} Score;

__device__ __forceinline__ void fence() {{ asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }}
__device__ __forceinline__ void commit() {{ asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }}
"""
    return {"products.h": text + scores + sums}


def _products(
    dtype: str, columns: int, kinds: str, arguments: str, operands: str, inputs: str, integer: bool
) -> str:
    """`multiply`, `finish`, and `start`, a product whose sums begin at zero: what their registers held is not kept for it."""
    made = {
        more: product(
            columns, 32, kinds, arguments, operands.replace("MORE", more), inputs, integer=integer
        ).replace("Sum", dtype)
        for more in "01"
    }  # fmt: skip
    start = (
        made["0"].partition("// Wait for all")[0].replace("void multiply(", "void start(").replace('"+', '"=')
    )
    return start.replace("// Add the", "// The") + made["1"]


KERNEL = Kernel(
    "sm90_attention",
    Path(__file__).parent,
    _defines,
    own=("head_codes.cuh",),
    shared=("copies.cuh",),
    generated=_generated,
    instead="Triton's kernel multiplies",
    fails_whole=True,
)


#: What serves where nothing else is asked for.
SERVED = Variant(units=2, heads=True, token_major=True)


def refusal(
    q: torch.Tensor, v: torch.Tensor, recipe: AttentionRecipe, window: int | None, mask: torch.Tensor | None
) -> str | None:
    """Why Triton's kernel multiplies, or None."""
    if not is_served(q):
        return "it is for Hopper, with NVRTC"
    return unfit(q.shape[-1], v.shape[-1], recipe, window, mask)


def unfit(
    width: int, value_width: int, recipe: AttentionRecipe, window: int | None, mask: torch.Tensor | None
) -> str | None:
    """The same of sizes and rules."""
    if (width, value_width) != (WIDTH, WIDTH):
        return f"it takes heads of {WIDTH} channels"
    if window is not None or mask is not None:
        return "it has no windows and masks"
    if tokens_of_scale(recipe.schemes[0], width) != 1 or recipe.chain % KEYS:
        return f"it takes a scale for each query, and chains of {KEYS} tokens"
    return None


def takes_queries(q: torch.Tensor) -> bool:
    """Whether `sm90_heads` makes codes of these queries: 16-bit floats, in rows that begin at multiples of 16 bytes."""
    steps = (q.data_ptr() // 2, *q.stride()[:3])
    return q.dtype in (torch.bfloat16, torch.float16) and not any(one % 8 for one in steps)


def attended(
    heads: Heads, q: torch.Tensor, recipe: AttentionRecipe, scale: float, causal: bool, offset: int | None, keys: int,
    variant: Variant | None = None,
) -> torch.Tensor | None:  # fmt: skip
    """(B, H, T, D), memory (B, T, H, D), of codes; None where the kernel does not compile or load.

    q: for shape and dtype.
    """
    variant = SERVED if variant is None else variant
    by_token = tokens_of_scale(recipe.schemes[1], WIDTH) == 1
    problem = Problem(recipe.schemes[0].element, FLOAT_NAMES[q.dtype], by_token, causal)
    if not cuda.is_loadable(KERNEL, variant, problem, heads.k.get_device(), variant.shared):
        return None
    launch = _launch(heads, q, scale, offset, keys, variant, problem)
    names = launch.names
    call = Call(heads._asdict(), strided=True)
    batch, count, queries, _ = q.shape
    call.allocate("y", (batch, queries, count, WIDTH), q.dtype)
    call.launch(launch, names)
    y: torch.Tensor = call.result("y", None, None)
    return y.transpose(1, 2)


def _launch(
    heads: Heads,
    q: torch.Tensor,
    scale: float,
    offset: int | None,
    keys: int,
    variant: Variant,
    problem: Problem,
) -> CudaLaunch:
    """Of all units, as many programs as run at once."""
    batch, count, queries, _ = q.shape
    groups, q_room, k_room = count // heads.k.shape[1], padded(queries), padded(keys)
    rows, place = batch * count, keys - queries if offset is None else offset
    together = min(rows, max(1, TOGETHER // (2 * k_room * WIDTH)) * groups)
    assert heads.q is not None
    token_major = count > 1 and heads.q.stride(1) == WIDTH
    sizes = (queries, q_room, keys, k_room, place, count, groups, rows, together)
    numbers = (scale * LOG2E, *sizes, token_major)
    units = rows * -(-queries // QUERIES)
    device = heads.k.get_device()
    programs = min(units, cuda.clusters_at_once(KERNEL, variant, problem, variant.shared, device))

    def describe(k: int, v: int, q: int) -> bytes:
        found = tensor_map(k, rows // groups * k_room, WIDTH, (KEYS, WIDTH))
        found += tensor_map(v, rows // groups * WIDTH, k_room, (WIDTH, KEYS))
        across = count if token_major else 1
        return found + tensor_map(q, rows // across * q_room, across * WIDTH, (64, WIDTH))

    maps = Maps(describe, 3, (0, 1, 2))
    return CudaLaunch(
        KERNEL, variant, problem, POINTERS, programs, variant.shared, (NUMBERS, numbers), maps=maps
    )


__all__ = ["KERNEL", "SERVED", "Problem", "Variant", "attended", "refusal", "takes_queries", "unfit"]
