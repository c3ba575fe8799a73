"""A folder's safetensors files: one, or shards with the index that transformers reads.

Reading is in two steps. `look_at` checks headers and index and says which tensors there are; nothing of them is read.
`Folder. read` maps the tensors that are asked for. Only the files that are named here and shards of the index are opened,
whatever else (pickles, for instance) lies beside them, and an index can name files of its own folder alone.

Files that other programs read are called model.safetensors, as these programs expect. Our own layout is in
ao_lab.safetensors: a program that does not know it finds no weights, and says so, instead of finding none of the names that
it looks for.

A header is checked before a byte of a tensor is read. A file is the header's length (8 bytes, little-endian), the header
(JSON: name -> dtype, shape, offsets of its bytes) and the bytes. The library that maps tensors checks much of this again;
here every rule has an error that names file and tensor, equal keys are found, and shapes are known before anything is
allocated.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ao_lab.checkpoint.io.files import save_file, without
from ao_lab.checkpoint.io.strict_json import parsed_object, read_object, regular_size, shown

LOG = logging.getLogger(__name__)
#: How files are called that other programs read, and those of our own layout.
COMMON, OWN = "model", "ao_lab"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
OWN_SINGLE, OWN_INDEX = "ao_lab.safetensors", "ao_lab.safetensors.index.json"
#: Names of shards: plain ones, so that none leads out of the folder.
SHARD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,200}\.safetensors", re.ASCII)
#: Weights as pickles, which transformers reads with `weights_only` where there is no safetensors file.
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
PICKLED_SHARD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,200}\.bin", re.ASCII)


@dataclass(frozen=True)
class Folder:
    """What a folder holds, before it is read: what each tensor is, its file, and the metadata of all files."""

    path: Path
    specs: Mapping[str, Spec]
    files: Mapping[str, Path]
    metadata: Mapping[str, str]

    def read(self, names: Iterable[str]) -> Tensors:
        """These tensors; ValueError where the library that maps them finds what the headers did not say."""
        return dict(self.each(names))

    def each(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """`read`, one after the other, file by file."""
        from safetensors import SafetensorError, safe_open

        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.files[name], []).append(name)
        for path, wanted in by_file.items():
            try:
                with safe_open(path, framework="pt") as file:
                    for name in wanted:
                        yield name, file.get_tensor(name)
            except SafetensorError as error:
                raise ValueError(f"{path} cannot be read: {shown(str(error))}; fetch it again") from error

    @property
    def bytes(self) -> int:
        """What its files take."""
        return sum(path.stat().st_size for path in set(self.files.values()))


def write_files(
    folder: Path, tensors: Tensors, metadata: dict[str, str], limit: int, stem: str = COMMON
) -> list[Path]:
    """Write the tensors, in files of at most `limit` bytes (a larger tensor has its own); each carries the metadata.

    `stem`: what the files are called, COMMON or OWN. The folder has no weights yet: see `io.files.staged`.
    """
    shards, single = _shards(tensors, limit), f"{stem}.safetensors"
    count = len(shards)
    names = (
        [f"{stem}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)] if count > 1 else [single]
    )
    for name, shard in zip(names, shards, strict=True):
        save_file(_apart(shard), folder / name, metadata=metadata)
    if count > 1:
        where = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        index = {"metadata": {"total_size": sum(map(_size, tensors.values()))}, "weight_map": where}
        (folder / f"{single}.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return [folder / name for name in names]


def remove_others(folder: Path, kept: Collection[str]) -> None:
    """Remove files of weights, whatever they are called, but those of these names."""
    for old in weight_paths(folder):
        if old.name not in kept:
            old.unlink(missing_ok=True)


def weight_paths(folder: Path) -> list[Path]:
    """Where files of weights lie, or may be written."""
    return [path for stem in (COMMON, OWN) for path in _files_called(folder, stem)]


def has_weights(folder: Path) -> bool:
    """Whether a folder has safetensors files of weights, by their names."""
    return any((folder / name).exists() for name in (SINGLE, INDEX, OWN_SINGLE, OWN_INDEX))


def _files_called(folder: Path, stem: str) -> list[Path]:
    """The index first: without it no reader looks for its shards."""
    single = folder / f"{stem}.safetensors"
    return [single.with_name(f"{single.name}.index.json"), *folder.glob(f"{stem}-*-of-*.safetensors"), single]


def _names(folder: Path) -> tuple[str, str]:
    """The names of a folder's single file and index: our own where it has them; ValueError where both kinds are there."""
    own = any((folder / name).exists() for name in (OWN_SINGLE, OWN_INDEX))
    if own and any((folder / name).exists() for name in (SINGLE, INDEX)):
        raise ValueError(
            f"{folder} has weights as {COMMON}*.safetensors and as {OWN}*.safetensors; remove those that are stale"
        )
    return (OWN_SINGLE, OWN_INDEX) if own else (SINGLE, INDEX)


def look_at(folder: Path) -> Folder:
    """What a folder holds; FileNotFoundError where there are no tensors, ValueError where files and index disagree."""
    single, index_name = _names(folder)
    index = _index(folder / index_name) if (folder / index_name).exists() else None
    if index is None and not (folder / single).exists():
        raise FileNotFoundError(without(folder, f"neither {SINGLE} nor {INDEX}", "save_pretrained"))
    names = [single] if index is None else sorted(set(index.values()))
    if index is not None and single not in names and (folder / single).exists():
        raise ValueError(
            f"{folder} has {single}, and {index_name} for other files: programs read one or the other; remove what is stale"
        )
    headers = {folder / name: read_header(folder / name) for name in names}
    specs: dict[str, Spec] = {}
    files: dict[str, Path] = {}
    for path, header in headers.items():
        for name, spec in header.tensors.items():
            if name in files:
                raise ValueError(
                    f"tensor {shown(name)} is in {files[name].name} and in {path}; one of them is stale"
                )
            specs[name], files[name] = spec, path
    if index is not None:
        _check_index(index, files, folder / index_name)
    LOG.debug("%s: %d tensors in %d files", folder, len(specs), len(headers))
    return Folder(folder, specs, files, _joined(headers))


def check_named_weights(path: Path, named: Any) -> None:
    """ValueError where a dense model's config.json names its file of weights: transformers would read that one, and none of
    those that `look_at` has checked."""
    if named is not None:
        raise ValueError(
            f"{path}: transformers_weights names {shown(named)}, weights are read from {SINGLE} or {INDEX}; rename the file, "
            "and remove the entry"
        )


def check_pickled(folder: Path) -> None:
    """ValueError where a folder without safetensors has an index of pickles with files that are not its own, or that block."""
    if any((folder / name).is_file() for name in (SINGLE, INDEX, PICKLED)):
        return
    path = folder / PICKLED_INDEX
    if path.is_file():
        fields = read_object(path)
        if not isinstance(fields.get("metadata"), dict):
            raise ValueError(f"{path} has no metadata, which transformers requires; fetch it again")
        for name in set(_index(path, PICKLED_SHARD).values()):
            regular_size(folder / name)


def pickled_refusal(folder: Path, error: Exception) -> ValueError | None:
    """What is to be said of an error while transformers reads a folder's pickles; None where it reads safetensors."""
    if any((folder / name).is_file() for name in (SINGLE, INDEX)):
        return None
    return ValueError(
        f"{folder}: {PICKLED} cannot be read as tensors alone ({type(error).__name__}: {shown(str(error))}), and nothing else "
        "of a pickle is run; fetch it again, or a safetensors file"
    )


def _index(path: Path, shard: re.Pattern[str] = SHARD) -> dict[str, str]:
    """The file's name of each tensor."""
    found = read_object(path).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise ValueError(
            f"{path} has no weight_map from tensors to files, got {shown(found)}; fetch it again"
        )
    for name, file in found.items():
        if not isinstance(file, str) or not shard.fullmatch(file):
            ending = "bin" if shard is PICKLED_SHARD else "safetensors"
            raise ValueError(
                f"{path}: weight_map of {shown(name)} is the name of a .{ending} file in the same folder, got "
                f"{shown(file)}; fetch the index again"
            )
    return found


def _check_index(index: Mapping[str, str], files: Mapping[str, Path], path: Path) -> None:
    wrong = [name for name, file in index.items() if name not in files or files[name].name != file]
    extra = [name for name in files if name not in index]
    if wrong or extra:
        name = (wrong or extra)[0]
        what = f"puts it into {index[name]}" if wrong else "does not name it"
        where = f"is in {files[name].name}" if name in files else "is in no file"
        raise ValueError(f"tensor {shown(name)} {where}, but {path} {what}; fetch the folder again")


def _joined(headers: Mapping[Path, Header]) -> dict[str, str]:
    """The metadata of all files; ValueError where two say different things."""
    result: dict[str, str] = {}
    for path, header in headers.items():
        for key, value in header.metadata.items():
            if result.setdefault(key, value) != value:
                raise ValueError(
                    f"{path}: metadata {shown(key)} is another than in the other files; fetch them again"
                )
    return result


def _apart(tensors: Tensors) -> Tensors:
    """The tensors on the host, none in another's memory, which safetensors refuses: pieces of a weight share its scale."""
    result: Tensors = {}
    addresses: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        result[name] = plain.clone() if plain.data_ptr() in addresses else plain
        addresses.add(plain.data_ptr())
    return result


def _shards(tensors: Tensors, limit: int) -> list[Tensors]:
    shards: list[Tensors] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + _size(tensor) > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += _size(tensor)
    return shards


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


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


Specs = dict[str, Spec]
Tensors = dict[str, torch.Tensor]


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
