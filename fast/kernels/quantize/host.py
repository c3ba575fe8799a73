"""`choose_scales`, `quantize`, `dequantize` and fake quantization of torch tensors by the block kernel.

Arguments are checked by the same code as in `reference`, so that messages agree. What a call does is a plan (`passes`), made
once for each shape and kept with its compiled kernels. Where no kernel covers a tensor (`geometry` says which) the functions
here give None, and the reference runs as torch operations on the tensor's device: the same bits, more slowly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fast.kernels.encode import pointwise
from fast.kernels.launch import cache as ready
from fast.kernels.launch import plan as passes
from fast.kernels.launch.launcher import interpreted, together
from fast.kernels.launch.plan import Asked, Plan
from fast.kernels.launch.plans import NAMES, Prepared
from fast.kernels.launch.replay import picked, several
from reference import Quantized, Scales
from reference.arrays.errors import choice
from reference.arrays.namespace import namespace_of
from reference.formats.encode import check_random_bits
from reference.formats.pack import packed_shape
from reference.formats.rounding import check_mode
from reference.quantize.blocks import Blocks
from reference.quantize.provided_scales import check_scales
from reference.quantize.quantize import check_quantized, with_plain_scales, with_tiled_scales
from reference.quantize.tiled_scales import check_tiled
from reference.schemes.schemes import Scheme, scheme_of

# Plans by what was asked. A program that sees ever new shapes starts afresh now and then.
PLANS: dict[Any, Prepared] = {}
MOST_PLANS = 4096
# Bytes that kernels read at once of packed codes, and of the numbers that become some.
WORD = 4
PARTS = ("scale", "outer", "zero")


def prepared(key: Any, make: Callable[[], Plan]) -> Prepared:
    """The plan of a key, made when it is first asked for."""
    found = PLANS.get(key)
    if found is None:
        if len(PLANS) >= MOST_PLANS:
            PLANS.clear()
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


def quantize(
    x: torch.Tensor,
    asked_scheme: str | Scheme,
    axis: int,
    scales: Any,
    words: Any,
    packed: bool,
    tiled: bool = False,
    key: Any = None,
) -> Quantized | None:
    """`fast.quantize` by kernels, or None where none covers it. key: of the call, here and below; see `ready`."""
    scheme = scheme_of(asked_scheme)
    check_mode(scheme.rounding, words)
    if packed:
        packed_shape(tuple(x.shape), scheme.format)  # refuses a 0-d tensor
    if tiled:
        check_tiled(scheme, tuple(x.shape), axis)
    of = asked_of(x, scheme, axis)
    given = check_scales(namespace_of(x), scales, scheme, Blocks.of(tuple(x.shape), scheme.scale, axis))
    check_words(x, scheme, words)
    if of is None or not together(x, words, *given_parts(given).values()):
        return None
    return _quantize(x, of, given, words, packed, tiled, key, asked_scheme)


def _quantize(
    x: torch.Tensor, of: Asked, given: Scales | None, words: Any, packed: bool, tiled: bool, key: Any,
    asked_scheme: str | Scheme,
) -> Quantized:  # fmt: skip
    """Codes and scales by the passes of a plan, which answers the next call with this key."""
    kind, fused = given_kind(given), packed and passes.packs(of)
    tiles = tiled and passes.tiles(of, kind)
    plan = prepared(
        ("quantize", of.dtype, of.scheme, of.blocks, kind, fused, tiles),
        lambda: passes.quantizing(of, kind, fused, tiles),
    )
    tensors = inputs(x, given, words)
    if fused or passes.paired(of, fused):
        tensors["x"] = in_words(tensors["x"])
    made = plan(tensors, x.device)
    codes = _packed(made["codes"], of.scheme) if packed and not fused else made["codes"]
    q = _finished(of, codes, kept_scales(made, given), packed, tiled)
    if key is not None and codes is made["codes"] and tiles == tiled:
        plan.remember(key, asked_scheme, asked_tensors(x, given, words), partial(ready.like, q))
    return q


def asked_tensors(x: torch.Tensor, given: Scales | None, words: Any) -> dict[str, Any]:
    """The caller's tensors in the order of `ready.inputs`, by the names of the kernel's arguments."""
    parts = given_parts(Scales() if given is None else given)
    return {"x": x} if given is None and words is None else {"x": x, **parts, "words": words}


def inputs(x: torch.Tensor, given: Scales | None, words: Any) -> dict[str, Any]:
    """The caller's tensors, contiguous, by the names of the kernel's arguments."""
    tensors = {"x": x, "words": words, **given_parts(given)}
    return {name: value.contiguous() for name, value in tensors.items() if value is not None}


def in_words(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, where it can be read in words of 4 bytes; else, as in a view that begins at an odd element, a copy."""
    return tensor.clone() if tensor.data_ptr() % WORD else tensor


def given_parts(given: Any) -> dict[str, Any]:
    """The scale, outer scale and zero point of `Scales` or a `Quantized`, None where there is none."""
    return {} if given is None else {part: getattr(given, part) for part in PARTS}


def kept_scales(made: dict[str, Any], given: Scales | None) -> Scales:
    """The scales that the result keeps: the given ones, where there are any."""
    if given is not None and given.scale is not None:
        return given
    outer = made.get("outer") if given is None else given.outer
    return Scales(made["scale"], outer, made.get("zero"))


def _finished(of: Asked, codes: torch.Tensor, kept: Scales, packed: bool, tiled: bool) -> Quantized:
    """tiled: scales that no kernel tiled are tiled here; a matrix of them is not flat."""
    blocks = of.blocks
    place = (blocks.shape, blocks.axis, of.scheme, packed, tiled and kept.scale.dim() == 1)
    q = Quantized(codes, kept.scale, kept.outer, kept.zero, *place)
    return with_tiled_scales(q) if tiled else q


def _packed(codes: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    made = pointwise.pack(codes, scheme.format)
    return codes if made is None else made


def choose_scales(x: torch.Tensor, asked_scheme: str | Scheme, axis: int, key: Any = None) -> Scales | None:
    """`fast.choose_scales` by a kernel, or None where none covers the tensor."""
    of = asked_of(x, scheme_of(asked_scheme), axis)
    if of is None:
        return None
    plan = prepared(("choose", of.dtype, of.scheme, of.blocks), lambda: passes.choosing(of))
    made = kept_scales(plan({"x": x.contiguous()}, x.device), None)
    kept = several(*(part if getattr(made, part) is not None else None for part in PARTS))
    plan.remember(key, asked_scheme, {"x": x}, lambda names: _scales_of(kept(names)))
    return made


def _scales_of(parts: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Scales]:
    return lambda tensors: Scales(*parts(tensors))


def dequantize(q: Quantized, dtype: str, key: Any = None) -> torch.Tensor | None:
    """`fast.dequantize` by a kernel, or None where none covers the tensor."""
    choice(dtype, ("float32", "bfloat16", "float16", "float64"), "dtype")
    blocks, scheme = check_quantized(q), q.scheme
    if dtype == "float64" or not together(q.codes, *given_parts(q).values()):
        return None
    key, q = None if q.tiled else key, with_plain_scales(q)
    of = passes.asked(dtype, scheme, blocks, not interpreted())
    packed = q.packed and scheme.format.bits < 8
    if of is None or (packed and not passes.packs(of)):
        return None
    stored = {part: value.contiguous() for part, value in given_parts(q).items() if value is not None}
    tensors = {"codes": in_words(q.codes.contiguous()), **stored}
    plan = prepared(("dequantize", dtype, scheme, of.blocks, packed), lambda: passes.dequantizing(of, packed))
    y = plan(tensors, q.codes.device)["y"]
    plan.remember(key, scheme, {"codes": q.codes, **given_parts(q)}, picked("y"))
    return y  # type: ignore[no-any-return]


def fake_quantize(
    x: torch.Tensor, asked_scheme: str | Scheme, axis: int, scales: Any, words: Any = None, key: Any = None
) -> torch.Tensor | None:
    """`fast.fake_quantize` without autograd."""
    scheme = scheme_of(asked_scheme)
    check_mode(scheme.rounding, words)
    of = asked_of(x, scheme, axis)
    given = check_scales(namespace_of(x), scales, scheme, Blocks.of(tuple(x.shape), scheme.scale, axis))
    check_words(x, scheme, words)
    if of is None or not together(x, words, *given_parts(given).values()):
        return None
    kind = given_kind(given)
    plan = prepared(("fake", of.dtype, scheme, of.blocks, kind), lambda: passes.fake_quantizing(of, kind))
    y = plan(inputs(x, given, words), x.device)["y"]
    plan.remember(key, asked_scheme, asked_tensors(x, given, words), picked("y"))
    return y  # type: ignore[no-any-return]


def gradient(
    g: torch.Tensor,
    x: torch.Tensor,
    scheme: str | Scheme,
    axis: int,
    words: Any = None,
    scales: Any = None,
    key: Any = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None] | None:
    """`fast.fake_quantize_vjp` by kernels, or None where none covers the tensors."""
    from fast.kernels.quantize import vjp as gradients

    return gradients.gradient(g, x, scheme, axis, words, scales, key)
