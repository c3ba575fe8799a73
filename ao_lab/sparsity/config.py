"""`SparsityConfig`: which weights `ao_lab.sparsify_` keeps."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

from reference.arrays.namespace import choice
from reference.sparsity.prune import parse_pattern

#: Scores that read inputs, with what they keep of them; magnitude reads weights alone.
SCORES = ("magnitude", "wanda", "ria", "sparsegpt")
MOST_BLOCK = 128
#: How pruned weights are stored: as dense tensors with zeros, or as kept elements and their places.
STORAGES = ("dense", "compressed")


def is_number(value: object) -> bool:
    """Whether a value is a real number, and no flag."""
    return isinstance(value, Real) and not isinstance(value, bool)


@dataclass(frozen=True)
class SparsityConfig:
    """A pattern and the score that decides, by `reference.prune` and the functions that it names.

    pattern: "N:M", of every M consecutive weights along the contraction axis N are kept. score: "magnitude" (|w|), "wanda" (|w|
    times the norm of its input channel), "ria" (relative importance times the root of that norm), or "sparsegpt", which also
    changes the weights that stay. All but magnitude need calibration data.
    transposable: masks whose transpose is 2:4 as well, for training; pattern "2:4", not with "sparsegpt".
    damping, block: of `reference.sparsegpt`: the share of the Hessian's mean diagonal that is added to it, 0 to 1, and how many
    columns are updated at once, a multiple of M (None: 128, or the multiple of M above). Other scores ignore them.
    storage: "dense", zeros in dense weights, to be trained further or quantized; "compressed", for inference: kept elements and
    their places (`ao_lab.SparseQuantizedTensor`), pattern "2:4", weights of bfloat16 or float16.

    Raises ValueError for values outside of these, TypeError for a pattern that is no string.
    """

    pattern: str = "2:4"
    score: str = "magnitude"
    transposable: bool = False
    damping: float = 0.01
    block: int | None = None
    storage: str = "dense"

    def __post_init__(self) -> None:
        choice(self.score, SCORES, "SparsityConfig: score")
        kept, group = parse_pattern(self.pattern)
        if kept == group:
            raise ValueError(
                f"SparsityConfig: pattern {self.pattern!r} keeps every weight; give N below M, as in '2:4'"
            )
        if not isinstance(self.transposable, bool):
            raise TypeError(f"SparsityConfig: transposable is True or False, got {self.transposable!r}")
        if self.transposable and (self.pattern != "2:4" or self.score == "sparsegpt"):
            raise ValueError(
                f"SparsityConfig: transposable masks are 2:4, by magnitude, wanda or ria, got {self.pattern!r} by "
                f"{self.score!r}; leave transposable out, or change these"
            )
        choice(self.storage, STORAGES, "SparsityConfig: storage")
        if self.storage == "compressed" and self.pattern != "2:4":
            raise ValueError(
                f"SparsityConfig: compressed storage exists for the pattern '2:4' only, got {self.pattern!r}; use "
                f"storage='dense'"
            )
        self._check_sparsegpt(group)

    def _check_sparsegpt(self, group: int) -> None:
        if not is_number(self.damping) or not 0 <= self.damping <= 1:
            raise ValueError(
                f"SparsityConfig: damping is a share of the mean diagonal, 0 to 1, got {self.damping!r}; 0.01 is usual"
            )
        if self.block is not None and (
            isinstance(self.block, bool)
            or not isinstance(self.block, int)
            or self.block < 1
            or self.block % group
        ):
            raise ValueError(
                f"SparsityConfig: block is a positive multiple of the {group} of {self.pattern!r}, got {self.block!r}; None "
                f"chooses one"
            )

    @property
    def kept_of(self) -> tuple[int, int]:
        """N and M."""
        return parse_pattern(self.pattern)

    @property
    def calibrates(self) -> bool:
        """Whether the score reads inputs."""
        return self.score != "magnitude"

    @property
    def columns(self) -> int:
        """How many columns SparseGPT updates at once."""
        group = self.kept_of[1]
        return -(-MOST_BLOCK // group) * group if self.block is None else self.block

    def __str__(self) -> str:
        more = (", transposable" if self.transposable else "") + (
            ", compressed" if self.storage == "compressed" else ""
        )
        return f"{self.pattern} by {self.score}{more}"


__all__ = ["SparsityConfig"]
