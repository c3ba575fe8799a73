"""`choose_scales`, `quantize`, `dequantize` and fake quantization of torch tensors by the block kernel.

Arguments are checked by the same code as in `reference`, so that messages agree. What a call does is a plan (`launch.plan`).
Where no kernel covers a tensor (`geometry` says which) the functions here give None, and the reference runs as torch operations
on the tensor's device: the same bits, more slowly. key: of the call, see `launch.cache`.
"""

from __future__ import annotations

from typing import Any

import torch

from fast.kernels.encode.pointwise import add_packing
from fast.kernels.launch.cache import PARTS, like
from fast.kernels.launch.call import FLOATS, Call, Finishing, select, select_all
from fast.kernels.launch.launcher import interpreted, same_device
from fast.kernels.quantize import plan as plans
from fast.kernels.quantize.block_launch import run_plan
from fast.kernels.quantize.plan import Problem
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


def problem_of(x: torch.Tensor, scheme: Scheme, axis: int) -> Problem | None:
    """What plans are made from, or None where no kernel covers the tensor; ValueError as the reference raises it."""
    name = FLOATS.get(x.dtype)
    blocks = Blocks.of(tuple(x.shape), scheme.scale, axis)
    return None if name is None else plans.problem_of(name, scheme, blocks, not interpreted())


def checked(
    x: torch.Tensor, scheme: Scheme, axis: int, scales: Any, words: Any
) -> tuple[Problem | None, Scales | None]:
    """The problem, None where no kernel covers it, and the given scales; the errors of the reference, in its order."""
    of = problem_of(x, scheme, axis)
    given = check_scales(namespace_of(x), scales, scheme, Blocks.of(tuple(x.shape), scheme.scale, axis))
    check_mode(scheme.rounding, words)
    check_random_bits(namespace_of(x), x, words)
    return (of if same_device(x, words, *stored_parts(given).values()) else None), given


def given_kind(given: Scales | None) -> str:
    """Which scales the caller brought: "", "outer" or "all"."""
    return "" if given is None else "outer" if given.scale is None else "all"


def operands(x: torch.Tensor, given: Scales | None, words: Any) -> dict[str, Any]:
    """The caller's tensors in the order of the key, by the names of the kernel's arguments."""
    if given is None and words is None:
        return {"x": x}
    return {"x": x, **stored_parts(Scales() if given is None else given), "words": words}


def stored_parts(given: Any) -> dict[str, Any]:
    """The scale, outer scale and zero point of `Scales` or a `Quantized`, None where there is none."""
    return {} if given is None else {part: getattr(given, part) for part in PARTS}


def quantize(
    x: torch.Tensor, record: str | Scheme, axis: int, scales: Any, words: Any, packed: bool, tiled: bool = False,
    key: Any = None,
) -> Quantized | None:  # fmt: skip
    """`fast.quantize` by kernels, or None where none covers it."""
    scheme = scheme_of(record)
    check_mode(scheme.rounding, words)
    if packed:
        packed_shape(tuple(x.shape), scheme.format)  # refuses a 0-d tensor
    if tiled:
        check_tiled(scheme, tuple(x.shape), axis)
    of, given = checked(x, scheme, axis, scales, words)
    if of is None:
        return None
    kind, fused = given_kind(given), packed and plans.packs(of, writes=True)
    tiles = tiled and plans.tiles(of, kind)
    read_in_words = fused or plans.paired(of, fused)
    call = Call(operands(x, given, words), words=("x",) if read_in_words else ())
    run_plan(call, plans.quantizing(of, kind, fused, tiles))
    apart = packed and not fused and add_packing(call, "codes", "packed", scheme.format)
    result: Quantized = call.result(
        _quantized(call, of, packed, tiled, "packed" if apart else "codes"), key, record
    )
    return result


def _quantized(call: Call, of: Problem, packed: bool, tiled: bool, codes: str) -> Finishing:
    """The result of `quantize`; scales that no kernel tiled are tiled here; a matrix of them is not flat."""

    def finishing(names: list[str]) -> Any:
        scales = [part if part in names else None for part in PARTS]
        flat = (
            tiled
            and len(call.buffers["scale"].shape if "scale" in call.buffers else of.blocks.scale_shape) == 1
        )
        place = (of.blocks.shape, of.blocks.axis, of.scheme, packed, flat)
        finish = like(Quantized(codes, *scales, *place), names, {"codes": codes})
        return finish if flat or not tiled else lambda tensors: with_tiled_scales(finish(tensors))

    return finishing


def choose_scales(x: torch.Tensor, record: str | Scheme, axis: int, key: Any = None) -> Scales | None:
    """`fast.choose_scales` by a kernel, or None where none covers the tensor."""
    of = problem_of(x, scheme_of(record), axis)
    if of is None:
        return None
    call = Call({"x": x})
    run_plan(call, plans.choosing(of))
    parts = select_all(*(part if part in call.buffers else None for part in PARTS))

    def finishing(names: list[str]) -> Any:
        selected = parts(names)
        return lambda tensors: Scales(*selected(tensors))

    result: Scales = call.result(finishing, key, record)
    return result


def dequantize(q: Quantized, dtype: str, key: Any = None) -> torch.Tensor | None:
    """`fast.dequantize` by a kernel, or None where none covers the tensor."""
    choice(dtype, ("float32", "bfloat16", "float16", "float64"), "dtype")
    blocks, scheme = check_quantized(q), q.scheme
    if dtype == "float64" or not same_device(q.codes, *stored_parts(q).values()):
        return None
    key, q = None if q.tiled else key, with_plain_scales(q)
    of = plans.problem_of(dtype, scheme, blocks, not interpreted())
    packed = q.packed and scheme.format.bits < 8
    if of is None or (packed and not plans.packs(of)):
        return None
    call = Call({"codes": q.codes, **stored_parts(q)}, words=("codes",))
    run_plan(call, plans.dequantizing(of, packed))
    y: torch.Tensor = call.result(select("y"), key, scheme)
    return y


def fake_quantize(
    x: torch.Tensor, record: str | Scheme, axis: int, scales: Any, words: Any = None, key: Any = None
) -> torch.Tensor | None:
    """`fast.fake_quantize` without autograd."""
    scheme = scheme_of(record)
    check_mode(scheme.rounding, words)
    of, given = checked(x, scheme, axis, scales, words)
    if of is None:
        return None
    call = Call(operands(x, given, words))
    run_plan(call, plans.fake_quantizing(of, given_kind(given)))
    y: torch.Tensor = call.result(select("y"), key, record)
    return y
