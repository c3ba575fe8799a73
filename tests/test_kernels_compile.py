"""Every kernel of `fast` compiles for Hopper without a GPU, keeps its numbers in registers, and moves them 16 bytes at a time.

`COMPILED` has a case for every branch of the kernels, `HOT` the ones whose speed counts, at the shapes that are measured. What a
GPU would find, wrong bits, is no matter of these tests: `test_kernels_interpreter` and `tests/gpu` compare those.

No case may have local memory or a stack. Some call a subroutine, the slow path of a correctly rounded division or root; it
works in registers too. Triton is required here, on any machine: it is among what `make test` installs.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch

from fast.kernels import both, normalize, pointwise, quantizer, swiglu
from fast.kernels.inputs_first import inputs_first
from fast.kernels.launch import Launch
from fast.kernels.passes import asked, fake_quantizing
from fast.kernels.rule import rule_of
from reference import SCHEMES, Quantized, Scales
from reference.blocks import Blocks
from reference.pack import packed_shape
from reference.storage import storage_dtype
from tests.kernel_compiler import launched

KERNELS = Path(quantizer.__file__).parent
BIG = (16384, 4096)
SOME = (64, 512)


def empty(shape, dtype):
    """Memory that nobody writes or reads."""
    return torch.empty(shape, dtype=getattr(torch, dtype))


def scales_of(scheme, shape, axis):
    """Scales as they are kept."""
    kept = Blocks.of(shape, scheme.scale, axis).scale_shape
    return Scales(
        empty(kept, storage_dtype(scheme.scale.storage)),
        empty((), "float32") if scheme.outer else None,
        empty(kept, storage_dtype(scheme.zero.storage)) if scheme.zero else None,
    )


def quantize(name, dtype="bfloat16", shape=SOME, axis=-1, packed=False, given="", stochastic=False):
    scheme, words = SCHEMES[name], None
    if stochastic:
        scheme, words = (
            replace(scheme, rounding="stochastic", name=f"{name} stochastic"),
            empty(shape, "uint32"),
        )
    scales = scales_of(scheme, shape, axis) if given else None
    if given == "outer":
        scales = Scales(outer=scales.outer)
    return quantizer.quantize(empty(shape, dtype), scheme, axis, scales, words, packed)


def dequantize(name, dtype="bfloat16", shape=SOME, axis=-1, packed=False):
    scheme = SCHEMES[name]
    codes = empty(packed_shape(shape, scheme.format) if packed else shape, "uint8")
    kept = scales_of(scheme, shape, axis)
    return quantizer.dequantize(
        Quantized(codes, kept.scale, kept.outer, kept.zero, shape, axis, scheme, packed), dtype
    )


def fake(name, dtype="bfloat16", shape=SOME, axis=-1):
    return quantizer.fake_quantize(empty(shape, dtype), SCHEMES[name], axis, None)


def gradient(name, dtype="bfloat16", shape=SOME, axis=-1):
    return quantizer.gradient(empty(shape, dtype), empty(shape, dtype), SCHEMES[name], axis)


def mx_both(name="mxfp8_e4m3", dtype="bfloat16"):
    rows, columns = BIG
    sizes = {"codes": BIG, "scale": (rows, columns // 32), "transposed": (columns, rows),
             "transposed_scale": (columns, rows // 32)}  # fmt: skip
    made = {part: empty(size, "uint8") for part, size in sizes.items()}
    both.mx_both(empty(BIG, dtype), rule_of(SCHEMES[name], dtype), made)
    return made


def given_both(one, name="fp8_tensorwise", dtype="bfloat16"):
    scale, other = empty((), "float32"), empty((), "float32")
    made = {"codes": empty(BIG, "uint8"), "transposed": empty(BIG[::-1], "uint8"), "scale": scale}
    made["transposed_scale"] = scale if one else other
    both.given_both(empty(BIG, dtype), rule_of(SCHEMES[name], dtype), made)
    return made


def norm(scheme=None, dtype="bfloat16", shape=(4096, 4096), residual=True, packed=False):
    x = empty(shape, dtype)
    if scheme is None:
        return normalize.rms_norm(x, x[0], 1e-5, x if residual else None)
    return normalize.rms_norm_quantize(x, x[0], scheme, 1e-5, x if residual else None, packed)


def gate(scheme=None, dtype="bfloat16", shape=(4096, 4096), packed=False):
    x = empty(shape, dtype)
    return swiglu.swiglu(x, x) if scheme is None else swiglu.swiglu_quantize(x, x, scheme, packed)


def encode(fmt, dtype="bfloat16", rounding="nearest_even"):
    words = empty(SOME, "uint32") if rounding == "stochastic" else None
    return pointwise.encode(empty(SOME, dtype), fmt, rounding, "saturate", words)


def for_jax():
    """`inputs_first` with the arguments that `ao_lab.jax` hands over."""
    scheme = SCHEMES["nvfp4"]
    plan = fake_quantizing(asked("bfloat16", scheme, Blocks.of(SOME, scheme.scale, -1)), "outer")
    launch = Launch(plan.passes[-1])
    dtypes = {"x": "bfloat16", "outer": "float32", "scale": "uint8", "y": "bfloat16"}
    order = [name for name in inputs_first.arg_names[:10]]
    pointers = [empty(SOME, dtypes[name]) if name in launch.names else None for name in order]
    return inputs_first[(launch.grid,)](
        *pointers, *launch.tail, num_warps=launch.warps, enable_fp_fusion=False
    )


@dataclass(frozen=True)
class Case:
    """A call, and how often it launches which kernels."""

    call: partial
    kernels: tuple[str, ...] = ("blocks_kernel",)

    @property
    def name(self):
        parts = [*self.call.args, *(f"{key}={value}" for key, value in self.call.keywords.items())]
        return " ".join([self.call.func.__name__, *map(str, parts)]).replace("bfloat16", "bf16")


def case(function, *args, kernels=("blocks_kernel",), **options):
    return Case(partial(function, *args, **options), kernels)


TWICE = ("blocks_kernel", "blocks_kernel")
COMPILED = (
    # 8-bit floats: whole rows, long rows in two passes, columns, groups, rectangles, the whole tensor.
    case(quantize, "fp8_rowwise", "float32"),
    case(quantize, "fp8_rowwise_e5m2", "float16", (4, 32768), kernels=TWICE),
    case(quantize, "fp8_rowwise", shape=(1000, 96), axis=0, kernels=TWICE),
    case(quantize, "fp8_1x128", "float32", (200, 48), axis=0),
    case(quantize, "fp8_1x128", "float16", (3, 200)),
    case(quantize, "fp8_128x128_e5m2", shape=(300, 200)),
    case(quantize, "fp8_tensorwise", "float32", given="all"),
    case(quantize, "torchao.fp8_rowwise_training_pow2"),
    case(quantize, "torchao.fp8_tensorwise_inference", shape=BIG, kernels=TWICE),
    # Powers of two: every element, every rule.
    case(quantize, "mxfp8_e5m2_rceil", "float16"),
    case(quantize, "mxfp6_e2m3", "float32", (64, 48), axis=0),
    case(quantize, "mxfp6_e3m2", packed=True),
    case(quantize, "mxfp6_e2m3_rceil", "float16", given="all", packed=True),
    case(quantize, "mxfp4", shape=(64, 48), axis=0),
    case(quantize, "mxfp4_rceil", "float32", packed=True),
    case(quantize, "mxfp4", stochastic=True),
    case(quantize, "mxint8", "float16"),
    case(quantize, "torchao.mxfp8_e4m3_rceil"),
    case(quantize, "torchao.mxfp4_even", "float32", packed=True),
    # Scales under an outer scale.
    case(quantize, "nvfp4", "float32", kernels=TWICE),
    case(quantize, "nvfp4", "float16", given="outer", packed=True),
    case(quantize, "nvfp4", given="all"),
    case(quantize, "torchao.nvfp4", given="outer"),
    case(quantize, "te.nvfp4_16x16", kernels=TWICE),
    case(quantize, "compressed_tensors.nvfp4", "float16", packed=True, kernels=TWICE),
    case(quantize, "nf4", kernels=TWICE),
    case(quantize, "torchao.nf4", shape=(64, 256), kernels=TWICE),
    # Integers: symmetric and with zero points, every way to pack.
    case(quantize, "int8_rowwise_asymmetric", "float16", (4, 32768), kernels=TWICE),
    case(quantize, "int4_g32_asymmetric", packed=True),
    case(quantize, "int2_g64_asymmetric", "float32", packed=True),
    case(quantize, "int3_g32", packed=True),
    case(quantize, "int6_g32", "float16", packed=True),
    case(quantize, "int8_rowwise", "float32", stochastic=True),
    case(quantize, "torchao.int4_g32_tinygemm", "float16"),
    case(quantize, "torchao.int8_rowwise_no_clipping"),
    case(quantize, "compressed_tensors.int4_g128", packed=True),
    # Back, in every dtype.
    case(dequantize, "fp8_rowwise_e5m2", "float16"),
    case(dequantize, "fp8_1x128", "float32", (200, 48), axis=0),
    case(dequantize, "mxfp6_e3m2", "float16", packed=True),
    case(dequantize, "torchao.mxfp8_e4m3_rceil", "float16"),
    case(dequantize, "torchao.nvfp4", "float32", packed=True),
    case(dequantize, "mxint8", "float32"),
    case(dequantize, "int4_g32_asymmetric", "float16", packed=True),
    case(dequantize, "int2_g32", packed=True),
    case(dequantize, "int3_g32", "float32", packed=True),
    case(dequantize, "torchao.int4_g32_tinygemm", packed=True),
    # Training.
    case(fake, "mxfp6_e2m3", "float16"),
    case(fake, "int4_g32_asymmetric", "float32"),
    case(fake, "torchao.int4_g32_tinygemm"),
    case(gradient, "mxfp8_e4m3"),
    case(gradient, "nvfp4", "float32", kernels=TWICE),
    case(gradient, "torchao.int4_g32_tinygemm", "float16"),
    case(given_both, False, dtype="float16", kernels=("given_both_kernel",)),
    case(mx_both, "mxfp8_e5m2_rceil", "float32", kernels=("mx_both_kernel",)),
    case(for_jax, kernels=("inputs_first",)),
    # Producers: long rows, rows that fill no tile, packed codes, zero points.
    case(norm, dtype="float16", shape=(64, 32768), residual=False, kernels=("sums_kernel", "norm_kernel")),
    case(norm, "int8_rowwise_asymmetric", "float32", (7, 1000), kernels=("norm_kernel",)),
    case(norm, "mxfp4", packed=True, kernels=("norm_kernel",)),
    case(gate, "int4_g32_asymmetric", "float16", (7, 96), packed=True, kernels=("swiglu_kernel",)),
    # One element at a time.
    case(encode, "float8_e4m3fn", kernels=("encode_kernel",)),
    case(encode, "float4_e2m1fn", "float16", rounding="stochastic", kernels=("encode_kernel",)),
    case(encode, "nf4", "float32", kernels=("encode_kernel",)),
    case(pointwise.decode, empty(SOME, "uint8"), "float6_e3m2fn", kernels=("decode_kernel",)),
    case(pointwise.decode, empty(SOME, "uint16"), "bfloat16", kernels=("decode_kernel",)),
    case(pointwise.pack, empty(SOME, "uint8"), "int3", kernels=("pack_kernel",)),
    case(pointwise.unpack, empty((64, 192), "uint8"), "int3", SOME, kernels=("unpack_kernel",)),
)  # fmt: skip


def short_name(one):
    return " ".join(part if len(part) < 60 else "tensor" for part in one.name.split("  "))


@pytest.mark.parametrize("one", COMPILED, ids=lambda one: one.name[:60])
def test_compiles_and_stays_in_registers(one):
    machines = launched(one.call)
    assert tuple(machine.kernel for machine in machines) == one.kernels
    for machine in machines:
        stay_in_registers(machine)
