"""The variants of the kernel: how large its tiles are, what of the weight it decodes, and what is defined for its source."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from fast.kernels.hopper.wgmma import header, product
from fast.kernels.triton_small_m.layout import FACTORED
from fast.launch.cuda import KINDS, MOST_SHARED, Kernel

#: Stages that one warpgroup is behind the other, so that one multiplies while the other writes its tile.
SKEW = 2
#: Warpgroups that multiply, 64 features each.
GROUPS = 2
#: Rows and columns of an atom of the weight.
ATOM = 64
#: Features of a tile.
FEATURES = GROUPS * ATOM
#: Tokens whose sums one warpgroup leaves for another at once.
GATHERED = 64
#: Bytes of a row of x in a stage.
PANEL = 128
#: Bytes of an atom, by elements in the order of the numbers that the source gives them.
ELEMENTS = {"int4": 2048, "int8": 4096, "e4m3": 4096, "e2m1": 2048, "e4m3_mx": 4096, "nf4": 2048}
MOST_STAGES = 12
#: Bytes of the table of 16 levels, each once for every bank.
TABLE = 2048
#: Products of 16 columns that are given to the tensor core together, and decoded for together.
BATCH = 2


#: PTX's names of the dtypes of x.
PTX_KINDS = {"bfloat16": "bf16", "float16": "f16"}
#: Elements of K of an instruction.
INSTRUCTION = 16


class Weight(NamedTuple):
    """What a variant decodes. element: of ELEMENTS; zero: whether there are zero points; parts: blocks of scales in a stage."""

    element: str
    zero: bool = False
    parts: int = 1

    @property
    def stage(self) -> int:
        """Bytes of a stage of FEATURES rows: words, scales, zero points."""
        return GROUPS * ELEMENTS[self.element] + self.parts * FEATURES * self._each

    @property
    def table(self) -> int:
        """Bytes of the table of levels."""
        return TABLE if self.element == "nf4" else 0

    @property
    def _each(self) -> int:
        """Bytes of a row's scale, or factor, and zero point."""
        if self.element in FACTORED:
            return self.parts // 2
        return 6 if self.zero else 4


class Variant(NamedTuple):
    """tokens: of a tile, a multiple of 16 up to 256. pair: programs of a cluster along the features, which share tokens.

    splits: programs along K. stages: of the ring. small: tokens of smaller tiles, a multiple of 16 as well, 0 where there are
    none, as with splits. turns: 2 where twice as many warpgroups take stages in turn, without pairs, splits and small tiles;
    stages are even then. scaled: whether rows of x have scales. grouped: whether they are sorted by expert and
    have weights of their own (`experts.py`), without clusters and scales.
    """

    tokens: int
    pair: int
    splits: int
    stages: int
    small: int = 0
    turns: int = 1
    scaled: bool = False
    grouped: bool = False

    @property
    def threads(self) -> int:
        """Of a program: warpgroups that multiply, and one that loads."""
        return 128 * (GROUPS * self.turns + 1)

    @property
    def cluster(self) -> int:
        """Programs of a cluster."""
        return self.pair * self.splits

    @property
    def chunk(self) -> int:
        """Tokens of a warpgroup's outgoing tile."""
        return self.tokens if self.splits > 1 else (16 if (self.tokens | self.small) % 32 else 32)

    @property
    def box(self) -> int:
        """Rows of x that are copied at once where they are not a whole tile's: 64, or fewer where programs share less, that
        divide what they share of a small tile."""
        share = (self.small or self.tokens) // self.pair
        return next(
            rows for rows in (64, 32, 16, 8) if share >= rows and (not self.small or share % rows == 0)
        )

    @property
    def name(self) -> str:
        """Such as t256c2k1s5, t256+192c1k1s5, t96c1k1s10u2, t64c1k1s12u2x, t256+128c1k1s5g."""
        small = f"+{self.small}" if self.small else ""
        turns = (f"u{self.turns}" if self.turns > 1 else "") + "x" * self.scaled + "g" * self.grouped
        return f"t{self.tokens}{small}c{self.pair}k{self.splits}s{self.stages}{turns}"

    def ring(self, weight: Weight) -> int:
        """Bytes of the ring."""
        return self.stages * (self.tokens * PANEL + weight.stage)

    def shared(self, weight: Weight) -> int:
        """Bytes of dynamic shared memory: ring, outgoing tiles (of the ring's bytes with splits), then or where rows have
        scales those and biases, sums of those that take turns, levels, barriers, alignment."""
        outgoing = GROUPS * 2 * self.chunk * PANEL if self.splits == 1 else 0
        outgoing += GROUPS * (self.tokens + 128) * 4 if self.splits > 1 or self.scaled else 0
        sums = GROUPS * min(GATHERED, self.tokens) * 256 if self.turns > 1 else 0
        return self.ring(weight) + outgoing + sums + weight.table + 16 * self.stages + 1024


def fitted(
    tokens: int, pair: int, splits: int, weight: Weight, small: int = 0, turns: int = 1, scaled: bool = False
) -> Variant:
    """The variant with as many stages as shared memory holds, at most MOST_STAGES, the same number for each turn."""
    none = Variant(tokens, pair, splits, 0, small, turns, scaled)
    each = none._replace(stages=1).shared(weight) - none.shared(weight)
    most = min(MOST_STAGES, (MOST_SHARED - none.shared(weight)) // each)
    return none._replace(stages=most - most % turns)


def with_scales(one: Variant, weight: Weight) -> Variant:
    """The same of rows that have scales."""
    return fitted(one.tokens, one.pair, one.splits, weight, one.small, one.turns, True)


class Problem(NamedTuple):
    """What is multiplied. x: the name of the dtype of x and y."""

    weight: Weight
    x: str


def _defines(variant: Variant, problem: Problem) -> dict[str, int]:
    weight = problem.weight
    return {
        "TOKENS": variant.tokens, "SMALL": variant.small or variant.tokens, "BOX": variant.box, "GROUPS": GROUPS,
        "TURNS": variant.turns, "STAGES": variant.stages, "PAIR": variant.pair, "SPLITS": variant.splits,
        "CHUNK": variant.chunk, "BATCH": BATCH, "PARTS": weight.parts, "ZERO": int(weight.zero),
        "SCALED": int(variant.scaled), "GROUPED": int(variant.grouped), "HALF": int(problem.x == "float16"),
        "SKEW": SKEW if variant.splits == variant.turns == 1 and variant.stages > SKEW else 0,
        "ELEMENT": list(ELEMENTS).index(weight.element), "OUT": KINDS.index(problem.x),
    }  # fmt: skip


def _generated(variant: Variant, problem: Problem) -> dict[str, str]:
    """Products of 64 features, their columns in registers, of each tile."""
    kind = PTX_KINDS[problem.x]
    inputs = ", ".join(f'"r"(a[{i}])' for i in range(4)) + ', "l"(b)'
    products = (
        product(
            tokens, INSTRUCTION, f"{kind}.{kind}", "const u32 (&a)[4], u64 b", "{{{0}, {1}, {2}, {3}}}, {4}, 1, 1, 1, 0", inputs
        )
        for tokens in sorted({variant.tokens, variant.small} - {0})
    )  # fmt: skip
    return {"products.h": header(False, products)}


KERNEL = Kernel(
    "sm90_w4a16_gemm",
    Path(__file__).parent,
    _defines,
    own=("schedule.cuh", "experts.cuh", "decode.cuh", "factors.cuh", "levels.cuh", "load.cuh", "turns.cuh"),
    generated=_generated,
    instead="dense weights are multiplied",
    fails_whole=True,
)


__all__ = [
    "ATOM", "ELEMENTS", "FEATURES", "GROUPS", "KERNEL", "PANEL", "Problem", "Variant", "Weight", "fitted", "with_scales",
]  # fmt: skip
