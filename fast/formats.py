"""`encode`, `decode`, `pack` and `unpack` for torch tensors: the rules of `reference.encode`, the layout of `reference.pack`.

`times_power_of_two` is no name of `fast` itself: readers of folders scale stored scales by it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import reference
from fast.dispatch import Function, execute, require_tensor, run
from fast.ops import format_name, in_own_memory, named_format, register
from reference import Format
from reference.formats.storage import SCALED, packed_shape


def encode(
    x: torch.Tensor,
    fmt: str | Format,
    *,
    rounding: str = "nearest_even",
    overflow: str = "saturate",
    random_bits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Codes of x: uint8 (uint16 for 16-bit formats) of x's shape, on its device. No gradient flows through them.

    Arguments, edges and errors as in `reference.encode`.
    """
    codes: torch.Tensor = run(ENCODE, fmt, (rounding, overflow), (x, random_bits))
    return codes


def decode(codes: torch.Tensor, fmt: str | Format) -> torch.Tensor:
    """float32 values of codes, exact, as in `reference.decode`."""
    values: torch.Tensor = run(DECODE, fmt, (), (codes,))
    return values


# `pack` and `unpack` for torch tensors; see `reference.pack` for the layout.


def pack(codes: torch.Tensor, fmt: str | Format) -> torch.Tensor:
    """Bytes of sub-byte codes along the last axis, as in `reference.pack`."""
    packed: torch.Tensor = run(PACK, fmt, (), (codes,))
    return packed


def unpack(packed: torch.Tensor, fmt: str | Format, shape: tuple[int, ...]) -> torch.Tensor:
    """Codes of the given shape, as in `reference.unpack`."""
    codes: torch.Tensor = run(UNPACK, fmt, tuple(shape), (packed,))
    return codes


# `encode`, `decode`, `pack` and `unpack` below their signatures: kernel, reference and operator; see `fast.dispatch`.

Values = tuple[Any, ...]
Operands = Sequence[Any]


def _kernel(name: str) -> Callable[..., Any]:
    """A function of `kernels.encode` as `Function` has it."""

    def run(record: Any, values: Values, operands: Operands, key: Any) -> Any:
        from fast.kernels import encode

        x, *words = operands
        return getattr(encode, name)(x, record, *values, *words, key)

    return run


def encode_op(
    x: torch.Tensor, fmt: str, rounding: str, overflow: str, random_bits: torch.Tensor | None
) -> torch.Tensor:
    """Codes of x."""
    result: torch.Tensor = execute(ENCODE, named_format(fmt), (rounding, overflow), (x, random_bits))
    return result


def _encode_fake(x: torch.Tensor, fmt: str, rounding: str, overflow: str, random_bits: Any) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=torch.uint8 if named_format(fmt).bits <= 8 else torch.uint16)


ENCODE = Function(
    "encode", ("x", "random_bits"),
    lambda r, v, o: reference.encode(o[0], r, rounding=v[0], overflow=v[1], random_bits=o[1]),
    lambda r, v, o: torch.ops.ao_lab.encode(o[0], format_name(r), *v, o[1]), _kernel("encode"),
)  # fmt: skip
register("encode", encode_op, _encode_fake)


def decode_op(codes: torch.Tensor, fmt: str) -> torch.Tensor:
    """float32 values of codes."""
    result: torch.Tensor = execute(DECODE, named_format(fmt), (), (codes,))
    return result


DECODE = Function(
    "decode", ("codes",), lambda r, v, o: reference.decode(o[0], r),
    lambda r, v, o: torch.ops.ao_lab.decode(o[0], format_name(r)), _kernel("decode"),
)  # fmt: skip
register("decode", decode_op, lambda codes, fmt: codes.new_empty(codes.shape, dtype=torch.float32))


def pack_op(codes: torch.Tensor, fmt: str) -> torch.Tensor:
    """Bytes of sub-byte codes."""
    result: torch.Tensor = execute(PACK, named_format(fmt), (), (codes,))
    return in_own_memory(result, codes)


def _pack_fake(codes: torch.Tensor, fmt: str) -> torch.Tensor:
    return codes.new_empty(packed_shape(tuple(codes.shape), named_format(fmt)))


PACK = Function(
    "pack", ("codes",), lambda r, v, o: reference.pack(o[0], r),
    lambda r, v, o: torch.ops.ao_lab.pack(o[0], format_name(r)), _kernel("pack"),
)  # fmt: skip
register("pack", pack_op, _pack_fake)


def unpack_op(packed: torch.Tensor, fmt: str, shape: list[int]) -> torch.Tensor:
    """Codes of a shape."""
    result: torch.Tensor = execute(UNPACK, named_format(fmt), tuple(shape), (packed,))
    return in_own_memory(result, packed)


def _unpack_kernel(record: Any, values: Values, operands: Operands, key: Any) -> Any:
    from fast.kernels import encode

    return encode.unpack(operands[0], record, values, key)


UNPACK = Function(
    "unpack", ("packed",), lambda r, v, o: reference.unpack(o[0], r, v),
    lambda r, v, o: torch.ops.ao_lab.unpack(o[0], format_name(r), list(v)), _unpack_kernel,
)  # fmt: skip
register("unpack", unpack_op, lambda packed, fmt, shape: packed.new_empty(shape))


# `times_power_of_two` for torch tensors; see `reference.formats.storage`.


def times_power_of_two(
    stored: torch.Tensor, storage: str, exponent: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stored scales times 2**exponent, and where that is exact, as in the reference; on their device, without gradient.

    Values that are not exact may differ from the reference's: they mean nothing.
    """
    stored = require_tensor(stored, "times_power_of_two").detach()
    if storage not in SCALED:
        raise ValueError(
            f"scales stored as {storage} times a power of two are not exact; {', '.join(SCALED)} are"
        )
    if storage == "float8_e8m0fnu":
        codes = stored.to(torch.int32)
        moved = torch.where(codes == 255, codes, codes + exponent)
        return moved.to(stored.dtype), ((moved >= 1) & (moved < 255)) | (codes == 255)
    numbers = stored if storage == "float32" else stored.view(getattr(torch, storage))
    moved = _times(numbers, exponent)
    # Zeros, infinities and NaN have no other exponent.
    special = (numbers == 0) | ~numbers.isfinite()
    exact = (_times(moved, -exponent) == numbers) & (
        moved.abs() >= torch.finfo(numbers.dtype).smallest_normal
    )
    return torch.where(special, numbers, moved).view(stored.dtype), special | exact


def _times(numbers: torch.Tensor, exponent: int) -> torch.Tensor:
    """Times 2**exponent in float64, which float32 cannot leave by a product that is exact, rounded to their dtype."""
    return torch.ldexp(numbers.double(), torch.tensor(exponent, device=numbers.device)).to(numbers.dtype)
