"""`fast.kernels.sm90_s8_gemm.host` on CPU tensors: its launches run in the emulator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch

from fast.kernels.sm90_s8_gemm import host
from fast.kernels.sm90_s8_gemm.variants import THREADS, Variant, sources
from tests.emulator.device.machine import Machine
from tests.emulator.device.stand_in import MAP, StandIn, described


class DenseStandIn(StandIn):
    """A device for `sm90_s8_gemm`."""

    def launches(self, variant: Variant, element: str, name: str, device: int) -> Any:  # type: ignore[override]
        """As `host._launch`."""
        ptx = self.compiled(*sources(variant, element, name))

        def launch(programs: int, stream: Any, *values: Any) -> None:
            packed = host.ARGUMENTS.pack(*values)
            arguments = [
                np.frombuffer(part, np.uint8).copy() for part in (packed[: host.MAPS], packed[host.MAPS :])
            ]
            count = 2 + variant.stored
            found = {(0, at): described(packed[at : at + MAP]) for at in range(0, count * MAP, MAP)}
            machine = Machine(
                ptx, self.memory, arguments, found, threads=THREADS, shared=variant.shared, early=self.early,
                seed=self.seed,
            )  # fmt: skip
            machine.run(programs, variant.pair)

        return launch, self.at_once

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Take the place of the GPU."""
        replaced = {
            "_launch": self.launches, "tensor_map": self.tensor_map, "current_device": lambda: -1,
            "current_stream": lambda index: 0, "allocator": lambda device: self.empty,
        }  # fmt: skip
        with mock.patch.multiple(host, **replaced):
            yield

    def multiplied(self, variant: Variant, element: str, dtype: torch.dtype, *operands: Any) -> torch.Tensor:
        """The product of codes by a variant; operands: those of `host.Product`."""
        for one in operands:
            if one is not None:
                self.add(one)
        with self.installed():
            made: torch.Tensor | None = host.Product(variant, element, dtype, operands)(*operands)
        assert made is not None
        self.check_guards()
        return made


__all__ = ["DenseStandIn"]
