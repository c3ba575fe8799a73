"""The kernels of ao_lab.jax without a GPU: Triton's interpreter runs them inside JAX programs, by callbacks.

    TRITON_INTERPRET=1 python -m tests.emulator.interpreter_process jax_calls [day] SCHEME...

Prints the schemes whose bits agree with the reference in every function, shape and transformation tried; raises otherwise.
Everything but the launch itself is what runs on a GPU: the checks, the plans, vmap's rule, the gradient. (Values are float32:
the interpreter truncates where it should round to bfloat16.)
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import torch

import reference
from ao_lab import jax as functions
from ao_lab.jax import functions as implementation
from ao_lab.jax import launches
from ao_lab.testing.strategies import assert_same_bits
from fast.kernels.quantize import plan as passes
from fast.kernels.quantize.host import POINTERS, block_launch
from reference import SCHEMES, Scales
from reference.arrays.bridges import to_numpy, to_torch
from reference.quantize.stored import STORAGES
from tests.emulator import quick_interpreter

RNG = np.random.default_rng(0)
#: Several axes; blocks beyond a tile in rows and in columns; short last blocks; a vector.
SHAPES = (
    ((2, 128, 128), -1),
    ((2, 128, 128), 1),
    ((1, 16640), -1),
    ((640, 24), 0),
    ((3, 100), -1),
    ((256,), -1),
)
BY_DAY = SHAPES[1:3] + SHAPES[4:5]
PARTS = ("codes", "scale", "outer", "zero")
# XLA's threads flush subnormals, which callbacks on them would inherit.
THREAD = ThreadPoolExecutor(1)
launched = []


def emulated(one, inputs, outputs, updated):
    """`launches.launch` by a callback."""
    wanted = {**outputs, **updated}
    shapes = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in wanted.items()}

    def host(inputs, updated):
        launched.append(one)
        given = {name: to_torch(np.array(value)) for name, value in {**inputs, **updated}.items()}
        made = {name: torch.full(b.shape, 77, dtype=getattr(torch, b.dtype)) for name, b in outputs.items()}
        launch, _ = block_launch(one)
        launch.run([{**given, **made}.get(argument) for argument in POINTERS], -1)
        return {name: to_numpy({**given, **made}[name]) for name in wanted}

    return jax.pure_callback(
        lambda *a: THREAD.submit(host, *a).result(), shapes, inputs, updated, vmap_method="sequential"
    )


def install():
    """Kernels for every array of this process."""
    quick_interpreter.install()
    THREAD.submit(int).result()
    launches.launch = emulated
    passes.problem_of = partial(passes.problem_of, hardware=False)
    implementation.place_of = lambda value: "cuda"


def covered(x, name, axis):
    """Whether the scheme takes this shape."""
    try:
        reference.choose_scales(x, name, axis=axis)
    except ValueError:
        return False
    return True


def compare(x, name, axis):
    """Every function, eagerly and in its transformations."""
    d, q = jnp.asarray(x), reference.quantize(x, name, axis=axis)
    made = functions.quantize(d, name, axis=axis)
    assert_same_bits(made, q)
    assert_same_bits(jax.jit(lambda v: functions.quantize(v, name, axis=axis))(d), q)
    assert_same_bits(functions.choose_scales(d, name, axis=axis), q.scales)
    packed = functions.quantize(d, name, axis=axis, packed=True)
    assert_same_bits(packed, reference.quantize(x, name, axis=axis, packed=True))
    for stored in (made, packed):
        assert_same_bits(functions.dequantize(stored), reference.dequantize(q))
    given = reference.quantize(x, name, axis=axis, scales=q.scales)
    assert_same_bits(functions.quantize(d, name, axis=axis, scales=made.scales), given)
    if q.outer is not None and q.outer.shape == ():
        outer = reference.quantize(x, name, axis=axis, scales=Scales(outer=q.outer))
        assert_same_bits(functions.quantize(d, name, axis=axis, scales=Scales(outer=made.outer)), outer)
    assert_same_bits(functions.fake_quantize(d, name, axis=axis), reference.fake_quantize(x, name, axis=axis))
    g = RNG.standard_normal(x.shape).astype(np.float32)
    dx = jax.grad(lambda v: jnp.vdot(functions.fake_quantize(v, name, axis=axis), g))(d)
    assert_same_bits(dx, reference.fake_quantize_vjp(g, x, name, axis=axis)[0])


def compare_tiled(x, name):
    """Scales tiled by kernels or afterwards, chosen and given; a batch of matrices."""
    d, q = jnp.asarray(x), reference.quantize(x, name)
    for scales in (None, q.scales):
        wanted = reference.quantize(x, name, scales=scales, tiled=True)
        given = None if scales is None else jax.tree.map(jnp.asarray, scales)
        assert_same_bits(functions.quantize(d, name, scales=given, tiled=True), wanted)
    made = jax.vmap(lambda v: functions.quantize(v, name, tiled=True))(jnp.stack([d, -d]))
    both = [reference.quantize(v, name, tiled=True) for v in (x, -x)]
    for part in ("codes", "scale"):
        assert_same_bits(getattr(made, part), np.stack([getattr(one, part) for one in both]))
    assert_same_bits(functions.dequantize(functions.quantize(d, name, tiled=True)), reference.dequantize(q))


def compare_mapped(x, name):
    """vmap over the first axis and over the second, with and without given scales."""
    d, rows = jnp.asarray(x), [reference.quantize(row, name) for row in x]
    expected = {
        part: [getattr(q, part) for q in rows] for part in PARTS if getattr(rows[0], part) is not None
    }
    mapped = jax.vmap(lambda v: functions.quantize(v, name))(d)
    moved = jax.vmap(lambda v: functions.quantize(v, name), in_axes=1)(jnp.moveaxis(d, 0, 1))
    again = jax.jit(jax.vmap(lambda v, s: functions.quantize(v, name, scales=s)))(d, mapped.scales)
    kept = [reference.quantize(row, name, scales=q.scales) for row, q in zip(x, rows, strict=True)]
    assert_same_bits(again.codes, np.stack([q.codes for q in kept]))
    for part, values in expected.items():
        assert_same_bits(getattr(mapped, part), np.stack(values))
        assert_same_bits(getattr(moved, part), np.stack(values))
    values = jax.vmap(functions.dequantize)(mapped)
    assert_same_bits(values, np.stack([reference.dequantize(q) for q in rows]))


def compare_stochastic(x, name):
    """Random words reach the kernels, also those of the gradient."""
    scheme = replace(SCHEMES[name], rounding="stochastic", name=f"{name} stochastic")
    words = RNG.integers(0, 2**32, x.shape, dtype=np.uint32)
    d, w = jnp.asarray(x), jnp.asarray(words)
    wanted = reference.quantize(x, scheme, random_bits=words)
    assert_same_bits(functions.quantize(d, scheme, random_bits=w), wanted)
    value, pull = jax.vjp(lambda v: functions.fake_quantize(v, scheme, random_bits=w), d)
    assert_same_bits(value, reference.fake_quantize(x, scheme, random_bits=words))
    dx = reference.fake_quantize_vjp(np.ones_like(x), x, scheme, random_bits=words)[0]
    assert_same_bits(pull(jnp.ones_like(d))[0], dx)


def main(*names):
    """Compare; the names of schemes that agree. After "day": the shapes that take ways of their own alone."""
    install()
    shapes, names = (BY_DAY, names[1:]) if names[0] == "day" else (SHAPES, names)
    for name in names:
        before = len(launched)
        outer = SCHEMES[name].outer
        # Scales of scales are XLA's work, which takes long to compile; their blocks know no axes.
        few = outer is not None and outer.statistic != "absmax_elements"
        for shape, axis in shapes[:1] if few else shapes:
            x = RNG.standard_normal(shape) * np.exp(RNG.standard_normal((*shape[:-1], 1)))
            x = x.astype(np.float32)
            if covered(x, name, axis):
                compare(x, name, axis)
        compare_mapped(x=RNG.standard_normal((3, 4, 128)).astype(np.float32), name=name)
        if SCHEMES[name].scale.storage in STORAGES:
            # With padding, which XLA makes, and whole tiles, which the kernel writes.
            for rows in (130, 256):
                compare_tiled(RNG.standard_normal((rows, 128)).astype(np.float32), name)
            assert any(one.block_op.tiled for one in launched)
        assert len(launched) > before, "no kernel ran"
        print(name, flush=True)
    compare_stochastic(RNG.standard_normal((8, 128)).astype(np.float32), "mxfp8_e4m3")
    print("stochastic", flush=True)
