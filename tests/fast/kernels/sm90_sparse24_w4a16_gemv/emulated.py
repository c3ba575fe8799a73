"""`sm90_sparse24_w4a16_gemv` on CPU tensors: its launches run in the emulator; outputs are poisoned and lie between guards."""

from __future__ import annotations

from contextlib import ExitStack
from unittest import mock

import numpy as np
import torch

from fast.kernels.sm90_sparse24_w4a16_gemv import host, launch, pair
from fast.kernels.sm90_sparse24_w4a16_gemv.variants import KINDS, sources
from fast.kernels.sparse_linear import host as sparse_linear
from fast.launch.call import Call
from tests.emulator.device.machine import Machine
from tests.emulator.device.memory import POISON, Memory
from tests.emulator.device.stand_in import GUARD, _bytes, compiled
from tests.emulator.faults import unchanged


class Device:
    """Memory of the tensors that it was given, and of an output. change: of the source, to plant faults."""

    def __init__(self, *, early=False, seed=0, change=unchanged):
        self.memory, self.early, self.seed, self.change = Memory(), early, seed, change

    def run(self, one, pointers, device):
        """As `SparseSkinnyLaunch.run`."""
        ptx = compiled(*sources(one.variant, one.form), self.change)
        bias = pointers[one.names.index("bias")]
        kind = 0 if bias is None else KINDS.index(str(bias.dtype).removeprefix("torch."))
        addresses = [0 if p is None else p.data_ptr() for p in pointers]
        packed = one.layout.pack(*addresses, *one.arguments(kind))
        machine = Machine(
            ptx, self.memory, [np.frombuffer(packed, np.uint8).copy()], {}, threads=one.variant.threads,
            shared=one.variant.shared(one.form), early=self.early, seed=self.seed,
        )  # fmt: skip
        machine.run(one.programs, one.variant.splits)
        return (device,)

    def product(self, x, codes, metadata, scale, bias=None, *, variant, zero=None):
        """`sparse_linear.host.linear_sparse_int4` by a variant of this kernel."""
        group = 4 * codes.shape[1] // scale.shape[1]
        given = (x, codes, metadata, scale, bias)
        with mock.patch.object(host, "choose", return_value=variant):
            call = lambda: sparse_linear.linear_sparse_int4(*given, group, zero=zero)  # noqa: E731
            return self.made((*given, zero), call)

    def two(self, x, first, second, *, variant, gated=False):
        """`sm90_sparse24_w4a16_gemv_pair` by a variant, or `sm90_sparse24_w4a16_gemv_swiglu`."""
        function = pair.sm90_sparse24_w4a16_gemv_swiglu if gated else pair.sm90_sparse24_w4a16_gemv_pair
        group = 4 * first[0].shape[1] // first[2].shape[1]
        return self.made((x, *first, *second), lambda: function(x, first, second, group, variant))

    def made(self, operands, call):
        """What a call makes of these operands."""
        for one in operands:
            if one is not None:
                self.memory.regions[one.data_ptr()] = _bytes(one.data_ptr(), one.nbytes)
        made = []

        def allocate(call, name, shape, dtype):
            size = int(np.prod(shape)) * dtype.itemsize
            made.append(torch.empty(size + 2 * GUARD, dtype=torch.uint8).fill_(POISON))
            part = made[-1][GUARD : GUARD + size]
            self.memory.regions[part.data_ptr()] = _bytes(part.data_ptr(), size)
            call.tensors[name], call.buffers[name] = part.view(dtype).view(shape), (tuple(shape), dtype, ())

        run = mock.patch.object(
            launch.SparseSkinnyLaunch, "run", lambda one, pointers, device: self.run(one, pointers, device)
        )
        served = [mock.patch.object(module, "is_served", return_value=True) for module in (host, pair)]
        loaded = [mock.patch.object(module, "is_loadable", return_value=True) for module in (host, pair)]
        with ExitStack() as stack:
            for patch in (run, *served, *loaded, mock.patch.object(Call, "allocate", allocate)):
                stack.enter_context(patch)
            y = call()
        for whole in made:
            if not bool((whole[:GUARD] == POISON).all() and (whole[-GUARD:] == POISON).all()):
                raise ValueError("the kernel wrote outside of its output")
        return y
