"""Records of other projects on ordinary blocks, by the sequences, and on all blocks, by the sequences or the general rules.

    TRITON_INTERPRET=1 python -m tests.emulator.interpreter_process conventions conventions PART/PARTS [NAME or DTYPE...]

Emulated as in `fast_codes`. Every record whose ordinary blocks go by a sequence (`scheme.ordinary_blocks`) is compared, in
every dtype for which it does: codes, packed codes, scales, zero points, and fake quantization. PART/PARTS: every PARTS-th
record, from the PART-th. It prints what agreed, one line each, and raises at the first difference.

Records of the user's own at the edges of what the short sequences serve, emulated as in `programs/fast_codes.py`.

    TRITON_INTERPRET=1 python -m tests.emulator.interpreter_process conventions records [day]

day: each record in one dtype, the next one in another.
It prints what agreed, one line each, and raises at the first difference.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

import reference
from ao_lab.testing.strategies import assert_same_bits
from fast.kernels.quantize import host as quantizer
from fast.kernels.quantize import plan as passes
from fast.kernels.quantize.plan import first_level
from fast.kernels.scheme.constants import constants_of, is_two_level
from fast.kernels.scheme.fast_path_rules import bounds, has_zero_blocks, outer_bounds
from fast.launch.launcher import power_above
from reference import SCHEMES, Scales, Scheme
from reference.arrays.bridges import to_torch
from reference.formats.formats import FORMATS, Format
from reference.schemes.schemes import Zero
from tests.emulator import ptx_interpreter
from tests.emulator.programs.fast_codes import compare, inputs, one_tile, two_tiles
from tests.gpu.harness.inputs import DTYPES, NUMPY, WIDTH, Array

#: Inputs that are tried of each record: edge blocks, and blocks at halves of steps and with all patterns of 16 bits.
KINDS = ("edges", "halfway", "patterns", "ladders", "normals", "sparse")


def codes_of(scheme: Scheme) -> Scheme:
    """The record that makes the codes: of scales that are quantized themselves, the one before that."""
    return first_level(scheme) if is_two_level(scheme) and scheme.codes_from == "exact" else scheme


def has_same(scheme: Scheme, dtype: str) -> bool:
    """Whether ordinary blocks of a record go by a sequence."""
    return bool(constants_of(codes_of(scheme), dtype).has_same)


def quotients(dtype: str, size: int) -> Array:
    """Blocks of all significands of 8 bits under all maxima of 8 bits, twelve binades and both signs."""
    top = np.arange(128)[:, None]
    rest = np.arange(12 * 128)
    count = -(-len(rest) // (size - 1))
    rest = np.resize(rest, count * (size - 1)).reshape(1, count, size - 1)
    below = (1 + rest % 128 / 128) * np.exp2(-(rest // 128)) * np.where(rest % 3, 1, -1)
    tops = np.broadcast_to((1 + top / 128)[:, :, None], (128, count, 1))
    # No element above the maximum.
    below = np.where(np.abs(below) > tops, below / 2, below)
    x = np.concatenate([tops, below], -1).reshape(128 * count, size)
    return (x * np.exp2(np.arange(len(x)) % 9 - 4)[:, None]).astype(NUMPY[dtype])


def zeros(dtype: str, size: int) -> Array:
    """Blocks of zeros of both signs beside one element, of all significands of 8 bits and both signs; every ninth has none."""
    row = np.arange(256)
    x = np.where(np.arange(size) % 3, -0.0, 0.0) * np.ones((256, 1))
    x[row, row % size] = (1 + row % 128 / 128) * np.where(row < 128, 1, -1) * np.exp2(row % 5 - 2)
    x[::9] = np.copysign(0.0, x[::9])
    return x.astype(NUMPY[dtype])


def ordinary(x: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """The rows all of whose blocks are ordinary, as many as a power of two, and none where there are none."""
    least, most = bounds(codes_of(scheme), str(x.dtype).removeprefix("torch."))
    block = scheme.scale.block
    size = block if isinstance(block, int) and 0 < block < x.shape[1] else x.shape[1]
    largest = x.float().abs().reshape(len(x), -1, size).amax(-1)
    fit = (largest >= least) & (largest <= most)
    if has_zero_blocks(codes_of(scheme)):
        fit |= largest == 0
    rows = x[fit.all(-1) & x.isfinite().all(-1)]
    return rows[torch.arange(power_above(len(rows))) % max(len(rows), 1)] if len(rows) else rows


def has_ordinary_outer(x: torch.Tensor, scheme: Scheme) -> bool:
    """Whether the outer scale of a tensor is ordinary."""
    if scheme.outer is None or is_two_level(scheme):
        return True
    least, most = outer_bounds(scheme)
    return bool(least <= float(reference.choose_scales(x, scheme).outer) <= most)


def compare_record(scheme: Scheme, dtype: str) -> None:
    """Ordinary blocks, then all."""
    block = scheme.scale.block
    size = block if isinstance(block, int) and 0 < block <= WIDTH else WIDTH
    made: dict[str, Any] = {
        of.__name__: to_torch(of(dtype, size).reshape(-1, WIDTH)) for of in (quotients, zeros)
    }
    others = inputs(scheme, dtype, 0.02)
    made |= {label: x for label, x in others if label in KINDS}
    for label, x in made.items():
        # A scale over all elements takes passes in parts: one part.
        x = x[:: max(1, len(x) // 64)][:64] if scheme.outer is not None else x[: 1 << 11]
        rows = ordinary(x, scheme)
        if is_two_level(scheme) and len(rows) % 64:
            # Groups of 256 scales are whole.
            rows = rows[:0]
        if len(rows):
            if not has_ordinary_outer(rows, scheme):
                rows = ordinary(
                    rows[(rows.float().abs().amax(-1) < 1024) & (rows.float().abs().amax(-1) > 1e-3)], scheme
                )
            compare(rows, scheme)
        if label != "quotients":
            compare(x[:256], scheme)
        print(scheme.name, dtype, label, len(rows), flush=True)


def conventions(part: str, *names: str) -> None:
    """Compare some records."""
    passes.geometry, passes._place = one_tile(passes.geometry), two_tiles(passes._place)
    first, every = map(int, part.split("/"))
    schemes = [name for name in names if name not in DTYPES]
    chosen = [s for s in SCHEMES.values() if not schemes or s.name in schemes]
    chosen = [s for s in chosen if any(has_same(s, dtype) for dtype in DTYPES)]
    for scheme in chosen[first::every]:
        for dtype in [d for d in DTYPES if d in names] or DTYPES:
            if has_same(scheme, dtype):
                compare_record(scheme, dtype)


def record(name: str, base: str, scale: Any = None, **fields: Any) -> Scheme:
    """A default scheme with other fields, of itself and of its scale."""
    made = SCHEMES[base]
    return replace(made, name=name, scale=replace(made.scale, **(scale or {})), **fields)


def stretched(bits: int) -> Scheme:
    """Levels one apart of a format of the user's own, which has a name while this program runs."""
    count = 1 << bits
    fmt = Format(
        name=f"levels{bits}", kind="codebook", bits=bits, table=tuple(np.arange(count) - (count - 1) / 2),
        reach=count / 2,
    )  # fmt: skip
    FORMATS[fmt.name] = fmt
    return record(fmt.name, "stretched2_g32", {"target": fmt.limit}, element=fmt.name)


RECORDS = (
    record("zero points beyond the codes", "int3_g32_asymmetric", {"target": 15.0}),
    record("pairs beyond the codes", "int4_g32_asymmetric", {"target": 63.0}),
    record("zero points of maxima", "int8_g32", zero=Zero(), deviations=("one sign is lost",)),
    record("no floor", "int4_g32", {"floor": None}),
    record("floor of a dtype", "int4_g32_asymmetric", {"floor": ("stored", "tiny")}),
    record(
        "codebook", "nf4", {"storage": "float32", "floor": ("stored", "eps")}, outer=None, codes_from="stored"
    ),
    record("codes from exact scales", "int4_g32_asymmetric", codes_from="exact"),
    record("codes from exact scales, float", "fp8_1x128", {"block": 32}, codes_from="exact"),
    record("encoding scales", "int4_g32", {"stored": "encode"}),
    record("infinite powers of two", "mxint8", nan="ieee"),
    record("infinite scales", "fp8_1x128", {"block": 32}, nan="nan"),
    record("infinite ranges", "int8_g32_asymmetric", nan="ieee"),
    record("far beyond six bits", "mxfp6_e3m2", {"target": 57344.0}),
    record("far beyond six bits, by ratio", "fp8_1x128", {"block": 32}, element="float6_e2m3fn"),
    record("a codebook under powers of two", "mxfp4", element="nf4"),
    record("stretched levels far within", "stretched2_g32", {"target": 0.75}),
    record("stretched levels far beyond", "stretched2_g32", {"target": 3000.0}),
    record("stretched levels under powers of two", "mxfp4", element="stretched2"),
    record(
        "stretched levels under an outer scale", "nvfp4", {"storage": "float32", "floor": ("stored", 2.0**-126)},
        element="stretched2",
    ),
    *(stretched(bits) for bits in (1, 2, 3, 4, 7)),
    record("NaN by arithmetic", "mxfp4", nan="ieee"),
    record("NaN by arithmetic, 8 bits", "mxfp8_e4m3", nan="ieee"),
    record("values in the dtype", "int8_g32", dequantize="target"),
    record("values that overflow", "int8_g32_asymmetric", dequantize="ieee"),
    record("blocks of less than a word", "int4_g32", {"block": 4}),
    record("scales in float16", "int4_g32_asymmetric", {"storage": "float16", "floor": None}, nan="ieee", dequantize="ieee"),
    record("a codebook, scales in float32", "nf4", {"block": 32, "storage": "float32"}, outer=None, codes_from="stored"),
    record(
        "one bit", "int4_g32_asymmetric", {"target": 1.0, "statistic": "minmax", "storage": "bfloat16"}, element="uint1",
        zero=Zero(rule="value", storage="bfloat16"),
    ),
    *(SCHEMES[f"torchao.{name}"] for name in ("intx4_g32", "intx4_g32_asymmetric", "int8_rowwise")),
)  # fmt: skip


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """Blocks of 32 of all sizes: of both signs, above and below zero, of zeros, with infinities and NaN."""
    rng = np.random.default_rng(11)
    size = np.exp2(rng.integers(-24 if dtype == torch.float16 else -148, 16, (256, 1)))
    x = rng.standard_normal((256, 32)) * size
    x[:64], x[64:128], x[128:132] = np.abs(x[:64]), -np.abs(x[64:128]), 0.0
    x[::16, 3], x[1::16, 5], x[2::16, 7] = np.inf, -np.inf, np.nan
    made = torch.from_numpy(x.astype(np.float32))
    if dtype != torch.float16:
        # Ranges wider than the largest number.
        made[200:208] = torch.linspace(-1, 1, 32) * torch.finfo(torch.float32).max
    return made.to(dtype).reshape(64, 128)


def given_of(x: torch.Tensor, scheme: Scheme) -> Scales:
    """The scales of x, some of them 0."""
    made = reference.choose_scales(x, scheme)
    made.scale[::5] = 0
    return made


RECORD_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def records(part: str = "") -> None:
    """Compare everything."""
    by_day = part == "day"
    passes.geometry = one_tile(passes.geometry, programs=2)
    for at, scheme in enumerate(RECORDS):
        for dtype in RECORD_DTYPES[at % 3 :][:1] if by_day else RECORD_DTYPES:
            x = numbers(dtype)
            assert_same_bits(quantizer.choose_scales(x, scheme, -1), reference.choose_scales(x, scheme))
            for packed in (at % 2 == 1,) if by_day else (False, True):
                wanted = reference.quantize(x, scheme, packed=packed)
                assert_same_bits(quantizer.quantize(x, scheme, -1, None, None, packed), wanted)
                values = quantizer.dequantize(wanted, "bfloat16")
                if values is not None:
                    assert_same_bits(values, reference.dequantize(wanted, "bfloat16"))
            fake = reference.fake_quantize(x, scheme)
            assert_same_bits(quantizer.fake_quantize(x, scheme, -1, None), fake)
            wanted = reference.quantize(x, scheme, scales=given_of(x, scheme))
            assert_same_bits(quantizer.quantize(x, scheme, -1, wanted.scales, None, False), wanted)
        print(scheme.name, flush=True)


def main(name: str, *arguments: str) -> None:
    """Compare what has this name."""
    ptx_interpreter.install()
    {"conventions": conventions, "records": records}[name](*arguments)
