"""`sparse_skinny` on CPU tensors: its launches run in the emulator; outputs are poisoned and lie between guards."""

from __future__ import annotations

from unittest import mock

import numpy as np
import torch

from fast.kernels.hopper import nvrtc
from fast.kernels.launch.call import Call
from fast.kernels.sparse_linear import host as sparse_linear
from fast.kernels.sparse_skinny import host, launch
from fast.kernels.sparse_skinny.variants import KINDS, OUTPUT, sources
from tests.emulator.device.machine import Machine
from tests.emulator.device.memory import POISON, Memory
from tests.emulator.device.stand_in import GUARD, _bytes


class Device:
    """Memory of the tensors that it was given, and of an output. change: of the source, to plant faults."""

    def __init__(self, *, early=False, seed=0, change=lambda text: text):
        self.memory, self.early, self.seed, self.change = Memory(), early, seed, change

    def run(self, one, pointers, device):
        """As `SparseSkinnyLaunch.run`."""
        source, headers, options = sources(one.variant, one.form)
        source = source.replace(f'#include "{OUTPUT}"\n', headers[OUTPUT])
        ptx = nvrtc.compile_source(self.change(source), headers, options, ptx=True)[0].decode().rstrip("\0")
        bias = pointers[launch.POINTERS.index("bias")]
        kind = 0 if bias is None else KINDS.index(str(bias.dtype).removeprefix("torch."))
        addresses = [0 if p is None else p.data_ptr() for p in pointers]
        packed = launch.ARGUMENTS.pack(*addresses, *one.sizes, kind)
        machine = Machine(
            ptx, self.memory, [np.frombuffer(packed, np.uint8).copy()], {}, threads=one.variant.threads,
            shared=one.variant.shared(one.form), early=self.early, seed=self.seed,
        )  # fmt: skip
        machine.run(one.programs, one.variant.splits)
        return (device,)

    def product(self, x, codes, metadata, scale, bias=None, *, variant):
        """`sparse_linear.host.linear_sparse_int4` by a variant of this kernel."""
        for one in (x, codes, metadata, scale, bias):
            if one is not None:
                self.memory.regions[one.data_ptr()] = _bytes(one.data_ptr(), one.nbytes)
        made = []

        def allocate(call, name, shape, dtype):
            size = int(np.prod(shape)) * dtype.itemsize
            made.append(torch.empty(size + 2 * GUARD, dtype=torch.uint8).fill_(POISON))
            part = made[-1][GUARD : GUARD + size]
            self.memory.regions[part.data_ptr()] = _bytes(part.data_ptr(), size)
            call.tensors[name], call.buffers[name] = part.view(dtype).view(shape), (tuple(shape), dtype, ())

        group = 4 * codes.shape[1] // scale.shape[1]
        with (
            mock.patch.object(host, "is_served", return_value=True),
            mock.patch.object(host, "is_loadable", return_value=True),
            mock.patch.object(
                launch.SparseSkinnyLaunch,
                "run",
                lambda one, pointers, device: self.run(one, pointers, device),
            ),
            mock.patch.object(Call, "allocate", allocate),
            mock.patch.object(host, "choose", return_value=variant),
        ):
            y = sparse_linear.linear_sparse_int4(x, codes, metadata, scale, bias, group)
        (whole,) = made
        if not bool((whole[:GUARD] == POISON).all() and (whole[-GUARD:] == POISON).all()):
            raise ValueError("the kernel wrote outside of its output")
        return y
