"""The generated header `products.h`: wgmma.mma_async as inline PTX.

A statement of inline PTX names each of its registers, of which there are up to 133, so it is written out here.
Sources: PTX ISA, sections 9.7.15.5 (`wgmma.mma_async`) and 9.7.15.6 (`wgmma.mma_async.sp`).
"""

from __future__ import annotations

from collections.abc import Iterable

#: Names of PTX and of C of sums, and the constraint of a register, by whether they are integers.
SUMS = {True: ("s32", "int", "r"), False: ("f32", "float", "f")}


def header(integer: bool, products: Iterable[str]) -> str:
    """What all products need, and those of each number of sums."""
    return "\n".join([
        f"""
typedef {SUMS[integer][1]} Sum;

__device__ __forceinline__ void fence() {{ asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }}
__device__ __forceinline__ void commit() {{ asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }}
""",
        *products,
    ])  # fmt: skip


def product(
    tokens: int,
    k: int,
    kinds: str,
    arguments: str,
    operands: str,
    inputs: str,
    *,
    integer: bool = False,
    sparse: bool = False,
) -> str:
    """`multiply` and `finish` of a tile of tokens, which are chosen by the number of its sums.

    k: elements of K of an instruction. kinds: PTX's names of the elements. arguments: of `multiply` behind its sums; operands:
    of the instruction behind them, {0} and so on for their registers; inputs: constraints of these.
    """
    sums, (dtype, _, letter) = tokens // 2, SUMS[integer]
    registers = ", ".join(f"%{i}" for i in range(sums))
    outputs = ", ".join(f'"+{letter}"(d[{i}])' for i in range(sums))
    places = operands.format(*(f"%{sums + i}" for i in range(5)))
    name = f"wgmma.mma_async{'.sp' * sparse}.sync.aligned.m64n{tokens}k{k}.{dtype}.{kinds}"
    return f"""
// Add the product of 64 features and the tokens of a tile.
__device__ __forceinline__ void multiply(Sum (&d)[{sums}], {arguments}) {{
  asm volatile("{name} "
      "{{{registers}}}, {places};"
      : {outputs}
      : {inputs} : "memory");
}}

// Wait for all but the last PENDING groups of products.
template <int PENDING>
__device__ __forceinline__ void finish(Sum (&d)[{sums}]) {{
  asm volatile("wgmma.wait_group.sync.aligned %{sums};" : {outputs} : "n"(PENDING) : "memory");
}}
"""


__all__ = ["header", "product"]
