"""Functions of JAX arrays and modes of JAX: each function in each mode gives the bits that it gives eagerly, on one device.

Run as a program it needs several devices (`XLA_FLAGS=--xla_force_host_platform_device_count=4`): `python jax_modes.py NAME... @
MODE...` prints each pair that fails, and how many ran.
"""

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ao_lab.jax
import reference
from reference.layers.hadamard import hadamard

ROWS, COLUMNS = 32, 128
# Integers: their sums are exact in any order, over any number of devices.
X = np.random.default_rng(0).integers(-8, 9, (ROWS, COLUMNS)).astype(np.float32)
W = np.random.default_rng(1).integers(-8, 9, (COLUMNS, 64)).astype(np.float32)
NUMBERS = (((1,), (0,)), ((), ()))


def product(recipe: str, seed: Any = None) -> Callable[..., Any]:
    def run(x: Any) -> Any:
        return ao_lab.jax.dot_general(x, jnp.asarray(W), NUMBERS, recipe=recipe, seed=seed)

    return run


def gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient of a sum of squares, whose cotangents are integers here."""
    return jax.grad(lambda x: (function(x) * jax.lax.stop_gradient(function(x))).sum())


def stored(x: Any) -> Any:
    return ao_lab.jax.quantize(x, "mxfp8_e4m3")


#: From x (32, 128) to arrays.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "encode": lambda x: reference.encode(x, "float8_e4m3fn"),
    "decode": lambda x: reference.decode(x.astype(jnp.uint8), "float8_e4m3fn"),
    "encode nf4": lambda x: reference.encode(x, "nf4"),
    "pack": lambda x: reference.pack(x.astype(jnp.uint8), "int3"),
    "unpack": lambda x: reference.unpack(reference.pack(x.astype(jnp.uint8), "int3"), "int3", x.shape),
    "choose_scales": lambda x: ao_lab.jax.choose_scales(x, "int4_g32_asymmetric"),
    "quantize packed": lambda x: ao_lab.jax.quantize(x, "nvfp4", packed=True),
    "quantize tiled": lambda x: ao_lab.jax.quantize(x, "mxfp8_e4m3", tiled=True),
    "dequantize": lambda x: ao_lab.jax.dequantize(stored(x), jnp.bfloat16),
    "quantize_both": lambda x: reference.quantize_both(x, "fp8_rowwise"),
    "given scales": lambda x: ao_lab.jax.quantize(
        x, "fp8_rowwise", scales=ao_lab.jax.choose_scales(x, "fp8_rowwise")
    ),
    "prune": lambda x: reference.prune(x),
    "compress": lambda x: reference.compress(x, "2:4"),
    "decompress": lambda x: reference.decompress(*reference.compress(x, "2:4")),
    "hadamard": lambda x: hadamard(x, 16),
    "rms_norm": lambda x: reference.rms_norm(x, jnp.ones(COLUMNS, jnp.float32), eps=1e-6),
    "swiglu": lambda x: reference.swiglu(x.astype(jnp.bfloat16), x.astype(jnp.bfloat16)),
    "matmul": lambda x: ao_lab.jax.matmul(x, ao_lab.jax.quantize(jnp.asarray(W), "int8_rowwise", axis=0)),
    "dot_general": product("tensorwise"),
    "dot_general gradient": gradients(product("tensorwise")),
    "dot_general seed": lambda x: gradients(product("nvfp4", seed=jax.random.key(3)))(x),
    "dot_general integer": lambda x: gradients(product("nvfp4", seed=jnp.asarray(3)))(x),
}
SCHEMES = {
    f"fake_quantize {name}": lambda x, name=name: ao_lab.jax.fake_quantize(x, name)
    for name in reference.SCHEMES
} | {
    f"fake_quantize gradient {name}": lambda x, name=name: gradients(
        lambda x: ao_lab.jax.fake_quantize(x, name)
    )(x)
    for name in ("fp8_rowwise", "nf4", "int4_g32_asymmetric", "mxfp4", "nvfp4")
}
ALL = FUNCTIONS | SCHEMES


def on_mesh(kind: Any, spec: Any) -> Callable[..., Any]:
    """A call with x over the devices of a mesh whose axes are of this kind."""

    def run(function: Callable[..., Any]) -> Any:
        mesh = jax.make_mesh((len(jax.devices()),), ("d",), axis_types=(kind,))
        with jax.set_mesh(mesh):
            return jax.jit(function)(jax.device_put(X, NamedSharding(mesh, spec)))

    return run


def under(context: Callable[[], Any]) -> Callable[..., Any]:
    def run(function: Callable[..., Any]) -> Any:
        with context():
            return jax.jit(function)(jnp.asarray(X))

    return run


def batched(function: Callable[..., Any]) -> Any:
    made = jax.jit(jax.vmap(function))(jnp.asarray(np.stack([X, -X])))
    return jax.tree.map(lambda leaf: leaf[0], made)


def looped(function: Callable[..., Any]) -> Any:
    """As a step of scan."""
    return jax.tree.map(lambda leaf: leaf[0], jax.lax.scan(lambda c, x: (c, function(x)), 0, X[None])[1])


MODES: dict[str, Callable[..., Any]] = {
    "jit": lambda function: jax.jit(function)(jnp.asarray(X)),
    "disable_jit": under(lambda: jax.disable_jit()),
    "x64": under(lambda: jax.enable_x64(True)),
    "strict": under(lambda: jax.numpy_dtype_promotion("strict")),
    "rank": under(lambda: jax.numpy_rank_promotion("raise")),
    "debug_nans": under(lambda: jax.debug_nans(True)),
    "leaks": under(lambda: jax.checking_leaks()),
    "rbg": under(lambda: jax.default_prng_impl("rbg")),
    "vmap": batched,
    "scan": looped,
    "auto mesh": on_mesh(AxisType.Auto, P("d")),
    "explicit mesh": on_mesh(AxisType.Explicit, P("d")),
    "explicit mesh, columns": on_mesh(AxisType.Explicit, P(None, "d")),
    "explicit mesh, replicated": on_mesh(AxisType.Explicit, P()),
}
#: What a mode changes by its nature: other keys, so other random words.
DIFFERENT = {("dot_general seed", "rbg")}


def wrong(name: str, mode: str) -> str:
    """Why a function does not give its bits in a mode, or nothing."""
    expected = jax.tree.leaves(ALL[name](jnp.asarray(X)))
    try:
        made = jax.tree.leaves(MODES[mode](ALL[name]))
    except Exception as error:  # noqa: BLE001  what was raised is the answer
        return f"{type(error).__name__}: {str(error)[:300]}"
    if (name, mode) in DIFFERENT:
        return ""
    same = [_bytes(one) == _bytes(two) for one, two in zip(expected, made, strict=True)]
    return "" if all(same) else "other bits"


def _bytes(array: Any) -> bytes:
    return np.ascontiguousarray(np.asarray(array)).tobytes()


if __name__ == "__main__":
    at = sys.argv.index("@")
    with contextlib.suppress(BrokenPipeError):
        ran = 0
        for name in sys.argv[1:at] or ALL:
            for mode in sys.argv[at + 1 :] or MODES:
                ran += 1
                if reason := wrong(name, mode):
                    print(f"{name} @ {mode}: {reason}")
        print(f"{ran} pairs")
