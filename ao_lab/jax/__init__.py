"""ao_lab for JAX: the functions of `reference` for JAX arrays, by kernels where the arrays are on a GPU.

Arrays on a CPU run the specification, which XLA compiles. Arrays on an NVIDIA GPU (compute capability 9.0 or later, with
triton installed) run the kernels that torch tensors run, with the same bits: eagerly, under `jit`, `vmap` and `grad`, and in
any mixture. Under `jit` the platform that the program is compiled for decides. Programs over several devices run the kernels
on each device's part inside `jax.shard_map`; otherwise XLA gathers the array first.

`from_torch` and `to_torch` hand quantized tensors over without copying them. `dot_general` is `jax.lax.dot_general` by a
training recipe; `ao_lab.jax.training` has it too, with what flax and einsum take. `quantize_params` and `quantize_` are
`ao_lab.quantize_` for parameters of linen and for models of nnx.
"""

from ao_lab.install.extras import explained
from reference import register_jax

try:
    from ao_lab.jax import training
    from ao_lab.jax.exchange import from_torch, to_torch
    from ao_lab.jax.functions import choose_scales, dequantize, fake_quantize, quantize
    from ao_lab.jax.matmul import matmul
    from ao_lab.jax.params import Axes, QuantizedParam, dequantize_params
    from ao_lab.jax.quantize_params import fake_quantize_params, quantize_, quantize_params
    from ao_lab.jax.training import dot_general
except ModuleNotFoundError as error:
    if error.name == "torch":
        said = "ao_lab.jax needs torch beside JAX: pip install torch; without it ao_lab.quantize and dequantize take JAX arrays"
        raise ModuleNotFoundError(said, name="torch") from None
    raise explained(error) from None

# What `from_torch` makes may be handed to `jax.jit` before anything else here is called.
register_jax()

__all__ = [
    "Axes", "QuantizedParam", "choose_scales", "dequantize", "dequantize_params", "dot_general", "fake_quantize",
    "fake_quantize_params", "from_torch", "matmul", "quantize", "quantize_", "quantize_params", "to_torch", "training",
]  # fmt: skip
