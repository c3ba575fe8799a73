"""2:4 masks, compressed storage and back, inline assembly included, on CPU tensors against `reference`, bit for bit.

    TRITON_INTERPRET=1 python tests/emulator/programs/sparsity/storage.py [day]

day: patterns other than 2:4, 4:8 and 8:16 in bfloat16 alone.

Instructions are emulated (`ptx_interpreter`). Prints what agreed, a line for each dtype and function; raises at the first
difference.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

import numpy as np
import torch
import triton

import reference
from ao_lab.testing.strategies import assert_same_bits
from fast.kernels.sm90_sparse24_gemm.bits import pack_bits, packed_shape
from fast.kernels.sparsity import host
from tests.emulator import ptx_interpreter
from tests.gpu.sparsity.cases import PATTERN_SHAPES, PATTERNS, few_of_four, patterns

#: Of rows: usual, zero, subnormal, below zero, infinite, NaN, so large that its reciprocal is subnormal.
SCALES = (0.0173, 1.0, 0.0, 1e-40, -1.0, float("inf"), float("nan"), 3e38)


def compare_masks(dtype: torch.dtype, chosen: tuple[str, ...]) -> None:
    """The mask of 2:4, and of other patterns, of scores with ties, NaN and both zeros."""
    for shape in PATTERN_SHAPES:
        scores = patterns(dtype, shape)
        for pattern in chosen:
            if shape[-1] % int(pattern.split(":")[1]) == 0:
                assert_same_bits(host.prune(scores, None, pattern), reference.prune(scores, pattern=pattern))
        if dtype.is_floating_point and shape[-1] % 8 == 0:
            bits = torch.randint(0, 256, packed_shape(shape), dtype=torch.uint8)
            assert host.prune(scores, None, "2:4", None, bits) is bits
            assert_same_bits(bits, pack_bits(torch.as_tensor(reference.prune(scores))))
    w = torch.zeros(PATTERN_SHAPES[0])
    assert_same_bits(
        host.prune(w, patterns(dtype, PATTERN_SHAPES[0]), "2:4"),
        reference.prune(w, scores=patterns(dtype, PATTERN_SHAPES[0])),
    )


def compare_storage(w: torch.Tensor, pattern: str | None, mask: torch.Tensor | None) -> None:
    """Values, metadata, and the tensor that comes back."""
    made, wanted = host.compress(w, mask, pattern), reference.compress(w, pattern or mask)
    assert made is not None
    for one, other in zip(made, wanted, strict=True):
        assert_same_bits(one, other)
    assert_same_bits(host.decompress(*made, None), reference.decompress(*wanted))


def compare_rules(dtype: torch.dtype) -> None:
    """By magnitude, by a mask with two, one or no element of a group, and what is not zero."""
    for shape in PATTERN_SHAPES:
        w = patterns(dtype, shape)
        if dtype in host.RANKED:
            compare_storage(w, "2:4", None)
        mask = few_of_four(shape)
        compare_storage(w, None, mask)
        bits = w.view(getattr(torch, f"int{8 * w.itemsize}"))
        compare_storage(torch.where(mask, bits, 0).view(dtype), None, None)
        if host.STORED[dtype]:
            negative = torch.full_like(bits, torch.iinfo(bits.dtype).min)
            compare_storage(torch.where(mask, bits, negative).view(dtype), None, None)


def compare_refusals(dtype: torch.dtype) -> None:
    """One group with three, in the last octet or the first: the reference's error."""
    for at in (0, -8):
        w, mask = torch.zeros(8, 1032), torch.zeros(8, 1032, dtype=torch.bool)
        w.view(-1)[at : at + 3 or None], mask.view(-1)[at : at + 3 or None] = 1, True
        w = w.to(dtype)
        same_error(lambda w=w: host.compress(w, None, None), lambda w=w: reference.compress(w))
        same_error(
            lambda w=w, mask=mask: host.compress(w, mask, None),
            lambda w=w, mask=mask: reference.compress(w, mask),
        )


def compare_codes(dtype: torch.dtype) -> None:
    """Pruned, scaled, rounded and compressed: rows that fill a program and that do not, scales that are hard."""
    for name in host.SERVED:
        for shape in PATTERN_SHAPES:
            w = patterns(dtype, shape)
            scales = torch.tensor(SCALES).repeat(shape[0])[: w.numel() // shape[-1]].reshape(*shape[:-1], 1)
            for scale in [scales] if "row" in name else [torch.tensor(SCALES[0])]:
                made = host.quantize_compressed(name, "2:4", w, None, scale, None, None)
                assert made is not None
                for one, other in zip(made, reference.quantize_compressed(w, name, scale), strict=True):
                    assert_same_bits(one, other)


def same_error(call: Callable[[], Any], wanted: Callable[[], Any]) -> None:
    """Both raise ValueError with one text."""
    texts = []
    for one in (call, wanted):
        try:
            one()
        except ValueError as error:
            texts.append(str(error))
    assert len(texts) == 2
    assert texts[0] == texts[1]


def main(by_day: bool) -> None:
    """Install the emulator, and compare."""
    assert triton.knobs.runtime.interpret, "TRITON_INTERPRET=1 is missing"
    ptx_interpreter.install()
    with np.errstate(all="ignore"):
        for dtype in host.SCORES:
            few = by_day and dtype != torch.bfloat16
            compare_masks(dtype, ("2:4", "4:8", "8:16") if few else PATTERNS)
            print(dtype, "masks", flush=True)
        for dtype in host.HALVES:
            compare_codes(dtype)
            print(dtype, "codes", flush=True)
        for dtype in host.STORED:
            compare_rules(dtype)
            compare_refusals(dtype)
            print(dtype, "storage", flush=True)
    print("agreed", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] == ["day"])
