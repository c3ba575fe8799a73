"""Recipes: how one layer runs, as data.

A `Recipe` names the scheme of the weight, the scheme of the activations (None: they are not quantized) and which function
computes the product (`ao_lab.products`). Configurations (`ao_lab.configs`) are other names of recipes; everything behind
`quantize_` reads recipes alone.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from reference.errors import choice
from reference.schemes import SCHEMES, Block, Scale, Scheme, Zero, scheme_of

#: What `Recipe.kernel` may say; `ao_lab.products` has the functions.
KERNELS = ("auto", "int8", "scaled_mm", "dequantize", "reference")
ACCUMULATIONS = ("exact", "blocked", "hopper_fp8")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a layer runs."""

    weight: Scheme
    #: Scheme of the input, found anew for each input unless the weight brings static scales; None: left as it is.
    activation: Scheme | None = None
    #: "auto", or the one function that must compute the product.
    kernel: str = "auto"
    #: Tier of `reference.matmul` where the kernel is "reference".
    accumulation: str = "exact"

    def __post_init__(self) -> None:
        choice(self.kernel, KERNELS, "kernel")
        choice(self.accumulation, ACCUMULATIONS, "accumulation")

    def __str__(self) -> str:
        inputs = "" if self.activation is None else f" x {self.activation.name}"
        return self.weight.name + inputs


def integer_scheme(bits: int, block: Block, asymmetric: bool) -> Scheme:
    """The house's integers of `bits` bits in any block: the record that has this name, or a new one by the same rules.

    One bit has no symmetric integers: its two levels are the ends of the block's range (`int1`).
    """
    if bits == 1:
        return _one_bit(block)
    suffix = "_asymmetric" if asymmetric else ""
    name = f"int{bits}_{block_name(block)}{suffix}"
    if name in SCHEMES:
        return SCHEMES[name]
    model = SCHEMES[f"int4_g32{suffix}"]
    target = 2.0**bits - 1 if asymmetric else 2.0 ** (bits - 1) - 1
    return replace(
        model, name=name, element=f"int{bits}", scale=replace(model.scale, block=block, target=target)
    )


def _one_bit(block: Block) -> Scheme:
    """Two levels, the block's minimum and maximum: code * (max - min) + min."""
    model = SCHEMES["int4_g32_asymmetric"]
    scale = replace(model.scale, block=block, statistic="minmax", target=1.0)
    return replace(
        model,
        name=f"int1_{block_name(block)}",
        element="uint1",
        scale=scale,
        zero=Zero(rule="value", storage="float32"),
    )


def block_name(block: Block) -> str:
    """How the names of house schemes call a block."""
    if isinstance(block, tuple):
        return "x".join(map(str, block))
    return {"-1": "rowwise", "tensor": "tensorwise"}.get(str(block), f"g{block}")


def named(scheme: str | Scheme | None) -> Scheme | None:
    """The record of a name; records and None pass through."""
    return None if scheme is None else scheme_of(scheme)


def scheme_fields(scheme: Scheme) -> dict[str, Any]:
    """A record as plain values, for files."""
    return asdict(scheme)


def scheme_from(fields: dict[str, Any]) -> Scheme:
    """The record that `scheme_fields` took apart; ValueError or TypeError where it is none. JSON's lists may be tuples."""
    given = {name: _tuples(value) for name, value in fields.items()}
    for name, record in (("scale", Scale), ("outer", Scale), ("zero", Zero)):
        if given.get(name) is not None:
            given[name] = record(**{key: _tuples(value) for key, value in given[name].items()})
    return Scheme(**given)


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


__all__ = [
    "ACCUMULATIONS",
    "KERNELS",
    "Recipe",
    "block_name",
    "integer_scheme",
    "named",
    "scheme_fields",
    "scheme_from",
]
