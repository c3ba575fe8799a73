"""Operands of attention in 8 bits as codes, in CUDA C++: what is taken, what is compiled for it, and what is launched.

Codes and scales are those of `quantize_heads`, bit for bit under the same mean key, which is a float32 sum in an order of its
own. Two launches: statistics of parts of the tokens of keys and values, and codes, whose programs begin with what these left.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fast.kernels.attention.quantize_heads import Heads, padded, tokens_of_scale
from fast.kernels.attention.sm90 import takes_queries
from fast.launch import cuda
from fast.launch.cuda import CudaLaunch, Kernel, is_served
from fast.launch.launcher import FLOAT_NAMES, Call
from reference.attention.quantized import AttentionRecipe

#: Channels of a head; tokens of a program; threads.
WIDTH, TOKENS, THREADS = 128, 128, 256
#: Most parts of a head's tokens, whose statistics each program of the second launch reads; rows of threads of the first.
PARTS, ROWS = 32, 16
#: Pointers of both launches, and numbers of the sources' `Problem`.
STATISTICS = ("k", "v", "sums", "largest")
MADE = ("mean", "k_codes", "k_scale", "v_codes", "v_scale")
OF_QUERIES = ("q_codes", "q_scale")
CODES = (*STATISTICS, *MADE, "q", *OF_QUERIES)
NUMBERS = "f9i9q"


class Variant(NamedTuple):
    """Of what launches have besides their sources."""

    @property
    def cluster(self) -> int:
        """Programs of a cluster."""
        return 1

    @property
    def threads(self) -> int:
        """Threads of a program."""
        return THREADS


class Problem(NamedTuple):
    """Element of keys' codes, dtype of keys and values, whether each key has a scale, and the recipe's steps.

    token_major: whether codes lie as queries do, as (B, T, H, 128), else those of a head's queries together. A program then has
    up to CHUNKS times as many rows, which come by way of shared memory while it makes codes of others.
    """

    element: str
    dtype: str
    by_token: bool
    rotate: bool
    center: bool
    token_major: bool = False


def _defines(variant: Variant, problem: Problem) -> dict[str, int]:
    return {
        "INTEGER": int(problem.element == "int8"), "BF16": int(problem.dtype == "bfloat16"), "BY_TOKEN": int(problem.by_token),
        "ROTATE": int(problem.rotate), "CENTER": int(problem.center), "TOKEN_MAJOR": int(problem.token_major),
    }  # fmt: skip


STATISTICS_KERNEL = Kernel(
    "sm90_head_statistics",
    Path(__file__).parent,
    _defines,
    own=("head_codes.cuh",),
    shared=(),
    instead="Triton's kernels quantize",
    fails_whole=True,
)
CODES_KERNEL = replace(STATISTICS_KERNEL, name="sm90_head_codes", programmatic=True)
#: Bytes of shared memory: two numbers of each channel for each row of threads; a number of each channel, then a tile of codes.
STATISTICS_SHARED, CODES_SHARED = 2 * 4 * ROWS * WIDTH, 4 * WIDTH + TOKENS * WIDTH


#: Two chunks of 128 queries of 16 bits; most chunks of a program, and programs of queries from which on it has more than one.
RING_SHARED, CHUNKS, MANY_PROGRAMS = 2 * 2 * TOKENS * WIDTH, 4, 512


def refusal(k: torch.Tensor, v: torch.Tensor, recipe: AttentionRecipe) -> str | None:
    """Why Triton's kernels quantize, or None."""
    if not is_served(k):
        return "they are for Hopper, with NVRTC"
    return unfit(k, v, recipe)


def unfit(k: torch.Tensor, v: torch.Tensor, recipe: AttentionRecipe) -> str | None:
    """The same of sizes, dtypes and places."""
    if (k.shape[-1], v.shape[-1]) != (WIDTH, WIDTH):
        return f"they take heads of {WIDTH} channels"
    if k.dtype not in (torch.bfloat16, torch.float16):
        return "they take 16-bit floats"
    if any(one % 8 for x in (k, v) for one in (x.data_ptr() // 2, *x.stride()[:3])):
        return "they take keys and values that begin at multiples of 16 bytes"
    if tokens_of_scale(recipe.schemes[1], WIDTH) is None:
        return f"they take a scale for each key, or for {TOKENS}"
    return None


def quantized(
    k: torch.Tensor,
    v: torch.Tensor,
    recipe: AttentionRecipe,
    q: torch.Tensor | None = None,
    token_major: bool = False,
) -> Heads | None:
    """Codes and scales of k and v (B, KV, S, 128), and of q (B, H, T, 128) where it is given and `takes_queries`, else None.

    token_major: whether codes of queries lie as these, where those of all heads of a token are side by side, as a projection
    leaves them; they are then a view, (B, H, T', 128) of (B, T', H, 128). None where the kernels do not compile or load.
    """
    by_token = tokens_of_scale(recipe.schemes[1], WIDTH) == 1
    if q is not None and not (
        q.dtype == k.dtype and takes_queries(q) and tokens_of_scale(recipe.schemes[0], WIDTH) == 1
    ):
        q = None
    token_major = token_major and q is not None and q.stride(1) == WIDTH
    element, dtype = recipe.schemes[1].element, FLOAT_NAMES[k.dtype]
    problem = Problem(element, dtype, by_token, recipe.rotate, recipe.center, token_major)
    kernels = STATISTICS_KERNEL, CODES_KERNEL
    if not all(cuda.is_loadable(one, Variant(), problem, k.get_device()) for one in kernels):
        return None
    call = Call({"k": k, "v": v, "q": q}, strided=True)
    parts, numbers = _numbers(k, v, q)
    pairs, blocks, query_blocks = numbers[9], numbers[5], numbers[8]
    _allocate(call, k, q, parts, by_token, token_major)
    programs_of_codes = 2 * pairs * blocks
    if q is not None:
        programs_of_codes += q.shape[0] * _programs(q, query_blocks, token_major)
    shared_of_codes = RING_SHARED if token_major else CODES_SHARED
    for kernel, names, programs, shared in (
        (STATISTICS_KERNEL, STATISTICS, pairs * parts, STATISTICS_SHARED),
        (CODES_KERNEL, CODES, programs_of_codes, shared_of_codes),
    ):
        call.launch(
            CudaLaunch(kernel, Variant(), problem, names, programs, shared, (NUMBERS, numbers)), names
        )
    mean, *codes = call.result(MADE, None, None)
    q_codes, q_scale = (None, None) if q is None else call.result(OF_QUERIES, None, None)
    if token_major:
        q_codes = q_codes.transpose(1, 2)
    return Heads(q_codes, q_scale, *codes, mean if recipe.center else None)


def _numbers(k: torch.Tensor, v: torch.Tensor, q: torch.Tensor | None) -> tuple[int, tuple[Any, ...]]:
    """Parts of a head's tokens, and the numbers of both sources' `Problem`."""
    batch, heads, tokens, _ = k.shape
    each = -(-tokens // (PARTS * ROWS)) * ROWS
    parts = -(-tokens // each)
    sizes = (tokens, each, parts, heads, padded(tokens) // TOKENS)
    of_queries = (0, 1, 1) if q is None else (q.shape[2], q.shape[1], padded(q.shape[2]) // TOKENS)
    steps = (*k.stride()[:3], *v.stride()[:3], *((0, 0, 0) if q is None else q.stride()[:3]))
    return parts, (1.0 / tokens, *sizes, *of_queries, batch * heads, *steps)


def _programs(q: torch.Tensor, blocks: int, token_major: bool) -> int:
    """Of a sequence's queries."""
    chunks = blocks * q.shape[1]
    each = max(1, min(CHUNKS, q.shape[0] * chunks // MANY_PROGRAMS)) if token_major else 1
    return -(-chunks // each)


def _allocate(
    call: Call, k: torch.Tensor, q: torch.Tensor | None, parts: int, by_token: bool, token_major: bool
) -> None:
    batch, heads, tokens, _ = k.shape
    room = padded(tokens)
    for name in ("sums", "largest"):
        call.allocate(name, (batch * heads, parts, WIDTH), torch.float32)
    call.allocate("mean", (batch, heads, 1, WIDTH), torch.float32)
    call.allocate("k_codes", (batch, heads, room, WIDTH), torch.uint8)
    call.allocate("k_scale", (batch, heads, room if by_token else room // TOKENS), torch.float32)
    call.allocate("v_codes", (batch, heads, WIDTH, room), torch.uint8)
    call.allocate("v_scale", (batch, heads, WIDTH), torch.float32)
    if q is not None:
        (sequences, count), places = q.shape[:2], padded(q.shape[2])
        shape = (sequences, places, count) if token_major else (sequences, count, places)
        call.allocate("q_codes", (*shape, WIDTH), torch.uint8)
        call.allocate("q_scale", (sequences, count, places), torch.float32)


__all__ = ["CODES_KERNEL", "STATISTICS_KERNEL", "Problem", "Variant", "quantized", "refusal", "unfit"]
