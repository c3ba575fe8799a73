"""Integers with zero points in groups along the inputs, as AutoGPTQ's and AutoAWQ's files hold them, as stored weights.

Both store unsigned codes u and zero points z of `bits` bits in little-endian int32 words, transposed (inputs first), and scales
s in float16. Both dequantize by (u - z) * s: the difference is an exact integer, the product of it and s is rounded once to the
dtype of s. Here u and z are signed, both less by 2**(bits - 1), so the difference is the same; a weight whose zero points all
are in the middle has none. The record multiplies in float32, which holds these products exactly, and rounds to the output's
dtype: in the dtype of the scales (which is the weight's) that gives the bits of both libraries.

Scales whose groups are not runs of columns: activation order, as GPTQ's `g_idx` says it.

A quantizer that went through the columns in another order than they are stored has groups of columns that lie apart, and
`g_idx` names the group of each. Schemes have blocks of neighbours alone, so the scales are stored again for the longest aligned
runs of columns that lie in one group: the same length as before where the groups are runs, 1 (a scale for each column) where
they are scattered. The values are the same to the bit; scattered groups take more memory for their scales.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import torch

import fast
from ao_lab.checkpoint.io.shards import Folder, Spec, Specs, Tensors
from ao_lab.checkpoint.io.strict_json import shown
from ao_lab.checkpoint.records import Records, Weight
from ao_lab.config.recipe import Recipe, block_name
from ao_lab.tensor.metadata import Meta
from ao_lab.tensor.quantized_tensor import QuantizedTensor, from_quantized
from reference import Quantized, Scheme
from reference.schemes.schemes import Block


def run_length(g_idx: torch.Tensor, groups: int) -> int:
    """The longest length that divides the columns (g_idx: integers, one for each) and whose aligned runs lie in one group.

    ValueError where g_idx is no list of columns or names groups that are not 0..groups - 1.
    """
    if g_idx.dim() != 1 or not g_idx.numel() or g_idx.is_floating_point():
        raise ValueError(
            f"g_idx has an integer for each column, got {g_idx.dtype} of shape {tuple(g_idx.shape)}"
        )
    low, high = int(g_idx.min()), int(g_idx.max())
    if low < 0 or high >= groups:
        raise ValueError(f"g_idx names groups 0 to {groups - 1}, got {low} to {high}")
    changes = torch.nonzero(g_idx[1:] != g_idx[:-1]).flatten() + 1
    return gcd(g_idx.numel(), *changes.tolist())


def regrouped(g_idx: torch.Tensor, length: int, *stored: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Scales and zero points (..., groups), stored again for runs of `length` columns: (..., columns / length)."""
    groups = g_idx[::length].to(torch.int64)
    return tuple(part.index_select(-1, groups).contiguous() for part in stored)


WORD_BITS = 32
QWEIGHT = "qweight"
#: Dtypes of scales: what records call them, and the ends of the records' names.
STORAGE = {
    torch.float16: ("float16", ""),
    torch.bfloat16: ("bfloat16", "_bf16"),
    torch.float32: ("float32", "_f32"),
}


@dataclass(frozen=True)
class Models:
    """The two records of a library, without and with zero points, of 4 bits; others are made of them."""

    symmetric: Scheme
    asymmetric: Scheme


@dataclass(frozen=True)
class Integers:
    """How one weight is stored."""

    models: Models
    bits: int
    #: Elements of a group; -1: all inputs.
    group: int
    #: (outputs, inputs).
    shape: tuple[int, int]
    dtype: torch.dtype

    @property
    def groups(self) -> int:
        """Groups of a row, the last perhaps short."""
        return 1 if self.group == -1 else math.ceil(self.shape[1] / self.group)

    @property
    def middle(self) -> int:
        """What is taken from unsigned codes and zero points."""
        return 1 << (self.bits - 1)

    def scheme(self, asymmetric: bool) -> Scheme:
        """The record of weights with zero points, or without."""
        model = self.models.asymmetric if asymmetric else self.models.symmetric
        whole = self.group == -1 or self.group >= self.shape[1]
        block: Block = -1 if whole else self.group
        storage, suffix = STORAGE[self.dtype]
        library = model.name.partition(".")[0]
        name = f"{library}.int{self.bits}_{block_name(block)}{'_asymmetric' if asymmetric else ''}{suffix}"
        levels = 2.0**self.bits - 1
        scale = replace(
            model.scale,
            block=block,
            target=levels if asymmetric else levels / 2,
            storage=storage,
            partial=not whole and self.shape[1] % self.group != 0,
        )
        return replace(model, name=name, element=f"int{self.bits}", scale=scale)

    def weight(self, codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> QuantizedTensor:
        """The stored weight of packed unsigned codes (outputs, bytes), zero points and scales (outputs, groups)."""
        asymmetric = bool((zeros != self.middle).any())
        scheme = self.scheme(asymmetric)
        signed = codes ^ self._signs()
        zero = (zeros.to(torch.int16) - self.middle).to(torch.int8) if asymmetric else None
        scale = scales.contiguous()
        kept = scale if scale.dtype == torch.float32 else scale.view(torch.uint16)
        q = Quantized(signed, kept, None, zero, self.shape, 1, scheme, self.bits < 8)
        return from_quantized(q, Recipe(weight=scheme), self.dtype)

    def _signs(self) -> torch.Tensor:
        """The highest bit of every code of a row, packed: what u and u - 2**(bits - 1) differ by."""
        return fast.pack(torch.full((self.shape[1],), self.middle, dtype=torch.uint8), f"uint{self.bits}")


def words_of(count: int, bits: int) -> int:
    """32-bit words of `count` codes, one after the other."""
    return math.ceil(count * bits / WORD_BITS)


def row_bytes(words: torch.Tensor) -> torch.Tensor:
    """The bytes of int32 words (rows, n) as uint8 (rows, 4 n), in new memory where the words are not row by row."""
    return words.reshape(-1).view(torch.uint8).reshape(words.shape[0], -1)


def unpacked_rows(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """`count` codes (uint8) of every row of int32 words: a little-endian stream of bits."""
    stored = row_bytes(words)[:, : math.ceil(count * bits / 8)]
    return fast.unpack(stored.contiguous(), f"uint{bits}", (words.shape[0], count))


def layers(folder: Folder, library: str) -> list[str]:
    """The paths of the layers that have packed words, each ending on "." if it has a name; ValueError where none has."""
    paths = [name.removesuffix(QWEIGHT) for name in folder.specs if name.rpartition(".")[2] == QWEIGHT]
    if not paths:
        raise ValueError(
            f"{folder.path} has no tensor named {QWEIGHT}, which {library} writes for every quantized layer; fetch the folder "
            "again, or see whether its quantization_config belongs to another format"
        )
    return paths


def spec_of(folder: Folder, name: str, axes: int = 2) -> Spec:
    """What a tensor is; ValueError where it is missing, empty, or has another number of axes."""
    if name not in folder.specs:
        raise ValueError(f"{folder.path} lacks tensor {shown(name)}; fetch the folder again")
    spec = folder.specs[name]
    if len(spec.shape) != axes or 0 in spec.shape:
        raise ValueError(
            f"tensor {shown(name)} of {folder.files[name]} has {axes} axes, none of length 0, got {spec}; fetch it again"
        )
    return spec


def scale_dtype(folder: Folder, name: str) -> torch.dtype:
    """The dtype of the scales, which is that of the dequantized weight; ValueError for one that no scheme stores."""
    dtype = spec_of(folder, name).dtype
    if dtype not in STORAGE:
        raise ValueError(
            f"tensor {shown(name)} of {folder.files[name]}: scales are float16, bfloat16 or float32, got {dtype}; fetch it "
            "again"
        )
    return dtype


@dataclass(frozen=True)
class PackedLayer:
    """One layer: how its weight is stored, what its tensors are, and the weight of these."""

    integers: Integers
    specs: Specs
    build: Callable[[Tensors], QuantizedTensor]
    format: str


def records_of(found: Mapping[str, PackedLayer], method: str, symmetric: bool) -> Records:
    """The records of layers by path; `symmetric`: whether the configuration says that zero points are in the middle."""
    weights = {}
    for path, layer in found.items():
        integers = layer.integers
        meta = Meta(Recipe(weight=integers.scheme(not symmetric)), -1, integers.dtype)
        names = {part: path + part for part in layer.specs}
        weights[f"{path}weight"] = Weight(
            meta, integers.shape, names, layer.specs, layer.build, method, layer.format
        )
    return Records(weights, (), {})


def integer(
    config: Mapping[str, Any], names: tuple[str, ...], allowed: Callable[[int], bool], where: str
) -> int:
    """A whole number of a configuration under the first of its names; ValueError where it is missing or not `allowed`."""
    value = next((config[name] for name in names if name in config), None)
    if type(value) is not int or not allowed(value):
        raise ValueError(f"{names[0]} of quantization_config in {where} cannot be read: {shown(value)}")
    return value


def width_and_group(
    config: Mapping[str, Any], folder: Folder, widths: tuple[int, ...], way_out: str
) -> tuple[int, int]:
    """Bits of an integer, of those that a format has, and elements of a group (-1: a row), as a configuration says them.

    ValueError, with the way out, for others.
    """
    where = f"{folder.path} ({', '.join(map(str, widths))} bits; groups of n > 0, or -1; {way_out})"
    bits = integer(config, ("bits", "w_bit"), widths.__contains__, where)
    return bits, integer(config, ("group_size", "q_group_size"), lambda n: n > 0 or n == -1, where)
