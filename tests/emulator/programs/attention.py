"""The attention kernel of `decode` in Triton's interpreter, against torch's attention in float64.

    TRITON_INTERPRET=1 python tests/emulator/programs/attention.py

A program of its own, because the interpreter is chosen at import. Caches hold NaN where nothing may be read, and positions lie
on both sides of what a program takes at once. Numbers and angles are such that rotations are exact in bfloat16.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np
import torch
import triton

from fast.kernels.layers.attention import attention_kernel
from tests.emulator import quick_interpreter

HEADS, KV_HEADS, WIDTH, LENGTH, STEP = 4, 2, 16, 40, 8
#: The interpreter cuts off where a GPU rounds; and what float32 loses in sums of scores below 16, exponentials and values.
RELATIVE, ABSOLUTE = 2.0**-7, 2.0**-16


def rotated(x, cosine, sine):
    """Heads (n, WIDTH) after rotation, float64."""
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat((-second, first), -1) * sine


def expected(qkv, cosine, sine, last, keys, values):
    """All heads' attention in float64, and the rotated key."""
    heads = qkv.double().view(-1, WIDTH)
    cosine, sine = cosine.double(), sine.double()
    q = rotated(heads[:HEADS], cosine, sine).bfloat16().double()
    own = rotated(heads[HEADS : HEADS + KV_HEADS], cosine, sine).bfloat16()
    k = torch.cat((keys[0, :, :last], own[:, None]), 1).double()
    v = torch.cat((values[0, :, :last], qkv.view(-1, WIDTH)[HEADS + KV_HEADS :, None]), 1).double()
    k, v = (part.repeat_interleave(HEADS // KV_HEADS, 0) for part in (k, v))
    chances = ((q[:, None] * k).sum(-1) * WIDTH**-0.5).softmax(-1)
    return (chances[..., None] * v).sum(1), own


def compare(last, rng):
    """One position; returns the largest error over what is allowed."""
    qkv = torch.from_numpy(rng.integers(-16, 17, (HEADS + 2 * KV_HEADS) * WIDTH) / 8).bfloat16()
    cosine, sine = torch.from_numpy(rng.integers(-2, 3, (2, WIDTH // 2)) / 2).repeat(1, 2).bfloat16()
    keys, values = (
        torch.from_numpy(rng.standard_normal((1, KV_HEADS, LENGTH, WIDTH))).bfloat16() for _ in range(2)
    )
    keys[:, :, last:], values[:, :, last:] = torch.nan, torch.nan
    before = keys.clone(), values.clone()
    want, own = expected(qkv, cosine, sine, last, keys, values)
    y = torch.empty(HEADS * WIDTH, dtype=torch.bfloat16)
    position = torch.tensor([last])
    attention_kernel[HEADS,](
        qkv, cosine, sine, position, keys, values, y, WIDTH**-0.5,
        HEADS=HEADS, KV_HEADS=KV_HEADS, WIDTH=WIDTH, LENGTH=LENGTH, STEP=STEP, USE_PDL=False,
    )  # fmt: skip
    here = torch.arange(LENGTH) == last
    for now, then in zip((keys, values), before, strict=True):
        assert torch.equal(now[:, :, ~here].view(torch.int16), then[:, :, ~here].view(torch.int16))
    assert torch.equal(values[0, :, last], qkv.view(-1, WIDTH)[HEADS + KV_HEADS :])
    assert torch.equal(keys[0, :, last], own)
    error = float(((y.double().view(HEADS, WIDTH) - want).abs() / (RELATIVE * want.abs() + ABSOLUTE)).max())
    assert error <= 1, f"position {last}: {error} of what is allowed"
    return error


def main():
    """All positions of interest."""
    assert triton.knobs.runtime.interpret, "TRITON_INTERPRET=1 is missing"
    quick_interpreter.install()
    rng = np.random.default_rng(0)
    for last in (0, 1, STEP - 1, STEP, STEP + 1, 3 * STEP, LENGTH - 1):
        print(f"position {last}: {compare(last, rng):.2f} of the allowed error")
    print("agreed")


if __name__ == "__main__":
    main()
