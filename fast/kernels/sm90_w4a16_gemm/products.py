"""The header `products.h` of the kernel: wgmma.mma_async with its first operand in registers, as inline PTX.

A statement of inline PTX names each of its registers, of which there are up to 133, so it is written out by this module.
Source: PTX ISA, section 9.7.15.5 (`wgmma.mma_async`).
"""

from __future__ import annotations

from collections.abc import Iterable

#: PTX's names of the dtypes of x.
KINDS = {"bfloat16": "bf16", "float16": "f16"}
#: Elements of K of an instruction.
INSTRUCTION = 16
BEGIN = """
typedef float Sum;

__device__ __forceinline__ void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
"""


def header(x: str, sizes: Iterable[int]) -> str:
    """The text of `products.h`. x: the name of its dtype; sizes: tokens of tiles, each once."""
    return "\n".join([BEGIN, *(products(x, tokens) for tokens in sizes)])


def products(x: str, tokens: int) -> str:
    """Those of a tile, chosen by the number of its sums."""
    sums, kind = tokens // 2, KINDS[x]
    registers = ", ".join(f"%{i}" for i in range(sums))
    fragment = ", ".join(f"%{sums + i}" for i in range(4))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(sums))
    return f"""
// Add the product of 64 features, 16 columns in registers, and as many columns of the tokens at the descriptor b.
__device__ __forceinline__ void multiply(Sum (&d)[{sums}], const u32 (&a)[4], u64 b) {{
  asm volatile("wgmma.mma_async.sync.aligned.m64n{tokens}k{INSTRUCTION}.f32.{kind}.{kind} "
      "{{{registers}}}, {{{fragment}}}, %{sums + 4}, 1, 1, 1, 0;"
      : {outputs}
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b) : "memory");
}}

// Wait for all but the last PENDING groups of products.
template <int PENDING>
__device__ __forceinline__ void finish(Sum (&d)[{sums}]) {{
  asm volatile("wgmma.wait_group.sync.aligned %{sums};" : {outputs} : "n"(PENDING) : "memory");
}}
"""


__all__ = ["INSTRUCTION", "KINDS", "header"]
