"""What a launch does with a tile."""

from fast.kernels.scheme.element_constants import Constant


class Job(Constant):
    """What a launch does.

    source: "tile", "statistic" or "given" scales. outer: "", "statistic" or "given". codes, scales, statistic: what is
    written. output: dtype name of dequantized values, or "". gradient: y = g where the element did not saturate.
    dequantize: codes are read, not x. packed: codes are packed. words: stochastic rounding. tiled: scales are written in
    the tiles of `reference.quantize.tiled_scales`, and `stride` is the number of blocks in a row. pairs: x is read in
    pairs of bfloat16. level: "averages" or "groups", where scales that are quantized themselves are averaged, and
    quantized (`second_level`). exact: scales that are quantized themselves divide elements as they are, below the floor or
    not. clipped: "note": which blocks reach beyond the codes is written to `codes`; "gradient": g is masked in place by
    such notes. parts, share: the power of two above the number of averages, and 1 over that above the number of scales.
    """


def job(
    *, source: str = "tile", outer: str = "", codes: bool = False, scales: bool = False, statistic: bool = False,
    output: str = "", gradient: bool = False, dequantize: bool = False, packed: bool = False, exact: bool = False,
    reverse: bool = False, tiled: bool = False, pairs: bool = False, level: str = "", parts: int = 1, share: float = 1.0,
    clipped: str = "",
) -> Job:  # fmt: skip
    """A `Job` with the parts that a launch needs."""
    return Job(
        source=source, outer=outer, codes=codes, scales=scales, statistic=statistic, output=output, gradient=gradient,
        dequantize=dequantize, packed=packed, exact=exact, reverse=reverse,
        tiled=tiled, pairs=pairs, level=level, parts=parts, share=share, clipped=clipped,
    )  # fmt: skip
