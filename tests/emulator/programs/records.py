"""Records of the user's own at the edges of what the short sequences serve, emulated as in `interpreted_hot`.

    TRITON_INTERPRET=1 python tests/emulator/programs/records.py [day]

day: each record in one dtype, the next one in another.
It prints what agreed, one line each, and raises at the first difference.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np
import torch
import triton

import reference
from ao_lab.testing.strategies import assert_same_bits
from fast.kernels.quantize import host as quantizer
from fast.kernels.quantize import plan as passes
from reference import SCHEMES, Scales, Scheme
from reference.formats.formats import FORMATS, Format
from reference.schemes.schemes import Zero
from tests.emulator import ptx_interpreter
from tests.emulator.programs.fast_codes import one_tile


def record(name: str, base: str, scale: Any = None, **fields: Any) -> Scheme:
    """A house record with other fields, of itself and of its scale."""
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
    record("zero points of maxima", "int8_g32", zero=Zero()),
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


DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def main(by_day: bool) -> None:
    """Compare everything."""
    assert triton.knobs.runtime.interpret, "TRITON_INTERPRET=1 is missing"
    ptx_interpreter.install()
    passes.geometry = one_tile(passes.geometry, programs=2)
    for at, scheme in enumerate(RECORDS):
        for dtype in DTYPES[at % 3 :][:1] if by_day else DTYPES:
            x = numbers(dtype)
            assert_same_bits(quantizer.choose_scales(x, scheme, -1), reference.choose_scales(x, scheme))
            for packed in (False, True):
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
    print("agreed", flush=True)


if __name__ == "__main__":
    with np.errstate(all="ignore"):
        main(sys.argv[1:] == ["day"])
