"""The header `products.h` of the kernel: wgmma.mma_async.sp for the elements and the tokens of a variant, as inline PTX.

A statement of inline PTX names each of its registers, of which there are up to 132, so it is written out by this module.
Source: PTX ISA, section 9.7.15.6 (`wgmma.mma_async.sp`).
"""

from __future__ import annotations

from typing import NamedTuple

#: Elements of K of an instruction, by the bits of an element.
INSTRUCTION = {8: 64, 16: 32}


class Elements(NamedTuple):
    """values, x: PTX's names of the elements of the weight and of x; bits of each."""

    values: str
    x: str
    bits: int

    @property
    def integer(self) -> bool:
        """Whether sums are int32, not float32."""
        return self.values == "s8"


def header(elements: Elements, tokens: int) -> str:
    """The text of `products.h`."""
    sums = tokens // 2
    kind, letter, dtype = ("int", "r", "s32") if elements.integer else ("float", "f", "f32")
    # Signs of the operands, and for 16 bits that neither is transposed; integers have neither.
    tail = "" if elements.integer else ", 1, 1" + (", 0, 0" if elements.bits == 16 else "")
    shape = f"m64n{tokens}k{INSTRUCTION[elements.bits]}"
    registers = ", ".join(f"%{i}" for i in range(sums))
    outputs = ", ".join(f'"+{letter}"(d[{i}])' for i in range(sums))
    return f"""
typedef {kind} Sum;

__device__ __forceinline__ void fence() {{ asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }}
__device__ __forceinline__ void commit() {{ asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }}

__device__ __forceinline__ void multiply(Sum (&d)[{sums}], u64 a, u64 b, u32 metadata) {{
  asm volatile("wgmma.mma_async.sp.sync.aligned.{shape}.{dtype}.{elements.values}.{elements.x} "
      "{{{registers}}}, %{sums}, %{sums + 1}, %{sums + 2}, 0, 1{tail};"
      : {outputs}
      : "l"(a), "l"(b), "r"(metadata) : "memory");
}}

// Wait for all but the last PENDING groups of products.
template <int PENDING>
__device__ __forceinline__ void finish(Sum (&d)[{sums}]) {{
  asm volatile("wgmma.wait_group.sync.aligned %{sums};" : {outputs} : "n"(PENDING) : "memory");
}}
"""


__all__ = ["INSTRUCTION", "Elements", "header"]
