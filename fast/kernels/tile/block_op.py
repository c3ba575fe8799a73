"""What a launch does with a tile."""

from __future__ import annotations

from fast.kernels.scheme.constants import Constant


class BlockOp(Constant):
    """What a launch does with the tiles of a tensor.

    source: where scales come from: "tile", "statistic" (of an earlier pass) or "given". outer: the same of the outer scale, ""
    for none. codes, scales, statistic: what is written. output: dtype of dequantized values, or "". gradient: y = g where the
    element did not saturate. dequantize: codes are read, not x. packed: codes are packed. reverse: programs begin at the end of
    x. tiled: scales are written in the tiles of `reference.quantize.stored`, and `stride` is the number of blocks in a
    row. pairs: x is read in pairs of 16-bit floats. level: "averages" or "groups": scales that are quantized themselves are
    averaged, and quantized (`second_level`). exact: such scales divide elements as they are, below the floor or not.
    saturation: "mask": which blocks saturate is written to the argument `codes`; "gradient": g is masked in place by it.
    parts, share: the power of two above the number of averages, and 1 over that above the number of scales.
    """


def block_op(
    *, source: str = "tile", outer: str = "", codes: bool = False, scales: bool = False, statistic: bool = False,
    output: str = "", gradient: bool = False, dequantize: bool = False, packed: bool = False, exact: bool = False,
    reverse: bool = False, tiled: bool = False, pairs: bool = False, level: str = "", parts: int = 1, share: float = 1.0,
    saturation: str = "",
) -> BlockOp:  # fmt: skip
    """A `BlockOp`; what is not named is off."""
    return BlockOp(
        source=source, outer=outer, codes=codes, scales=scales, statistic=statistic, output=output, gradient=gradient,
        dequantize=dequantize, packed=packed, exact=exact, reverse=reverse,
        tiled=tiled, pairs=pairs, level=level, parts=parts, share=share, saturation=saturation,
    )  # fmt: skip
