"""`choose_scales`, `quantize`, `dequantize` and `fake_quantize` for JAX arrays; see `reference` for the rules.

Arguments are checked by the code of `reference`, in its order, so that errors agree. Calls with concrete arrays are compiled
once for each combination of record, axis and shapes, checks included; later calls only look the program up (`run`).

The keys of programs are those of `fast.dispatch` with JAX arrays in them: class (a tracer's is another), shape
and dtype, and where the first array lies. What is found is a program that takes and gives arrays alone; flattening a
`Quantized` and making one again takes JAX longer than a small program runs. Programs check their arguments when they are
traced, so a remembered call is a right one.

What is computed, once by kernels and once by the specification, is an `Operation`. It says what is wanted; arrays come and
leave as dictionaries: x, g, words, codes, scale, outer, zero, y.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import prod
from typing import Any

import jax

import reference
from fast.dispatch import TENSORS, find, maker, remember, scale_parts, settings
from reference import Quantized, Scales, Scheme
from reference.arrays.bridges import over_mesh, register_flax_if_imported, register_jax
from reference.arrays.namespace import FLOAT_DTYPES, DTypeLike, dtype_name, float_input
from reference.formats.encode import check_mode, check_random_bits
from reference.formats.storage import packed_shape
from reference.quantize.blocks import Blocks
from reference.quantize.fake_quantize import no_cotangent, scale_cotangents
from reference.quantize.quantize import check_quantized, with_tiled_scales
from reference.quantize.scales import check_scales
from reference.quantize.stored import check_tiled, tiled_size
from reference.schemes.schemes import scheme_of


def choose_scales(x: jax.Array, scheme: str | Scheme, *, axis: int = -1) -> Scales:
    """Scales of x, as in `reference.choose_scales`."""
    key, known = call("jax choose_scales", scheme, (axis,), x)
    if known is not None:
        return known  # type: ignore[no-any-return]
    place = _place(require_array(x, "choose_scales"), axis)
    if place is None:
        return reference.choose_scales(x, scheme, axis=axis)
    made: Scales = _call(_choose_scales, (x,), (scheme, int(axis), place), key)
    return made


def quantize(
    x: jax.Array,
    scheme: str | Scheme,
    *,
    axis: int = -1,
    scales: Scales | jax.Array | None = None,
    random_bits: jax.Array | None = None,
    packed: bool = False,
    tiled: bool = False,
) -> Quantized:
    """x as codes and scales. Arguments, edges and errors as in `reference.quantize`; no gradient flows through."""
    key, known = call("jax quantize", scheme, (axis, packed, tiled), x, *scale_parts(scales), random_bits)
    if known is not None:
        return known  # type: ignore[no-any-return]
    place = _place(require_array(x, "quantize"), axis, scales, random_bits)
    if place is None:
        return reference.quantize(
            x, scheme, axis=axis, scales=scales, random_bits=random_bits, packed=packed, tiled=tiled
        )
    constants = (scheme, int(axis), place, bool(packed), bool(tiled))
    made: Quantized = _call(_quantize, (x, scales, random_bits), constants, key)
    return made


def dequantize(q: Quantized, dtype: DTypeLike = "float32") -> jax.Array:
    """The tensor that q stands for; dtype as in `reference.dequantize`."""
    dtype = dtype_name(dtype, FLOAT_DTYPES, "dtype")
    if not isinstance(q, Quantized) or dtype == "float64":
        return reference.dequantize(q, dtype)
    parts = (q.codes, q.scale, q.outer, q.zero)
    key, known = call("jax dequantize", q.scheme, (dtype, *settings(q)), *parts)
    if known is not None:
        return known
    place = _place(require_array(q.codes, "dequantize"), q.axis, Scales(*parts[1:]))
    if place is None:
        return reference.dequantize(q, dtype)
    check_quantized(q)
    operation = Operation("dequantize", q.scheme, q.shape, q.axis, dtype, q.packed)
    # Tiled scales are taken apart first.
    made: jax.Array = _call(_dequantize, (q.codes, q.scales), (operation, place), None if q.tiled else key)
    return made


def fake_quantize(
    x: jax.Array,
    scheme: str | Scheme,
    *,
    axis: int = -1,
    scales: Scales | jax.Array | None = None,
    random_bits: jax.Array | None = None,
) -> jax.Array:
    """x rounded to what its scheme represents, in x's dtype, with the gradients of `reference.fake_quantize_vjp`.

    Arguments and errors as in `reference.fake_quantize`.
    """
    key, known = call("jax fake_quantize", scheme, (axis,), x, *scale_parts(scales), random_bits)
    if known is not None:
        return known
    place = _place(require_array(x, "fake_quantize"), axis, scales, random_bits)
    if place is None:
        return reference.fake_quantize(x, scheme, axis=axis, scales=scales, random_bits=random_bits)
    made: jax.Array = _call(_fake_quantize, (x, scales, random_bits), (scheme, int(axis), place), key)
    return made


def _place(x: Any, axis: Any, *others: Any) -> str | None:
    """`place_of` of x. None where the specification is called as it is: for arguments that are none of JAX's, so that it says
    what is wrong, and for traced arrays that can meet no kernel.
    """
    leaves = [x, *(leaf for other in others for leaf in _leaves(other) if leaf is not None)]
    known = all(isinstance(leaf, jax.Array) for leaf in leaves)
    if not known or not hasattr(axis, "__index__") or isinstance(axis, bool):
        return None
    place = place_of(x)
    return None if place == "" and any(map(is_traced, leaves)) else place


def _leaves(value: Any) -> list[Any]:
    return [value.scale, value.outer, value.zero] if isinstance(value, Scales) else [value]


def _call(function: Callable[..., Any], arrays: tuple[Any, ...], constants: tuple[Any, ...], key: Any) -> Any:
    """function(*constants, *arrays), as a program where all arrays are concrete. The key has the id of the first constant."""
    if any(map(is_traced, jax.tree.leaves(arrays))):
        return function(*constants, *arrays)
    return run(function, constants, arrays, key, constants[0])


def _choose_scales(scheme: str | Scheme, axis: int, place: str, x: Any) -> Scales:
    scheme = scheme_of(scheme)
    ns, x, name = float_input(x, "choose_scales")
    blocks = Blocks.of(ns.shape(x), scheme.scale, axis)
    operation = Operation("choose", scheme, blocks.shape, blocks.axis, name)
    return scales_of(dispatch(operation, _named(x=x), place)) or Scales()


def _quantize(
    scheme: str | Scheme, axis: int, place: str, packed: bool, tiled: bool, x: Any, scales: Any, words: Any
) -> Quantized:
    scheme = scheme_of(scheme)
    ns, x, name = float_input(x, "quantize")
    check_mode(scheme.rounding, words)
    if packed:
        packed_shape(ns.shape(x), scheme.format)  # refuses a 0-d tensor
    if tiled:
        check_tiled(scheme, ns.shape(x), axis)
    blocks, given = _checked(x, scheme, axis, scales, words)
    operation = Operation("quantize", scheme, blocks.shape, blocks.axis, name, packed, tiled)
    made = dispatch(operation, _named(x=x, words=words, **_parts(given)), place)
    q = quantized(operation, made["codes"], scales_of({**_parts(given), **made}) or Scales())
    # Given scales are not tiled yet.
    return replace(q, tiled=True) if tiled and "scale" in made else with_tiled_scales(q) if tiled else q


def _checked(x: Any, scheme: Scheme, axis: int, scales: Any, words: Any) -> tuple[Blocks, Scales | None]:
    """Blocks and given scales; ValueError as the specification raises it."""
    ns, x, _ = float_input(x, "quantize")
    blocks = Blocks.of(ns.shape(x), scheme.scale, axis)
    given = check_scales(ns, scales, scheme, blocks)
    check_random_bits(ns, x, words)
    return blocks, given


def _parts(given: Scales | None) -> Arrays:
    return {} if given is None else {part: getattr(given, part) for part in PARTS}


def _named(**arrays: Any) -> Arrays:
    """The arrays that there are, without gradients: codes have none, and `fake_quantize` brings its own."""
    return {name: jax.lax.stop_gradient(value) for name, value in arrays.items() if value is not None}


def _dequantize(operation: Operation, place: str, codes: Any, scales: Scales) -> Any:
    return dispatch(operation, _named(codes=codes, **vars(scales)), place)["y"]


def _fake_quantize(scheme: str | Scheme, axis: int, place: str, x: Any, scales: Any, words: Any) -> Any:
    scheme = scheme_of(scheme)
    _, x, _ = float_input(x, "fake_quantize")
    check_mode(scheme.rounding, words)
    given = scales if scales is None or isinstance(scales, Scales) else Scales(scales)
    return _differentiable()(x, given, words, scheme, axis, place)


@lru_cache(maxsize=1)
def _differentiable() -> Any:
    """fake_quantize with its gradient."""
    register_jax()
    function = jax.custom_vjp(_forward, nondiff_argnums=(3, 4, 5))
    function.defvjp(_forward_saved, _backward)
    return function


def _forward(x: Any, scales: Any, words: Any, scheme: Scheme, axis: int, place: str) -> Any:
    blocks, given = _checked(x, scheme, axis, scales, words)
    _, x, name = float_input(x, "fake_quantize")
    operation = Operation("fake", scheme, blocks.shape, blocks.axis, name)
    return dispatch(operation, _named(x=x, words=words, **_parts(given)), place)["y"]


def _forward_saved(x: Any, scales: Any, words: Any, scheme: Scheme, axis: int, place: str) -> Any:
    return _forward(x, scales, words, scheme, axis, place), (x, scales, words)


def _backward(scheme: Scheme, axis: int, place: str, saved: Any, g: Any) -> Any:
    """Straight through where nothing saturated, by a kernel; gradients of given scales by the specification."""
    x, scales, words = saved
    if scales is not None:
        made = reference.fake_quantize_vjp(g, x, scheme, axis=axis, scales=scales, random_bits=words)
        dx, dscale, dzero = made
        return dx, scale_cotangents(jax, scales, dscale, dzero), no_cotangent(jax, words)
    name = float_input(x, "fake_quantize")[2]
    blocks = Blocks.of(x.shape, scheme.scale, axis)
    operation = Operation("mask", scheme, blocks.shape, blocks.axis, name)
    dx = dispatch(operation, _named(x=x, g=g, words=words), place)["y"]
    return dx, None, no_cotangent(jax, words)


# Which arrays the kernels take: those on CUDA devices of Hopper or later, with triton installed.

OLDEST = 90


def require_array(value: Any, what: str) -> Any:
    """`value` if it is a JAX array; TypeError that names the way out otherwise."""
    if not isinstance(value, jax.Array):
        raise TypeError(
            f"ao_lab.jax.{what} takes JAX arrays, got {type(value).__name__}; use jax.numpy.asarray, ao_lab.jax.from_torch, "
            f"or ao_lab.{what} for NumPy arrays and torch tensors"
        )
    return value


def is_traced(value: Any) -> bool:
    """Whether an array stands for others, inside jit, vmap or grad."""
    return isinstance(value, jax.core.Tracer)


def place_of(value: Any) -> str:
    """Where kernels may run on an array: "cuda" (it lies there), "any" (a traced one: the compiler will know) or ""."""
    if not has_kernels():
        return ""
    if is_traced(value):
        return "any"
    return "cuda" if all(device.platform == "gpu" for device in value.devices()) else ""


@lru_cache(maxsize=1)
def has_kernels() -> bool:
    """Whether this process can run kernels. Where there is a GPU and they cannot run, a warning says once why."""
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:
        return False
    reason = missing(devices)
    if reason:
        warnings.warn(
            f"ao_lab's kernels do not run in JAX here: {reason}. The same functions run as XLA operations, with the same bits, "
            f"more slowly.",
            RuntimeWarning,
            stacklevel=4,
        )
    return not reason


def missing(devices: list[Any]) -> str:
    """Why there are no kernels on these devices, or nothing."""
    oldest = min(devices, key=lambda device: float(device.compute_capability))
    if float(oldest.compute_capability) * 10 < OLDEST:
        return f"{oldest.device_kind} is older than compute capability {OLDEST / 10}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    if not hasattr(jax.ffi, "ffi_call"):
        return f"JAX {jax.__version__} has no jax.ffi.ffi_call; 0.6 and later do"
    return (
        ""
        if _registered()
        else f"JAX {jax.__version__} has no custom call for Triton kernels in its CUDA plugin"
    )


def _registered() -> bool:
    """Whether the CUDA plugin brought the custom call: importing this module registers it."""
    try:
        return hasattr(importlib.import_module("jaxlib.gpu_triton"), "TritonKernelCall")
    except ImportError:
        return False


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

    Explicit axes of a mesh are automatic inside (`reference.arrays.bridges`).
    """
    return over_mesh(_dispatch, (operation, arrays, place), {})  # type: ignore[no-any-return]


def _dispatch(operation: Operation, arrays: Arrays, place: str) -> Arrays:
    if not place or not covered(operation):
        return by_reference(operation, arrays)
    if not any(map(is_traced, arrays.values())):
        return _operation_program(operation)(arrays)  # type: ignore[no-any-return]
    if place == "cuda":
        return mapped(operation, arrays)
    made: Arrays = jax.lax.platform_dependent(
        arrays,
        cuda=lambda arrays: mapped(operation, arrays),
        default=lambda arrays: by_reference(operation, arrays),
    )
    return made


@lru_cache(maxsize=1024)
def _operation_program(operation: Operation) -> Any:
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
            broadcast = jax.numpy.broadcast_to
            long = {n: v if which[n] else broadcast(v, (size, *v.shape)) for n, v in arrays.items()}
            folded = replace(operation, shape=(size, *operation.shape), axis=operation.axis + 1)
            made = mapped(folded, long)
        else:
            fixed = {name: v for name, v in arrays.items() if not which[name]}
            along = {name: v for name, v in arrays.items() if which[name]}
            made = jax.lax.map(lambda part: mapped(operation, {**fixed, **part}), along)
        return made, dict.fromkeys(made, True)

    made: Arrays = run(arrays)
    return made


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
        return _operation_dequantize(operation, of, arrays)
    given = "all" if "scale" in arrays else "outer" if "outer" in arrays else ""
    if operation.kind == "quantize":
        fused = operation.packed and passes.packs(of)
        tiles = operation.tiled and passes.tiles(of, given) and _whole_tiles(of)
        made = run_plan(passes.quantizing(of, given, fused, tiles), arrays)
        if operation.packed and not fused:
            made["codes"] = reference.pack(made["codes"], operation.scheme.element)
        if operation.tiled and not tiles and "scale" in made:
            made["scale"] = reference.tile_scales(made["scale"])
        return made
    if operation.kind == "choose":
        return run_plan(passes.choosing(of, given), arrays)
    plan = passes.masking(of) if operation.kind == "mask" else passes.fake_quantizing(of, given)
    return {"y": run_plan(plan, arrays)["y"]}


def _whole_tiles(of: Any) -> bool:
    """Whether tiles of scales have no padding. That would have to be 0 before the launch, and what comes in lies before what
    goes out: no order of the kernel's arrays has an outer scale on one side of the scales in every job."""
    shape = of.blocks.scale_shape
    return bool(tiled_size(shape) == prod(shape))


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


def _operation_dequantize(operation: Operation, of: Any, arrays: Arrays) -> Arrays:
    """Values of codes, unpacked by XLA first where the kernel does not."""
    from fast.kernels.quantize import plan as passes

    scheme = operation.scheme
    fused = operation.packed and (passes.packs(of) or scheme.format.bits >= 8)
    if operation.packed and not fused:
        arrays = {**arrays, "codes": reference.unpack(arrays["codes"], scheme.element, operation.shape)}
    return run_plan(passes.dequantizing(of, fused and scheme.format.bits < 8), arrays)


def call(name: str, record: Any, values: tuple[Any, ...], *arrays: Any) -> tuple[Any, Any]:
    """The key of a call, and what it gives; None for a key that cannot be, and for a result that no program is known for."""
    register_flax_if_imported()
    if is_traced(arrays[0]):
        return None, None
    where = getattr(arrays[0], "sharding", None)
    named = record if record.__class__ is str else id(record)
    key = (name, named, values, *map(type, values), where, *map(_part, arrays))
    found = find(key)
    return key, None if found is None else found(*arrays)


def _part(array: Any) -> Any:
    return None if array is None else (array.__class__, getattr(array, "aval", None))


def run(
    function: Callable[..., Any], constants: tuple[Any, ...], arrays: tuple[Any, ...], key: Any, record: Any
) -> Any:
    """function(*constants, *arrays) for concrete arrays and None, as one program that answers the next call with this key."""
    try:
        hash(constants)
    except TypeError:
        return function(*constants, *arrays)  # says what is wrong
    leaves, tree = jax.tree.flatten(arrays)
    program = _program(function, constants, tree)
    shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    finish = _finishing(_result(function, constants, tree, shapes))

    def call(*arrays: Any) -> Any:
        return finish(program(*(array for array in arrays if array is not None)))

    remember(key, call, record)
    return finish(program(*leaves))


@lru_cache(maxsize=1024)
def _program(function: Callable[..., Any], constants: tuple[Any, ...], tree: Any) -> Any:
    """From the arrays among the arguments to those of the result."""
    return jax.jit(lambda *leaves: jax.tree.leaves(function(*constants, *jax.tree.unflatten(tree, leaves))))


@lru_cache(maxsize=1024)
def _result(
    function: Callable[..., Any], constants: tuple[Any, ...], tree: Any, shapes: tuple[tuple[Any, Any], ...]
) -> Any:
    """The result, with shapes for arrays; the errors of the function."""
    leaves = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    return jax.eval_shape(partial(function, *constants), *jax.tree.unflatten(tree, leaves))


def _finishing(like: Any) -> Callable[[Sequence[Any]], Any]:
    """What makes a result like this one of its arrays."""
    if not isinstance(like, (Quantized, Scales)):
        return lambda made: made[0]
    parts = [part for part in TENSORS if getattr(like, part, None) is not None]
    names: Any = dict(zip(parts, parts, strict=True))
    return maker(replace(like, **names), {part: at for at, part in enumerate(parts)})


register_jax()
