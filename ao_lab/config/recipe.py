"""Recipes: how one layer runs, as data.

A `Recipe` names the scheme of the weight, the scheme of the activations (None: they are not quantized) and which function
computes the product (`ao_lab.gemm.select`). Configurations (`ao_lab.config.base`) are other names of recipes; everything behind
`quantize_` reads recipes alone.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import gcd
from typing import Any

from reference.arrays.namespace import choice
from reference.schemes.conventions import torchao_float6, torchao_integer
from reference.schemes.schemes import SCHEMES, Block, Scheme, Zero, scheme_of, stretched_scheme
from reference.sparsity.compress import unsupported_reason

#: What `Recipe.kernel` may say; `ao_lab.gemm.select` has the functions.
KERNELS = ("auto", "int8", "scaled_mm", "fused", "dequantize", "reference")
#: What `SparseRecipe.kernel` may say: those that multiply weights in 2:4 storage and no others (`ao_lab.gemm.sparse`).
SPARSE_KERNELS = ("cusparselt", "sparse_int4", "sparse_wgmma")
ACCUMULATIONS = ("exact", "blocked", "hopper_fp8")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a layer runs: schemes of weight and activations, and the kernel."""

    weight: Scheme
    #: Scheme of the input, found anew for each input unless the weight brings static scales; None: left as it is.
    activation: Scheme | None = None
    #: "auto", or the one function that must compute the product.
    kernel: str = "auto"
    #: Tier of `reference.matmul` where the kernel is "reference".
    accumulation: str = "exact"
    #: Inputs a block mixed by `reference.layers.hadamard` before they are quantized and multiplied: the weight that is stored
    #: was mixed so too. A power of two; 0: they are taken as they are.
    rotation: int = 0

    def __post_init__(self) -> None:
        choice(self.kernel, KERNELS, "kernel")
        choice(self.accumulation, ACCUMULATIONS, "accumulation")
        if type(self.rotation) is not int or self.rotation < 0 or self.rotation & (self.rotation - 1):
            raise ValueError(
                f"rotation is a power of two, the inputs of a block, or 0; got {self.rotation!r}"
            )

    def __str__(self) -> str:
        inputs = "" if self.activation is None else f" x {self.activation.name}"
        return self.weight.name + inputs + (f" rotated by {self.rotation}" if self.rotation else "")


@dataclass(frozen=True, kw_only=True)
class SparseRecipe(Recipe):
    """How a layer runs with a kernel for weights in 2:4 storage only; a matmul with another weight is a ValueError."""

    kernel: str

    def __post_init__(self) -> None:
        choice(self.kernel, SPARSE_KERNELS, "kernel")
        choice(self.accumulation, ACCUMULATIONS, "accumulation")
        if self.rotation:
            raise ValueError(f"kernel {self.kernel!r} does not rotate inputs; drop rotation")


def recipe_of(*, kernel: str, **others: Any) -> Recipe:
    """A recipe with these fields: a `SparseRecipe` where the kernel is one of 2:4 storage. ValueError for other names."""
    if kernel in SPARSE_KERNELS:
        return SparseRecipe(kernel=kernel, **others)
    choice(kernel, (*KERNELS, *SPARSE_KERNELS), "kernel")
    return Recipe(kernel=kernel, **others)


def changed_recipe(recipe: Recipe, **changes: Any) -> Recipe:
    """A recipe with other fields, for instance another kernel; of the class that the kernel asks for."""
    return recipe_of(**{f.name: getattr(recipe, f.name) for f in fields(Recipe)} | changes)


def registered(scheme: Scheme) -> Scheme:
    """The record of `SCHEMES` that computes the same, whatever its name; the given one where there is none."""
    wanted = numerics(scheme)
    return next((known for known in SCHEMES.values() if numerics(known) == wanted), scheme)


@lru_cache(maxsize=4096)
def numerics(scheme: Scheme) -> tuple[Any, ...]:
    """The fields of a record that decide bits: all but its name and what is said of it."""
    return tuple(getattr(scheme, f.name) for f in fields(scheme) if f.name not in ("name", "deviations"))


# What users type as a scheme's name, beside the names of records. Nothing here reads the name of a record.

#: int4_g48_asymmetric_bf16: bits, block, zero points, scales in bfloat16 (or `_f16`).
INTEGER = re.compile(r"int([1-8])_(?:g([1-9]\d*)|(rowwise)|(tensorwise))(_asymmetric)?(_bf16|_f16)?")
#: How scales are stored, by the end of a name.
STORED = {None: "float32", "_bf16": "bfloat16", "_f16": "float16"}
#: float16's smallest value: reciprocals and products of finite elements stay finite.
FLOAT16_FLOOR = ("stored", 2.0**-24)
FLOAT16_OVERFLOWS = "a block whose scale lies beyond 65504 becomes NaN"
#: int8_rowwise_cast: scales rounded to the dtype of the tensor that is quantized.
CAST = "_cast"
#: An outer scale that is a power of two: nvfp4_pow2.
POWER = "_pow2"
#: ternary_g64, stretched2_rowwise: level set, block.
STRETCHED = re.compile(r"(ternary|stretched2)_(?:g([1-9]\d*)|(rowwise)|(tensorwise))")


def integer_scheme(bits: int, block: Block, asymmetric: bool, storage: str = "float32") -> Scheme:
    """The default integers of `bits` bits in any block: the record of them, or a new one by the same rules.

    One bit has no symmetric integers: its two levels are the ends of the block's range (`int1`). `storage` "bfloat16" stores
    scales in bfloat16, as other programs do that load a checkpoint in bfloat16; "float16" as blocks of GGUF files do.
    """
    choice(storage, tuple(STORED.values()), "storage of scales")
    suffix = next(end for end, name in STORED.items() if name == storage) or ""
    ends = ("_asymmetric" if asymmetric and bits > 1 else "") + suffix
    name = f"int{bits}_{block_name(block)}{ends}"
    model = SCHEMES["int4_g32_asymmetric" if asymmetric or bits == 1 else "int4_g32"]
    target = 2.0**bits - 1 if model.zero is not None else 2.0 ** (bits - 1) - 1
    half = storage == "float16"
    floor = FLOAT16_FLOOR if half else model.scale.floor
    model = replace(model, deviations=(FLOAT16_OVERFLOWS,)) if half else model
    scale = replace(model.scale, block=block, target=target, storage=storage, floor=floor)
    if bits > 1:
        return registered(replace(model, name=name, element=f"int{bits}", scale=scale))
    # Two levels, the block's minimum and maximum: code * (max - min) + min.
    ends_of_range = replace(scale, statistic="minmax")
    return replace(
        model, name=name, element="uint1", scale=ends_of_range, zero=Zero(rule="value", storage="float32")
    )


def cast_scales(scheme: Scheme) -> Scheme:
    """The scheme with scales rounded to the dtype of what is quantized, still stored in float32; itself where they are already.

    Programs that hold scales in a model's own dtype read these unchanged. ValueError for scales that are stored otherwise.
    """
    if scheme.scale.storage != "float32" or scheme.outer is not None:
        raise ValueError(
            f"scales of {scheme.name} are stored as {scheme.scale.storage}, which no dtype of a model changes"
        )
    if scheme.scale.compute == "input":
        return scheme
    return replace(scheme, name=scheme.name + CAST, scale=replace(scheme.scale, compute="input"))


def power_of_two_outer(scheme: Scheme) -> Scheme:
    """The scheme with its outer scale rounded up to a power of two; itself where the outer scale is stored for encoding.

    Programs that keep the reciprocal and divide by it read these unchanged: a power of two has an exact one. ValueError for a
    scheme of one level.
    """
    if scheme.outer is None:
        raise ValueError(f"{scheme.name} has no outer scale")
    if scheme.outer.stored == "encode" or scheme.outer.rule == "ratio_pow2":
        return scheme
    return replace(scheme, name=scheme.name + POWER, outer=replace(scheme.outer, rule="ratio_pow2"))


def stretched(element: str, block: Block) -> Scheme:
    """Stretched levels in any block: the record of them, or a new one by the same rules."""
    return registered(stretched_scheme(element, block, f"{element}_{block_name(block)}"))


def block_name(block: Block) -> str:
    """How the names of the default schemes call a block."""
    if isinstance(block, tuple):
        return "x".join(map(str, block))
    return {"-1": "rowwise", "tensor": "tensorwise"}.get(str(block), f"g{block}")


def named(scheme: str | Scheme | None) -> Scheme | None:
    """The record of a name, also of integers and stretched levels in blocks that no record has yet; records and None pass.

    Torchao's integers are made by `reference.schemes.conventions.torchao_integer`: `torchao.intx3_g64_asymmetric`; its FP6 by
    `torchao_float6`: `torchao.fp6_e3m2_rowwise`.
    """
    new = isinstance(scheme, str) and scheme not in SCHEMES
    if new and str(scheme).endswith(CAST) and (base := named(str(scheme).removesuffix(CAST))) is not None:
        return cast_scales(base)
    if new and str(scheme).endswith(POWER) and (base := named(str(scheme).removesuffix(POWER))) is not None:
        return power_of_two_outer(base)
    if new and (theirs := torchao_integer(str(scheme)) or torchao_float6(str(scheme))) is not None:
        return theirs
    if new and (levels := STRETCHED.fullmatch(str(scheme))) is not None:
        return stretched(levels[1], _named_block(levels[2], levels[3]))
    match = INTEGER.fullmatch(str(scheme)) if new else None
    if match is None:
        return None if scheme is None else scheme_of(scheme)
    bits, group, rows, _, asymmetric, ending = match.groups()
    return integer_scheme(int(bits), _named_block(group, rows), asymmetric is not None, STORED[ending])


def _named_block(group: str | None, rows: str | None) -> Block:
    return int(group) if group else -1 if rows else "tensor"


# Whether weights can be stored 2:4, compressed, as `Config.sparsity` asks, and whether a kernel wants that: by the recipe
# alone.

#: Patterns that have a compressed storage.
SPARSITY_PATTERNS = ("2:4",)
#: Kernels that read dense codes, and why they do not take the others.
DENSE_KERNELS = {
    "int8": "torch._int_mm reads every value of a row",
    "scaled_mm": "torch._scaled_mm reads every value of a row",
    "fused": "its kernels decode every value of a row",
}


def unstorable_recipe(recipe: Recipe) -> str | None:
    """Why no weight of a recipe is stored 2:4, whatever its shape, and the way out; None where it can be."""
    if (reason := unsupported_reason(recipe.weight)) is not None:
        return f"2:4 storage does not hold {recipe.weight.name}: {reason}; take symmetric integers or floats, as int8_rowwise"
    if recipe.kernel in DENSE_KERNELS:
        return f"kernel {recipe.kernel!r} does not take 2:4 storage: {DENSE_KERNELS[recipe.kernel]}; use kernel='auto'"
    return None


def check_sparsity(name: str, sparsity: str | None, recipe: Recipe) -> None:
    """ValueError for a `Config.sparsity` that is no pattern, or that the recipe of configuration `name` does not allow; and for
    none beside a kernel that multiplies no other weights."""
    if sparsity is None:
        if recipe.kernel in SPARSE_KERNELS:
            raise ValueError(
                f"{name}: kernel {recipe.kernel!r} supports weights in 2:4 storage only; give sparsity='2:4' with it, or "
                f"take kernel='auto'"
            )
        return
    choice(sparsity, SPARSITY_PATTERNS, f"{name}: sparsity")
    if (reason := unstorable_recipe(recipe)) is not None:
        raise ValueError(f"{name}: {reason}")


__all__ = [
    "ACCUMULATIONS",
    "KERNELS",
    "SPARSE_KERNELS",
    "Recipe",
    "SparseRecipe",
    "block_name",
    "cast_scales",
    "changed_recipe",
    "check_sparsity",
    "integer_scheme",
    "largest_group",
    "named",
    "numerics",
    "power_of_two_outer",
    "recipe_of",
    "registered",
    "stretched",
    "undividing",
    "unstorable_recipe",
]  # fmt: skip


#: Group sizes that most checkpoints have.
USUAL_GROUPS = (128, 64, 32)
#: Lengths that a message names.
MOST_LENGTHS = 6


def largest_group(block: int, lengths: Collection[int]) -> int:
    """The largest power of two that divides all lengths, up to `block`, or 32 where that is less."""
    common = gcd(*lengths)
    return min(common & -common, 1 << max(block, USUAL_GROUPS[-1]).bit_length() - 1)


def usual_group(block: int, lengths: Collection[int]) -> int:
    """The largest usual group below `block` that divides most of the lengths, one for each layer; 0 where none does."""
    fits = {size: sum(one % size == 0 for one in lengths) for size in USUAL_GROUPS if size < block}
    return next((size for size, count in fits.items() if 2 * count > len(lengths)), 0)


def undividing(block: int, lengths: Collection[int]) -> str:
    """That groups of `block` divide none of the lengths of layers' inputs (one for each layer), and what to use instead: the
    `largest_group`, one scale per row where that is less than 8; before it the usual group that divides most, where that is
    larger."""
    common, shown = gcd(*lengths), sorted(set(lengths))
    size, usual = largest_group(block, lengths), usual_group(block, lengths)
    way = (
        f"use group_size={size}"
        if common % 8 == 0
        else "use one scale per row (int8_rowwise, or group_size=-1)"
    )
    if usual > size:
        fits = sum(one % usual == 0 for one in lengths)
        way = f"use group_size={usual}, which fits {fits} of {len(lengths)} layers; for all of them {way}"
    more = ", ..." if len(shown) > MOST_LENGTHS else ""
    named = f"{', '.join(map(str, shown[:MOST_LENGTHS]))}{more}"
    return f"groups of {block} divide the inputs of no layer ({named}); {way}"
