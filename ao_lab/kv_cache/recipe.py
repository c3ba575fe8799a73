"""`KVRecipe`: how a cache stores keys and values, as a record; `recipe_of` finds one by its name.

Keys and values may be in any `Scheme`. Along head_dim (axis -1) a token is final when it is written. Along tokens (axis -2,
KIVI, arXiv 2402.02750: keys have few channels of large magnitude, so a scale a channel fits them) a group of tokens is final
when it is full; the open group stays in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from reference import SCHEMES, Scale, Scheme, packed_shape
from reference.quantize.blocks import Blocks
from reference.schemes.schemes import scheme_of

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

    key, value: a scheme by name or record; None: as the model computes them. key_axis, value_axis: -1, blocks along head_dim;
    -2, blocks along tokens, the open block beside in the model's dtype. rotate: queries and keys are mixed by a Hadamard
    transform of head_dim (their products are unchanged), which spreads channels of large magnitude. sinks: as many first tokens
    stay in the model's dtype.

    ValueError for unknown schemes, other axes, a negative number of sinks, a scale of the whole tensor (a cache grows), and
    along tokens for a scheme without blocks.
    """

    key: str | Scheme | None = None
    value: str | Scheme | None = None
    key_axis: int = -1
    value_axis: int = -1
    rotate: bool = False
    sinks: int = 0

    def __post_init__(self) -> None:
        for name in ("key", "value"):
            given = getattr(self, name)
            if given is not None:
                scheme = scheme_of(given)
                check_scheme(scheme, getattr(self, f"{name}_axis"), name)
                object.__setattr__(self, name, scheme)
            elif getattr(self, f"{name}_axis") != -1:
                raise ValueError(f"{name}_axis is for a scheme, and {name} has none; leave it at -1")
        if type(self.sinks) is not int or self.sinks < 0:
            raise ValueError(f"sinks is a number of tokens, 0 or more; got {self.sinks!r}")

    @property
    def schemes(self) -> tuple[Scheme | None, Scheme | None]:
        """Records of keys and of values; None: as the model computes them."""
        return self.key, self.value  # type: ignore[return-value]  # names became records in __post_init__

    def __str__(self) -> str:
        parts = [
            f"{name} {_text(getattr(self, name), getattr(self, f'{name}_axis'))}" for name in ("key", "value")
        ]
        more = ["rotated"] * self.rotate + [f"{self.sinks} first tokens as they are"] * bool(self.sinks)
        return ", ".join(("keys" + parts[0][3:], "values" + parts[1][5:], *more))

    def check_width(self, key_width: int, value_width: int) -> None:
        """ValueError for heads of a width that a scheme's blocks do not divide, or that Hadamard's transform does not take."""
        if self.rotate and (key_width < 1 or key_width & (key_width - 1)):
            raise ValueError(
                f"rotate takes heads of a power of two, and this model's keys have {key_width} channels; use rotate=False"
            )
        for name, width in (("key", key_width), ("value", value_width)):
            scheme, axis = getattr(self, name), getattr(self, f"{name}_axis")
            block = scheme.scale.block if scheme is not None else -1
            if axis == -1 and block != -1 and width % block:
                raise ValueError(
                    f"{scheme.name} has blocks of {block} along head_dim, which do not divide this model's {width} channels of "
                    f"a {name}; use a scheme with smaller blocks or one with a scale a token, as fp8_rowwise"
                )
            if scheme is not None and axis == -1:
                packed_shape((1, width), scheme.format)

    def bytes_per_token(self, heads: int, width: int, dtype_bytes: int = 2) -> float:
        """Bytes of keys and values of a token in one layer, scales included; open groups and sinks are not."""
        total = 0.0
        for name in ("key", "value"):
            scheme, axis = getattr(self, name), getattr(self, f"{name}_axis")
            total += heads * (width * dtype_bytes if scheme is None else _bytes(scheme, axis, width))
        return total


def _bytes(scheme: Scheme, axis: int, width: int) -> float:
    """Bytes of a head's token."""
    tokens = scheme.scale.block if axis == -2 and isinstance(scheme.scale.block, int) else 1
    blocks = Blocks.of((tokens, width), scheme.scale, axis).scale_shape
    sizes = {"float32": 4, "bfloat16": 2, "float16": 2}
    scales = blocks[0] * blocks[1] / tokens
    zero = 0 if scheme.zero is None else sizes.get(scheme.zero.storage, 1)
    return width * scheme.format.bits / 8 + scales * (sizes.get(scheme.scale.storage, 1) + zero)


def _text(scheme: Scheme | None, axis: int) -> str:
    if scheme is None:
        return "as they are"
    return scheme.name + (" along tokens" if axis == -2 else "")


def check_scheme(scheme: Scheme, axis: int, name: str) -> None:
    """ValueError for a scheme that a growing cache cannot have along an axis."""
    block = scheme.scale.block
    if axis not in (-1, -2):
        raise ValueError(f"{name}_axis is -1 (blocks along head_dim) or -2 (along tokens), got {axis!r}")
    if scheme.outer is not None or not isinstance(block, int):
        raise ValueError(
            f"{scheme.name} has scales over the whole tensor or blocks of two axes, and a cache grows token by token; use "
            "blocks along one axis, as fp8_rowwise, int4_g64, mxfp4, or the cache's own 'nvfp4' and 'nf4'"
        )
    if axis == -2 and block < 1:
        raise ValueError(
            f"along tokens a scheme has blocks of some tokens, and {scheme.name} has one scale a channel for all of them; use "
            "one as int2_g32_asymmetric"
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
    "kivi2": KVRecipe(key="int2_g32_asymmetric", key_axis=-2, value="int2_g32_asymmetric"),
    "kivi4": KVRecipe(key="int4_g32_asymmetric", key_axis=-2, value="int4_g32_asymmetric"),
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
