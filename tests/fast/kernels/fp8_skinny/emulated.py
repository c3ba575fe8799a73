"""`fp8_skinny` on CPU tensors: its launches run in the emulator; outputs are poisoned and lie between guards."""

from __future__ import annotations

import numpy as np
import torch

from fast.kernels.fp8_skinny import launch
from fast.kernels.fp8_skinny.variants import KINDS, sources
from fast.kernels.hopper import nvrtc
from tests.emulator.device.machine import Machine
from tests.emulator.device.memory import POISON, Memory
from tests.emulator.device.stand_in import GUARD, _bytes


def product(x, codes, scale, bias=None, *, variant, x_scale=None, early=False, seed=0, swap=None):
    """The product by a variant. swap: a text that the source or its header has, and what takes its place, to plant faults."""
    source, headers, options = sources(variant)
    if swap is not None:
        assert sum(swap[0] in text for text in (source, *headers.values())) == 1
        headers = {name: text.replace(*swap) for name, text in headers.items()}
        source = source.replace(*swap)
    ptx = nvrtc.compile_source(source, headers, options, ptx=True)[0].decode().rstrip("\0")
    (count, k), n = x.shape, codes.shape[0]
    size, memory = count * n * 2, Memory()
    held = torch.empty(size + 2 * GUARD, dtype=torch.uint8).fill_(POISON)
    y = held[GUARD : GUARD + size].view(torch.bfloat16).view(count, n)
    given = (x, x_scale, codes, scale, bias, y)
    for one in given:
        if one is not None:
            memory.regions[one.data_ptr()] = _bytes(one.data_ptr(), one.nbytes)
    kind = 0 if bias is None else KINDS.index(str(bias.dtype).removeprefix("torch."))
    addresses = [0 if one is None else one.data_ptr() for one in given]
    packed = launch.ARGUMENTS.pack(*addresses, count, n, k, kind)
    machine = Machine(
        ptx, memory, [np.frombuffer(packed, np.uint8).copy()], {}, threads=variant.threads,
        shared=variant.shared(count, k), early=early, seed=seed,
    )  # fmt: skip
    machine.run(variant.programs(n), 1)
    assert bool((held[:GUARD] == POISON).all() and (held[GUARD + size :] == POISON).all())
    return y
