"""The header of a safetensors file: what it holds, checked before a byte of a tensor is read.

A file is the header's length (8 bytes, little-endian), the header (JSON: name -> dtype, shape, offsets of its bytes) and the
bytes. The library that maps tensors checks much of this again; here every rule has an error that names file and tensor, equal
keys are found, and shapes are known before anything is allocated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ao_lab.checkpoint.io.strict_json import parsed_object, regular_size, shown

LENGTH_BYTES = 8
#: The format's own limit on headers.
LARGEST_HEADER = 100 * 10**6
METADATA = "__metadata__"
MOST_AXES = 64
#: Bytes of an empty tensor without its axes of length 0: the library that maps tensors multiplies in 64 bits.
LARGEST_TENSOR = 2**63
#: Dtypes of whole bytes, as files name them; those that this torch lacks are left out.
NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "I16": "int16",
    "U16": "uint16", "F16": "float16", "BF16": "bfloat16", "I32": "int32", "U32": "uint32", "F32": "float32",
    "C64": "complex64", "F64": "float64", "I64": "int64", "U64": "uint64",
}  # fmt: skip
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, dtype) for name, dtype in NAMES.items() if hasattr(torch, dtype)
}
#: Two numbers a byte: the file counts numbers, torch counts pairs.
PAIRS = "F4"


class Spec(NamedTuple):
    """What a tensor is before it is read."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """How many bytes its numbers take."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} of shape {self.shape}"


@dataclass(frozen=True)
class Header:
    """The tensors of one file by name, and its metadata."""

    tensors: dict[str, Spec]
    metadata: dict[str, str]


def read_header(path: Path) -> Header:
    """The checked header of a file; ValueError that names the file, the tensor and the rule where it does not hold together."""
    size = regular_size(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if size < LENGTH_BYTES or length > min(LARGEST_HEADER, size - LENGTH_BYTES):
            raise ValueError(
                f"{path} says that its header has {length} bytes, the file has {size} in all; it is cut off or no safetensors "
                "file, fetch it again"
            )
        fields = parsed_object(file.read(length), f"the header of {path}")
    metadata = _metadata(fields.pop(METADATA, {}), path)
    if broken := next((name for name in fields if not _is_text(name)), None):
        raise ValueError(f"{path} names a tensor {shown(broken)}, which is no Unicode text; fetch it again")
    spans = {name: _span(name, entry, path) for name, entry in fields.items()}
    _check_spans(spans, size - LENGTH_BYTES - length, path)
    return Header({name: spec for name, (spec, _, _) in spans.items()}, metadata)


def _metadata(given: Any, path: Path) -> dict[str, str]:
    if not isinstance(given, dict) or not all(isinstance(value, str) for value in given.values()):
        raise ValueError(f"the metadata of {path} is text by name, got {shown(given)}; fetch the file again")
    return given


def _span(name: str, entry: Any, path: Path) -> tuple[Spec, int, int]:
    """dtype and shape of a tensor, and where its bytes begin and end."""
    try:
        return _checked_span(entry)
    except ValueError as error:
        raise ValueError(f"tensor {shown(name)} of {path} {error}") from error


def _checked_span(entry: Any) -> tuple[Spec, int, int]:
    """`_span`; the ValueError goes on behind the tensor's name."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"is described by dtype, shape and data_offsets, got {shown(entry)}; fetch it again")
    shape, offsets, dtype = entry["shape"], entry["data_offsets"], entry["dtype"]
    if not _counts(shape) or not _counts(offsets) or len(offsets) != 2:
        raise ValueError(
            f"has shape {shown(shape)} and offsets {shown(offsets)}; both are lists of counts; fetch it again"
        )
    if dtype == PAIRS and shape and shape[-1] % 2 == 0:
        spec = Spec(torch.float4_e2m1fn_x2, (*shape[:-1], shape[-1] // 2))
    elif isinstance(dtype, str) and dtype in DTYPES:
        spec = Spec(DTYPES[dtype], tuple(shape))
    else:
        raise ValueError(f"has dtype {shown(dtype)}; known are {', '.join((*DTYPES, PAIRS))}")
    if 0 in shape and math.prod(n for n in shape if n) * spec.dtype.itemsize >= LARGEST_TENSOR:
        raise ValueError(f"is {shown(str(spec))}, beyond 64 bits; fetch it again")
    if spec.bytes != offsets[1] - offsets[0]:
        raise ValueError(
            f"is {shown(str(spec))}, which takes {shown(spec.bytes)} bytes, but has {offsets[1] - offsets[0]}; "
            "fetch it again"
        )
    return spec, offsets[0], offsets[1]


def _is_text(name: str) -> bool:
    """Whether a name holds no half of a surrogate pair, which JSON can escape and no other library reads."""
    return name.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in name)


def _counts(value: Any) -> bool:
    few = isinstance(value, list) and len(value) <= MOST_AXES
    return few and all(type(n) is int and n >= 0 for n in value)


def _check_spans(spans: dict[str, tuple[Spec, int, int]], size: int, path: Path) -> None:
    """Tensors lie one behind the other and fill the file."""
    end = 0
    for name, (_, start, stop) in sorted(spans.items(), key=lambda item: item[1][1:]):
        if start != end:
            kind = "overlaps the tensor before it" if start < end else "leaves bytes that no tensor has"
            raise ValueError(
                f"tensor {shown(name)} of {path} begins at byte {start} and {kind} (it ends at {end}); fetch it again"
            )
        end = stop
    if end != size:
        raise ValueError(
            f"the tensors of {path} take {end} bytes, the file has {size} for them; it is cut off or was added to, fetch it "
            "again"
        )


__all__ = ["Header", "Spec", "read_header"]
