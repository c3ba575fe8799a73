"""Scales that are quantized themselves, by kernels on CPU tensors in Triton's interpreter, against `reference`, bit for bit.

    TRITON_INTERPRET=1 python tests/emulator/programs/second_level.py [day]

day: a record and a shape of each kind alone.
See `interpreted_kernels`. It prints what agreed, one line each, and raises at the first difference.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
import triton

import reference
from ao_lab.testing.strategies import assert_same_bits
from fast.kernels.quantize import host as quantizer
from fast.kernels.quantize import plan as passes
from fast.kernels.quantize import vjp
from fast.launch import cache
from reference import SCHEMES, Scales, Scheme
from tests.emulator import quick_interpreter
from tests.emulator.programs.kernels import numbers

NF4, TORCHAO = SCHEMES["nf4"], SCHEMES["torchao.nf4"]
# Less than a block, short last blocks and groups, one scale more than the last pass averages by itself.
SHAPES = ((), (3, 41), (64 * 257 + 1,), (64 * 1024 + 1,))


def record(
    name: str, base: Scheme = NF4, scale: Any = None, outer: Any = None, **fields: Any
) -> tuple[str, Scheme]:
    """A record of the user's own: fields of the scheme, of its scale and of its outer scale."""
    made = replace(base.scale, **(scale or {})), replace(base.outer, **(outer or {}))
    return name, replace(base, name=name, scale=made[0], outer=made[1], **fields)


RECORDS = (
    record("from stored scales", codes_from="stored"),
    record("odd groups", scale={"block": "flat:48"}, outer={"block": 40}),
    record("integers", element="int4", scale={"target": 7.0}),
    record("integers from stored scales", element="int8", scale={"target": 127.0}, codes_from="stored"),
    record("in the dtype", scale={"compute": "input"}, outer={"compute": "input"}, dequantize="target"),
    record("any NaN", nan="ieee", codes_from="stored"),
    record("long blocks", scale={"block": "flat:20000"}),
)


#: What is left to the night: other values of fields that a record of the day has, one more pass of averages.
BY_NIGHT = ("from stored scales", "integers", "any NaN")


def extremes(shape: tuple[int, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors whose scales are all NaN, all alike, as large or as small as there are, and of all sizes."""
    x = numbers(shape, torch.float32, seed=3)
    yield "NaN", torch.full_like(x, float("nan"))
    yield "zeros", torch.zeros_like(x)
    yield "ones", torch.ones_like(x)
    # The scale of the first block, read back, lies beyond float32.
    large = torch.where(torch.arange(x.numel()).reshape(shape) < 64, 1.0, 0.3)
    yield "large", large * torch.finfo(torch.float32).max
    yield "small", x * 1e-41
    yield "mixed", x * torch.exp2(torch.arange(x.numel()).reshape(shape) // 64 * 37 % 250 - 125.0)


def compare(x: torch.Tensor, scheme: Scheme) -> None:
    """Every function of the quantizer, and scales from outside."""
    q = reference.quantize(x, scheme)
    assert_same_bits(quantizer.quantize(x, scheme, -1, None, None, False), q)
    assert_same_bits(quantizer.choose_scales(x, scheme, -1), q.scales)
    strange = torch.randint(-128, 128, q.scale.shape, dtype=torch.int8)
    for given in (q.scales, Scales(strange, q.outer, q.zero), Scales(q.scale * 0, q.outer, q.zero * 0)):
        wanted = reference.quantize(x, scheme, scales=given)
        assert_same_bits(quantizer.quantize(x, scheme, -1, given, None, False), wanted)
        for dtype in ("float32", "float16"):
            assert_same_bits(quantizer.dequantize(wanted, dtype), reference.dequantize(wanted, dtype))
    if x.dtype == torch.bfloat16:
        return
    for given in (None, Scales(strange, q.outer, q.zero)):
        fake = reference.fake_quantize(x, scheme, scales=given)
        assert_same_bits(quantizer.fake_quantize(x, scheme, -1, given), fake)
        wanted = reference.fake_quantize_vjp(x, x, scheme, scales=given)
        assert_same_bits(vjp.gradient(x, x, scheme, -1, None, given), wanted)


def compare_packed(x: torch.Tensor, scheme: Scheme) -> None:
    """Packed codes, written and read."""
    q = reference.quantize(x, scheme, packed=True)
    assert_same_bits(quantizer.quantize(x, scheme, -1, None, None, True), q)
    assert_same_bits(quantizer.dequantize(q, "float32"), reference.dequantize(q))


def main(by_day: bool) -> None:
    """Compare everything, or what stands for it."""
    assert triton.knobs.runtime.interpret, "TRITON_INTERPRET=1 is missing"
    quick_interpreter.install()
    torch.manual_seed(0)
    for shape in SHAPES[: 3 if by_day else None]:
        compare(numbers(shape, torch.float32, specials=True), NF4)
        print("nf4", *shape, flush=True)
    for label, x in extremes((9, 300)):
        compare(x, NF4)
        print("nf4", label, flush=True)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for specials in (False, True):
            compare(numbers((64, 256), dtype, specials=specials), TORCHAO)
        compare_packed(numbers((64, 256), dtype, specials=True), TORCHAO)
        compare_packed(numbers((30, 64), dtype, specials=True), NF4)
        print("torchao.nf4", dtype, flush=True)
    # Trees of several passes, whose last is small.
    passes.AVERAGED, passes.MOST_AVERAGES = 16, 4
    for count in (5, 17, 300) if by_day else (5, 16, 17, 250, 300):
        cache.CALLS.clear()
        compare(numbers((count * 64 - 3,), torch.float32), NF4)
        print("passes", count, flush=True)
    for name, scheme in RECORDS:
        if by_day and name in BY_NIGHT:
            continue
        dtype = torch.float16 if scheme.outer.compute == "input" else torch.float32
        compare(numbers((7, 3001), dtype, specials=True), scheme)
        print(name, flush=True)
    print("agreed", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] == ["day"])
