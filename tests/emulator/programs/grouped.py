"""Kernels for tokens sorted by expert in Triton's interpreter: which rows go where, which become zero, columns of groups and of
weights (these with instructions emulated too), and words; and those of `hadamard`, in one process.

TRITON_INTERPRET=1 python tests/emulator/programs/grouped.py
"""

import sys
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
import triton

import reference
from ao_lab.training.grouped import autograd, products
from ao_lab.training.grouped import autograd as layouts
from ao_lab.training.grouped.autograd import _layout, layout_of
from fast.kernels import grouped
from fast.kernels import grouped as layout
from fast.kernels.encode import random_words
from fast.kernels.rowwise_colwise import host as batches
from fast.kernels.rowwise_colwise import host as tiles
from fast.kernels.rowwise_colwise import mx as mx
from fast.layers.gather import _gather
from reference import SCHEMES
from reference.training import RECIPES
from reference.training.grouped import group_step, padded_rows
from reference.training.recipe import Operand
from tests.emulator import ptx_interpreter, quick_interpreter
from tests.emulator.programs.training import hadamard

#: Ends of groups among rows: groups without rows at both ends and between, all rows in one, none at all, rows of no group.
CASES = (
    (90, (7, 7, 60, 83)),
    (90, (0, 90, 90, 90)),
    (90, (0, 0, 0)),
    (64, (64,)),
    (130, (1, 2, 3, 130)),
    (33, (0, 33)),
)
NAN = float("nan")


def compare_gather(rows: int, ends: torch.Tensor) -> None:
    """Bits of the columns, with NaN in rows of no group, for widths that fill tiles and that do not."""
    for width, step, dtype in ((64, 16, torch.bfloat16), (40, 32, torch.float32), (130, 16, torch.float16)):
        x = torch.randn(rows, width).to(dtype)
        x[int(ends[-1]) :] = NAN
        source = layout_of(ends, rows, step).source
        found = grouped.gather_transposed(x, source)
        assert torch.equal(found, _gather(x, source))
        assert found.isfinite().all()


def compare_layout(rows: int, ends: torch.Tensor) -> None:
    """Every table, for programs of some places and steps of one and of several grains."""
    for step in (16, 32, 128):
        found = layout.group_layout(ends, rows, padded_rows(rows, len(ends), step), step)
        for got, wanted in zip(found, _layout(ends, rows, step), strict=True):
            assert torch.equal(got, wanted)


def compare_columns(rows: int, ends: torch.Tensor) -> None:
    """Codes, scales and tables of every kind of scale, with NaN in rows of no group, an infinity and zeros in others."""
    cases = (("fp8_rowwise", 16, 64), ("fp8_tensorwise", 16, 128), ("fp8_rowwise", 128, 128), ("fp8_1x128", 128, 64),
             ("mxfp8_e4m3_rceil", 32, 128), ("mxfp4", 32, 64), ("fp8_tensorwise_e5m2", 32, 64))  # fmt: skip
    for number, (name, step, width) in enumerate(cases):
        x = torch.randn(rows, width).to((torch.bfloat16, torch.float16)[number % 2])
        x *= torch.exp2(torch.arange(rows) % 5)[:, None].to(x.dtype)
        x[int(ends[-1]) :], x[::7, 5], x[3 % rows, 9] = NAN, 0, float("inf")
        x[:, 2] = 0
        scheme, where = SCHEMES[name], layout_of(ends, rows, step)
        wanted = autograd.columns_operand(x, Operand(scheme=scheme), where)
        found = grouped.group_columns(x, scheme, where.source, where.owners, where.experts, step)
        assert found is not None
        for got, one in zip(found, (wanted.matrix.codes, wanted.matrix.scale, wanted.table), strict=True):
            # What bits of NaN torch's maxima give depends on the shape.
            assert got is one or torch.equal(got.nan_to_num(-1), one.nan_to_num(-1)), name


def compare_operands() -> None:
    """Operands of recipes by the kernels, as on a GPU, and by torch operations; w along either axis."""
    x, w, offsets = (
        torch.randn(70, 128).bfloat16(),
        torch.randn(3, 128, 64).bfloat16(),
        torch.tensor([9, 9, 60]),
    )
    for name in ("rowwise", "tensorwise", "blockwise", "mxfp8"):
        recipe = RECIPES[name]
        wanted, found = [], []
        for made, kernels in ((wanted, False), (found, True)):
            for module in (autograd, autograd, layouts):
                module.has_kernels = lambda x, kernels=kernels: kernels
            where = layouts.layout_of(offsets.to(torch.int32), 70, group_step(recipe))
            columns = autograd.columns_operand(x, recipe.weight_grad.a, where)
            turned = autograd.weight_columns(w, recipe.input_grad.b, recipe.output.b)
            made += [where.ends, where.source, where.owners, columns.matrix.codes, columns.matrix.scale]
            made += [turned.codes, turned.scale, columns.matrix.scheme.key, turned.scheme.key]
        assert all(
            a == b if isinstance(a, str) else torch.equal(a, b) for a, b in zip(found, wanted, strict=True)
        )


def compare_instructions() -> None:
    """Columns of groups, and of batches of weights, by the instructions that a GPU runs."""
    ptx_interpreter.install()
    hardware = [
        mock.patch.object(module, "interpreted", return_value=False) for module in (grouped, batches, tiles)
    ]
    # The interpreter takes the constants of a rule apart that it has run by.
    with hardware[0], hardware[1], hardware[2], mock.patch.object(mx, "is_mx", return_value=True):
        for rows, ends in CASES[::3]:
            compare_columns(rows, torch.tensor(ends, dtype=torch.int32))
        for name in ("fp8_rowwise", "fp8_tensorwise", "fp8_1x128", "fp8_128x128", "mxfp8_e4m3_rceil"):
            compare_batch(name, torch.randn(2, 128, 128).bfloat16())


def compare_batch(name: str, x: torch.Tensor) -> None:
    """Codes of the columns of each matrix, and their scales."""
    x[0, 3, 5], x[1] = NAN, 9 * x[1]
    made = batches.batch_columns(x, SCHEMES[name])
    assert made is not None
    for matrix, codes, scale in zip(x, *(part.chunk(len(x)) for part in made), strict=True):
        wanted = reference.quantize(matrix.t().contiguous(), SCHEMES[name])
        assert torch.equal(codes, wanted.codes)
        assert torch.equal(scale.nan_to_num(-1), wanted.scale.expand(scale.shape).nan_to_num(-1))


def compare_zeros(rows: int, ends: torch.Tensor) -> None:
    """What is written, and that the rest stays, for widths of one tile, of more and of a part."""
    for width, dtype in ((1024, torch.bfloat16), (1500, torch.float32), (3, torch.bfloat16)):
        y = torch.full((rows, width), NAN, dtype=dtype)
        wanted = products._with_zeros(y, ends, rows=True)
        grouped.zero_tail_(y, ends)
        assert torch.equal(y.isnan(), wanted.isnan())
        assert torch.equal(y.nan_to_num(1), wanted.nan_to_num(1))
    for size in ((40, 30), (150, 120)):
        dw = torch.full((ends.shape[0], *size), NAN)
        wanted = products._with_zeros(dw, ends, rows=False)
        grouped.zero_empty_(dw, ends)
        assert torch.equal(dw.nan_to_num(1), wanted.nan_to_num(1))


def compare_words() -> None:
    """Random words of tiles and of parts of them, for seeds and streams of all lengths."""
    for count, seed, stream in (
        (7, 3, 0),
        (4291, 2**63 - 5, 4),
        (2048, 2**32 + 1, 2),
        (5, 2**64 - 1, 2**32 - 1),
    ):
        found = random_words((count,), seed, stream, torch.device("cpu"))
        wanted = torch.from_numpy(reference.random_bits(count, seed=seed, stream=stream))
        assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))


def main() -> None:
    """Compare all cases."""
    assert triton.knobs.runtime.interpret, "TRITON_INTERPRET=1 is missing"
    quick_interpreter.install()
    for rows, ends in CASES:
        offsets = torch.tensor(ends, dtype=torch.int32)
        compare_gather(rows, offsets)
        compare_layout(rows, offsets)
        compare_columns(rows, offsets)
        compare_zeros(rows, offsets)
        print(rows, *ends, flush=True)
    compare_operands()
    compare_words()
    hadamard.compare_all()
    compare_instructions()
    print("agreed", flush=True)


if __name__ == "__main__":
    main()
