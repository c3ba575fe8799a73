"""Gradients of fake quantization in Triton's interpreter, against `reference.fake_quantize_vjp`, bit for bit.

    TRITON_INTERPRET=1 python -m tests.emulator.interpreter_process gradients gradients [day | SCHEME ...]

`programs/kernels.py` says what the interpreter can show. Every case is tried with gradients of
many magnitudes, with NaN and infinities among numbers and gradients, and with zeros of one sign, whose sums have a sign too.

Notes of blocks that reach beyond the codes, and gradients masked by them, in Triton's interpreter, bit for bit.

    TRITON_INTERPRET=1 python -m tests.emulator.interpreter_process gradients saturation places | sequences

places: every place of blocks, by the rules of any record. sequences: by the instruction sequences of a GPU, emulated.
Numbers are such that ends of ranges lie half way between codes, among others.
"""

from dataclasses import replace

import torch

import reference
from ao_lab.testing.strategies import assert_same_bits
from fast.kernels.quantize import host as clipping
from fast.kernels.quantize import host as quantizer
from fast.kernels.quantize import plan as passes
from fast.kernels.quantize import vjp as gradients
from fast.kernels.quantize.host import problem_of
from fast.launch.launcher import Call
from reference import SCHEMES, Scales, Scheme
from reference.arrays.bridges import to_torch
from reference.schemes.schemes import scheme_of
from tests.emulator import ptx_interpreter, quick_interpreter
from tests.emulator.programs.fast_codes import halfway, inputs, one_tile
from tests.emulator.programs.kernels import numbers, words

# (scheme, fields of its scale, shape, axis): every shape of tiles, whole, cut, short; every rule of scales and zero points.
CASES = (
    ("fp8_rowwise", {}, (3, 77), -1),
    ("fp8_rowwise", {}, (300, 5), 0),
    ("fp8_rowwise", {}, (2, 17001), -1),
    ("fp8_tensorwise_e5m2", {}, (2, 4601), -1),
    ("fp8_tensorwise", {}, (), -1),
    ("fp8_1x128", {}, (3, 200), -1),
    ("fp8_1x128", {}, (200, 3), 0),
    ("fp8_1x128", {}, (64, 3), 0),
    ("fp8_1x128", {"block": 300}, (77, 3), 0),
    ("fp8_1x128", {"block": 16384}, (2, 9001), -1),
    ("fp8_1x128", {"block": "flat:48"}, (7, 31), -1),
    ("fp8_128x128", {}, (130, 150), -1),
    ("fp8_128x128", {}, (130, 150), 0),
    ("int4_g32_asymmetric", {"block": (16, 32), "partial": True}, (33, 70), 0),
    ("int4_g32_asymmetric", {}, (64, 3), 0),
    ("int8_rowwise_asymmetric", {}, (2, 9001), -1),
    ("mxfp8_e4m3", {}, (2, 96, 5), 1),
    ("mxfp8_e5m2_rceil", {}, (3, 64), -1),
    ("mxint8", {}, (3, 64), -1),
    ("nvfp4", {}, (5, 64), -1),
    ("te.nvfp4_16x16", {}, (32, 48), -1),
    ("compressed_tensors.nvfp4", {}, (3, 64), -1),
    ("torchao.nvfp4", {}, (3, 64), -1),
    ("torchao.fp8_rowwise_training", {}, (3, 77), -1),
    ("torchao.int4_g32_asymmetric", {}, (3, 64), -1),
    ("torchao.int4_g32_tinygemm", {}, (3, 64), -1),
    ("torchao.mxfp8_e4m3_rceil", {}, (3, 64), -1),
    ("nf4", {}, (3, 41), -1),
    ("torchao.nf4", {}, (64, 256), -1),
    ("ternary_g32", {}, (3, 64), -1),
    ("stretched2_rowwise", {}, (3, 77), -1),
)


#: Of other cases the paths are among those: another record by the same rules, a shape by the same passes.
BY_NIGHT = (5, 6, 8, 12, 14, 17, 18, 21, 22, 23, 24, 27, 29)


def gradient_of(x: torch.Tensor, kind: str) -> torch.Tensor:
    """What arrives at y: ordinary numbers, with NaN of any payload and infinities, or zeros."""
    g = numbers(tuple(x.shape), x.dtype, seed=2)
    flat = g.reshape(-1)
    if kind in ("+0", "-0"):
        return torch.full_like(g, float(kind))
    if kind == "special" and flat.numel() > 60:
        flat[5::89], flat[::97] = -float("inf"), float("nan")
        if x.dtype == torch.float32:
            flat.view(torch.int32)[44] = -0x3FFFEE
    return g


def rare(given: Scales) -> Scales:
    """Every third scale 0, every third a huge power of two or, as a float8_e4m3fn, a negative number."""
    scale = given.scale.contiguous().clone()
    flat = scale.view(-1)
    flat[::3], flat[1::3] = 0, -1 if scale.dtype == torch.int8 else 254
    return replace(given, scale=scale)


def compare(
    x: torch.Tensor, g: torch.Tensor, record: reference.Scheme, axis: int, scales, drawn=None
) -> None:
    """One call."""
    wanted = reference.fake_quantize_vjp(g, x, record, axis=axis, scales=scales, random_bits=drawn)
    assert_same_bits(gradients.gradient(g, x, record, axis, drawn, scales), wanted)


def compare_case(name: str, fields: dict, shape: tuple[int, ...], axis: int) -> None:
    """Scales of x / 2, under which elements saturate, some of them zero or huge; scales from x; an outer scale alone."""
    record = SCHEMES[name]
    record = replace(record, name=f"{name} {fields}", scale=replace(record.scale, **fields))
    for kind, dtype in (("plain", torch.float32), ("special", torch.float32), ("+0", torch.float32), ("-0", torch.float32),
                        ("special", torch.float16), ("special", torch.bfloat16)):  # fmt: skip
        x = numbers(shape, dtype, specials=kind == "special")
        g = gradient_of(x, kind)
        given = reference.choose_scales(x / 2, record, axis=axis)
        compare(x, g, record, axis, given)
        if kind != "plain":
            compare(x, g, record, axis, rare(given))
            compare(x, g, record, axis, None)
        if given.outer is not None and given.outer.shape == ():
            for factor in (1.5, -1.0, 1e-38):
                compare(x, g, record, axis, Scales(outer=given.outer * factor))
            # The reciprocal of the combined scale overflows.
            compare(x * 1e-43, g, record, axis, Scales(outer=torch.full_like(given.outer, 1e-40)))
    print(name, *fields.values(), "x".join(map(str, shape)), axis, flush=True)


def compare_stochastic() -> None:
    """The words of the forward pass decide what saturated."""
    for name, shape in (("mxfp4", (3, 96)), ("int8_rowwise", (3, 77)), ("nvfp4", (5, 64))):
        record = replace(scheme_of(name), rounding="stochastic", name=f"{name} stochastic")
        x = numbers(shape, torch.float32)
        compare(x, gradient_of(x, "plain"), record, -1, reference.choose_scales(x / 2, record), words(shape))
        print(name, "stochastic", flush=True)


def compare_long_sums() -> None:
    """Sums of more parts than a program takes."""
    parts = numbers((3, 5001), torch.float32)
    wanted = parts.new_zeros((3, 8192))
    wanted[:, :5001] = parts
    while wanted.shape[1] > 1:
        wanted = wanted[:, 0::2] + wanted[:, 1::2]
    call = Call({"parts": parts})
    made = gradients._total(call, "parts", tuple(parts.shape), (3, 1))
    assert_same_bits(call.tensors[made], wanted)
    print("long sums", flush=True)


def all_gradients(*names: str) -> None:
    """Compare all, or the cases of some schemes."""
    by_day = names == ("day",)
    for at, case in enumerate(CASES):
        if (by_day and at not in BY_NIGHT) or not names or case[0] in names:
            compare_case(*case)
    compare_stochastic()
    compare_long_sums()


# (scheme, fields of its scale, shape, axis).
PLACES = (
    ("int8_rowwise_asymmetric", {}, (3, 77), -1),
    ("int8_rowwise_asymmetric", {}, (70, 5), 0),
    ("int4_g32_asymmetric", {}, (66, 64), -1),
    ("int4_g32_asymmetric", {}, (64, 3), 0),
    ("int4_g32_asymmetric", {"partial": True}, (3, 45), -1),
    ("int4_g32_asymmetric", {"block": (16, 32), "partial": True}, (33, 70), 0),
    ("int4_g128_asymmetric", {}, (64, 128), -1),
)
SEQUENCES = (
    "int4_g32_asymmetric",
    "int4_g128_asymmetric",
    "int8_g64_asymmetric",
    "int8_rowwise_asymmetric",
)
#: Of which no notes are made: no zero point, one that is a number, other rules, rows in parts.
WITHOUT = (
    ("int8_rowwise", (3, 64)),
    ("mxfp4", (3, 64)),
    ("nvfp4", (3, 64)),
    ("torchao.int4_g32_tinygemm", (3, 64)),
    ("torchao.int4_g32_asymmetric", (3, 64)),
    ("int8_rowwise_asymmetric", (2, 40000)),
)


def compare_saturated(x: torch.Tensor, scheme: Scheme, axis: int) -> int:
    """Values as without notes, notes, and masked gradients; how many blocks are noted."""
    found = clipping.noted(x, scheme, axis)
    assert found is not None
    y, notes = found
    assert_same_bits(y, quantizer.fake_quantize(x, scheme, axis, None))
    g = gradient_of(x, "special")
    dx, _, _ = reference.fake_quantize_vjp(g, x, scheme, axis=axis)
    lost = reference.fake_quantize_vjp(torch.ones_like(g), x, scheme, axis=axis)[0] == 0
    mine = g.clone()
    assert clipping.clip(mine, x, notes, scheme, axis) is mine
    assert_same_bits(mine, torch.where(lost, torch.zeros_like(g), g))
    assert_same_bits(mine.nan_to_num(7.0), dx.nan_to_num(7.0))
    assert int(notes.max()) <= 1
    assert bool(notes.any()) == bool(lost.any()), "blocks are noted that lose nothing, or the other way round"
    # Without notes nothing is touched, whatever lies beyond the codes.
    untouched = g.clone()
    assert_same_bits(clipping.clip(untouched, x, torch.zeros_like(notes), scheme, axis), g)
    return int(notes.sum())


def compare_place(name: str, fields: dict, shape: tuple[int, ...], axis: int) -> None:
    """Ordinary numbers with NaN and infinities, and ranges whose ends are halfway between codes."""
    scheme = SCHEMES[name]
    scheme = replace(scheme, name=f"{name} {fields}", scale=replace(scheme.scale, **fields))
    noted = 0
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = numbers(shape, dtype, specials=True)
        compare_saturated(x, scheme, axis)
        # As far below zero as above: halfway between the codes on both sides, in many blocks.
        pairs = torch.where(torch.arange(x.numel()).reshape(shape) % 2 == 0, 1.0, -1.0).to(dtype)
        noted += compare_saturated(pairs * numbers(shape, dtype).abs().amax(), scheme, axis)
    assert noted
    print(name, *fields.values(), "x".join(map(str, shape)), axis, flush=True)


def compare_sequences(name: str) -> None:
    """Inputs of the instruction sequences."""
    scheme = SCHEMES[name]
    noted = 0
    for dtype in ("float32", "bfloat16", "float16"):
        tried = [x for label, x in inputs(scheme, dtype, 0.02) if label != "patterns"]
        block = scheme.scale.block
        size = block if isinstance(block, int) and block > 0 else 256
        noted += sum(
            compare_saturated(x, scheme, -1) for x in (*tried, to_torch(halfway(scheme, dtype, size)))
        )
        of = problem_of(tried[0], scheme, -1)
        assert of is not None
        assert of.rule.ranged, "not by the sequences"
        print(name, dtype, flush=True)
    assert noted


def compare_without() -> None:
    """Nothing is noted where the rule does not hold."""
    for name, shape in WITHOUT:
        assert clipping.noted(numbers(shape, torch.bfloat16), name, -1) is None
    print("without notes", flush=True)


def saturation(group: str) -> None:
    """Compare one group."""
    if group == "places":
        for case in PLACES:
            compare_place(*case)
        compare_without()
    else:
        ptx_interpreter.install()
        passes.geometry, passes.MASK_TILE = one_tile(passes.geometry), 1 << 14
        for name in SEQUENCES:
            compare_sequences(name)


def main(name: str, *arguments: str) -> None:
    """Compare what has this name."""
    quick_interpreter.install()
    {"gradients": all_gradients, "saturation": saturation}[name](*arguments)
