"""The work of the cases as plain torch expressions: what a user writes who has no kernels, run as it stands and under
torch.compile.

They follow our own records on ordinary values (`tests/experiments/kernels/test_baselines.py` counts where their bits differ)
and leave out edge cases: NaN, infinities and floors of scales. Each is one function of tensors without data-dependent control
flow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ao_lab.gemm.codes import FLOAT8
from experiments.kernels.operations import EPS, Case, Inputs
from reference import FORMATS, SCHEMES, Format, Scheme
from reference.schemes.conventions import conventions
from reference.sparsity.transposable import MASKS, ROW_PAIRS

#: Operations of a format, without scales.
STORAGE = ("encode", "decode", "pack", "unpack")
#: Records of other projects: the expressions here follow the rules of our own.
CONVENTIONS = frozenset(scheme.name for scheme in conventions())


def expression(case: Case) -> tuple[Expression, Callable[[Inputs], tuple[Any, ...]]] | None:
    """A function and the arguments that it takes of a case's inputs, or None where nobody would write one."""
    maker = MAKERS.get(case.operation)
    if maker is None or not expressible(case):
        return None
    return maker(case)


def expressible(case: Case) -> bool:
    """Formats, sparsity; symmetric schemes of ours of blocks along an axis, of squares or of a tensor, plainly encoded."""
    if case.operation in STORAGE or case.operation in SPARSE:
        return True
    scheme = SCHEMES.get(case.scheme)
    if scheme is None or case.scheme in CONVENTIONS:
        return False
    return scheme.zero is None and scheme.format.kind != "codebook" and scheme.format.bits not in (2, 3, 5)


E8M0_BIAS = 127
MANTISSA_BITS = 23
TINY = 2.0**-126


@dataclass(frozen=True)
class Element:
    """The numbers of a format as plain constants: what torch.compile traces holds no record that computes its limits."""

    name: str
    kind: str
    bits: int
    low: float
    high: float
    mantissa_bits: int
    bias: int
    #: What an integer code counts.
    unit: float

    @classmethod
    def of(cls, fmt: Format) -> Element:
        """The constants of a format."""
        unit = 2.0**-6 if fmt.name == "mxint8" else 1.0
        return cls(fmt.name, fmt.kind, fmt.bits, fmt.min, fmt.max, fmt.mantissa_bits, fmt.bias, unit)


def quantizer(scheme: Scheme, *, packed: bool = False, axis: int = -1) -> Expression:
    """x (and, where it is given, the tensor-wide scale) to codes and scales."""
    element = Element.of(scheme.format)

    def run(x: torch.Tensor, given: torch.Tensor | None = None) -> Any:
        wide = x.float().t() if axis == 0 else x.float()
        blocks = in_blocks(wide, scheme)
        scale, factor, outer = scales_of(blocks, scheme, given)
        codes = coded(blocks * factor, element)
        codes = from_blocks(codes, wide.shape, scheme)
        codes = pack(codes, element) if packed else codes
        return (codes.t().contiguous() if axis == 0 else codes), scale, outer

    return run


def in_blocks(x: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """(..., blocks, n): n elements that share a scale last."""
    block = scheme.scale.block
    if block == "tensor":
        return x.reshape(1, 1, -1)
    if isinstance(block, tuple):
        rows, columns = x.shape[0] // block[0], x.shape[1] // block[1]
        tiles = x.reshape(rows, block[0], columns, block[1]).transpose(1, 2)
        return tiles.reshape(rows, columns, -1)
    size = x.shape[1] if block == -1 else int(block)
    return x.reshape(x.shape[0], -1, size)


def from_blocks(blocks: torch.Tensor, shape: torch.Size, scheme: Scheme) -> torch.Tensor:
    """The tensor again."""
    block = scheme.scale.block
    if isinstance(block, tuple):
        rows, columns = blocks.shape[:2]
        blocks = blocks.reshape(rows, columns, block[0], block[1]).transpose(1, 2)
    return blocks.reshape(shape)


def scales_of(
    blocks: torch.Tensor, scheme: Scheme, given: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Scales as stored, the factor that elements are multiplied by, and the outer scale."""
    largest = blocks.abs().amax(-1, keepdim=True)
    target = scheme.scale.target
    if scheme.scale.power_of_two:
        exponent = power_exponent(largest, target, scheme.scale.rule)
        return (exponent + E8M0_BIAS).to(torch.uint8).squeeze(-1), torch.exp2(-exponent.float()), None
    if scheme.outer is not None:
        outer = given if given is not None else (largest.amax() / scheme.outer.target).clamp(min=2.0**-112)
        scale = (largest / target / outer).clamp(2.0**-9, 448.0).to(torch.float8_e4m3fn)
        return scale.view(torch.uint8).squeeze(-1), 1.0 / (scale.float() * outer), outer
    scale = given if given is not None else (largest / target).clamp(min=TINY).squeeze(-1)
    return scale, (1.0 / scale).unsqueeze(-1) if given is None else 1.0 / scale, None


def power_exponent(largest: torch.Tensor, target: float, rule: str) -> torch.Tensor:
    """Exponent of the power-of-two scale: floor of the logarithm, or the smallest that overflows nothing."""
    if rule == "rceil":
        bits = (largest / target).view(torch.int32)
        exponent = (bits >> MANTISSA_BITS) - E8M0_BIAS + ((bits & (2**MANTISSA_BITS - 1)) != 0).int()
    else:
        emax = int(target).bit_length() - 1
        exponent = (largest.view(torch.int32) >> MANTISSA_BITS) - E8M0_BIAS - emax
    return exponent.clamp(-E8M0_BIAS, E8M0_BIAS)


def coded(v: torch.Tensor, fmt: Element) -> torch.Tensor:
    """Codes of scaled values, one uint8 each, in the low bits."""
    if fmt.name in FLOAT8:
        return v.clamp(fmt.low, fmt.high).to(FLOAT8[fmt.name]).view(torch.uint8)
    if fmt.kind == "int":
        rounded = torch.round(v / fmt.unit).clamp(fmt.low / fmt.unit, fmt.high / fmt.unit).to(torch.int32)
        return (rounded & ((1 << fmt.bits) - 1)).to(torch.uint8)
    exponent = (v.abs().clamp(max=fmt.high).view(torch.int32) >> MANTISSA_BITS) - E8M0_BIAS
    exponent = exponent.clamp(min=1 - fmt.bias)
    steps = torch.round(v.abs().clamp(max=fmt.high) * torch.exp2((fmt.mantissa_bits - exponent).float()))
    code = steps.to(torch.int32) + ((exponent + fmt.bias - 1) << fmt.mantissa_bits)
    return (code + (torch.signbit(v).int() << (fmt.bits - 1))).to(torch.uint8)


def pack(codes: torch.Tensor, fmt: Element) -> torch.Tensor:
    """Two codes of 4 bits in a byte, four of 6 bits in three."""
    if fmt.bits == 4:
        return codes[..., 0::2] | (codes[..., 1::2] << 4)
    if fmt.bits == 6:
        a, b, c, d = (codes[..., start::4] for start in range(4))
        packed = torch.stack([a | (b << 6), (b >> 2) | (c << 4), (c >> 4) | (d << 2)], -1)
        return packed.reshape(*codes.shape[:-1], -1)
    return codes


def unpack(packed: torch.Tensor, fmt: Element) -> torch.Tensor:
    """One code a byte."""
    if fmt.bits == 4:
        return torch.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)
    if fmt.bits == 6:
        a, b, c = (packed[..., start::3] for start in range(3))
        parts = [a & 63, ((a >> 6) | (b << 2)) & 63, ((b >> 4) | (c << 4)) & 63, c >> 2]
        return torch.stack(parts, -1).reshape(*packed.shape[:-1], -1)
    return packed


def decoded(codes: torch.Tensor, fmt: Element, table: torch.Tensor | None = None) -> torch.Tensor:
    """float32 values: a cast where torch has one, sign extension of integers, a table otherwise."""
    if fmt.name in FLOAT8:
        return codes.view(FLOAT8[fmt.name]).float()
    if fmt.kind == "int":
        shift = 8 - fmt.bits
        return ((codes << shift).view(torch.int8) >> shift).float() * fmt.unit
    assert table is not None
    return table[codes.to(torch.int64)]


def dequantizer(scheme: Scheme, packed: bool) -> Expression:
    """Codes and scales to bfloat16."""
    element = Element.of(scheme.format)

    def run(codes: torch.Tensor, scale: torch.Tensor, outer: Any, table: torch.Tensor) -> torch.Tensor:
        whole = unpack(codes, element) if packed else codes
        values = in_blocks(decoded(whole, element, table), scheme)
        if scheme.scale.power_of_two:
            factor = torch.exp2(scale.float() - E8M0_BIAS)
        elif scheme.outer is not None:
            factor = scale.view(torch.float8_e4m3fn).float() * outer
        else:
            factor = scale
        return from_blocks(values * factor.reshape(*values.shape[:-1], 1), whole.shape, scheme).to(
            torch.bfloat16
        )

    return run


def faked(scheme: Scheme) -> Expression:
    """Rounded in place, to bfloat16."""
    fmt = Element.of(scheme.format)

    def run(x: torch.Tensor) -> torch.Tensor:
        blocks = in_blocks(x.float(), scheme)
        _, factor, _ = scales_of(blocks, scheme, None)
        if fmt.kind == "int":
            rounded = torch.round(blocks * factor).clamp(fmt.low, fmt.high)
        else:
            rounded = (blocks * factor).clamp(fmt.low, fmt.high).to(FLOAT8[fmt.name]).float()
        return from_blocks(rounded / factor, x.shape, scheme).to(torch.bfloat16)

    return run


def _expression_quantize(case: Case) -> Any:
    options = {key: case.options[key] for key in ("packed", "axis")}
    run = quantizer(SCHEMES[case.scheme], **options)
    return run, lambda inputs: (inputs["x"], *_given(inputs))


def _given(inputs: Inputs) -> tuple[torch.Tensor, ...]:
    scales = inputs.get("scales")
    return () if scales is None else (scales.scale if scales.outer is None else scales.outer,)


def _expression_both(case: Case) -> Any:
    run = quantizer(SCHEMES[case.scheme])

    def both(x: torch.Tensor, *given: torch.Tensor) -> Any:
        return run(x, *given), run(x.t().contiguous(), *given)

    return both, lambda inputs: (inputs["x"], *_given(inputs))


def _expression_dequantize(case: Case) -> Any:
    scheme = SCHEMES[case.scheme]

    def arguments(inputs: Inputs) -> tuple[Any, ...]:
        q = inputs["q"]
        table = torch.from_numpy(scheme.format.values.copy()).to(q.codes.device)
        return q.codes, q.scale, q.outer, table

    return dequantizer(scheme, bool(case.options["packed"])), arguments


def _fake(case: Case) -> Any:
    fmt = SCHEMES[case.scheme].format
    if fmt.kind != "int" and fmt.name not in FLOAT8:
        return None
    return faked(SCHEMES[case.scheme]), lambda inputs: (inputs["x"],)


def _rms_norm(case: Case) -> Any:
    quantize = quantizer(SCHEMES[case.scheme])

    def run(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> Any:
        total = x if residual is None else x + residual
        y = torch.nn.functional.rms_norm(total, (total.shape[-1],), weight, EPS)
        return quantize(y) if residual is None else (quantize(y), total)

    return run, lambda inputs: (inputs["x"], inputs["weight"], inputs["residual"])


def _swiglu(case: Case) -> Any:
    quantize = quantizer(SCHEMES[case.scheme])

    def run(gate: torch.Tensor, up: torch.Tensor) -> Any:
        return quantize(torch.nn.functional.silu(gate) * up)

    return run, lambda inputs: (inputs["gate"], inputs["up"])


def _storage(case: Case) -> Any:
    fmt = Element.of(FORMATS[case.scheme])
    run: Expression = {
        "encode": lambda x: coded(x.float(), fmt),
        "decode": lambda codes: decoded(codes, fmt),
        "pack": lambda codes: pack(codes, fmt),
        "unpack": lambda packed: unpack(packed, fmt),
    }[case.operation]
    return run, lambda inputs: (inputs["x"],)


# Masks and 2:4 storage.

#: The two columns of each pair of a row.
PAIRS = ((0, 0, 0, 1, 1, 2), (1, 2, 3, 2, 3, 3))


def pruned(x: torch.Tensor, kept: int, group: int) -> torch.Tensor:
    """The mask of the `kept` largest magnitudes of each group, by a stable sort."""
    magnitudes = x.abs().unflatten(-1, (-1, group))
    order = magnitudes.argsort(dim=-1, descending=True, stable=True)[..., :kept]
    return torch.zeros_like(magnitudes, dtype=torch.bool).scatter(-1, order, True).flatten(-2)


def stored(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and metadata of what a mask keeps, two of every four at most."""
    k0, k1, k2, k3 = mask.unflatten(-1, (-1, 4)).unbind(-1)
    first = torch.where(k0, 0, torch.where(k1, 1, 2))
    second = torch.where(k0 & k1, 1, torch.where((k0 | k1) & (k2 | ~k3), 2, 3))
    values = x.masked_fill(~mask, 0).unflatten(-1, (-1, 4)).gather(-1, torch.stack([first, second], -1))
    nibbles = (first | (second << 2)).unflatten(-1, (-1, 2))
    return values.flatten(-2), (nibbles[..., 0] | (nibbles[..., 1] << 4)).to(torch.uint8)


def restored(values: torch.Tensor, metadata: torch.Tensor) -> torch.Tensor:
    """The dense tensor."""
    wide = metadata.long()
    nibbles = torch.stack([wide & 15, wide >> 4], -1).flatten(-2)
    index = torch.stack([nibbles & 3, nibbles >> 2], -1)
    pairs = values.unflatten(-1, (-1, 2))
    return pairs.new_zeros(*nibbles.shape, 4).scatter(-1, index, pairs).flatten(-2)


def best_of_tiles(x: torch.Tensor, picks: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """The best of the 90 masks of each tile. picks: a pair of each row; masks: (90, 16)."""
    tiles = x.float().abs().unflatten(-1, (-1, 4)).unflatten(-3, (-1, 4)).transpose(-3, -2)
    pairs = tiles[..., list(PAIRS[0])] + tiles[..., list(PAIRS[1])]
    rows = [pairs[..., row, :].index_select(-1, picks[:, row]) for row in range(4)]
    best = ((rows[0] + rows[1]) + (rows[2] + rows[3])).argmax(-1)
    return masks[best].unflatten(-1, (4, 4)).transpose(-3, -2).flatten(-4, -3).flatten(-2)


def _tables(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = inputs["x"]
    picks, masks = torch.tensor(ROW_PAIRS.astype("int64")), torch.tensor(MASKS)
    return x, picks.to(x.device), masks.to(x.device)


def _first(inputs: Inputs) -> tuple[Any, ...]:
    return (inputs["x"],)


def _prune(case: Case) -> Any:
    kept, group = (
        (int(n) for n in case.name.split(".")[2].split("of")) if case.name.count(".") > 1 else (2, 4)
    )
    return lambda x: pruned(x, kept, group), _first


def _compress(case: Case) -> Any:
    if case.scheme == "bfloat16":
        return lambda x: stored(x, pruned(x, 2, 4)), _first

    def run(x: torch.Tensor) -> Any:
        codes = x.view(torch.uint8)
        values, metadata = stored(codes, (codes & 127) != 0)
        return values.view(x.dtype), metadata

    return run, _first


def _decompress(case: Case) -> Any:
    return restored, lambda inputs: tuple(inputs["x"])


def _quantize_compressed(case: Case) -> Any:
    fmt = SCHEMES[case.scheme].format
    low, high, dtype = fmt.min, fmt.max, getattr(torch, FORMATS[fmt.name].name)

    def run(x: torch.Tensor, scale: torch.Tensor) -> Any:
        codes = (x.float() * (1 / scale)).clamp(low, high).to(dtype).view(torch.uint8)
        return stored(codes, pruned(x, 2, 4))

    return run, lambda inputs: (inputs["x"], inputs["scale"])


def _compress_transposable(case: Case) -> Any:
    def run(x: torch.Tensor, picks: torch.Tensor, masks: torch.Tensor) -> Any:
        mask = best_of_tiles(x, picks, masks)
        return stored(x, mask), stored(x.t(), mask.t())

    return run, _tables


SPARSE: dict[str, Callable[[Case], Any]] = {
    "prune": _prune,
    "compress": _compress,
    "decompress": _decompress,
    "quantize_compressed": _quantize_compressed,
    "prune_transposable": lambda case: (best_of_tiles, _tables),
    "compress_transposable": _compress_transposable,
}


Expression = Callable[..., Any]


MAKERS: dict[str, Callable[[Case], Any]] = {
    "quantize": _expression_quantize,
    "small": _expression_quantize,
    "both": _expression_both,
    "dequantize": _expression_dequantize,
    "fake_quantize": _fake,
    "rms_norm": _rms_norm,
    "swiglu": _swiglu,
    **dict.fromkeys(STORAGE, _storage),
    **SPARSE,
}
