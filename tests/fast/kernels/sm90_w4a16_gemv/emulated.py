"""`sm90_w4a16_gemv` on CPU tensors: its launches run in the emulator; outputs are poisoned and lie between guards."""

from __future__ import annotations

from unittest import mock

import numpy as np
import torch

from fast.kernels.sm90_w4a16_gemv import host, launch
from fast.kernels.sm90_w4a16_gemv.variants import STEP, sources
from tests.emulator.device.machine import Machine
from tests.emulator.device.memory import POISON, Memory
from tests.emulator.device.stand_in import GUARD, _bytes, compiled
from tests.emulator.faults import unchanged


class Device:
    """Memory of the tensors that it was given, and of an output. change: of the source with what it includes, to plant
    faults."""

    def __init__(self, *, early, seed=0, change=unchanged):
        self.memory, self.early, self.seed, self.change = Memory(), early, seed, change

    def launcher(self, variant, form, sizes, bias_kind):
        """As `SkinnyLaunch.launch`."""
        ptx = compiled(*sources(variant, form), self.change)
        programs, splits = variant.programs(sizes[1]), getattr(variant, "splits", 1)

        def run(stream, addresses):
            packed = launch.ARGUMENTS.pack(*[one or 0 for one in addresses], *sizes, bias_kind)
            machine = Machine(
                ptx, self.memory, [np.frombuffer(packed, np.uint8).copy()], {}, threads=variant.threads,
                shared=variant.shared(form, sizes[0], sizes[2] // STEP), early=self.early, seed=self.seed,
            )  # fmt: skip
            machine.run(programs, splits)

        return run

    def product(self, x, w, bias=None, *, variant, **options):
        """`host.sm90_w4a16_gemv` by a variant."""
        for one in (x, w.words, w.scale, w.zero, bias, options.get("x_scale")):
            if one is not None and one.numel():
                self.memory.regions[one.data_ptr()] = _bytes(one.data_ptr(), one.nbytes)
        made = []

        def allocate(call, name, shape, dtype):
            size = int(np.prod(shape)) * dtype.itemsize
            made.append(torch.empty(size + 2 * GUARD, dtype=torch.uint8).fill_(POISON))
            part = made[-1][GUARD : GUARD + size]
            self.memory.regions[part.data_ptr()] = _bytes(part.data_ptr(), size)
            call.tensors[name], call.buffers[name] = part.view(dtype).view(shape), (tuple(shape), dtype, ())

        def run(one, pointers, device):
            kind = (
                0
                if pointers[5] is None
                else launch.KINDS.index(str(pointers[5].dtype).removeprefix("torch."))
            )
            self.launcher(one.variant, one.form, one.sizes, kind)(
                0, [p if p is None else p.data_ptr() for p in pointers]
            )
            return (device,)

        with (
            mock.patch.object(host, "is_taken", return_value=True),
            mock.patch.object(host, "is_loadable", return_value=True),
            mock.patch.object(launch.SkinnyLaunch, "run", run),
            mock.patch.object(host.Call, "allocate", allocate),
        ):
            y = host.sm90_w4a16_gemv(x, w, bias, variant=variant, **options)
        (whole,) = made
        if not bool((whole[:GUARD] == POISON).all() and (whole[-GUARD:] == POISON).all()):
            raise ValueError("the kernel wrote outside of its output")
        return y
