"""2:4 storage, masks, masked weights and dense weights of 4-bit integers, inline assembly included, against `reference`.

    TRITON_INTERPRET=1 python -m tests.emulator.interpreter_process sparsity storage|transposable [day]
    TRITON_INTERPRET=1 python -m tests.emulator.interpreter_process sparsity masked [DTYPE [day]]
    TRITON_INTERPRET=1 python -m tests.emulator.interpreter_process sparsity int4_dense

day: fewer shapes and kinds of scores, of dtypes other than bfloat16 fewer still. Instructions are emulated (`ptx_interpreter`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import reference
from ao_lab.testing.strategies import assert_same_bits
from fast.kernels.sm90_sparse24_gemm.arrange import pack_bits, packed_shape
from fast.kernels.sm90_sparse24_gemm.masked import compress_masked, keep
from fast.kernels.sparsity import host as storage_host
from fast.kernels.sparsity import transposable as transposable_host
from fast.kernels.triton_sparse24_small_m import host as int4_host
from fast.sparsity.compress import COMPRESS_MASKED, DTYPES
from reference.sparsity.linear_sparse_int4 import sparse_int4_weight
from tests.emulator import ptx_interpreter
from tests.gpu.kernels.sparsity import KINDS, TILE_SHAPES, tiles
from tests.gpu.sparsity.cases import (
    MASKED_SHAPES,
    PATTERN_SHAPES,
    PATTERNS,
    as_tensors,
    few_of_four,
    masked_weights,
    patterns,
    random_case,
    zero_points,
)

#: Of rows: usual, zero, subnormal, below zero, infinite, NaN, so large that its reciprocal is subnormal.
SCALES = (0.0173, 1.0, 0.0, 1e-40, -1.0, float("inf"), float("nan"), 3e38)


#: Scores whose masks are compared by day: any bits, ties, sums that differ by less than they are rounded, NaN.
KINDS_BY_DAY = ("patterns", "few", "close", "special")


def compare_masks(dtype: torch.dtype, chosen: tuple[str, ...]) -> None:
    """The mask of 2:4, and of other patterns, of scores with ties, NaN and both zeros."""
    for shape in PATTERN_SHAPES:
        scores = patterns(dtype, shape)
        for pattern in chosen:
            if shape[-1] % int(pattern.split(":")[1]) == 0:
                assert_same_bits(
                    storage_host.prune(scores, None, pattern), reference.prune(scores, pattern=pattern)
                )
        if dtype.is_floating_point and shape[-1] % 8 == 0:
            bits = torch.randint(0, 256, packed_shape(shape), dtype=torch.uint8)
            assert storage_host.prune(scores, None, "2:4", None, bits) is bits
            assert_same_bits(bits, pack_bits(torch.as_tensor(reference.prune(scores))))
    w = torch.zeros(PATTERN_SHAPES[0])
    assert_same_bits(
        storage_host.prune(w, patterns(dtype, PATTERN_SHAPES[0]), "2:4"),
        reference.prune(w, scores=patterns(dtype, PATTERN_SHAPES[0])),
    )


def compare_storage(w: torch.Tensor, pattern: str | None, mask: torch.Tensor | None) -> None:
    """Values, metadata, and the tensor that comes back."""
    made, wanted = storage_host.compress(w, mask, pattern), reference.compress(w, pattern or mask)
    assert made is not None
    for one, other in zip(made, wanted, strict=True):
        assert_same_bits(one, other)
    assert_same_bits(storage_host.decompress(*made, None), reference.decompress(*wanted))


def compare_rules(dtype: torch.dtype) -> None:
    """By magnitude, by a mask with two, one or no element of a group, and what is not zero."""
    for shape in PATTERN_SHAPES:
        w = patterns(dtype, shape)
        if dtype in storage_host.RANKED:
            compare_storage(w, "2:4", None)
        mask = few_of_four(shape)
        compare_storage(w, None, mask)
        bits = w.view(getattr(torch, f"int{8 * w.itemsize}"))
        compare_storage(torch.where(mask, bits, 0).view(dtype), None, None)
        if storage_host.STORED[dtype]:
            negative = torch.full_like(bits, torch.iinfo(bits.dtype).min)
            compare_storage(torch.where(mask, bits, negative).view(dtype), None, None)


def compare_refusals(dtype: torch.dtype) -> None:
    """One group with three, in the last octet or the first: the reference's error."""
    for at in (0, -8):
        w, mask = torch.zeros(8, 1032), torch.zeros(8, 1032, dtype=torch.bool)
        w.view(-1)[at : at + 3 or None], mask.view(-1)[at : at + 3 or None] = 1, True
        w = w.to(dtype)
        same_error(lambda w=w: storage_host.compress(w, None, None), lambda w=w: reference.compress(w))
        same_error(
            lambda w=w, mask=mask: storage_host.compress(w, mask, None),
            lambda w=w, mask=mask: reference.compress(w, mask),
        )


def compare_codes(dtype: torch.dtype) -> None:
    """Pruned, scaled, rounded and compressed: rows that fill a program and that do not, scales that are hard."""
    for name in storage_host.SERVED:
        for shape in PATTERN_SHAPES:
            w = patterns(dtype, shape)
            scales = torch.tensor(SCALES).repeat(shape[0])[: w.numel() // shape[-1]].reshape(*shape[:-1], 1)
            for scale in [scales] if "row" in name else [torch.tensor(SCALES[0])]:
                made = storage_host.quantize_compressed(name, "2:4", w, None, scale, None, None)
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


def storage(part: str = "") -> None:
    """Install the emulator, and compare."""
    by_day = part == "day"
    for dtype in storage_host.SCORES:
        few = by_day and dtype != torch.bfloat16
        compare_masks(dtype, ("2:4", "4:8", "8:16") if few else PATTERNS)
        print(dtype, "masks", flush=True)
    for dtype in storage_host.HALVES:
        compare_codes(dtype)
        print(dtype, "codes", flush=True)
    for dtype in storage_host.STORED:
        compare_rules(dtype)
        compare_refusals(dtype)
        print(dtype, "storage", flush=True)


def compare_transposable(w: torch.Tensor) -> None:
    """The mask, and of matrices both orientations."""
    mask = transposable_host.prune_transposable(w, None, "exact")
    assert_same_bits(mask, reference.prune_transposable(w))
    out = torch.rand(w.shape) < 0.5
    assert transposable_host.prune_transposable(w, None, "exact", None, out) is out
    assert_same_bits(out, mask)
    bits = torch.randint(0, 256, packed_shape(w.shape), dtype=torch.uint8)
    assert transposable_host.prune_transposable(w, None, "exact", None, bits) is bits
    assert_same_bits(bits, pack_bits(mask))
    made = transposable_host.compress_transposable(w)
    if w.dim() != 2:
        assert made is None
        return
    assert made is not None
    for pair, wanted in zip(made, reference.compress_transposable(w), strict=True):
        for one, other in zip(pair, wanted, strict=True):
            assert_same_bits(one, other)


def compare_infinite_scores(dtype: torch.dtype) -> None:
    """Of w only the shape matters; one infinity sends all of a program to the careful keys."""
    scores = tiles(dtype, (64, 128), "normal")
    for place in (0, 8 * 128 - 1):
        scores.view(-1)[place] = torch.inf
        mask = transposable_host.prune_transposable(torch.zeros(64, 128), scores, "exact")
        assert_same_bits(mask, reference.prune_transposable(scores))


def transposable(part: str = "") -> None:
    """Install the emulator, and compare_transposable."""
    by_day = part == "day"
    for dtype in transposable_host.FLOATS:
        few = by_day and dtype != torch.bfloat16
        for kind in KINDS[:1] if few else KINDS_BY_DAY if by_day else KINDS:
            compare_transposable(tiles(dtype, (32, 64), kind))
        for shape in () if few else TILE_SHAPES["cut"][by_day:3]:
            compare_transposable(tiles(dtype, shape, "patterns"))
        if not few:
            compare_infinite_scores(dtype)
        print(dtype, "tiles", flush=True)


def compare_full(w: torch.Tensor) -> None:
    """Of more than two the first two stay, which no product needs, but which is said."""
    first = torch.tensor([True, True, False, False] * (w.shape[1] // 4)).expand(w.shape)
    for one, other in zip(
        compress_masked(w, torch.ones_like(first), False),
        compress_masked(w, first.contiguous(), False),
        strict=True,
    ):
        assert_same_bits(one, other)


def compare_kept(dtype: torch.dtype) -> None:
    """The same bits or +0, also of 32 bits and in place; whole programs and one that is cut."""
    for shape in ((64, 64), (24, 104)):
        for w, mask in masked_weights(shape, dtype, False):
            for given in (w, w.float()):
                right = torch.where(mask, given, 0)
                assert_same_bits(keep(given, pack_bits(mask), None), right)
                own = given.clone()
                assert keep(own, pack_bits(mask), own) is own
                assert_same_bits(own, right)


def masked(name: str = "", part: str = "") -> None:
    """Install the emulator, and compare; by day a matrix of whole programs and cut ones."""
    for dtype in DTYPES:
        if name not in ("", str(dtype)):
            continue
        for shape in MASKED_SHAPES[3 if part == "day" else 1 : 4]:
            for transposed in (False, True):
                for w, mask in masked_weights(shape, dtype, transposed):
                    wanted = COMPRESS_MASKED.reference(None, (transposed,), (w, mask))
                    for given in (mask, pack_bits(mask)):
                        for one, other in zip(compress_masked(w, given, transposed), wanted, strict=True):
                            assert_same_bits(one, other)
        compare_kept(dtype)
        compare_full(next(masked_weights((16, 16), dtype, False))[0])
        print(dtype, flush=True)


#: Programs that are not filled, filled and followed by another.
INT4_SHAPES = ((5, 96, 32), (16, 256, 256), (3, 4096, 128))


def compare_int4_dense(dtype: torch.dtype, storage: str) -> None:
    """Usual scales, and those that overflow, underflow and are not numbers, with zero points and without."""
    for rows, length, group in INT4_SHAPES:
        case = random_case(1, rows, length, group, storage=storage)
        _, codes, metadata, scale, _ = as_tensors(case)
        zeros = (None, torch.from_numpy(zero_points(case)))
        hard = torch.tensor([1e-40, 3e38, float("nan"), float("inf"), -1.0, 7e4]).to(scale.dtype)
        for given in (scale, hard[torch.arange(scale.numel()) % len(hard)].view(scale.shape)):
            for zero in zeros:
                made = int4_host.sparse_int4_dense(codes, metadata, given, dtype, group, None, zero)
                w = sparse_int4_weight(codes, metadata, given, zero)
                assert_same_bits(made, reference.dequantize(w, str(dtype).removeprefix("torch.")))
    pattern = given.view(torch.uint16) if storage == "bfloat16" else given
    again = int4_host.sparse_int4_dense(codes, metadata, pattern, dtype, group, None, zeros[1])
    assert_same_bits(again, made)


def int4_dense() -> None:
    """Compare all."""
    for dtype in int4_host.INPUTS:
        for storage in ("float32", "bfloat16"):
            compare_int4_dense(dtype, storage)
            print(dtype, storage, flush=True)


def main(name: str, *arguments: str) -> None:
    """Compare what has this name."""
    ptx_interpreter.install()
    {"storage": storage, "transposable": transposable, "masked": masked, "int4_dense": int4_dense}[name](
        *arguments
    )
