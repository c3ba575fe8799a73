"""`sm90_intn_small_m` on CPU tensors: its PTX runs in the emulator; outputs are poisoned and lie between guards."""

from __future__ import annotations

import numpy as np
import torch

from fast.kernels.sm90_intn_small_m.host import form_of
from fast.kernels.sm90_intn_small_m.launch import ARGUMENTS
from fast.kernels.sm90_intn_small_m.variants import KINDS, Form, sources
from tests.emulator.device.machine import Machine
from tests.emulator.device.memory import POISON, Memory
from tests.emulator.device.stand_in import GUARD, _bytes, compiled
from tests.emulator.faults import unchanged


def product(x, w, bias, variant, *, early, seed=0, change=unchanged, at_once=1):
    """`host.sm90_intn_small_m` by a variant. change: of the source with what it includes, to plant faults; at_once: clusters
    that run together, of which some warps are slow."""
    form = form_of(w.scheme, tuple(w.shape), w.axis, w.packed)
    form = Form(*form[:-1], x.dtype == torch.float16)
    assert variant.takes(form, w.shape[1])
    ptx = compiled(*sources(variant, form), change)
    memory, (count, k), n = Memory(), x.shape, w.shape[0]
    for one in (x, w.codes, w.scale, w.zero, bias):
        if one is not None:
            memory.regions[one.data_ptr()] = _bytes(one.data_ptr(), one.nbytes)
    whole = torch.empty(2 * count * n + 2 * GUARD, dtype=torch.uint8).fill_(POISON)
    part = whole[GUARD:-GUARD]
    memory.regions[part.data_ptr()] = _bytes(part.data_ptr(), part.numel())
    y = part.view(x.dtype).view(count, n)
    kind = 0 if bias is None else KINDS.index(str(bias.dtype).removeprefix("torch."))
    addresses = [0 if one is None else one.data_ptr() for one in (x, w.codes, w.scale, w.zero, bias, y)]
    packed = ARGUMENTS.pack(*addresses, count, n, k, kind)
    machine = Machine(
        ptx, memory, [np.frombuffer(packed, np.uint8).copy()], {}, threads=variant.threads,
        shared=variant.shared(form, k), early=early, seed=seed,
    )  # fmt: skip
    machine.run(variant.programs(count, n), variant.splits, at_once)
    if not bool((whole[:GUARD] == POISON).all() and (whole[-GUARD:] == POISON).all()):
        raise ValueError("the kernel wrote outside of its output")
    return y


__all__ = ["product"]
