"""Rows stay valid where code was written in another way and runs the same: `python3 -m experiments.ledger.rewritten`.

A row's hash is of source, so a lookup by name that becomes the name itself makes it stale, though nothing else runs. Such
changes are listed here, each with the revision before it, the files and the reason. A row that was current at that revision,
and whose code there has today's hash once the listed files are as they are today, gets today's hash; whatever else has changed
since leaves it stale. It needs the history of git.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from experiments.harness import provenance
from experiments.harness.rows import ROOT, Row, read, table_parts, write, write_text
from experiments.ledger.carry_over import unpacked
from experiments.source.closure import Closure, SourceTree

#: How the status of what failed begins.
FAILED = "status: error"


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
        "aa5c318",
        (
            "ao_lab/config/recipe.py",
            "ao_lab/gemm/operand.py",
            "ao_lab/gemm/problem.py",
            "ao_lab/gemm/select.py",
            "ao_lab/tensor/collectives.py",
            "ao_lab/tensor/metadata.py",
            "ao_lab/tensor/preshuffled.py",
            "ao_lab/tensor/quantized_tensor.py",
            "ao_lab/tensor/scaling.py",
            "ao_lab/tensor/slicing.py",
            "ao_lab/tensor/view_ops.py",
            "ao_lab/tuning/api.py",
            "ao_lab/tuning/measure.py",
            "fast/kernels/int_scaled_mm/host.py",
            "fast/kernels/int_scaled_mm/kernel.py",
            "fast/kernels/int_scaled_mm/tiles.py",
            "fast/kernels/linear_small/arrange.py",
            "fast/kernels/linear_small/dense.py",
            "fast/kernels/linear_small/grouped.py",
            "fast/kernels/linear_small/grouped_product.py",
            "fast/kernels/linear_small/host.py",
            "fast/kernels/linear_small/layout.py",
            "fast/kernels/linear_small/product.py",
            "fast/kernels/linear_small/tilings.py",
            "fast/matmul/codes_ops.py",
            "fast/matmul/linear.py",
            "fast/matmul/preshuffled/grouped.py",
            "fast/matmul/preshuffled/layout.py",
            "fast/matmul/preshuffled/linear.py",
            "fast/matmul/preshuffled/ops.py",
            "fast/matmul/weights.py",
        ),
        "products of quantized weights, which trainings in low precision do not have: the preshuffled layout, rows of int8 "
        "codes, joined products; choices for eager mode bear a busy host, those for graphs go by the same times",
    ),
    Rewrite(
        "8759cbc",
        (
            "ao_lab/compile/fused_linears.py",
            "ao_lab/gemm/problem.py",
            "ao_lab/gemm/select.py",
            "ao_lab/quantization/prepared_products.py",
            "ao_lab/quantization/report.py",
            "ao_lab/tensor/slicing.py",
            "ao_lab/tuning/api.py",
            "ao_lab/tuning/measure.py",
            "fast/kernels/int_scaled_mm/tiles.py",
            "fast/kernels/linear_small/dense.py",
            "fast/kernels/linear_small/grouped.py",
            "fast/kernels/linear_small/host.py",
            "fast/kernels/linear_small/pair.py",
            "fast/kernels/linear_small/pair_product.py",
            "fast/kernels/linear_small/product.py",
            "fast/matmul/preshuffled/grouped.py",
            "fast/matmul/preshuffled/layout.py",
            "fast/matmul/preshuffled/ops.py",
            "fast/matmul/preshuffled/pair.py",
            "fast/matmul/preshuffled/pair_ops.py",
            "fast/prepared/program.py",
        ),
        "the same, as far as it came later; products of 2:4 weights have no part in it",
    ),
    Rewrite(
        "7584da0",
        ("fast/sparsity/linear_sparse_int4_ops.py",),
        "a bias in float64 goes to the reference, which nothing that is timed has",
    ),
    Rewrite(
        "74de05c",
        ("experiments/fp8_training/run.py", "experiments/fp8_training/training/plans.py"),
        "long trainings recipe by recipe, and longer: what is trained otherwise is what it was",
    ),
    Rewrite(
        "d468cc0",
        (
            "ao_lab/compile/guards.py",
            "ao_lab/gemm/prepared.py",
            "ao_lab/gemm/products/dense.py",
            "ao_lab/gemm/products/fused.py",
            "ao_lab/gemm/select.py",
            "ao_lab/quantization/prepared_products.py",
            "ao_lab/tensor/preshuffled.py",
            "ao_lab/tensor/quantized_tensor.py",
            "ao_lab/tensor/torch_changes/__init__.py",
            "ao_lab/tensor/torch_changes/weight_guards.py",
            "fast/codebook_scales.py",
            "fast/kernels/exact_inputs/host.py",
            "fast/kernels/exact_inputs/kernel.py",
            "fast/kernels/hopper/copies.cuh",
            "fast/kernels/hopper/headers.py",
            "fast/kernels/hopper/output.cuh",
            "fast/kernels/hopper/tiles.cuh",
            "fast/kernels/linear_skinny/host.py",
            "fast/kernels/linear_skinny/launch.py",
            "fast/kernels/linear_skinny/linear_skinny.cu",
            "fast/kernels/linear_skinny/select.py",
            "fast/kernels/linear_skinny/variants.py",
            "fast/kernels/linear_small/arrange.py",
            "fast/kernels/linear_small/decode.py",
            "fast/kernels/linear_small/dense.py",
            "fast/kernels/linear_small/elements.py",
            "fast/kernels/linear_small/grouped.py",
            "fast/kernels/linear_small/grouped_product.py",
            "fast/kernels/linear_small/host.py",
            "fast/kernels/linear_small/layout.py",
            "fast/kernels/linear_small/pair.py",
            "fast/kernels/linear_small/pair_product.py",
            "fast/kernels/linear_small/product.py",
            "fast/kernels/linear_small/tilings.py",
            "fast/kernels/mixed_mm/decode.cuh",
            "fast/kernels/mixed_mm/factors.cuh",
            "fast/kernels/mixed_mm/host.py",
            "fast/kernels/mixed_mm/load.cuh",
            "fast/kernels/mixed_mm/mixed_mm.cu",
            "fast/kernels/mixed_mm/products.py",
            "fast/kernels/mixed_mm/select.py",
            "fast/kernels/mixed_mm/store.cuh",
            "fast/kernels/mixed_mm/variants.py",
            "fast/kernels/sparse_mm/driver.py",
            "fast/kernels/sparse_mm/nvrtc.py",
            "fast/kernels/sparse_mm/sparse_mm.cu",
            "fast/kernels/sparse_mm/variants.py",
            "fast/matmul/preshuffled/dynamic.py",
            "fast/matmul/preshuffled/dynamic_ops.py",
            "fast/matmul/preshuffled/exact_inputs.py",
            "fast/matmul/preshuffled/layout.py",
            "fast/matmul/preshuffled/linear.py",
            "fast/matmul/preshuffled/ops.py",
            "fast/prepared/products.py",
            "fast/prepared/program.py",
            "fast/scale_factors.py",
        ),
        "products of preshuffled weights, and guards of compiled calls that trainings and captured products do not have; "
        "headers that kernels in CUDA C++ share are the text that each had, their cubins byte for byte the same",
        ("fp8_training", "kernels", "sparsity"),
    ),
    Rewrite(
        "d530b4d",
        (
            "ao_lab/tensor/torch_changes/weight_guards.py",
            "fast/kernels/linear_skinny/host.py",
            "fast/kernels/linear_skinny/select.py",
            "fast/kernels/mixed_mm/host.py",
        ),
        "choices for rows and shapes that no row is of; guards of torch 2.11 as they were, which captured calls do not pass",
        ("linear", "sparsity"),
    ),
    Rewrite(
        "97ba1f8",
        ("experiments/sparsity/speed/decode.py",),
        "what logits of pruned models are compared with, which bfloat16, int4 and fp8 are not",
        ("sparsity",),
    ),
    Rewrite(
        "7c57b07",
        ("fast/kernels/mixed_mm/host.py",),
        "what becomes of a variant that does not load, which no row is of",
    ),
    Rewrite(
        "67f4c40",
        (
            "fast/kernels/mixed_mm/store.cuh",
            "ao_lab/gemm/products/scaled_blocks.py",
            "ao_lab/gemm/select.py",
            "ao_lab/tensor/torch_changes/weight_guards.py",
            "ao_lab/training/autograd.py",
            "ao_lab/training/dequantized.py",
            "ao_lab/training/fused/swiglu_linear.py",
            "ao_lab/training/fused/swiglu_values.py",
            "ao_lab/training/prepared/autograd.py",
            "ao_lab/training/scaled_mm.py",
            "experiments/models/output_check.py",
            "fast/kernels/dense_mm/dense_mm.cu",
            "fast/kernels/dense_mm/host.py",
            "fast/kernels/dense_mm/products.py",
            "fast/kernels/dense_mm/select.py",
            "fast/kernels/dense_mm/variants.py",
            "fast/kernels/hopper/headers.py",
            "fast/kernels/hopper/output.cuh",
            "fast/kernels/hopper/scaled.cuh",
            "fast/kernels/hopper/store.cuh",
            "fast/kernels/int_scaled_mm/host.py",
            "fast/kernels/layers/column_sums.py",
            "fast/kernels/layers/rms_norm_gradient.py",
            "fast/kernels/linear_skinny/decode.cuh",
            "fast/kernels/linear_skinny/factors.cuh",
            "fast/kernels/linear_skinny/host.py",
            "fast/kernels/linear_skinny/launch.py",
            "fast/kernels/linear_skinny/levels.cuh",
            "fast/kernels/linear_skinny/linear_skinny.cu",
            "fast/kernels/linear_skinny/load.cuh",
            "fast/kernels/linear_skinny/select.py",
            "fast/kernels/linear_skinny/variants.py",
            "fast/kernels/mixed_mm/few.py",
            "fast/kernels/mixed_mm/host.py",
            "fast/kernels/mixed_mm/select.py",
            "fast/kernels/mixed_mm/variants.py",
            "fast/kernels/sparse_mm/host.py",
            "fast/kernels/sparse_mm/select.py",
            "fast/kernels/sparse_mm/sparse_mm.cu",
            "fast/kernels/sparse_mm/variants.py",
            "fast/kernels/sparse_skinny/sparse_skinny.cu",
            "fast/layers/column_sums.py",
            "fast/matmul/codes_ops.py",
            "fast/matmul/linear_ops.py",
            "fast/matmul/preshuffled/dynamic_ops.py",
            "fast/matmul/preshuffled/ops.py",
            "fast/matmul/stored_weight_ops.py",
        ),
        "sums of columns where layers have biases, which no layer of the rows has; kernels of inference, which trainings do "
        "not call",
        ("fp8_training",),
    ),
    Rewrite(
        "67f4c40",
        (
            "fast/kernels/mixed_mm/store.cuh",
            "ao_lab/gemm/products/scaled_blocks.py",
            "ao_lab/gemm/select.py",
            "ao_lab/sparsity/prune_layer.py",
            "ao_lab/sparsity/training/api.py",
            "ao_lab/sparsity/training/autograd.py",
            "ao_lab/sparsity/training/counts.py",
            "ao_lab/sparsity/training/layers.py",
            "ao_lab/sparsity/training/masks.py",
            "ao_lab/sparsity/training/pending.py",
            "ao_lab/sparsity/training/products.py",
            "ao_lab/tensor/torch_changes/weight_guards.py",
            "fast/kernels/dense_mm/dense_mm.cu",
            "fast/kernels/dense_mm/host.py",
            "fast/kernels/dense_mm/products.py",
            "fast/kernels/dense_mm/select.py",
            "fast/kernels/dense_mm/variants.py",
            "fast/kernels/hopper/headers.py",
            "fast/kernels/hopper/output.cuh",
            "fast/kernels/hopper/scaled.cuh",
            "fast/kernels/hopper/store.cuh",
            "fast/kernels/int_scaled_mm/host.py",
            "fast/kernels/layers/column_sums.py",
            "fast/kernels/layers/rms_norm_gradient.py",
            "fast/kernels/linear_skinny/decode.cuh",
            "fast/kernels/linear_skinny/factors.cuh",
            "fast/kernels/linear_skinny/host.py",
            "fast/kernels/linear_skinny/launch.py",
            "fast/kernels/linear_skinny/levels.cuh",
            "fast/kernels/linear_skinny/linear_skinny.cu",
            "fast/kernels/linear_skinny/load.cuh",
            "fast/kernels/linear_skinny/select.py",
            "fast/kernels/linear_skinny/variants.py",
            "fast/kernels/mixed_mm/few.py",
            "fast/kernels/mixed_mm/host.py",
            "fast/kernels/mixed_mm/select.py",
            "fast/kernels/mixed_mm/variants.py",
            "fast/kernels/sparse_linear/host.py",
            "fast/kernels/sparse_mm/host.py",
            "fast/kernels/sparse_mm/masked.py",
            "fast/kernels/sparse_mm/masked_host.py",
            "fast/kernels/sparse_mm/select.py",
            "fast/kernels/sparse_mm/sparse_mm.cu",
            "fast/kernels/sparse_mm/variants.py",
            "fast/kernels/sparse_skinny/host.py",
            "fast/kernels/sparse_skinny/launch.py",
            "fast/kernels/sparse_skinny/select.py",
            "fast/kernels/sparse_skinny/sparse_skinny.cu",
            "fast/kernels/sparse_skinny/variants.py",
            "fast/kernels/sparsity/host.py",
            "fast/kernels/sparsity/transposable.py",
            "fast/kernels/sparsity/transposable_host.py",
            "fast/layers/column_sums.py",
            "fast/matmul/codes_ops.py",
            "fast/matmul/linear_ops.py",
            "fast/matmul/preshuffled/dynamic_ops.py",
            "fast/matmul/preshuffled/ops.py",
            "fast/matmul/stored_weight_ops.py",
            "fast/sparsity/compress_masked.py",
            "fast/sparsity/linear_sparse_int4_ops.py",
            "fast/sparsity/prune_into.py",
        ),
        "masks written in place and steps counted on the host, the same masks; products of these trainings are dense; outputs "
        "of 16 bits that the copy engine writes, the same bits",
        ("sparsity/language", "sparsity/language gaps", "sparsity/vision", "sparsity/vision gaps"),
    ),
    Rewrite(
        "67f4c40",
        (
            "fast/kernels/mixed_mm/store.cuh",
            "ao_lab/gemm/select.py",
            "fast/kernels/layers/rms_norm_gradient.py",
            "fast/kernels/sparsity/host.py",
            "fast/kernels/sparsity/transposable.py",
            "fast/kernels/sparsity/transposable_host.py",
        ),
        "products of blocks, which these rows have none of; a size that launches of gradients are not compiled for; a name; "
        "where a mask is written",
        ("kernels",),
    ),
)


def tree_of(folder: Path) -> SourceTree:
    """The source in a folder, read as `provenance` reads this clone."""
    return SourceTree(folder, provenance.PACKAGES, provenance.BOOKKEEPING, registrars=provenance.REGISTRARS)


def trees(rewrite: Rewrite, clone: Path = ROOT) -> tuple[SourceTree, SourceTree]:
    """The revision as it was, and with the rewritten files as they are in the clone."""
    with unpacked(rewrite.revision) as folder:
        before = tree_of(folder)
        for file in rewrite.files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            if (clone / file).exists():
                shutil.copyfile(clone / file, folder / file)
            else:  # moved or removed
                (folder / file).unlink(missing_ok=True)
        return before, tree_of(folder)


def renamed(
    before: SourceTree, after: SourceTree, now: SourceTree, starts: Iterable[tuple[str, ...]]
) -> dict[str, str]:
    """Hashes of before by which rows are known, each with today's, where only what was rewritten differs."""

    @cache
    def digits(tree: SourceTree, roots: tuple[str, ...]) -> str:
        try:
            return Closure(tree, roots).hash[: provenance.DIGITS]
        except ValueError:
            return ""

    return {
        digits(before, roots): digits(now, roots)
        for roots in dict.fromkeys(starts)
        if digits(before, roots) and digits(after, roots) == digits(now, roots)
    }


def roots_of(row: Row) -> tuple[str, ...]:
    """What a row's measurement starts from."""
    sources, (kind, _, _) = provenance.sources_of(row.experiment), table_parts(row.table)
    if callable(sources):
        found: tuple[str, ...] = sources(kind, row.setting, row.method)
        return found
    return provenance.experiment_roots(row.experiment)


def carry(
    data: Path, hashes: dict[str, str], concerns: Callable[..., bool] = lambda experiment, kind=None: True
) -> int:
    """Put today's hashes into rows and into the records of runs; how many rows changed. What failed is to be tried again.

    concerns: which experiments and kinds of tables; a hash may be that of several.
    """
    changed = 0
    for path in sorted(data.glob("*.csv")):
        rows = read(path)
        made = [
            row
            if row.metric.startswith(FAILED) or not concerns(row.experiment, row.table.partition("/")[0])
            else replace(row, source_hash=hashes.get(row.source_hash, row.source_hash))
            for row in rows
        ]
        changed += sum(one != other for one, other in zip(rows, made, strict=True))
        if made != rows:
            write(path, made)
    for name in ("environment.json", "origins.json"):
        carry_records(data / name, hashes, concerns)
    return changed


def carry_records(path: Path, hashes: dict[str, str], concerns: Callable[..., bool]) -> None:
    """The same in a file of records, whose names begin with an experiment's."""
    text, made = path.read_text(encoding="utf-8"), dict[str, Any]()
    for name, record in json.loads(text).items():
        entry = json.dumps({name: record})
        for old, new in hashes.items() if concerns(name.partition("/")[0]) else ():
            entry = entry.replace(old, new)
        made |= json.loads(entry)
    if made != json.loads(text):
        indent = 2 if text.startswith("{\n  ") else 1
        write_text(path, json.dumps(made, indent=indent) + "\n")


def main() -> int:
    """Carry all rows over each rewrite in turn, and say how many there were."""
    data = ROOT / "reports" / "data"
    for rewrite in REWRITES:
        rows = [
            row
            for path in sorted(data.glob("*.csv"))
            for row in read(path)
            if rewrite.concerns(row.experiment, row.table.partition("/")[0])
        ]
        starts = {roots_of(row) for row in rows} | {
            provenance.experiment_roots(name) for name in provenance.EXPERIMENTS if rewrite.concerns(name)
        }
        hashes = renamed(*trees(rewrite), provenance.read_sources(), sorted(one for one in starts if one))
        count = carry(data, {old: new for old, new in hashes.items() if old != new}, rewrite.concerns)
        sys.stdout.write(f"{rewrite.revision} ({', '.join(rewrite.files)}): {count} rows\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
