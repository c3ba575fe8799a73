"""The assembly of `triton_sparse24_small_m_kernel`: what all codes and all indices become, in the PTX emulator."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from fast.kernels.triton_sparse24_small_m.assembly import BYTES, DECODE_OPERANDS, DOWN, UP, decode_asm
from tests.emulator.ptx_opcodes import run
from tests.gpu.sparsity.cases import metadata_of

KINDS = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}
#: Lanes of four, and random words.
LANES = np.arange(4096, dtype=np.uint32) % 4


def decoded(kind, codes, metadata):
    """Registers of the four instructions and their indices: codes (row, word, lane), metadata (row, word, lane)."""
    place = [np.array(BYTES)[LANES // 2], np.array(DOWN)[LANES % 2], np.array(UP)[LANES % 2], LANES]
    given = [*codes.reshape(4, -1), *metadata.reshape(8, -1), *place]
    made = run(decode_asm(kind), DECODE_OPERANDS, [v.astype(np.uint32) for v in given])
    return np.stack(made[:16]).reshape(4, 4, -1), np.stack(np.broadcast_arrays(*made[16:]))


@pytest.mark.parametrize("kind", KINDS)
def test_all_codes_in_all_places(kind):
    """Register 2 i + r of instruction 2 u + h has byte 2 h + i of word u of row r, the low half first, as exact numbers."""
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, (2, 2, len(LANES)), np.uint32)
    made, _ = decoded(kind, words, np.zeros((2, 4, len(LANES)), np.uint32))
    for u, h, i, r in itertools.product(range(2), repeat=4):
        byte = words[r, u] >> np.uint32(8 * (2 * h + i)) & np.uint32(255)
        assert len(set(byte)) == 256
        halves = (
            np.ascontiguousarray(made[2 * u + h, 2 * i + r])
            .astype(np.uint32)
            .view(KINDS[kind])
            .reshape(-1, 2)
        )
        wanted = np.stack([(byte & 15 ^ 8).astype(int) - 8, (byte >> 4 ^ 8).astype(int) - 8], -1)
        assert (halves.astype(int) == wanted).all()
        assert not np.signbit(halves[wanted == 0]).any()


def test_indices_of_four_lanes():
    """Place t' of each half of the four words, word 0's half for instructions 0 and 1; row g low, row g + 8 high."""
    stored = [metadata_of(np.random.default_rng(seed), len(LANES), 128).view("<u4").T for seed in (1, 2)]
    _, made = decoded("bf16", np.zeros((2, 2, len(LANES)), np.uint32), np.stack(stored))
    for at, row, t in itertools.product(range(4), range(2), range(4)):
        half = np.uint32(16 * (at // 2))
        wanted = stored[row][t] >> half >> (4 * LANES) & np.uint32(15)
        assert (made[at] >> np.uint32(16 * row + 4 * t) & np.uint32(15) == wanted).all()
