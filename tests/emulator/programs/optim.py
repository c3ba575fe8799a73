"""The optimizer kernel on CPU tensors in Triton's interpreter, against `reference.optim.update`, bit for bit.

TRITON_INTERPRET=1 python -m tests.emulator.interpreter_process optim [few | hardware]

hardware: what a GPU runs, its instructions emulated (`ptx_interpreter`).
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from fast.kernels.optim import host, nibbles
from fast.optim import update as module
from fast.optim.update import Moment, Slot, Updates
from reference.formats.encode import decode, encode
from reference.formats.storage import pack
from tests.emulator import ptx_interpreter
from tests.support.optim import CASES, SHAPES, compared, slots_of

FEW, SMALL = (0, 5, 11), ((1, 256), (1, 150))
#: Of the default states: with both halves of random words, in 4 bits, with a master.
HARDWARE = (5, 0, 2)


@triton.jit
def nibbles_kernel(y, u, words, first, second, values, poisoned, SIZE: tl.constexpr):
    """Words of codes of y and u (SIZE,) by random words (SIZE / 2,), and their values again."""
    at, half = tl.arange(0, SIZE)[None, :], tl.arange(0, SIZE // 2)[None, :]
    eighth = tl.arange(0, SIZE // 8)[None, :]
    middle = nibbles.halves_in_middle(tl.load(words + half))
    a = nibbles.e2m1_words(tl.load(y + at), middle, poisoned != 0)
    b = nibbles.uint4_words(tl.load(u + at), middle)
    tl.store(first + eighth, a)
    tl.store(second + eighth, b)
    tl.store(values + at, nibbles.e2m1_values(a))
    tl.store(values + SIZE + at, nibbles.uint4_values(b))


def near_carries(rng, size):
    """(numbers from 0 to 8, 16 random bits): next to where the bits carry into the code, and anywhere."""
    whole, fraction = rng.integers(0, 8, size), rng.integers(1, 65536, size)
    exact = np.ldexp(whole + fraction / 65536.0, rng.choice([0, -1, -2], size)).astype(np.float32)
    number = np.nextafter(exact, rng.choice(np.float32([0, 9]), size))
    number[::4] = exact[::4]
    number[1::8] = rng.random(number[1::8].size) * 8
    number[:8] = 0, 0.5, 1, 1.5, 2, 6, 2**-20, 1e-40
    return number.astype(np.float32), ((65536 - fraction) & 0xFFFF).astype(np.uint32)


def words_of_eight(size: int = 4096) -> None:
    """Codes and values of `fast.kernels.optim.nibbles` are those of `encode` and `decode`."""
    rng = np.random.default_rng(0)
    number, halves = near_carries(rng, size)
    y, u = np.minimum(number, 6) * rng.choice(np.float32([-1, 1]), size), np.minimum(number * 2, 15)
    words = (halves[::2] | halves[1::2] << 16).view(np.int32)
    tensors = [torch.from_numpy(v.copy()) for v in (y, u, words)]
    first, second = torch.zeros(2, size // 8, dtype=torch.int32)
    values = torch.zeros(2, size)
    nibbles_kernel[(1,)](*tensors, first, second, values, 0, size)
    for fmt, x, code, value in (("float4_e2m1fn", y, first, values[0]), ("uint4", u, second, values[1])):
        wanted = encode(x, fmt, rounding="stochastic", random_bits=halves << 16)
        wanted = np.maximum(wanted, 1) if fmt == "uint4" else wanted
        assert np.array_equal(code.numpy().view(np.uint8), pack(wanted, fmt))
        assert np.array_equal(value.numpy(), decode(wanted, fmt))
    nibbles_kernel[(1,)](*tensors, first, second, values, 1, size)
    assert not first.any()
    print("eight codes of 4 bits in a word")


def main(few: str = "") -> None:
    """Three steps of each case."""
    host.PLANS = {bits: plan._replace(elements=512) for bits, plan in host.PLANS.items()}
    module.INTERPRETED = True
    if few == "hardware":
        ptx_interpreter.install()
        host.interpreted = lambda: False
        words_of_eight()
    for case in [CASES[at] for at in {"": range(len(CASES)), "few": FEW, "hardware": HARDWARE}[few]]:
        shapes = SMALL if few == "few" else SHAPES[:2] if few else SHAPES
        rule, slots, stored = slots_of(case, torch.device("cpu"), np.random.default_rng(0), shapes)
        print(case.name, compared(case, rule, slots, stored, steps=2 if few else 3))
    rule, slots, _ = slots_of(CASES[0], torch.device("cpu"), np.random.default_rng(0), ((1, 256),))
    moments = [
        Moment(one.codes[:0], one.scale[:0]) for one in (slots[0].first_moment, slots[0].second_moment)
    ]
    empty = Slot(slots[0].p[:0], slots[0].g[:0], torch.zeros(()), *moments)
    Updates()([empty], rule)
    assert empty.step == 1
    print("a shard without rows, alone")
