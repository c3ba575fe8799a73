"""`choose_scales`, `quantize`, `dequantize` and fake quantization of torch tensors by the block kernel.

Arguments are checked by the same code as in `reference`, so that messages agree. What a call does is a plan (`passes`), made
once for each shape and kept with its compiled kernels. Where no kernel covers a tensor (`geometry` says which) the functions
here give None, and the reference runs as torch operations on the tensor's device: the same bits, more slowly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from fast.kernels import passes, pointwise
from fast.kernels.launch import ALIGNMENT, interpreted
from fast.kernels.passes import Asked, Plan
from fast.kernels.plans import DTYPES, NAMES, Prepared, Quick
from reference import Quantized, Scales
from reference.arrays import namespace_of
from reference.blocks import Blocks
from reference.encode import check_random_bits
from reference.errors import choice
from reference.given import check_scales, given_scales, usable
from reference.pack import packed_shape
from reference.quantize import unpacked
from reference.rounding import check_mode
from reference.scales import _two_level as second_level
from reference.schemes import Scheme, scheme_of

# Plans by what was asked. A program that sees ever new shapes starts afresh now and then.
PLANS: dict[Any, Prepared] = {}
# What `quantize` needs for a tensor that it has seen the like of.
READY: dict[Any, tuple[Quick, tuple[int, ...], int, Scheme]] = {}
MOST_PLANS = 4096
PARTS = ("scale", "outer", "zero")


def prepared(key: Any, make: Callable[[], Plan]) -> Prepared:
    """The plan of a key, made when it is first asked for."""
    found = PLANS.get(key)
    if found is None:
        if len(PLANS) >= MOST_PLANS:
            PLANS.clear()
            READY.clear()
        found = PLANS[key] = Prepared(make())
    return found


def asked_of(x: torch.Tensor, scheme: Scheme, axis: int) -> Asked | None:
    """What plans are made from, or None where no kernel covers the tensor; ValueError as the reference raises it."""
    name = NAMES.get(x.dtype)
    blocks = Blocks.of(tuple(x.shape), scheme.scale, axis)
    return None if name is None else passes.asked(name, scheme, blocks, not interpreted())


def check_words(x: torch.Tensor, scheme: Scheme, words: Any) -> None:
    """Random words where, and only where, the record rounds stochastically; ValueError otherwise."""
    check_mode(scheme.rounding, words)
    check_random_bits(namespace_of(x), x, words)


def given_kind(given: Scales | None) -> str:
    """Which scales the caller brought: "", "outer" or "all"."""
    return "" if given is None else "outer" if given.scale is None else "all"


def contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The tensor in row-major order."""
    return None if tensor is None else tensor.contiguous()


def ready(x: torch.Tensor, scheme: str | Scheme, axis: int, packed: bool) -> Quantized | None:
    """`quantize` with computed scales of a tensor like one seen before, without any further check; None otherwise."""
    if not isinstance(scheme, (str, Scheme)):
        return None
    found = READY.get((scheme, x.dtype, x.shape, axis, type(axis), packed))
    if found is None or not x.is_contiguous() or x.data_ptr() % ALIGNMENT:
        return None
    quick, shape, axis, record = found
    made = quick(x)
    if made is None:
        return None
    return Quantized(made[0], made[1], made[2], made[3], shape, axis, record, packed)


def _remember(of: Asked, key: Any, plan: Prepared) -> None:
    """Make the next call with this key a quick one."""
    if Quick.serves(plan) and not interpreted():
        READY[key] = (Quick(plan), of.blocks.shape, of.blocks.axis, of.scheme)


def quantize(
    x: torch.Tensor, asked_scheme: str | Scheme, axis: int, scales: Any, words: Any, packed: bool
) -> Quantized | None:
    """`fast.quantize` by kernels, or None where none covers it."""
    scheme = scheme_of(asked_scheme)
    check_mode(scheme.rounding, words)
    if packed:
        packed_shape(tuple(x.shape), scheme.format)  # refuses a 0-d tensor
    of = asked_of(x, scheme, axis)
    given = check_scales(namespace_of(x), scales, scheme, Blocks.of(tuple(x.shape), scheme.scale, axis))
    check_words(x, scheme, words)
    if of is None:
        return None
    if of.rule.two_level:
        codes, kept = _two_level_codes(x, of, given)
    else:
        fused = packed and passes.packs(of)
        codes, kept = _codes(x, of, given, words, fused)
        if given is None and words is None and fused == packed:
            plan = PLANS[("quantize", of.dtype, scheme, of.blocks, "", fused)]
            _remember(of, (asked_scheme, x.dtype, x.shape, axis, type(axis), packed), plan)
        if fused:
            return _finished(of, codes, kept, True)
    return _finished(of, _packed(codes, scheme) if packed else codes, kept, packed)


def _codes(
    x: torch.Tensor, of: Asked, given: Scales | None, words: Any, packed: bool
) -> tuple[torch.Tensor, Scales]:
    kind = given_kind(given)
    plan = prepared(
        ("quantize", of.dtype, of.scheme, of.blocks, kind, packed),
        lambda: passes.quantizing(of, kind, packed),
    )
    made = plan(inputs(x, given, words), x.device)
    return made["codes"], kept_scales(made, given)


def inputs(x: torch.Tensor, given: Scales | None, words: Any) -> dict[str, Any]:
    """The caller's tensors, contiguous, by the names of the kernel's arguments."""
    tensors = {"x": x.contiguous(), "words": contiguous(words)}
    if given is not None:
        tensors.update({part: contiguous(getattr(given, part)) for part in PARTS})
    return {name: value for name, value in tensors.items() if value is not None}


def kept_scales(made: dict[str, Any], given: Scales | None) -> Scales:
    """The scales that the result keeps: the given ones, where there are any."""
    if given is not None and given.scale is not None:
        return given
    outer = made.get("outer") if given is None else given.outer
    return Scales(made["scale"], outer, made.get("zero"))


def _finished(of: Asked, codes: torch.Tensor, kept: Scales, packed: bool) -> Quantized:
    blocks = of.blocks
    return Quantized(codes, kept.scale, kept.outer, kept.zero, blocks.shape, blocks.axis, of.scheme, packed)


def _packed(codes: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    made = pointwise.pack(codes, scheme.format)
    return codes if made is None else made


def choose_scales(x: torch.Tensor, scheme: Scheme, axis: int) -> Scales | None:
    """`fast.choose_scales` by a kernel, or None where none covers the tensor."""
    of = asked_of(x, scheme, axis)
    if of is None:
        return None
    if of.rule.two_level:
        return two_level(x, of, None).kept  # type: ignore[no-any-return]
    plan = prepared(("choose", of.dtype, of.scheme, of.blocks), lambda: passes.choosing(of))
    return kept_scales(plan({"x": x.contiguous()}, x.device), None)


def two_level(x: torch.Tensor, of: Asked, given: Scales | None) -> Any:
    """Chosen scales of a record whose scales are quantized: first level by kernel, the few scales by torch operations."""
    ns, scheme = namespace_of(x), of.scheme
    if given is not None:
        return usable(ns, given_scales(ns, given, of.blocks, scheme), scheme)
    first = replace(of, scheme=passes.first_level(scheme))
    plan = prepared(("choose", first.dtype, first.scheme, first.blocks), lambda: passes.choosing(first))
    exact = plan({"x": x.contiguous()}, x.device)["scale"]
    bits = exact.view(torch.int32).reshape((*of.blocks.scale_shape, 1))
    return second_level(ns, bits, of.blocks, scheme, of.dtype)


def _two_level_codes(x: torch.Tensor, of: Asked, given: Scales | None) -> tuple[torch.Tensor, Scales]:
    chosen = two_level(x, of, given)
    scale = floats(chosen.exact if of.scheme.codes_from == "exact" else chosen.scale)
    plan = prepared(("exact", of.dtype, of.scheme, of.blocks), lambda: passes.exact_codes(of))
    return plan({"x": x.contiguous(), "scale": scale}, x.device)["codes"], chosen.kept


def floats(bits: torch.Tensor) -> torch.Tensor:
    """int32 patterns as a flat float32 tensor."""
    return bits.reshape(-1).contiguous().view(torch.float32)


def dequantize(q: Quantized, dtype: str) -> torch.Tensor | None:
    """`fast.dequantize` by a kernel, or None where none covers the tensor."""
    choice(dtype, ("float32", "bfloat16", "float16", "float64"), "dtype")
    if dtype == "float64" or q.codes.dtype not in (torch.uint8, torch.uint16):
        return None
    scheme = q.scheme
    if tuple(q.codes.shape) != (packed_shape(q.shape, scheme.format) if q.packed else q.shape):
        unpacked(q)  # says what is wrong
    of = passes.asked(dtype, scheme, Blocks.of(q.shape, scheme.scale, q.axis), not interpreted())
    packed = q.packed and scheme.format.bits < 8
    if of is None or (packed and not passes.packs(of)) or not _fits(q, of):
        return None
    tensors = {"codes": q.codes.contiguous(), **_stored_scales(q, of)}
    plan = prepared(("dequantize", dtype, scheme, of.blocks, packed), lambda: passes.dequantizing(of, packed))
    return plan(tensors, q.codes.device)["y"]  # type: ignore[no-any-return]


def _fits(q: Quantized, of: Asked) -> bool:
    """Whether the scales have the shapes and dtypes that a kernel would read; otherwise the reference says what is wrong."""
    if of.rule.two_level:
        return True
    for part, buffer in passes.scale_buffers(of).items():
        value = getattr(q, part)
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != buffer.shape:
            return False
        if value.dtype != DTYPES[buffer.dtype] or value.device != q.codes.device:
            return False
    return True


def _stored_scales(q: Quantized, of: Asked) -> dict[str, Any]:
    """Scales as the kernel reads them; two-level ones are brought to float32 first."""
    if not of.rule.two_level:
        scales = {part: contiguous(getattr(q, part)) for part in PARTS}
        return {part: value for part, value in scales.items() if value is not None}
    precision = of.dtype if of.scheme.dequantize == "target" else "float32"
    chosen = given_scales(namespace_of(q.codes), q.scales, of.blocks, of.scheme, precision)
    return {"scale": floats(chosen.scale)}


def fake_quantize(
    x: torch.Tensor, scheme: Scheme, axis: int, scales: Any, words: Any = None
) -> torch.Tensor | None:
    """`fast.fake_quantize` without autograd: quantized and dequantized in registers."""
    check_mode(scheme.rounding, words)
    of = asked_of(x, scheme, axis)
    given = check_scales(namespace_of(x), scales, scheme, Blocks.of(tuple(x.shape), scheme.scale, axis))
    check_words(x, scheme, words)
    if of is None:
        return None
    if of.rule.two_level:
        q = quantize(x, scheme, axis, scales, words, False)
        return None if q is None else dequantize(q, of.dtype)
    kind = given_kind(given)
    plan = prepared(("fake", of.dtype, scheme, of.blocks, kind), lambda: passes.fake_quantizing(of, kind))
    return plan(inputs(x, given, words), x.device)["y"]  # type: ignore[no-any-return]


def gradient(
    g: torch.Tensor, x: torch.Tensor, scheme: Scheme, axis: int, words: Any = None, scales: Any = None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None] | None:
    """`fast.fake_quantize_vjp` by kernels, or None where none covers the tensors."""
    from fast.kernels import gradients

    return gradients.gradient(g, x, scheme, axis, words, scales)
