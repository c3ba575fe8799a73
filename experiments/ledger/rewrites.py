"""Changes of code that changed nothing of what runs, oldest first: what `rewritten` carries rows over.

Rows were carried over earlier ones, which this file's history has.
"""

from __future__ import annotations

from dataclasses import dataclass

from experiments.ledger.rewritten_files import (
    BY_EXPERT,
    BY_PRODUCT,
    DYNAMIC_INPUTS,
    EDGES,
    FEW_ROWS,
    LOW_BITS,
    PAIRS_APART,
    SAVED,
)


@dataclass(frozen=True)
class Rewrite:
    """A change of some files that changed nothing of what runs, the revision before it, and why it changed nothing.

    experiments: those that it changed nothing of, or kinds of their tables, as "experiment/kind"; all, where none is named.
    """

    revision: str
    files: tuple[str, ...]
    why: str
    experiments: tuple[str, ...] = ()

    def concerns(self, experiment: str, kind: str | None = None) -> bool:
        """Whether rows of an experiment, or of a kind of its tables, are carried over it."""
        if kind is None:
            return not self.experiments or experiment in {name.partition("/")[0] for name in self.experiments}
        return not self.experiments or bool({experiment, f"{experiment}/{kind}"} & {*self.experiments})


REWRITES = (
    Rewrite(
        "e4203da",
        DYNAMIC_INPUTS,
        "kernels and dispatch of preshuffled weights with many rows, of low bits and of pairs, which these rows have none of; "
        "masks of 2:4 training as bits, with the same masks and weights after every step",
        (
            "fp8_training",
            "sparsity/language",
            "sparsity/language gaps",
            "sparsity/vision",
            "sparsity/vision gaps",
            "sparsity/products",
            "sparsity/sam",
        ),
    ),
    Rewrite(
        "e5d9fea",
        PAIRS_APART,
        "pairs in programs compiled with our options, NF4 and inputs in a scheme, which these rows have none of; words; what "
        "computes experts of more than 64 rows, whose rows are left out",
        ("linear/experts", "sparsity/language", "sparsity/language gaps", "sparsity/vit"),
    ),
    Rewrite(
        "7ccb5cd",
        BY_EXPERT,
        "rows sorted by expert in mixed_mm, whose other variants compile to the same machine code, byte for byte; tiles of low "
        "bits; experts, of which these rows have none; errors at edges, and what leads to them",
        ("decode", "formats", "fp8_training", "ptq", "qat", "qat_overhead", "sparsity"),
    ),
    Rewrite(
        "371a87c",
        LOW_BITS,
        "tiles of low bits, and experts, of which these rows have none; errors at edges, and what leads to them",
        ("generate", "linear/activations"),
    ),
    Rewrite(
        "d3b7d46",
        EDGES,
        "errors at edges, and what leads to them: devices, files of choices, calibration, pruned weights; products of a batch "
        "of experts by number, which no row has",
        ("kernels", "linear"),
    ),
    Rewrite(
        "e1750a4",
        ("reference/matmul/error_bound.py",),
        "bounds that are infinite beside factors that are NaN, of which no measured product has any",
    ),
    Rewrite(
        "5a6558b",
        (*BY_PRODUCT, *FEW_ROWS),
        "what the next entry says, and which tables are beside torchao's methods",
        ("generate",),
    ),
    Rewrite(
        "0f79f97",
        (*BY_PRODUCT, *FEW_ROWS),
        "gemm's products in files of their own; low bits of many rows and the order of experts' tiles, whose rows are measured "
        "anew; dependent launches of more than 32 rows, likewise; what is saved with a model; generate() has a check and "
        "methods more, and the compiler's options behind torchao's models, after which no row's process compiled another's",
    ),
    Rewrite(
        "c5374b1",
        BY_PRODUCT,
        "gemm's products in files of their own; dependent launches of 17 to 32 rows, and of other products of more, which no "
        "row has; which methods of torchao are beside which of ours, at batch 64; what is saved with a model",
    ),
    Rewrite(
        "0832d6b",
        SAVED,
        "options of compiled programs that pickle; what is saved with a model",
    ),
    Rewrite(
        "a2401c0",
        SAVED,
        "dependent launches of products of codes with more than 32 rows, which no row has; what is saved with a model",
    ),
    Rewrite(
        "57ed72f",
        ("experiments/generate/times.py",),
        "logits are compared by rows of a batch too, outside of what is timed; these rows' were compared as a whole",
        ("generate",),
    ),
)

__all__ = ["REWRITES", "Rewrite"]
