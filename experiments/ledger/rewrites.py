"""Changes of code that changed nothing of what runs, oldest first: what `rewritten` carries rows over."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.ledger.rewritten_files import (
    BY_EXPERT,
    DYNAMIC_INPUTS,
    EDGES,
    LOW_BITS,
    PAIRS_APART,
    PRODUCTS,
    WEIGHTS,
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
            *WEIGHTS,
            "ao_lab/training/autograd.py",
            "ao_lab/training/dequantized.py",
            "ao_lab/training/fused/swiglu_linear.py",
            "ao_lab/training/fused/swiglu_values.py",
            "ao_lab/training/prepared/autograd.py",
            "ao_lab/training/scaled_mm.py",
            "experiments/models/output_check.py",
        ),
        "sums of columns where layers have biases, which no layer of the rows has; kernels of inference, which trainings do "
        "not call",
        ("fp8_training",),
    ),
    Rewrite(
        "67f4c40",
        (
            *WEIGHTS,
            "ao_lab/sparsity/prune_layer.py",
            "ao_lab/sparsity/training/api.py",
            "ao_lab/sparsity/training/autograd.py",
            "ao_lab/sparsity/training/counts.py",
            "ao_lab/sparsity/training/layers.py",
            "ao_lab/sparsity/training/masks.py",
            "ao_lab/sparsity/training/pending.py",
            "ao_lab/sparsity/training/products.py",
            "fast/kernels/sparse_linear/host.py",
            "fast/kernels/sparse_mm/masked.py",
            "fast/kernels/sparse_mm/masked_host.py",
            "fast/kernels/sparse_skinny/host.py",
            "fast/kernels/sparse_skinny/launch.py",
            "fast/kernels/sparse_skinny/select.py",
            "fast/kernels/sparse_skinny/variants.py",
            "fast/kernels/sparsity/host.py",
            "fast/kernels/sparsity/transposable.py",
            "fast/kernels/sparsity/transposable_host.py",
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
    Rewrite(
        "cd8bf87",
        PRODUCTS,
        "products of quantized and of 2:4 weights and gradients of 2:4 layers by sparse products, which these rows have "
        "none of; loads of words, addresses of operands and the compiler of CUDA C++ in other files",
        (
            "fp8_training",
            "linear/torchao",
            "sparsity/language",
            "sparsity/language gaps",
            "sparsity/vision",
            "sparsity/vision gaps",
        ),
    ),
    Rewrite(
        "58011ec",
        PRODUCTS,
        "products of a 2:4 weight in a CUDA graph: loads of words and addresses of operands stand elsewhere, the same "
        "machine code",
        ("sparsity/products",),
    ),
    Rewrite(
        "be9b969",
        PRODUCTS,
        "2:4 training layers: the same launches, on another stream object while a graph is captured; what happens where "
        "something fails",
        ("sparsity/linear", "sparsity/vit"),
    ),
    Rewrite(
        "65ddf60",
        ("ao_lab/calibration/autocast.py", "ao_lab/calibration/walk.py"),
        "blocks are called under the autocast that their model's forward enters; of models pruned by data, those whose rows "
        "exist enter none (one that does could not be pruned)",
    ),
    Rewrite(
        "11c1458",
        (
            "ao_lab/gemm/prepared.py",
            "ao_lab/quantization/prepared_products.py",
            "ao_lab/sparsity/training/products.py",
            "fast/kernels/dense_mm/host.py",
            "fast/kernels/hopper/driver.py",
            "fast/kernels/launch/call.py",
            "fast/kernels/linear_skinny/direct.cu",
            "fast/kernels/linear_skinny/linear_skinny.cu",
            "fast/kernels/linear_skinny/load.cuh",
            "fast/kernels/linear_skinny/select.py",
            "fast/kernels/linear_skinny/variants.py",
            "fast/kernels/mixed_mm/decode.cuh",
            "fast/kernels/mixed_mm/factors.cuh",
            "fast/kernels/mixed_mm/few.py",
            "fast/kernels/mixed_mm/host.py",
            "fast/kernels/mixed_mm/mixed_mm.cu",
            "fast/kernels/mixed_mm/select.py",
            "fast/kernels/mixed_mm/turns.cuh",
            "fast/kernels/mixed_mm/variants.py",
            "fast/kernels/sparse_skinny/output.cuh",
            "fast/kernels/sparse_skinny/select.py",
            "fast/kernels/sparse_skinny/sparse_skinny.cu",
            "fast/kernels/sparse_skinny/variants.py",
            "fast/layers/linear_gradients.py",
            "fast/prepared/products.py",
            "fast/prepared/program.py",
            "fast/prepared/scaled_mm.py",
        ),
        "a call says its launches, so that programs take them; the driver's call of four arguments in place of eleven; the "
        "same kernels in these rows, whose products of quantized weights, if any, are none of those that changed",
        (
            "formats",
            "ptq",
            "qat",
            "qat_overhead",
            "kernels",
            "fp8_training",
            "linear/torchao",
            "sparsity/language",
            "sparsity/language gaps",
            "sparsity/vision",
            "sparsity/vision gaps",
            "sparsity/products",
            "sparsity/sam",
        ),
    ),
    Rewrite(
        "1e12648",
        (
            "ao_lab/calibration/autocast.py",
            "ao_lab/calibration/walk.py",
            "ao_lab/quantization/prepared_products.py",
            "experiments/generate/tables.py",
            "fast/kernels/linear_skinny/direct.cu",
            "fast/kernels/linear_skinny/linear_skinny.cu",
            "fast/kernels/linear_skinny/load.cuh",
            "fast/kernels/linear_skinny/select.py",
            "fast/kernels/linear_skinny/variants.py",
            "fast/kernels/mixed_mm/mixed_mm.cu",
            "fast/kernels/sparse_skinny/select.py",
        ),
        "casts of weights inside a caller's autocast, inputs at odd addresses, weights of more than 65536 rows, which no row "
        "has; seconds that a table is expected to take; comments, and a choice of the next kernel's time that no variant made",
    ),
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
)

__all__ = ["REWRITES", "Rewrite"]
