"""`choose_scales`, `quantize`, `dequantize` and fake quantization of torch tensors by the block kernel.

Arguments are checked by the same code as in `reference`, so that messages agree. What a call does is a `plan`.
Where no kernel covers a tensor (`plan.geometry` says which) the functions here give None, and the reference runs as torch
operations on the tensor's device: the same bits, more slowly. key: of the call, see `dispatch`.
"""

from __future__ import annotations

from typing import Any

import torch

from fast.dispatch import PARTS
from fast.kernels.encode import add_packing, add_unpacking
from fast.kernels.quantize import plan as plans
from fast.kernels.quantize.kernel import blocks_kernel
from fast.kernels.quantize.plan import LARGEST_TILE, Pass, Plan, Problem
from fast.launch.launcher import ALIGNMENT, FLOAT_NAMES, Call, CompiledLaunch, interpreted, same_device
from reference import Quantized, Scales
from reference.arrays.namespace import choice, namespace_of
from reference.formats.encode import check_mode, check_random_bits
from reference.formats.storage import packed_shape
from reference.quantize.blocks import Blocks
from reference.quantize.quantize import check_quantized, with_plain_scales, with_tiled_scales
from reference.quantize.scales import check_scales
from reference.quantize.stored import check_tiled
from reference.schemes.schemes import Scheme, scheme_of


def problem_of(x: torch.Tensor, scheme: Scheme, axis: int) -> Problem | None:
    """What plans are made from, or None where no kernel covers the tensor; ValueError as the reference raises it."""
    name = FLOAT_NAMES.get(x.dtype)
    blocks = Blocks.of(tuple(x.shape), scheme.scale, axis)
    return None if name is None else plans.problem_of(name, scheme, blocks, not interpreted())


def checked(
    x: torch.Tensor, scheme: Scheme, axis: int, scales: Any, words: Any
) -> tuple[Problem | None, Scales | None, dict[str, Any]]:
    """The problem, None where no kernel covers it; the given scales; the caller's tensors in the order of the key, by the names
    of the kernel's arguments. The errors are those of the reference after `check_mode`, in its order."""
    of = problem_of(x, scheme, axis)
    if scales is None and words is None:
        return of, None, {"x": x}
    given = check_scales(namespace_of(x), scales, scheme, Blocks.of(tuple(x.shape), scheme.scale, axis))
    check_random_bits(namespace_of(x), x, words)
    parts = scale_tensors(Scales() if given is None else given)
    covered = same_device(x, words, *parts.values())
    return of if covered else None, given, {"x": x, **parts, "words": words}


def given_kind(given: Scales | None) -> str:
    """Which scales the caller brought: "", "outer" or "all"."""
    return "" if given is None else "outer" if given.scale is None else "all"


def scale_tensors(scales: Scales | Quantized) -> dict[str, Any]:
    """Scale, outer scale and zero point, None where there is none."""
    return {part: getattr(scales, part) for part in PARTS}


def scale_names(call: Call) -> list[str | None]:
    """The names of the scale, outer scale and zero point that a call was given or made."""
    return [part if part in call.tensors else None for part in PARTS]


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
    of, given, tensors = checked(x, scheme, axis, scales, words)
    if of is None:
        return None
    kind, fused = given_kind(given), packed and plans.packs(of, writes=True)
    tiles = tiled and plans.tiles(of, kind)
    call = Call(tensors, words=("x",) if fused or plans.paired(of, fused) else ())
    run_plan(call, plans.quantizing(of, kind, fused, tiles))
    apart = packed and not fused and add_packing(call, "codes", "packed", scheme.format)
    names = ("packed" if apart else "codes", *scale_names(call))
    output = Quantized(*names, of.blocks.shape, of.blocks.axis, scheme, packed, tiles)
    # Scales that no kernel tiled are tiled here.
    result: Quantized = call.result(output, key, record, with_tiled_scales if tiled and not tiles else None)
    return result


def choose_scales(x: torch.Tensor, record: str | Scheme, axis: int, key: Any = None) -> Scales | None:
    """`fast.choose_scales` by a kernel, or None where none covers the tensor."""
    of = problem_of(x, scheme_of(record), axis)
    if of is None:
        return None
    call = Call({"x": x})
    run_plan(call, plans.choosing(of))
    result: Scales = call.result(Scales(*scale_names(call)), key, record)
    return result


def dequantize(q: Quantized, dtype: str, key: Any = None) -> torch.Tensor | None:
    """`fast.dequantize` by a kernel, or None where none covers the tensor."""
    choice(dtype, ("float32", "bfloat16", "float16", "float64"), "dtype")
    blocks, scheme = check_quantized(q), q.scheme
    if dtype == "float64" or not same_device(q.codes, *scale_tensors(q).values()):
        return None
    key, q = None if q.tiled else key, with_plain_scales(q)
    of = plans.problem_of(dtype, scheme, blocks, not interpreted())
    if of is None:
        return None
    packed = q.packed and scheme.format.bits < 8
    # Blocks that the kernel does not read packed, those of one bit and of most whole rows, are unpacked in front of it.
    apart = packed and not plans.packs(of)
    call = Call(
        {"packed" if apart else "codes": q.codes, **scale_tensors(q)}, words=() if apart else ("codes",)
    )
    if apart:
        add_unpacking(call, "packed", "codes", tuple(blocks.shape), scheme.format)
    run_plan(call, plans.dequantizing(of, packed and not apart))
    y: torch.Tensor = call.result("y", key, scheme)
    return y


def fake_quantize(
    x: torch.Tensor, record: str | Scheme, axis: int, scales: Any, words: Any = None, key: Any = None
) -> torch.Tensor | None:
    """`fast.fake_quantize` without autograd."""
    scheme = scheme_of(record)
    check_mode(scheme.rounding, words)
    of, given, tensors = checked(x, scheme, axis, scales, words)
    if of is None:
        return None
    call = Call(tensors)
    run_plan(call, plans.fake_quantizing(of, given_kind(given)))
    y: torch.Tensor = call.result("y", key, record)
    return y


# Plans for torch tensors: buffers allocated, each pass of the block kernel launched.

# In every pass what is read comes before what is written, as XLA hands arrays over.
POINTERS = tuple(blocks_kernel.arg_names[:10])
# Registers a lane where rows of 14336 are rounded, or quantized by a sequence or the general rules: three programs on a
# multiprocessor, where the compiler's 128 leave room for two: faster in spite of a spill of two words (rates: reports/LOG.md).
ROUNDING_REGISTERS = 80
# The same of pairs under corrected quotients or the general rules, which spill where the compiler gives all 96.
QUOTIENT_REGISTERS = 72
# And of codebooks, whose general rules take 121 (packed or of float16 they would spill): five warps for four.
CODEBOOK_REGISTERS = 96


def run_plan(call: Call, plan: Plan) -> None:
    """Allocate the buffers of a plan, and launch its passes."""
    for name, buffer in plan.buffers.items():
        call.allocate(name, *buffer)
    for step in plan.passes:
        call.launch(*block_launch(step))


def block_launch(step: Pass) -> tuple[CompiledLaunch, list[str | None]]:
    """The launch of a pass of the block kernel, and the names of the tensors that are its pointers."""
    place = step.place
    used = {*step.reads, *step.writes, *step.updates}
    tail = (
        *place.integers, place.blocks, step.rule, step.block_op, place.shape, place.chunked, place.masked, place.wide,
        place.size, place.inner, place.p,
    )  # fmt: skip
    launch = CompiledLaunch(blocks_kernel, place.programs, tail, place.warps, **_registers(step))
    return launch, [step.array(argument) if argument in used else None for argument in POINTERS]


def _registers(step: Pass) -> dict[str, int]:
    """A limit where one path of two has to fit, and where the largest tile is rounded under masks: rows of 14336 numbers."""
    place, do, rule = step.place, step.block_op, step.rule
    if do.pairs and rule.has_same and rule.has_outer and rule.apply.value == "divide":
        return {"maxnreg": QUOTIENT_REGISTERS}
    codebook = rule.kind.value == "codebook" and rule.dtype.value == "bfloat16" and not do.packed
    if do.codes and do.source.value == "tile" and rule.has_same and codebook:
        return {"maxnreg": CODEBOOK_REGISTERS}
    large = place.shape == "flat" and place.masked and not place.chunked and place.size == LARGEST_TILE
    # Masks of single numbers, other paths and random words need more, and would spill.
    plain = place.integers[3] % ALIGNMENT == 0 and "words" not in step.reads and place.warps == 8
    rounded = do.output in ("bfloat16", "float16") and not do.dequantize and rule.fast_path.value != ""
    # Here the general rules spill some words, and the sequence, which runs, two or three.
    quantized = do.codes and do.source.value == "tile" and rule.has_same and rule.dtype.value != "float32"
    return {"maxnreg": ROUNDING_REGISTERS} if large and plain and (rounded or quantized) else {}


# Host side of `fast.quantize.fake_quantize`: a mask of the blocks that saturate, and gradients masked by it.


def noted(
    x: torch.Tensor, record: str | Scheme, axis: int, key: Any = None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Values and the mask, or None where the kernel makes no mask. key: of the call, see `dispatch`."""
    of = problem_of(x, scheme_of(record), axis)
    if of is None or not plans.makes_saturation_mask(of):
        return None
    call = Call({"x": x})
    run_plan(call, plans.fake_quantizing_with_mask(of))
    result: tuple[torch.Tensor, torch.Tensor] = call.result(("y", "codes"), key, record)
    return result


def clip(
    g: torch.Tensor, x: torch.Tensor, mask: torch.Tensor, record: str | Scheme, axis: int, key: Any = None
) -> torch.Tensor:
    """g, contiguous, zeroed in place where x saturates in a block of the mask."""
    of = problem_of(x, scheme_of(record), axis)
    if of is None or not plans.makes_saturation_mask(of):
        raise ValueError(
            f"clip: no kernel makes a saturation mask of {tuple(x.shape)} {x.dtype} for {record}"
        )
    if g.shape != x.shape or g.dtype != x.dtype or not g.is_contiguous() or g.is_neg():
        raise ValueError(
            f"clip: g is contiguous and like x, whose mask `noted` made; got {tuple(g.shape)} {g.dtype} for "
            f"{tuple(x.shape)} {x.dtype}"
        )
    if mask.dtype != torch.uint8 or mask.numel() != of.place.blocks:
        raise ValueError(
            f"clip: the saturation mask has one uint8 for each of {of.place.blocks} blocks, got {tuple(mask.shape)} "
            f"{mask.dtype}"
        )
    if not x.device == g.device == mask.device:
        raise ValueError(
            f"clip: g, x and mask lie on one device, got {g.device}, {x.device} and {mask.device}"
        )
    call = Call({"g": g, "x": x, "codes": mask})
    run_plan(call, plans.masking_in_place(of))
    result: torch.Tensor = call.result("g", key, record)
    return result
