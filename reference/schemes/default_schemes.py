"""The default schemes, those without a prefix in their name, and the parts that conventions of other projects share with them.

See `reference.schemes.schemes` for the rules that all of them follow.
"""

from __future__ import annotations

from reference.formats.formats import FORMATS
from reference.schemes.schemes import Block, Scale, Scheme, Zero

# Smallest float32 scale of the default schemes: its reciprocal is 2**126, so no product of a finite element overflows.
FLOOR = ("stored", 2.0**-126)
# Smallest outer scale: times the smallest e4m3 scale, 2**-9, it still has a reciprocal.
OUTER_FLOOR = ("stored", 2.0**-112)
OCP_BLOCK = 32
SHORT = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "float6_e2m3fn": "e2m3", "float6_e3m2fn": "e3m2"}


def _fp8() -> list[Scheme]:
    blocks: dict[str, Block] = {"tensorwise": "tensor", "rowwise": -1, "1x128": 128, "128x128": (128, 128)}
    schemes = []
    for element, suffix in (("float8_e4m3fn", ""), ("float8_e5m2", "_e5m2")):
        for name, block in blocks.items():
            scale = Scale(block=block, target=FORMATS[element].max, floor=FLOOR, partial=True)
            schemes.append(Scheme(name=f"fp8_{name}{suffix}", element=element, scale=scale))
    return schemes


def mx_name(element: str) -> str:
    """mxfp8_e4m3, mxfp6_e2m3, mxfp4, mxint8: the name of the MX scheme with this element."""
    fmt = FORMATS[element]
    return (
        element
        if fmt.kind == "int"
        else "mxfp" + str(fmt.bits) + ("_" + SHORT[element] if element in SHORT else "")
    )


def mx_scheme(element: str, rule: str = "floor", suffix: str = "") -> Scheme:
    """An OCP MX scheme: blocks of 32, e8m0 scales."""
    scale = Scale(block=OCP_BLOCK, target=FORMATS[element].max, rule=rule, storage="float8_e8m0fnu")
    return Scheme(name=mx_name(element) + suffix, element=element, scale=scale)


MX_ELEMENTS = ("float8_e4m3fn", "float8_e5m2", "float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn")


def _mx() -> list[Scheme]:
    floor = [mx_scheme(element) for element in (*MX_ELEMENTS, "mxint8")]
    return floor + [mx_scheme(element, "rceil", "_rceil") for element in MX_ELEMENTS]


def _nvfp4() -> Scheme:
    # Unlike torchao, subnormal e4m3 scales are used: blocks far below the tensor's maximum keep their precision.
    scale = Scale(block=16, target=6.0, floor=("stored", 2.0**-9), storage="float8_e4m3fn")
    outer = Scale(block="tensor", statistic="absmax_elements", target=6.0 * 448.0, floor=OUTER_FLOOR)
    return Scheme(name="nvfp4", element="float4_e2m1fn", scale=scale, outer=outer)


def _integer(name: str, bits: int, block: Block, asymmetric: bool) -> Scheme:
    qmax = FORMATS[f"int{bits}"].max
    if not asymmetric:
        return Scheme(name=name, element=f"int{bits}", scale=Scale(block=block, target=qmax, floor=FLOOR))
    scale = Scale(block=block, statistic="minmax_with_zero", target=2.0**bits - 1, floor=FLOOR)
    return Scheme(name=name, element=f"int{bits}", scale=scale, zero=Zero())


def _integers() -> list[Scheme]:
    schemes = [
        _integer("int8_tensorwise", 8, "tensor", False),
        _integer("int8_rowwise", 8, -1, False),
        _integer("int8_rowwise_asymmetric", 8, -1, True),
    ]
    for bits in (2, 3, 4, 5, 6, 8):
        for group in (32, 64, 128, 256):
            for suffix in ("", "_asymmetric"):
                schemes.append(_integer(f"int{bits}_g{group}{suffix}", bits, group, bool(suffix)))
    return schemes


def stretched_scheme(element: str, block: Block, name: str) -> Scheme:
    """ParetoQ's stretched levels (arXiv 2502.02631): a block's largest magnitude is the end of the outermost interval."""
    scale = Scale(block=block, target=FORMATS[element].limit, floor=FLOOR)
    return Scheme(name=name, element=element, scale=scale)


def _stretched() -> list[Scheme]:
    blocks: dict[str, Block] = {"rowwise": -1, "g32": 32}
    elements = ("ternary", "stretched2")
    return [stretched_scheme(e, block, f"{e}_{name}") for e in elements for name, block in blocks.items()]


def _nf4() -> Scheme:
    scale = Scale(block="flat:64", target=1.0, floor=FLOOR, storage="int8_nan", partial=True)
    outer = Scale(
        block=256, target=127.0, stored="encode", center="mean", floor=("statistic", 2.0**-112), partial=True
    )
    return Scheme(name="nf4", element="nf4", scale=scale, outer=outer, codes_from="exact")


def default_schemes() -> list[Scheme]:
    """Every scheme without a prefix."""
    return [*_fp8(), *_mx(), _nvfp4(), *_integers(), *_stretched(), _nf4()]


__all__ = ["FLOOR", "MX_ELEMENTS", "default_schemes", "mx_name", "mx_scheme", "stretched_scheme"]
