"""Comparing arrays bit for bit, with hexadecimal patterns in the message."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch

from reference.formats.formats import Format

WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def as_torch(values: npt.NDArray[np.float32], dtype: str) -> torch.Tensor:
    """float32 values that are exact in the dtype as a tensor, with the upper bits of every NaN kept."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    if dtype == "bfloat16":
        return torch.from_numpy((bits >> 16).astype(np.uint16).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(bits.view(np.float32).copy())


def tensor_of(values: npt.NDArray[Any]) -> torch.Tensor:
    """A copy of an array as a tensor of its dtype, bfloat16 too."""
    if values.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(values.copy().view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values.copy())


def words(values: Any) -> npt.NDArray[Any]:
    """An array or tensor as unsigned integers of its width."""
    if isinstance(values, torch.Tensor):
        values = values.detach().contiguous()
        values = values.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[values.element_size()]).numpy()
    values = np.ascontiguousarray(values)
    return values.view(WORDS[values.dtype.itemsize])


def is_nan(values: Any) -> npt.NDArray[np.bool_]:
    """Where a float array or tensor is NaN."""
    return (
        values.isnan().numpy()
        if isinstance(values, torch.Tensor)
        else np.isnan(np.asarray(values, np.float32))
    )


def assert_words(ours: Any, theirs: Any, what: str, x: Any = None) -> None:
    """Equal bits everywhere."""
    a, b = words(ours), words(theirs)
    assert a.size == b.size, f"{what}: {a.shape} against {b.shape}"
    _report(a.reshape(-1), b.reshape(-1), a.reshape(-1) != b.reshape(-1), what, x)


def assert_floats(ours: Any, theirs: Any, what: str, x: Any = None) -> None:
    """Equal bits, and NaN where the other is NaN: sign and payload of a NaN depend on the machine that made it."""
    a, b = words(ours).reshape(-1), words(theirs).reshape(-1)
    assert a.size == b.size, f"{what}: {a.size} elements against {b.size}"
    both = is_nan(ours).reshape(-1) & is_nan(theirs).reshape(-1)
    _report(a, b, (a != b) & ~both, what, x)


def _report(a: npt.NDArray[Any], b: npt.NDArray[Any], bad: npt.NDArray[np.bool_], what: str, x: Any) -> None:
    if not bad.any():
        return
    where = np.flatnonzero(bad)
    inputs = words(x).reshape(-1) if x is not None and words(x).size == a.size else None
    lines = [
        f"  [{i}] ours {int(a[i]):#x}, theirs {int(b[i]):#x}"
        + ("" if inputs is None else f", input {int(inputs[i]):#x}")
        for i in where[:8]
    ]
    raise AssertionError("\n".join([f"{what}: {len(where)} of {a.size} differ", *lines]))


def counted_machine() -> bool:
    """Whether this is a machine on which the signs of NaNs that arithmetic makes were counted: x86 with AVX2 or AVX-512.

    IEEE 754 leaves open the sign of inf / inf (x86: negative, ARM: positive) and which of two NaNs a product keeps.
    """
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def torchao_nan_codes(values: torch.Tensor, element: Format) -> torch.Tensor:
    """What torchao's integer cast to fp6 or fp4 makes of float32 NaNs: it has no NaN, rounds the payload to nearest even as
    if it were a fraction and keeps sign and low bits. NaNs of arithmetic have no payload; those read from an e4m3 NaN do."""
    bits = words(values).astype(np.int64)
    dropped = 23 - element.mantissa_bits
    payload = bits & 0x7FFFFF
    rounded = payload + (1 << (dropped - 1)) - 1 + (payload >> dropped & 1) >> dropped
    code = ((128 + element.bias << element.mantissa_bits) + rounded) & 0xFF
    return torch.from_numpy((code | (bits >> 31) * element.sign_mask).astype(np.uint8))


def assert_codes(
    ours: torch.Tensor, theirs: torch.Tensor, what: str, x: torch.Tensor, sign: int, machine: Any, count: int
) -> None:
    """Equal codes, but for the sign bit of exactly `count` elements among those in the mask `machine`."""
    a, b = words(ours), words(theirs)
    signs = ((a ^ b) == sign) & np.asarray(machine)
    assert_words(np.where(signs, b, a), b, what, x)
    if counted_machine():
        assert signs.sum() == count, f"{what}: {signs.sum()} signs of NaNs differ, {count} were explained"


__all__ = ["as_torch", "assert_codes", "assert_floats", "assert_words", "counted_machine", "is_nan",
           "torchao_nan_codes", "words"]  # fmt: skip
