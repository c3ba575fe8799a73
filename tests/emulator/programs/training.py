"""Kernels of training: both axes from one read, tokens sorted by expert, `hadamard`, sums of columns.

    TRITON_INTERPRET=1 python -m tests.emulator.interpreter_process training values [day | SCHEME ...]
    TRITON_INTERPRET=1 python -m tests.emulator.interpreter_process training grouped
    TRITON_INTERPRET=1 python -m tests.emulator.interpreter_process training column_sums [day]
    TRITON_INTERPRET=1 python -m tests.emulator.interpreter_process training turned
    TRITON_INTERPRET=1 python -m tests.emulator.interpreter_process training joined

values: codes and values of both axes, instructions emulated (`ptx_interpreter`), bit for bit: edge blocks, neighbours of every
tie and patterns of 16 bits lie along rows, and then along columns; programs of the size that runs are tried on a matrix that
they do not fill. day: each scheme in one dtype, the next one in the other.
grouped: which rows go where, which become zero, columns of groups and of weights (these with instructions emulated too), words;
and the transform of `hadamard` along both axes, and what is quantized after it.
column_sums: integers exactly, the bits of the model of its order, its bound, every edge.
"""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import numpy as np
import torch

import reference
from ao_lab.testing.strategies import assert_same_bits
from ao_lab.training.grouped import autograd, products
from ao_lab.training.grouped.autograd import _layout, layout_of
from fast.kernels import both_axes, grouped
from fast.kernels import hadamard as hadamard_host
from fast.kernels.encode import random_words
from fast.kernels.layers.column_sums import Plan, column_sums, plan_of
from fast.kernels.quantize.joined_rows import join_rows, split_rows
from fast.kernels.rowwise_colwise import host as batches
from fast.kernels.rowwise_colwise import mx
from fast.kernels.rowwise_colwise.turned import turned_bytes
from fast.layers.gather import _gather
from reference import SCHEMES, Scheme
from reference.layers.hadamard import hadamard
from reference.training.grouped import group_step, padded_rows
from reference.training.recipe import RECIPES, Operand
from tests.emulator import ptx_interpreter, quick_interpreter
from tests.emulator.programs import fast_codes
from tests.gpu.sparsity.cases import sum_bound, sum_model

#: Every element, and every rule that training uses.
BOTH_SCHEMES = ("mxfp8_e4m3_rceil", "mxfp8_e5m2", "mxfp6_e2m3_rceil", "mxfp6_e3m2", "mxfp4_rceil")
BOTH_DTYPES = ("bfloat16", "float16")
#: Columns of a program: few operations of the interpreter on many elements.
WIDE = 1 << 14


def compare_both_axes(x: torch.Tensor, scheme: Scheme) -> None:
    """Both outputs of both calls."""
    assert both_axes.covers(x, scheme)
    along = [reference.fake_quantize(x, scheme, axis=axis) for axis in (1, 0)]
    for made, wanted in zip(both_axes.both_values(x, scheme), along, strict=True):
        assert_same_bits(made, wanted)
    values, q = both_axes.values_and_codes(x, scheme)
    assert_same_bits(values, along[0])
    assert_same_bits(q, reference.quantize(x, scheme, axis=0))


def compare_blocks(scheme: Scheme, dtype: str) -> None:
    """Blocks that are hard to quantize, a strip of them along rows and one along columns."""
    made = [x.reshape(-1, 32) for _, x in fast_codes.inputs(scheme, dtype, 0.1)]
    blocks = torch.cat(made)
    blocks = torch.cat([blocks, blocks[: -len(blocks) % (WIDE // 32 * 32)]])
    with mock.patch.object(both_axes, "COLUMNS", WIDE):
        compare_both_axes(blocks.reshape(32, -1), scheme)
        compare_both_axes(blocks.t().contiguous(), scheme)


def compare_places(scheme: Scheme, dtype: str) -> None:
    """Programs as they run: some not filled, one alone."""
    generator = torch.Generator().manual_seed(1)
    for shape in ((96, 160), (32, 32), (64, 128)):
        x, spread = (torch.randn(shape, generator=generator) for _ in range(2))
        compare_both_axes((x * torch.exp(3 * spread)).to(getattr(torch, dtype)), scheme)


def compare_values(names: tuple[str, ...] = BOTH_SCHEMES, by_day: bool = False) -> None:
    """Compare some schemes, a line for each and a dtype."""
    with mock.patch.object(both_axes, "interpreted", return_value=False):
        for at, name in enumerate(names):
            for dtype in BOTH_DTYPES[at % 2 :][:1] if by_day else BOTH_DTYPES:
                compare_blocks(SCHEMES[name], dtype)
                print(name, dtype, "both axes", flush=True)
        for dtype in ("bfloat16", "float16"):
            compare_places(SCHEMES[names[0]], dtype)
            print(dtype, "places", flush=True)


def values(*names: str) -> None:
    """Install the emulator, and compare_both_axes."""
    ptx_interpreter.install()
    by_day = names == ("day",)
    compare_values(BOTH_SCHEMES if by_day else names or BOTH_SCHEMES, by_day)


SEED, STREAM = 2**40 + 5, 3
#: Scheme, Hadamard length, axis, dtype: each recipe's operands, and formats whose codes go by other rules.
HADAMARD_CASES = (
    ("mxfp4_rceil", 32, 0, torch.bfloat16, True),
    ("mxfp4_rceil", 32, 1, torch.bfloat16, True),
    ("nvfp4", 16, 0, torch.float32, False),
    ("nvfp4", 0, 1, torch.bfloat16, True),
    ("mxfp6_e3m2_rceil", 32, 1, torch.float16, False),
)


def matrix(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of all sizes, zeros, subnormals, NaN and infinity."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, columns, generator=generator)
    x *= torch.exp(3 * torch.randn(rows, columns, generator=generator))
    # The interpreter has no subnormal bfloat16.
    x[0], x[:, 3], x[9] = 0, 0, 1e-40 if dtype == torch.float32 else 0
    x[5, 7], x[20, 9], x[25, 1] = float("nan"), float("inf"), 1e-30
    return x.to(dtype)


def along(x: torch.Tensor, axis: int) -> torch.Tensor:
    """The matrix whose last axis is this one, and back."""
    return x if axis else x.t().contiguous()


def assert_same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """The same bits."""
    view = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[found.element_size()]
    assert found.shape == wanted.shape
    assert torch.equal(found.view(view), wanted.contiguous().view(view))


def compare_mixed() -> None:
    """The transform alone, of whole and of partly filled tiles."""
    for axis, dtype, length in (
        (0, torch.float32, 32),
        (0, torch.bfloat16, 16),
        (1, torch.float16, 4),
        (1, torch.bfloat16, 128),
    ):
        x = matrix(32, 384, dtype)
        found = hadamard_host.mixed(x, hadamard_host.Rule(None, length, axis))
        assert_same(found, along(hadamard(along(x, axis), length), axis))


def compare_hadamard(name: str, length: int, axis: int, dtype: torch.dtype, stochastic: bool) -> None:
    """Codes, scales and values."""
    scheme = SCHEMES[name]
    if stochastic:
        scheme = replace(scheme, name=f"{name}_stochastic", rounding="stochastic")
    x = matrix(32, 72 if axis == 0 else 160, dtype)
    rule = hadamard_host.Rule(scheme, length, axis)
    assert hadamard_host.covers(x, rule)
    mixed = hadamard(along(x, axis), length) if length else along(x, axis)
    words = None
    if stochastic:
        words = torch.from_numpy(reference.random_bits(tuple(mixed.shape), seed=SEED, stream=STREAM))
    wanted = reference.quantize(mixed, scheme, random_bits=words)
    found = hadamard_host.quantized(x, rule, SEED, STREAM)
    assert_same(found.codes, along(wanted.codes, axis))
    assert_same(found.scale, along(wanted.scale, axis))
    if wanted.outer is not None:
        assert_same(found.outer, wanted.outer)
    if dtype != torch.bfloat16 or scheme.outer is None:
        values = reference.dequantize(wanted, str(dtype).removeprefix("torch."))
        assert_same(hadamard_host.quantized_values(x, rule, SEED, STREAM), along(values, axis))


def compare_transforms() -> None:
    """Compare all cases, a line for each."""
    compare_mixed()
    for case in HADAMARD_CASES:
        compare_hadamard(*case)
        print(*case, flush=True)


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
    """Bits of the columns, with NaN in rows of no group, for widths that fill batches and that do not."""
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
        found = grouped.group_layout(ends, rows, padded_rows(rows, len(ends), step), step)
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
            autograd.has_kernels = lambda x, kernels=kernels: kernels
            where = autograd.layout_of(offsets.to(torch.int32), 70, group_step(recipe))
            columns = autograd.columns_operand(x, recipe.weight_grad.a, where)
            transposed = autograd.weight_columns(w, recipe.input_grad.b, recipe.output.b)
            made += [where.ends, where.source, where.owners, columns.matrix.codes, columns.matrix.scale]
            made += [transposed.codes, transposed.scale, columns.matrix.scheme.key, transposed.scheme.key]
        assert all(
            a == b if isinstance(a, str) else torch.equal(a, b) for a, b in zip(found, wanted, strict=True)
        )


def compare_instructions() -> None:
    """Columns of groups, and of batches of weights, by the instructions that a GPU runs."""
    ptx_interpreter.install()
    hardware = [mock.patch.object(module, "interpreted", return_value=False) for module in (grouped, batches)]
    # The interpreter takes the constants of a rule apart that it has run by.
    with hardware[0], hardware[1], mock.patch.object(mx, "is_mx", return_value=True):
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
    """Random words of batches and of parts of them, for seeds and streams of all lengths."""
    for count, seed, stream in (
        (7, 3, 0),
        (4291, 2**63 - 5, 4),
        (2048, 2**32 + 1, 2),
        (5, 2**64 - 1, 2**32 - 1),
    ):
        found = random_words((count,), seed, stream, torch.device("cpu"))
        wanted = torch.from_numpy(reference.random_bits(count, seed=seed, stream=stream))
        assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))


def grouped_kernels() -> None:
    """Compare all cases."""
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
    compare_transforms()
    compare_instructions()


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Rows and columns: chunks that end within a step, columns that fill no program, one chunk, three axes.
SHAPES = ((203, 528), (77, 1024), (5, 256), (2, 50, 272))
#: A plan that is none of `plan_of`: chunks of three steps, the last one short.
FEW = Plan(256, 1, 3, 9, 24)


def planned(shape: tuple[int, ...]) -> list[Plan]:
    """The plan of a shape, and another one where that is for it."""
    rows, length = int(np.prod(shape[:-1])), shape[-1]
    return [plan_of(rows, length), *([FEW] if (rows, length) == (203, 528) else [])]


def compare_sums(g: torch.Tensor, dtype: torch.dtype, plan: Plan, label: str) -> None:
    """The bits of the model rounded once; ValueError where they differ, or the model leaves its bound."""
    made = column_sums(g, dtype, None, plan)
    wide = g.float().reshape(-1, g.shape[-1]).numpy()
    right = sum_model(wide, plan.parts, plan.chunk)
    if made is None or made.dtype != dtype or not torch.equal(made, torch.from_numpy(right).to(dtype)):
        raise ValueError(f"{label}: other bits")
    if (np.abs(right - wide.astype(np.float64).sum(0)) > sum_bound(wide, plan.parts, plan.chunk)).any():
        raise ValueError(f"{label}: beyond the bound")
    print(label)


def special(dtype: torch.dtype) -> None:
    """NaN, infinities of one and of both signs, sums beyond a dtype, subnormals, zeros of either sign."""
    info = torch.finfo(dtype)
    g = torch.zeros((16, 256), dtype=dtype)
    g[3, 0], g[4, 1], g[5:7, 2] = torch.nan, torch.inf, torch.tensor([torch.inf, -torch.inf])
    g[0:16, 3], g[0:3, 4], g[:, 5] = info.max, info.smallest_normal * info.eps, -0.0
    with np.errstate(over="ignore", invalid="ignore"):
        made = column_sums(g, dtype, None, plan_of(16, 256))
    wanted = [torch.nan, torch.inf, torch.nan, torch.inf, 3 * info.smallest_normal * info.eps, 0.0]
    right = torch.tensor(wanted, dtype=dtype)
    if not torch.equal(made[:6].nan_to_num(7.0), right.nan_to_num(7.0)) or torch.signbit(made[5:]).any():
        raise ValueError(f"special numbers in {dtype}: {made[:6]}")
    print(f"special {dtype}")


def sums(part: str = "") -> None:
    """Every case; by day all shapes in bfloat16, and one in the others."""
    quick_interpreter.install()
    generator = torch.Generator().manual_seed(0)
    for dtype in DTYPES:
        special(dtype)
        for shape in SHAPES[1:2] if part == "day" and dtype != torch.bfloat16 else SHAPES:
            for plan in planned(shape):
                integers = torch.randint(-8, 9, shape, generator=generator).to(dtype)
                exact = integers.double().reshape(-1, shape[-1]).sum(0)
                if not torch.equal(column_sums(integers, torch.float32, None, plan).double(), exact):
                    raise ValueError(f"integers {dtype} {shape}")
                g = torch.randn(shape, generator=generator).mul(1.5).exp().to(dtype)
                g *= torch.randint(0, 2, shape, generator=generator).mul(2).sub(1).to(dtype)
                for out in dict.fromkeys((dtype, torch.float32, torch.bfloat16)):
                    compare_sums(g, out, plan, f"{dtype} {shape} {out} {plan}")
    transposed = torch.randn(512, 64, generator=generator).t()
    compare_sums(transposed, torch.float32, plan_of(64, 512), "a transpose")
    if column_sums(transposed.double(), torch.float32) is not None:
        raise ValueError("float64 is torch's")


def turned() -> None:
    """Matrices of bytes that fill programs, do not, and are words that 16 bytes do not divide."""
    generator = torch.Generator().manual_seed(0)
    for rows, columns in ((128, 128), (4, 4), (132, 260), (256, 12), (8, 520), (300, 64)):
        x = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=generator)
        assert_same_bits(turned_bytes(x), x.t().contiguous())
        print(f"turned {rows} x {columns}")


def joined() -> None:
    """Rows of codes and scales as they travel: the bytes of `quantize`, the values of `dequantize`, NaN and infinities too."""
    ptx_interpreter.install()
    generator = torch.Generator().manual_seed(0)
    for name in ("fp8_rowwise", "int8_rowwise"):
        for dtype in DTYPES:
            for count, width in ((64, 128), (5, 128), (3, 12), (33, 260)):
                x = torch.randn(count, width, generator=generator)
                x = (x * torch.randn(count, 1, generator=generator).mul(4).exp()).to(dtype)
                x[:3, :3] = torch.tensor(
                    [[0.0, -0.0, 0.0], [1.0, float("nan"), 2.0], [float("inf"), 1.0, 0.0]]
                )
                compare_joined(x, SCHEMES[name])
            print(f"joined {name} {dtype}")


def compare_joined(x: torch.Tensor, scheme: Scheme) -> None:
    """Both ways."""
    q = reference.quantize(x, scheme)
    parts = [part.view(torch.uint8).reshape(len(x), -1) for part in (q.codes, q.scale.contiguous())]
    made = join_rows(x, scheme)
    if made is None or (back := split_rows(made, scheme, x.dtype)) is None:
        raise ValueError(f"no kernel joins {tuple(x.shape)} {x.dtype}")
    assert_same_bits(made, torch.cat(parts, 1))
    assert_same_bits(back, reference.dequantize(q, str(x.dtype).removeprefix("torch.")))


def main(name: str, *arguments: str) -> None:
    """Compare what has this name."""
    programs = {"values": values, "grouped": grouped_kernels, "column_sums": sums}
    {**programs, "turned": turned, "joined": joined}[name](*arguments)
