"""Layouts of metadata: bijections, their inverses, torch's own reordering, and CUTLASS's layout algebra step by step."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.sparse import _semi_structured_conversions as conversions

from reference.sparsity.compress import compress
from reference.sparsity.layouts import METADATA_LAYOUTS, VALID, arrange_metadata, restore_metadata
from tests.support.refusals import refused

LAYOUTS = sorted(METADATA_LAYOUTS)


def metadata_of(rng, rows, columns):
    """Random valid groups, packed by hand; the last high half of an odd number is 0."""
    groups = rng.choice(VALID, (rows, columns // 4)).astype(np.uint8)
    if groups.shape[1] % 2:
        groups = np.concatenate([groups, np.zeros((rows, 1), np.uint8)], 1)
    return groups[:, ::2] | groups[:, 1::2] << 4


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=15, deadline=None)
@given(rows=st.integers(1, 200), groups=st.integers(1, 80), seed=st.integers(0, 99))
def test_there_and_back(layout, rows, groups, seed):
    metadata = metadata_of(np.random.default_rng(seed), rows, 4 * groups)
    stored = arrange_metadata(metadata, layout)
    m, k = METADATA_LAYOUTS[layout].padded((rows, 4 * groups))
    assert (stored.shape, stored.dtype) == ((m * k // 8,), np.uint8)
    back = restore_metadata(stored, layout, (rows, 4 * groups))
    np.testing.assert_array_equal(back, metadata)
    # The same groups in another order, and 1110 for all that was added.
    counts = [np.bincount(np.concatenate([t & 15, t >> 4], None), minlength=16) for t in (metadata, stored)]
    counts[0][0b1110] += m * k // 4 - rows * groups
    counts[0][0] = 0
    np.testing.assert_array_equal(*counts)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_place_is_taken_once(layout):
    record = METADATA_LAYOUTS[layout]
    for m, k in (
        (record.rows, record.columns),
        (3 * record.rows, 2 * record.columns),
        (2 * record.rows, 5 * record.columns),
    ):
        r, column = np.arange(m, dtype=np.int32)[:, None], np.arange(0, k, 4, dtype=np.int32)[None]
        place = record.place(r, column, m, k)
        np.testing.assert_array_equal(np.sort(place, None), np.arange(m * k // 4))


@pytest.mark.parametrize(("dtype", "layout"), [(torch.float16, "cutlass_sm80_16bit"), (torch.bfloat16, "cutlass_sm80_16bit"),
                                               (torch.int8, "cutlass_sm80_8bit")])  # fmt: skip
@pytest.mark.parametrize("shape", [(32, 64), (96, 320), (64, 128)])
def test_sm80_is_torchs_own(dtype, layout, shape):
    """torch.sparse's converter, which is CPU code, writes these bytes; and reads ours."""
    rng = np.random.default_rng(0)
    w = torch.from_numpy(rng.integers(1, 100, shape)).to(dtype)
    w = w.view(-1, 4) * torch.from_numpy(rng.permuted(np.tile([1, 1, 0, 0], (w.numel() // 4, 1)), axis=1)).to(
        dtype
    )
    w = w.view(shape)
    values, reordered = conversions.sparse_semi_structured_from_dense_cutlass(w)
    ours = compress(w)
    stored = arrange_metadata(ours.metadata, layout)
    assert torch.equal(stored, reordered.contiguous().view(torch.uint8).reshape(-1))
    assert torch.equal(restore_metadata(stored, layout, shape), ours.metadata)
    reordered = stored.view(reordered.dtype).view(reordered.shape)
    assert torch.equal(conversions.sparse_semi_structured_to_dense_cutlass(values, reordered), w)


def ordered_strides(shape, order):
    """CuTe's make_ordered_layout: modes get their strides from the one of lowest order on."""
    strides, reached = [0] * len(shape), 1
    for mode in sorted(range(len(shape)), key=lambda mode: order[mode]):
        strides[mode], reached = reached, reached * shape[mode]
    return strides


def cutlass_sm90_offset(r, k, m, atom_rows, atom_columns, order, tile):
    """Offset in elements of sm90_sparse_config.inl: the atom's modes, then atoms along M, then along K."""
    strides = ordered_strides((*atom_rows, *atom_columns), order)
    coordinates = []
    for index, shape in ((r % 64, atom_rows), (k % tile, atom_columns)):
        for length in shape:
            coordinates.append(index % length)
            index //= length
    inside = sum(c * s for c, s in zip(coordinates, strides, strict=True))
    return inside + r // 64 * 64 * tile + k // tile * m * tile


@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("bits", [8, 16])
def test_sm90_is_the_layout_of_cutlass(bits, tile):
    """One bit of metadata for each dense element: Shape <(8,2,4),(16,2,n)> ordered <(3,1,5),(0,4,2)>, or <64,T> by rows."""
    m, k = 128, 2 * tile
    place = METADATA_LAYOUTS[f"cutlass_sm90_{bits}bit_k{tile}"].place
    atom = ((64,), (tile,), (1, 0)) if bits == 8 else ((8, 2, 4), (16, 2, tile // 32), (3, 1, 5, 0, 4, 2))
    for r, column in itertools.product(range(m), range(0, k, 4)):
        at = place(np.int32(r), np.int32(column), m, k)
        assert 4 * at == cutlass_sm90_offset(r, column, m, *atom, tile)


def test_cusparselt_pairs_rows_eight_apart():
    """The thread's view of wgmma: 8 bytes of one row of 8 hold its 32 columns, in the high halves those of row + 8."""
    place = METADATA_LAYOUTS["cusparselt_sm90_16bit"].place
    groups = np.arange(0, 32, 4)
    for r in (0, 5, 17, 64, 83):
        at = place(np.int32(r), groups, 128, 64)
        # Eight bytes together; the two halves of 32 columns alternate.
        assert (at // 2 - at.min() // 2).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
        partner = place(np.int32(r ^ 8), groups, 128, 64)
        np.testing.assert_array_equal(at ^ 1, partner)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_libraries_agree(layout):
    metadata = metadata_of(np.random.default_rng(2), 70, 100)
    stored = arrange_metadata(metadata, layout)
    on_torch = arrange_metadata(torch.from_numpy(metadata), layout)
    np.testing.assert_array_equal(on_torch.numpy(), stored)
    np.testing.assert_array_equal(restore_metadata(on_torch, layout, (70, 100)).numpy(), metadata)
    on_jax = jax.jit(lambda t: arrange_metadata(t, layout))(jnp.asarray(metadata))
    np.testing.assert_array_equal(on_jax, stored)
    np.testing.assert_array_equal(restore_metadata(on_jax, layout, (70, 100)), metadata)


def test_groups_that_name_nothing():
    """0000 becomes 1110 both ways, whoever wrote it; other bits without a meaning are refused and counted."""
    empty = np.zeros((64, 16), np.uint8)
    for layout in LAYOUTS:
        assert set(arrange_metadata(empty, layout)) == {0xEE}
    assert set(
        restore_metadata(np.zeros(64 * 16, np.uint8), "cutlass_sm90_8bit_k128", (64, 128)).ravel()
    ) == {0xEE}
    for code in set(range(1, 16)) - set(VALID):
        wrong = np.full((64, 16), 0x44, np.uint8)
        wrong[3, 5] = code | 0x40
        with pytest.raises(ValueError, match="0100, 1000, 1001, 1100, 1101, 1110; 1 groups are not"):
            arrange_metadata(wrong, "cutlass_sm80_8bit")
        refused(ValueError, "1 groups are not", restore_metadata, wrong, "cutlass_sm90_8bit_k128", (64, 128))


def test_the_tile_of_the_gemm_matters():
    metadata = metadata_of(np.random.default_rng(0), 64, 128)
    assert (
        arrange_metadata(metadata, "cutlass_sm90_16bit_k64")
        != arrange_metadata(metadata, "cutlass_sm90_16bit_k128")
    ).any()


def test_refusals_name_the_way_out():
    metadata = np.full((4, 2), 0x44, np.uint8)
    with pytest.raises(ValueError, match="a metadata layout is one of cutlass_sm90_8bit_k64"):
        arrange_metadata(metadata, "cutlass")
    refused(TypeError, "uint8, got int16", arrange_metadata, metadata.view(np.int16), "cutlass_sm80_16bit")
    refused(ValueError, "arrange each by itself", arrange_metadata, metadata[0], "cutlass_sm80_16bit")
    stored = arrange_metadata(metadata, "cutlass_sm80_16bit")
    with pytest.raises(
        ValueError, match=r"stores 256 bytes for shape \(4, 40\), padded to \(32, 64\); got 128"
    ):
        restore_metadata(stored, "cutlass_sm80_16bit", (4, 40))
    refused(ValueError, "whole groups of four", restore_metadata, stored, "cutlass_sm80_16bit", (4, 18))
