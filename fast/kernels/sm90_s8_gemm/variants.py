"""The variants of the kernel: how large its tiles are, and what is defined for its source."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from fast.launch.cuda import Kernel
from fast.launch.hopper import KINDS, MOST_SHARED

#: PTX's names of elements, by the names of their dtypes; a product is of one of them. Sums of floats are the tensor core's.
ELEMENTS = {"int8": "s8", "float8_e4m3fn": "e4m3"}
INTEGER = "int8"
#: Elements of K of an instruction.
INSTRUCTION = 32
#: Features of a tile.
FEATURES = 128
#: Warpgroups that multiply them.
GROUPS = 2
#: Threads of a program, with those that load.
THREADS = 384
#: Bytes of a row in a stage.
ROW = 128
#: Bytes of an outgoing row of 64 outputs of 16 bits.
OUTGOING = 128
#: Words of a token in an outgoing tile that is not stored by the copy engine.
PITCH = 68
#: Stages that one warpgroup is behind the other.
SKEW = 2
#: Stages of the ring at most.
MOST_STAGES = 8


class Variant(NamedTuple):
    """tokens: of a tile, a multiple of 32. pair: programs of a cluster, along the features, which share tokens. stages: of the
    ring. stored: whether the copy engine writes y, of 16 bits. skew: stages that one warpgroup is behind the other, fewer than
    there are; no result may depend on it.
    """

    tokens: int
    pair: int
    stages: int
    stored: bool
    skew: int = SKEW

    @property
    def cluster(self) -> int:
        """Programs of a cluster."""
        return self.pair

    @property
    def threads(self) -> int:
        """Threads of a program."""
        return THREADS

    @property
    def chunk(self) -> int:
        """Tokens of a warpgroup's outgoing tile; where it is stored there are two of these."""
        return 32 if self.stored else 16

    @property
    def name(self) -> str:
        """Such as t256c2s4d2 of 16-bit outputs, t256c2s4d2w of others."""
        return f"t{self.tokens}c{self.pair}s{self.stages}d{self.skew}" + "w" * (not self.stored)

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory: ring, outgoing tiles, scales and biases, barriers, alignment."""
        ring = self.stages * (self.tokens + FEATURES) * ROW
        outgoing = self.chunk * (2 * OUTGOING if self.stored else 4 * PITCH)
        return ring + GROUPS * (outgoing + 4 * (self.tokens + 128)) + 16 * self.stages + 1024


def fitted(tokens: int, pair: int, stored: bool, skew: int = SKEW) -> Variant:
    """The variant with as many stages as shared memory holds, at most MOST_STAGES."""
    one = Variant(tokens, pair, 1, stored, skew)
    each = one._replace(stages=2).shared - one.shared
    return one._replace(stages=min(MOST_STAGES, 1 + (MOST_SHARED - one.shared) // each))


class Problem(NamedTuple):
    """What is multiplied: elements, and the dtype of the result, by their names."""

    element: str
    out: str


def _defines(variant: Variant, problem: Problem) -> dict[str, int]:
    return {
        "TOKENS": variant.tokens, "PAIR": variant.pair, "STAGES": variant.stages, "CHUNK": variant.chunk,
        "STORED": int(variant.stored), "SKEW": variant.skew, "OUT": KINDS.index(problem.out),
        "INTEGER": int(problem.element == INTEGER),
    }  # fmt: skip


def header(element: str, tokens: int) -> str:
    """The text of `products.h`: wgmma.mma_async of 8-bit elements in shared memory, as inline PTX. element: of `ELEMENTS`;
    tokens: of a tile.

    A statement of inline PTX names each of its registers, of which there are up to 130, so it is written out here.
    Source: PTX ISA, section 9.7.15.5 (`wgmma.mma_async`).
    """
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


KERNEL = Kernel(
    "sm90_s8_gemm",
    Path(__file__).parent,
    _defines,
    generated=lambda variant, problem: {"products.h": header(problem.element, variant.tokens)},
    instead="Triton's kernel multiplies",
)


__all__ = [
    "ELEMENTS",
    "FEATURES",
    "INTEGER",
    "KERNEL",
    "ROW",
    "SKEW",
    "THREADS",
    "Problem",
    "Variant",
    "fitted",
]
