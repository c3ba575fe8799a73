"""The variants of the kernel: how large its tiles are, and what is defined for its source."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from fast.kernels.hopper.headers import common
from fast.kernels.sm90_s8_gemm.products import INTEGER, header
from fast.kernels.sm90_sparse24_gemm.variants import KINDS, MOST_SHARED, OPTIONS, PITCH

SOURCE = Path(__file__).with_name("sm90_s8_gemm.cu")
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


def sources(variant: Variant, element: str, out: str) -> tuple[str, dict[str, str], tuple[str, ...]]:
    """Source, headers and options for NVRTC. element, out: names of the dtypes of operands and output."""
    defined = {
        "TOKENS": variant.tokens, "PAIR": variant.pair, "STAGES": variant.stages, "CHUNK": variant.chunk,
        "STORED": int(variant.stored), "SKEW": variant.skew, "OUT": KINDS.index(out), "INTEGER": int(element == INTEGER),
    }  # fmt: skip
    options = (*OPTIONS, *(f"-D{name}={value}" for name, value in defined.items()))
    return source(), {"products.h": header(element, variant.tokens), **common()}, options


@lru_cache(maxsize=1)
def source() -> str:
    """The text of the kernel."""
    return SOURCE.read_text()


__all__ = ["FEATURES", "KINDS", "MOST_SHARED", "ROW", "SKEW", "THREADS", "Variant", "fitted", "sources"]
