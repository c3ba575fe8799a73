"""Low-precision training in JAX: products by the recipes of `reference.training`.

`dot_general` stands for `jax.lax.dot_general`, `DotGeneral` for what takes such a function (flax), `einsum` for `jnp.einsum`.
"""

from ao_lab.jax.training.dot_general import DotGeneral, dot_general
from ao_lab.jax.training.einsum import einsum

__all__ = ["DotGeneral", "dot_general", "einsum"]
