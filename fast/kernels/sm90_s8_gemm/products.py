"""The header `products.h` of the kernel: wgmma.mma_async of 8-bit elements in shared memory, as inline PTX.

A statement of inline PTX names each of its registers, of which there are up to 130, so it is written out by this module.
Source: PTX ISA, section 9.7.15.5 (`wgmma.mma_async`).
"""

from __future__ import annotations

#: PTX's names of elements, by the names of their dtypes; a product is of one of them. Sums of floats are the tensor core's.
ELEMENTS = {"int8": "s8", "float8_e4m3fn": "e4m3"}
INTEGER = "int8"
#: Elements of K of an instruction.
INSTRUCTION = 32


def header(element: str, tokens: int) -> str:
    """The text of `products.h`. element: of `ELEMENTS`; tokens: of a tile."""
    sums, kind = tokens // 2, ELEMENTS[element]
    integer = element == INTEGER
    name, letter, dtype = ("int", "r", "s32") if integer else ("float", "f", "f32")
    # Integers have no signs of the operands.
    tail = "" if integer else ", 1, 1"
    registers = ", ".join(f"%{i}" for i in range(sums))
    outputs = ", ".join(f'"+{letter}"(d[{i}])' for i in range(sums))
    return f"""
typedef {name} Sum;

__device__ __forceinline__ void fence() {{ asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }}
__device__ __forceinline__ void commit() {{ asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }}

__device__ __forceinline__ void multiply(Sum (&d)[{sums}], u64 a, u64 b) {{
  asm volatile("wgmma.mma_async.sync.aligned.m64n{tokens}k{INSTRUCTION}.{dtype}.{kind}.{kind} "
      "{{{registers}}}, %{sums}, %{sums + 1}, 1{tail};"
      : {outputs}
      : "l"(a), "l"(b) : "memory");
}}

// Wait for all but the last PENDING groups of products.
template <int PENDING>
__device__ __forceinline__ void finish(Sum (&d)[{sums}]) {{
  asm volatile("wgmma.wait_group.sync.aligned %{sums};" : {outputs} : "n"(PENDING) : "memory");
}}
"""


__all__ = ["ELEMENTS", "INTEGER", "header"]
