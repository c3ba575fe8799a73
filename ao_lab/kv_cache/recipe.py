"""`KVRecipe`: how a cache stores keys and values, as a record; `recipe_of` finds one by its name.

Keys and values may be in any `Scheme` with blocks along head_dim, where a token is final when it is written, or along tokens,
where a group is final when it is full; neither beams nor rejected drafts round anything again. Beside them the first and the
last tokens may be read as they were computed (`reference.attention.window`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from reference import SCHEMES, Scale, Scheme
from reference.arrays.namespace import and_nearest
from reference.attention.window import Window
from reference.quantize.blocks import Blocks
from reference.quantize.scales import stored_parts
from reference.schemes.schemes import scheme_of

#: What a recipe says of states that stay as they are.
UNCHANGED = "as they are"
#: NVFP4 without a scale of the whole tensor, which a cache that grows does not know: e4m3 scales of 16 elements alone.
NVFP4 = replace(SCHEMES["nvfp4"], name="kv_nvfp4", outer=None)
#: Four bits with one scale for a token of a head, whatever its width. The largest value is half a step beyond the last level:
#: it is rounded no further than others are, and steps are 7 percent shorter.
INT4 = replace(
    SCHEMES["int4_g128"], name="kv_int4", scale=replace(SCHEMES["int4_g128"].scale, block=-1, target=7.5)
)
#: NF4 with a bfloat16 scale for 64 elements of a head.
NF4 = replace(
    SCHEMES["nf4"], name="kv_nf4", outer=None,
    scale=Scale(block=64, target=1.0, floor=("stored", 2.0**-126), storage="bfloat16"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class KVRecipe:
    """How keys and values are stored in a cache.

    key, value: a scheme by name or record; None: unquantized. key_axis, value_axis: the axis of its blocks, -1 head_dim, -2
    tokens (a scale per channel: KIVI). rotate: queries and keys are rotated by a Hadamard transform of head_dim (scores are
    unchanged), which spreads outlier channels. residual, sinks: how many of the last and of the first tokens are kept
    unquantized, in the model's dtype; with blocks along tokens, also those of the incomplete block. Sinks are positions: in a
    left-padded sequence they are padding. static: scales are not computed per token but found by calibration or stored in a
    folder (`cache_scales(model)`), per head or for all heads; larger values saturate.

    ValueError for unknown schemes, for a scale of the whole tensor or blocks of two axes (a cache grows token by token), for
    blocks along tokens of several lengths, and for static scales of schemes with more than one scale per token.
    """

    key: str | Scheme | None = None
    value: str | Scheme | None = None
    rotate: bool = False
    key_axis: int = -1
    value_axis: int = -1
    residual: int = 0
    sinks: int = 0
    static: bool = False

    def __post_init__(self) -> None:
        for name in ("key", "value"):
            given = getattr(self, name)
            if given is not None:
                scheme = scheme_of(given)
                check_scheme(scheme)
                object.__setattr__(self, name, scheme)
            _check_axis(name, getattr(self, name), getattr(self, f"{name}_axis"))
        if len(self._groups()) > 1:
            raise ValueError(
                f"blocks along tokens of keys and values are of one length, got {sorted(self._groups())}; a group is quantized "
                "when it is full"
            )
        _ = self.window
        if self.static and any(
            one is None or one.scale.block != -1 or one.zero is not None for one in self.schemes
        ):
            raise ValueError(
                "static scales are of recipes with one scale a token, keys and values both, as fp8_rowwise and int8_rowwise"
            )

    def _groups(self) -> set[int]:
        pairs = zip(self.schemes, self.axes, strict=True)
        return {scheme.scale.block for scheme, axis in pairs if scheme is not None and axis == 2}  # type: ignore[misc]

    @property
    def axes(self) -> tuple[int, int]:
        """Axes of (B, heads, tokens, width) that the blocks of keys and of values lie along."""
        return self.key_axis % 4, self.value_axis % 4

    @property
    def window(self) -> Window:
        """Which tokens are read as they were computed."""
        return Window(self.residual, self.sinks, max(self._groups(), default=1))

    @property
    def schemes(self) -> tuple[Scheme | None, Scheme | None]:
        """Records of keys and of values; None: as the model computes them."""
        return self.key, self.value  # type: ignore[return-value]  # names became records in __post_init__

    def __str__(self) -> str:
        key, value = (UNCHANGED if scheme is None else scheme.name for scheme in self.schemes)
        key, value = (
            text + " a channel" * (axis == 2) for text, axis in zip((key, value), self.axes, strict=True)
        )
        parts = [
            f"keys {key}",
            f"values {value}",
            *["static scales"] * self.static,
            *["rotated"] * self.rotate,
        ]
        parts += [
            f"{count} {which} tokens as computed"
            for count, which in ((self.sinks, "first"), (self.residual, "last"))
            if count
        ]
        return ", ".join(parts)

    def check_width(self, key_width: int, value_width: int) -> None:
        """ValueError for heads of a width that a scheme's blocks do not divide, or that Hadamard's transform does not take."""
        if self.rotate and (key_width < 1 or key_width & (key_width - 1)):
            raise ValueError(
                f"rotate takes heads of a power of two, and this model's keys have {key_width} channels; use rotate=False"
            )
        for name, scheme, width, axis in zip(
            ("key", "value"), self.schemes, (key_width, value_width), self.axes, strict=True
        ):
            block = -1 if scheme is None or axis == 2 else scheme.scale.block
            if scheme is not None and isinstance(block, int) and block != -1 and width % block:
                raise ValueError(
                    f"{scheme.name} has blocks of {block} along head_dim, which do not divide this model's {width} channels of "
                    f"a {name}; use a scheme with smaller blocks or one with a scale a token, as fp8_rowwise"
                )

    def bytes_per_token(self, heads: int, width: int, dtype_bytes: int = 2) -> float:
        """Bytes of keys and values of a token in one layer, scales included where they are of tokens."""
        return sum(
            heads * (width * dtype_bytes if scheme is None else _bytes(scheme, width, axis, self.static))
            for scheme, axis in zip(self.schemes, self.axes, strict=True)
        )

    def bytes_beside(self, heads: int, width: int, dtype_bytes: int = 2) -> int:
        """Bytes of a sequence in one layer that do not grow: the tokens that are read as computed."""
        stored = sum(scheme is not None for scheme in self.schemes)
        return stored * heads * width * self.window.slots * dtype_bytes


def _bytes(scheme: Scheme, width: int, axis: int, static: bool) -> float:
    """Bytes of a head's token, those of a group's scales shared by its tokens."""
    if static:
        return width * scheme.format.bits / 8
    tokens = int(scheme.scale.block) if axis == 2 else 1  # type: ignore[arg-type]
    parts = stored_parts(scheme, Blocks.of((tokens, width), scheme.scale, axis - 2)).values()
    scales = sum(np.dtype(part[0]).itemsize * math.prod(part[1]) for part in parts if part is not None)
    return width * scheme.format.bits / 8 + scales / tokens


def _check_axis(name: str, scheme: Scheme | None, axis: int) -> None:
    """ValueError for an axis that blocks do not lie along, and for one scale of all tokens."""
    if axis not in (-1, -2):
        raise ValueError(f"{name}_axis is -1 (head_dim) or -2 (tokens), got {axis!r}")
    block = None if scheme is None else scheme.scale.block
    if axis == -2 and (not isinstance(block, int) or block < 1):
        raise ValueError(
            f"blocks along tokens have a length, and {name} is {UNCHANGED if scheme is None else scheme.name}; give a scheme "
            "in groups, as int4_g64_asymmetric"
        )


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


#: First and last tokens that recipes of four bits, and of eight by name, read as they were computed.
NEAR: Mapping[str, Any] = {"sinks": 4, "residual": 64}
#: Recipes by name. "int4" is the one that was searched for on real models (`reports/LOG.md`): keys by channel in groups of 64
#: tokens, since their channels differ (a bias, as Qwen's, makes scales by token useless), values by token, and the last tokens
#: as computed, which had most of the error. Keys and values of a token of a head of D channels take 1.08 D + 4 bytes, 4 D
#: in 16 bits, the 68 tokens beside 4 D each. "int4_tokens" has a scale a token, keys rotated: D + 8 bytes. "int2": KIVI.
#: "fp8" and "int8" have a scale a token: 2 D + 8 bytes. FP8's three mantissa bits round keys, whose products are exponents of
#: softmax, too coarsely: INT8's KL is a seventh of it (`reports/LOG.md`), as FP8's is with first and last tokens as computed.
#: "int8_channels" is for keys with a bias, which both round badly: D (2 + 5 / 64) + 4 bytes, and tokens beside as "int4".
RECIPES: Mapping[str, KVRecipe] = {
    "bfloat16": KVRecipe(),
    "fp8": KVRecipe(key="fp8_rowwise", value="fp8_rowwise"),
    "fp8_residual": KVRecipe(key="fp8_rowwise", value="fp8_rowwise", **NEAR),
    "int8": KVRecipe(key="int8_rowwise", value="int8_rowwise"),
    "int8_channels": KVRecipe(key="int8_g64_asymmetric", key_axis=-2, value="int8_rowwise", **NEAR),
    "int4": KVRecipe(key="int4_g64_asymmetric", key_axis=-2, value=INT4, **NEAR),
    "int4_tokens": KVRecipe(key=INT4, value=INT4, rotate=True, **NEAR),
    "mxfp8": KVRecipe(key="mxfp8_e4m3", value="mxfp8_e4m3"),
    "mxfp4": KVRecipe(key="mxfp4", value="mxfp4", rotate=True, **NEAR),
    "nvfp4": KVRecipe(key=NVFP4, value=NVFP4, rotate=True, **NEAR),
    "nf4": KVRecipe(key=NF4, value=NF4, rotate=True, **NEAR),
    "int2": KVRecipe(
        key="int2_g32_asymmetric", key_axis=-2, value="int2_g32_asymmetric", sinks=4, residual=128
    ),
}


#: The name of the recipe with a model's own static scales, and recipes by what such a cache stores.
CALIBRATED = "calibrated"
STATIC: Mapping[str, KVRecipe] = {
    "float8_e4m3fn": replace(RECIPES["fp8"], static=True),
    "int8": replace(RECIPES["int8"], static=True),
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
        names = (*RECIPES, CALIBRATED)
        raise ValueError(
            f"no recipe of a KV cache is called {recipe!r}{and_nearest(recipe, names)}; names are {', '.join(names)}, or give "
            "a KVRecipe"
        )
    return RECIPES[recipe]


__all__ = ["RECIPES", "KVRecipe", "recipe_of"]
