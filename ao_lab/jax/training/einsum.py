"""`einsum` of inputs and a weight by a training recipe: `dot_general`, with the axes named by letters."""

from __future__ import annotations

from typing import Any

import jax

from ao_lab.jax.device import require_array
from ao_lab.jax.training.dot_general import dot_general
from reference.training.recipe import Recipe


def einsum(
    subscripts: str,
    x: jax.Array,
    w: jax.Array,
    *,
    recipe: str | Recipe,
    seed: Any = None,
    precision: Any = None,
    preferred_element_type: Any = None,
) -> jax.Array:
    """`jnp.einsum(subscripts, x, w)` of inputs x and a weight w, its gradients too, by a recipe.

    subscripts: "BSD,CKDH->CBSKH", one letter for each axis, the result named; an axis stands once in each operand, and an
    axis of one operand stands in the result. `jnp.einsum` may exchange its operands before it calls `_dot_general`; here the
    first is the input whatever the order of the result. Other arguments, roundings and errors as in `dot_general`; ValueError
    for other subscripts.
    """
    a, b, made = _parsed(subscripts)
    for labels, value, name in ((a, x, "x"), (b, w, "w")):
        if require_array(value, "training.einsum").ndim != len(labels):
            raise ValueError(
                f"einsum {subscripts!r}: {name} has {value.ndim} axes, its subscripts {len(labels)}"
            )
    batch = [label for label in made if label in a and label in b]
    contracted = [label for label in a if label in b and label not in made]
    pairs = [tuple(tuple(map(one.index, labels)) for one in (a, b)) for labels in (contracted, batch)]
    y = dot_general(
        x, w, tuple(pairs), precision, preferred_element_type, recipe=recipe, seed=seed, weight="rhs"
    )
    free = [label for one in (a, b) for label in one if label not in batch and label not in contracted]
    names = [*batch, *free]
    return y.transpose([names.index(label) for label in made])


def _parsed(subscripts: str) -> tuple[str, str, str]:
    """Labels of both operands and of the result; ValueError for what is no product of two operands."""
    operands, _, made = subscripts.replace(" ", "").partition("->")
    parts = operands.split(",")
    good = len(parts) == 2 and all(
        (part.isalpha() or not part) and len(set(part)) == len(part) for part in (*parts, made)
    )
    a, b = map(set, parts) if good else (set(), set())
    if not good or not a ^ b <= set(made) <= a | b:
        raise ValueError(
            f"einsum of a recipe takes 'ab,bc->ac': two operands, the result named, each letter once in each, letters of one "
            f"operand in the result; got {subscripts!r}"
        )
    return parts[0], parts[1], made
