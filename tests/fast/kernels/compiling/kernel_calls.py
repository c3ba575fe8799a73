"""Calls of the kernels' host functions on memory that is never touched, for `test_kernels_compile`."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

import fast.kernels
from ao_lab.config.recipe import named
from fast.kernels import both_axes as values_host
from fast.kernels import encode as pointwise
from fast.kernels import encode as random_words
from fast.kernels import grouped as grouped_layout
from fast.kernels import grouped as groups_host
from fast.kernels import grouped as host
from fast.kernels import hadamard as hadamard
from fast.kernels import static_scales as static_scales_host
from fast.kernels.layers import rms_norm as normalize
from fast.kernels.layers import swiglu
from fast.kernels.quantize import host as clipping
from fast.kernels.quantize import host as quantizer
from fast.kernels.quantize import vjp
from fast.kernels.rowwise_colwise import host as layouts_host
from fast.kernels.rowwise_colwise import mx as both
from fast.kernels.scheme.constants import constants_of
from fast.kernels.triton_gemv import select as products
from fast.kernels.triton_scaled_mm import host as code_rows
from fast.quantize.static_scales import rows_record
from reference import FORMATS, SCHEMES, Quantized, Scales
from reference.formats.storage import packed_shape, storage_dtype
from reference.quantize.blocks import Blocks
from reference.quantize.scales import scale_groups
from reference.training.grouped import padded_rows
from tests.support import chosen

KERNELS = Path(fast.kernels.__file__).parent
BIG = (16384, 4096)
SOME = (64, 512)


def empty(shape, dtype):
    """Memory that nobody writes or reads."""
    return torch.empty(shape, dtype=getattr(torch, dtype))


def scales_of(scheme, shape, axis):
    """Scales as they are kept."""
    kept = Blocks.of(shape, scheme.scale, axis).scale_shape
    scale = empty(kept, storage_dtype(scheme.scale.storage))
    if scheme.outer and scheme.outer.statistic != "absmax_elements":
        groups = scale_groups(Blocks.of(shape, scheme.scale, axis), scheme.outer, scheme)
        return Scales(scale, empty(groups.scale_shape, "float32"), empty((), "float32"))
    outer = empty((), "float32") if scheme.outer else None
    return Scales(scale, outer, empty(kept, storage_dtype(scheme.zero.storage)) if scheme.zero else None)


def quantize(
    name, dtype="bfloat16", shape=SOME, axis=-1, packed=False, given="", stochastic=False, tiled=False
):
    scheme, words = SCHEMES[name], None
    if stochastic:
        scheme, words = (
            replace(scheme, rounding="stochastic", name=f"{name} stochastic"),
            empty(shape, "uint32"),
        )
    scales = scales_of(scheme, shape, axis) if given else None
    if given == "outer":
        scales = Scales(outer=scales.outer)
    return quantizer.quantize(empty(shape, dtype), scheme, axis, scales, words, packed, tiled)


def static_scales(name, dtype="bfloat16", shape=SOME):
    scheme = SCHEMES[name]
    scales, by_rows = scales_of(scheme, shape, -1), rows_record(scheme.key)
    return static_scales_host.quantize_rows(empty(shape, dtype), scheme, by_rows, scales)


def dequantize(name, dtype="bfloat16", shape=SOME, axis=-1, packed=False):
    scheme = SCHEMES[name]
    codes = empty(packed_shape(shape, scheme.format) if packed else shape, "uint8")
    kept = scales_of(scheme, shape, axis)
    return quantizer.dequantize(
        Quantized(codes, kept.scale, kept.outer, kept.zero, shape, axis, scheme, packed), dtype
    )


def fake(name, dtype="bfloat16", shape=SOME, axis=-1):
    return quantizer.fake_quantize(empty(shape, dtype), SCHEMES[name], axis, None)


def gradient(name, dtype="bfloat16", shape=SOME, axis=-1, given=False):
    scheme, x = SCHEMES[name], empty(shape, dtype)
    return vjp.gradient(x, x, scheme, axis, None, scales_of(scheme, shape, axis) if given else None)


def noted(name, dtype="bfloat16", shape=SOME, axis=-1):
    return clipping.noted(empty(shape, dtype), SCHEMES[name], axis)


def clip(name, dtype="bfloat16", shape=SOME, axis=-1):
    x, scheme = empty(shape, dtype), SCHEMES[name]
    blocks = Blocks.of(shape, scheme.scale, axis).scale_shape
    return clipping.clip(x, x, empty(blocks, "uint8"), scheme, axis)


def mx_both(name="mxfp8_e4m3", dtype="bfloat16", tiled=False, **tuning):
    return both.mx_both(empty(BIG, dtype), constants_of(SCHEMES[name], dtype), tiled, **tuning)


def layouts(name, dtype="bfloat16", shape=BIG, rows=True, power=False):
    scheme = SCHEMES[name]
    if power:
        scale = replace(scheme.scale, rule="ratio_pow2")
        scheme = replace(scheme, name=f"{name} in powers of two", scale=scale)
    call = layouts_host.fused_both if rows else layouts_host.columns_only
    return call(empty(shape, dtype), scheme, *((None, False) if rows else (False,)))


def batches(name, dtype="bfloat16", shape=(8, 14336, 4096)):
    """The columns of each matrix of a batch."""
    return layouts_host.batch_columns(empty(shape, dtype), SCHEMES[name])


def both_axes(name, dtype="bfloat16", shape=BIG, codes=False):
    """Values along rows; values or codes along columns."""
    call = values_host.values_and_codes if codes else values_host.both_values
    return call(empty(shape, dtype), SCHEMES[name])


def given_both(one, name="fp8_tensorwise", dtype="bfloat16"):
    scale, other = empty((), "float32"), empty((), "float32")
    scales = (scale, scale if one else other)
    return both.given_both(empty(BIG, dtype), constants_of(SCHEMES[name], dtype), scales)


def norm(scheme=None, dtype="bfloat16", shape=(4096, 4096), residual=True, packed=False):
    x = empty(shape, dtype)
    if scheme is None:
        return normalize.rms_norm(x, x[0], 1e-5, x if residual else None)
    return normalize.rms_norm_quantize(x, x[0], scheme, 1e-5, x if residual else None, packed)


def gate(scheme=None, dtype="bfloat16", shape=(4096, 4096), packed=False):
    x = empty(shape, dtype)
    return swiglu.swiglu(x, x) if scheme is None else swiglu.swiglu_quantize(x, x, scheme, packed)


def encode(fmt, dtype="bfloat16", rounding="nearest_even", shape=SOME):
    words = empty(shape, "uint32") if rounding == "stochastic" else None
    return pointwise.encode(empty(shape, dtype), fmt, rounding, "saturate", words)


def decode(fmt, codes="uint8", shape=SOME):
    return pointwise.decode(empty(shape, codes), fmt)


def pack(fmt, shape=SOME):
    return pointwise.pack(empty(shape, "uint8"), fmt)


def unpack(fmt, shape=SOME):
    return pointwise.unpack(empty(packed_shape(shape, FORMATS[fmt]), "uint8"), fmt, shape)


def gathered(dtype="bfloat16", shape=BIG, filled=16512):
    """Rows sorted by expert as columns, groups filled up."""
    return host.gather_transposed(empty(shape, dtype), empty((filled,), "int32"))


def arranged(experts=8, step=16, places=16512):
    """Tables of rows sorted by expert."""
    return grouped_layout.group_layout(empty((experts,), "int32"), places, places, step)


def grouped(name, dtype="bfloat16", shape=BIG, step=16, experts=8):
    """Rows sorted by expert as codes of columns."""
    places = padded_rows(shape[0], experts, step)
    tables = empty((places,), "int32"), empty((places // 16,), "int32")
    return groups_host.group_columns(empty(shape, dtype), SCHEMES[name], *tables, experts, step)


def zeroed(which, dtype="bfloat16", shape=BIG):
    """Zeros where grouped products write nothing."""
    y = empty(shape, dtype)
    getattr(host, which)(y, empty((8,), "int32"))
    return y


def mixing(name=None, length=32, axis=0, dtype="bfloat16", shape=BIG, values=True):
    """Blocks mixed, and quantized by words drawn in place."""
    scheme = None
    if name is not None:
        scheme = replace(SCHEMES[name], name=f"{name}_stochastic", rounding="stochastic")
    rule, x = hadamard.Rule(scheme, length, axis), empty(shape, dtype)
    assert hadamard.covers(x, rule)
    if scheme is None:
        return hadamard.mixed(x, rule)
    return (hadamard.quantized_values if values else hadamard.quantized)(x, rule, 2**62 + 5, 4)


def words(shape=BIG):
    """Random words."""
    return random_words.random_words(shape, 2**62 + 5, 4, torch.device("cpu"))


def weight(name, shape):
    """A stored weight, small codes packed."""
    scheme = named(name)
    codes = empty(packed_shape(shape, scheme.format), "uint8")
    kept = scales_of(scheme, shape, 1)
    return Quantized(codes, kept.scale, kept.outer, kept.zero, shape, 1, scheme, scheme.format.bits < 8)


def linear(name, rows=1, dtype="bfloat16", shape=(4096, 4096), bias=False):
    added = empty(shape[:1], dtype) if bias else None
    return chosen.linear(empty((rows, shape[1]), dtype), weight(name, shape), added)


def pair(name, dtype="bfloat16", shape=(4096, 4096)):
    """One row times two weights."""
    return products.linear_pair(empty((1, shape[1]), dtype), weight(name, shape), weight(name, shape))


def gated(name, dtype="bfloat16", shape=(4096, 4096)):
    """silu of one product of one row times another."""
    return products.linear_swiglu(empty((1, shape[1]), dtype), weight(name, shape), weight(name, shape))


def codes(inputs, weight, rows=1, dtype="bfloat16", shape=(4096, 4096), bias=False, fast_sums=False):
    """Rows of codes times a weight of codes."""
    x, w = (
        Quantized(empty(size, "uint8"), kept.scale, kept.outer, kept.zero, size, 1, scheme)
        for size, scheme in (((rows, shape[1]), named(inputs)), (shape, named(weight)))
        for kept in (scales_of(scheme, size, 1),)
    )
    added = empty(shape[:1], dtype) if bias else None
    if rows > 1:
        return code_rows.linear_of_codes(x, w, added, getattr(torch, dtype), None, fast_sums)
    return products.linear_of_codes(x, w, added, getattr(torch, dtype), None)


@dataclass(frozen=True)
class Case:
    """A call, and the kernels that it launches, in order."""

    call: partial
    kernels: tuple[str, ...] = ("blocks_kernel",)

    @property
    def name(self):
        parts = [*self.call.args, *(f"{key}={value}" for key, value in self.call.keywords.items())]
        return " ".join([self.call.func.__name__, *map(str, parts)])


def case(function, *args, kernels=("blocks_kernel",), **options):
    return Case(partial(function, *args, **options), kernels)
