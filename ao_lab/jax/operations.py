"""What `ao_lab.jax` computes, once by kernels and once by the specification, as functions of named arrays.

An `Operation` says what is wanted; arrays come and leave as dictionaries: x, g, words, codes, scale, outer, zero, y.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

import jax

import reference
from ao_lab.jax.device import is_traced
from reference import Quantized, Scales
from reference.arrays.jax_mesh import over_mesh
from reference.quantize.blocks import Blocks
from reference.quantize.tiled_scales import tiled_size
from reference.schemes.schemes import Scheme

Arrays = dict[str, Any]
PARTS = ("scale", "outer", "zero")
RESULTS = ("codes", *PARTS, "y")


@dataclass(frozen=True)
class Operation:
    """kind: "quantize", "choose", "fake", "mask" (g where nothing saturated) or "dequantize".

    shape, axis: of the tensor, axis not negative. dtype: of x, or of the values of "dequantize". packed: packed codes.
    tiled: scales that "quantize" makes come as `reference.tile_scales` stores them.
    """

    kind: str
    scheme: Scheme
    shape: tuple[int, ...]
    axis: int
    dtype: str
    packed: bool = False
    tiled: bool = False

    @property
    def blocks(self) -> Blocks:
        """The tensor's blocks."""
        return Blocks.of(self.shape, self.scheme.scale, self.axis)

    @property
    def folds(self) -> bool:
        """Whether a batch of such tensors has the same blocks as one tensor with a further axis."""
        plain = not self.tiled and not isinstance(self.scheme.scale.block, str)
        return bool(self.shape) and plain and self.scheme.outer is None


def dispatch(operation: Operation, arrays: Arrays, place: str) -> Arrays:
    """The operation where `place` (see `device.place_of`) says; concrete arrays run as one compiled program.

    Explicit axes of a mesh are automatic inside (`reference.arrays.jax_mesh`).
    """
    return over_mesh(_dispatch, (operation, arrays, place), {})  # type: ignore[no-any-return]


def _dispatch(operation: Operation, arrays: Arrays, place: str) -> Arrays:
    if not place or not covered(operation):
        return by_reference(operation, arrays)
    if not any(map(is_traced, arrays.values())):
        return _program(operation)(arrays)  # type: ignore[no-any-return]
    if place == "cuda":
        return mapped(operation, arrays)
    made: Arrays = jax.lax.platform_dependent(
        arrays,
        cuda=lambda arrays: mapped(operation, arrays),
        default=lambda arrays: by_reference(operation, arrays),
    )
    return made


@lru_cache(maxsize=1024)
def _program(operation: Operation) -> Any:
    return jax.jit(lambda arrays: mapped(operation, arrays))


def covered(operation: Operation) -> bool:
    """Whether kernels cover the tensor; otherwise (no elements, blocks of unusual sizes) the specification runs."""
    from fast.kernels.quantize import plan as passes

    return passes.problem_of(operation.dtype, operation.scheme, operation.blocks) is not None


def mapped(operation: Operation, arrays: Arrays) -> Arrays:
    """`by_kernels`, with its rule for vmap: a further axis where that changes no block, one after the other elsewhere."""

    @jax.custom_batching.custom_vmap  # type: ignore[untyped-decorator]
    def run(arrays: Arrays) -> Arrays:
        return by_kernels(operation, arrays)

    @run.def_vmap  # type: ignore[untyped-decorator]
    def batch(size: int, batched: tuple[dict[str, bool]], arrays: Arrays) -> tuple[Arrays, dict[str, bool]]:
        (which,) = batched
        if operation.folds:
            long = {name: _lengthened(value, size, which[name]) for name, value in arrays.items()}
            made = mapped(_folded(operation, size), long)
        else:
            fixed = {name: v for name, v in arrays.items() if not which[name]}
            along = {name: v for name, v in arrays.items() if which[name]}
            made = jax.lax.map(lambda part: mapped(operation, {**fixed, **part}), along)
        return made, dict.fromkeys(made, True)

    made: Arrays = run(arrays)
    return made


def _folded(operation: Operation, size: int) -> Operation:
    return replace(operation, shape=(size, *operation.shape), axis=operation.axis + 1)


def _lengthened(array: Any, size: int, batched: bool) -> Any:
    return array if batched else jax.numpy.broadcast_to(array, (size, *array.shape))


def by_reference(operation: Operation, arrays: Arrays) -> Arrays:
    """The specification."""
    scheme, axis, scales = operation.scheme, operation.axis, scales_of(arrays)
    words = arrays.get("words")
    if operation.kind == "dequantize":
        q = quantized(operation, arrays["codes"], scales or Scales())
        return {"y": reference.dequantize(q, operation.dtype)}
    if operation.kind == "fake":
        q = reference.quantize(arrays["x"], scheme, axis=axis, scales=scales, random_bits=words)
        return {"y": reference.dequantize(q, operation.dtype)}
    if operation.kind == "mask":
        gradients = reference.fake_quantize_vjp(
            arrays["g"], arrays["x"], scheme, axis=axis, random_bits=words
        )
        return {"y": gradients[0]}
    if operation.kind == "choose":
        return _without(reference.choose_scales(arrays["x"], scheme, axis=axis), arrays)
    q = reference.quantize(
        arrays["x"],
        scheme,
        axis=axis,
        scales=scales,
        random_bits=words,
        packed=operation.packed,
        tiled=operation.tiled,
    )
    return {"codes": q.codes, **_without(q, arrays)}


def scales_of(arrays: Arrays) -> Scales | None:
    """The given scales among arrays, or None."""
    given = {part: arrays.get(part) for part in PARTS}
    return None if all(value is None for value in given.values()) else Scales(**given)


def quantized(operation: Operation, codes: Any, scales: Scales) -> Quantized:
    """Codes and scales together."""
    kept = scales.scale, scales.outer, scales.zero
    return Quantized(codes, *kept, operation.shape, operation.axis, operation.scheme, operation.packed)


def _without(made: Any, arrays: Arrays) -> Arrays:
    """The scales that were made, less those that were given."""
    parts = {part: getattr(made, part) for part in PARTS if part not in arrays}
    return {part: value for part, value in parts.items() if value is not None}


def by_kernels(operation: Operation, arrays: Arrays) -> Arrays:
    """Launches of the block kernel, and for odd packings XLA operations."""
    from fast.kernels.quantize import plan as passes

    of = passes.problem_of(operation.dtype, operation.scheme, operation.blocks)
    if of is None:
        return by_reference(operation, arrays)
    if operation.kind == "dequantize":
        return _dequantize(operation, of, arrays)
    given = "all" if "scale" in arrays else "outer" if "outer" in arrays else ""
    if operation.kind == "quantize":
        fused = operation.packed and passes.packs(of)
        tiles = operation.tiled and passes.tiles(of, given) and _whole_tiles(of)
        made = run_plan(passes.quantizing(of, given, fused, tiles), arrays)
        made = _packed(operation, made) if operation.packed and not fused else made
        return _tiled(made) if operation.tiled and not tiles else made
    if operation.kind == "choose":
        return run_plan(passes.choosing(of, given), arrays)
    plan = passes.masking(of) if operation.kind == "mask" else passes.fake_quantizing(of, given)
    return {"y": run_plan(plan, arrays)["y"]}


def _packed(operation: Operation, made: Arrays) -> Arrays:
    return {**made, "codes": reference.pack(made["codes"], operation.scheme.element)}


def _whole_tiles(of: Any) -> bool:
    """Whether tiles of scales have no padding. That would have to be 0 before the launch, and what comes in lies before what
    goes out: no order of the kernel's arrays has an outer scale on one side of the scales in every job."""
    shape = of.blocks.scale_shape
    return bool(tiled_size(shape) == prod(shape))


def _tiled(made: Arrays) -> Arrays:
    """The scales tiled, where they were made here."""
    return {name: reference.tile_scales(value) if name == "scale" else value for name, value in made.items()}


def run_plan(plan: Any, arrays: Arrays) -> Arrays:
    """Run a `passes.Plan`; its results by name: the buffers that are no statistics."""
    from ao_lab.jax import launches

    have = dict(arrays)
    for one in plan.passes:
        inputs = {argument: have[one.array(argument)] for argument in one.reads}
        outputs = {argument: plan.buffers[one.array(argument)] for argument in one.writes}
        updated = {argument: _started(plan.buffers[one.array(argument)]) for argument in one.updates}
        made = launches.launch(one, inputs, outputs, updated)
        have |= {one.array(argument): value for argument, value in made.items()}
    return {name: have[name] for name in RESULTS if name in plan.buffers}


def _started(buffer: Any) -> Any:
    """A buffer with its initial values."""
    jnp = jax.numpy
    column = jnp.array(buffer.fill, buffer.dtype).reshape((-1,) + (1,) * (len(buffer.shape) - 1))
    return jnp.broadcast_to(column, buffer.shape)


def _dequantize(operation: Operation, of: Any, arrays: Arrays) -> Arrays:
    """Values of codes, unpacked by XLA first where the kernel does not."""
    from fast.kernels.quantize import plan as passes

    scheme = operation.scheme
    fused = operation.packed and (passes.packs(of) or scheme.format.bits >= 8)
    if operation.packed and not fused:
        arrays = {**arrays, "codes": reference.unpack(arrays["codes"], scheme.element, operation.shape)}
    return run_plan(passes.dequantizing(of, fused and scheme.format.bits < 8), arrays)
