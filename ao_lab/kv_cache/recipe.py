"""`KVRecipe`: how a cache stores keys and values, as a record; `recipe_of` finds one by its name.

Keys and values may be in any `Scheme` whose blocks lie along head_dim: a token is final when it is written, and neither beams
nor rejected drafts round it again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from reference import SCHEMES, Scale, Scheme
from reference.quantize.blocks import Blocks
from reference.quantize.scales import stored_parts
from reference.schemes.schemes import scheme_of

#: Where a model has what `use_kv_cache_` set.
ATTRIBUTE = "_ao_lab_kv_cache"
#: What a recipe says of states that stay as they are.
UNCHANGED = "as they are"
#: NVFP4 without a scale of the whole tensor, which a cache that grows does not know: e4m3 scales of 16 elements alone.
NVFP4 = replace(SCHEMES["nvfp4"], name="kv_nvfp4", outer=None)
#: Four bits with one scale for a token of a head, whatever its width.
INT4 = replace(SCHEMES["int4_g128"], name="kv_int4", scale=replace(SCHEMES["int4_g128"].scale, block=-1))
#: NF4 with a bfloat16 scale for 64 elements of a head.
NF4 = replace(
    SCHEMES["nf4"], name="kv_nf4", outer=None,
    scale=Scale(block=64, target=1.0, floor=("stored", 2.0**-126), storage="bfloat16"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class KVRecipe:
    """How keys and values are stored.

    key, value: a scheme by name or record, blocks along head_dim; None: as the model computes them. rotate: queries and keys
    are mixed by a Hadamard transform of head_dim (their products are unchanged), which spreads channels of large magnitude.

    ValueError for unknown schemes, and for a scale of the whole tensor or blocks of two axes (a cache grows token by token).
    """

    key: str | Scheme | None = None
    value: str | Scheme | None = None
    rotate: bool = False

    def __post_init__(self) -> None:
        for name in ("key", "value"):
            given = getattr(self, name)
            if given is not None:
                scheme = scheme_of(given)
                check_scheme(scheme)
                object.__setattr__(self, name, scheme)

    @property
    def schemes(self) -> tuple[Scheme | None, Scheme | None]:
        """Records of keys and of values; None: as the model computes them."""
        return self.key, self.value  # type: ignore[return-value]  # names became records in __post_init__

    def __str__(self) -> str:
        key, value = (UNCHANGED if scheme is None else scheme.name for scheme in self.schemes)
        return f"keys {key}, values {value}" + ", rotated" * self.rotate

    def check_width(self, key_width: int, value_width: int) -> None:
        """ValueError for heads of a width that a scheme's blocks do not divide, or that Hadamard's transform does not take."""
        if self.rotate and (key_width < 1 or key_width & (key_width - 1)):
            raise ValueError(
                f"rotate takes heads of a power of two, and this model's keys have {key_width} channels; use rotate=False"
            )
        for name, scheme, width in zip(("key", "value"), self.schemes, (key_width, value_width), strict=True):
            block = -1 if scheme is None else scheme.scale.block
            if scheme is not None and isinstance(block, int) and block != -1 and width % block:
                raise ValueError(
                    f"{scheme.name} has blocks of {block} along head_dim, which do not divide this model's {width} channels of "
                    f"a {name}; use a scheme with smaller blocks or one with a scale a token, as fp8_rowwise"
                )

    def bytes_per_token(self, heads: int, width: int, dtype_bytes: int = 2) -> float:
        """Bytes of keys and values of a token in one layer, scales included."""
        return sum(
            heads * (width * dtype_bytes if scheme is None else _bytes(scheme, width))
            for scheme in self.schemes
        )


def _bytes(scheme: Scheme, width: int) -> float:
    """Bytes of a head's token."""
    parts = stored_parts(scheme, Blocks.of((1, width), scheme.scale, -1)).values()
    scales = sum(np.dtype(part[0]).itemsize * math.prod(part[1]) for part in parts if part is not None)
    return width * scheme.format.bits / 8 + scales


def check_scheme(scheme: Scheme) -> None:
    """ValueError for a scheme that a growing cache cannot have."""
    if scheme.outer is not None or not isinstance(scheme.scale.block, int):
        raise ValueError(
            f"{scheme.name} has scales over the whole tensor or blocks of two axes, and a cache grows token by token; use "
            "blocks along one axis, as fp8_rowwise, int4_g64, mxfp4, or the cache's own 'nvfp4' and 'nf4'"
        )
    if scheme.rounding == "stochastic":
        raise ValueError(
            f"a cache rounds to nearest, and {scheme.name} draws random bits; use another rounding"
        )


#: Recipes by name.
RECIPES: Mapping[str, KVRecipe] = {
    "bfloat16": KVRecipe(),
    "fp8": KVRecipe(key="fp8_rowwise", value="fp8_rowwise"),
    "int8": KVRecipe(key="int8_rowwise", value="int8_rowwise"),
    "int4": KVRecipe(key=INT4, value=INT4, rotate=True),
    "mxfp8": KVRecipe(key="mxfp8_e4m3", value="mxfp8_e4m3"),
    "mxfp4": KVRecipe(key="mxfp4", value="mxfp4", rotate=True),
    "nvfp4": KVRecipe(key=NVFP4, value=NVFP4, rotate=True),
    "nf4": KVRecipe(key=NF4, value=NF4, rotate=True),
    "int2": KVRecipe(key="int2_g32_asymmetric", value="int2_g32_asymmetric", rotate=True),
}


def recipe_of(recipe: Any) -> KVRecipe:
    """The recipe of a name, or itself; ValueError for unknown names, TypeError for anything else."""
    if isinstance(recipe, KVRecipe):
        return recipe
    if not isinstance(recipe, str):
        raise TypeError(
            f"a recipe is a KVRecipe or a name of one, got {type(recipe).__name__}: {recipe!r:.60}"
        )
    if recipe not in RECIPES:
        raise ValueError(
            f"no recipe of a KV cache is called {recipe!r}; names are {', '.join(RECIPES)}, or give a KVRecipe"
        )
    return RECIPES[recipe]


__all__ = ["RECIPES", "KVRecipe", "recipe_of"]
