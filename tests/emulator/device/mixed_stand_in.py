"""`fast.kernels.sm90_w4a16_gemm.host` on CPU tensors: its launches run in the emulator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch

from fast.kernels.linear_small.layout import ArrangedWeight
from fast.kernels.sm90_w4a16_gemm import host
from fast.kernels.sm90_w4a16_gemm.experts import ExpertsProduct
from fast.kernels.sm90_w4a16_gemm.variants import Variant, Weight, sources
from tests.emulator.device.machine import Machine
from tests.emulator.device.stand_in import MAP, StandIn, described


class MixedStandIn(StandIn):
    """A device for `sm90_w4a16_gemm`, whose clusters run at the same time, as many as at once."""

    def launches(self, variant: Variant, weight: Weight, name: str, device: int) -> Any:  # type: ignore[override]
        """As `host.launch_of`."""
        ptx = self.compiled(*sources(variant, weight, name, name))

        def launch(programs: int, stream: Any, *values: Any) -> None:
            packed = host.arguments_of(variant).pack(*values)
            arguments = [
                np.frombuffer(part, np.uint8).copy() for part in (packed[: host.MAPS], packed[host.MAPS :])
            ]
            found = {(0, at): described(packed[at : at + MAP]) for at in range(0, host.MAPS, MAP)}
            machine = Machine(
                ptx, self.memory, arguments, found, threads=variant.threads,
                shared=variant.shared(weight), early=self.early, seed=self.seed,
            )  # fmt: skip
            machine.run(programs, variant.cluster, self.at_once)

        return launch, self.at_once

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Take the place of the GPU."""
        replaced = {
            "launch_of": self.launches, "tensor_map": self.tensor_map, "current_device": lambda: -1,
            "current_stream": lambda index: 0, "allocator": lambda device: self.empty,
        }  # fmt: skip
        with mock.patch.multiple(host, **replaced):
            yield

    def of_experts(
        self, x: torch.Tensor, w: ArrangedWeight, ends: torch.Tensor, variant: Variant
    ) -> torch.Tensor:
        """The product of rows sorted by expert by a variant."""
        operands = x, w.words, w.scale, w.zero, ends
        for one in operands:
            if one is not None:
                self.add(one)
        with self.installed():
            made = ExpertsProduct(x, w, variant)(*operands)
        assert made is not None
        self.check_guards()
        return made

    def multiplied(
        self,
        x: torch.Tensor,
        w: ArrangedWeight,
        bias: Any,
        variant: Variant,
        schedule: Any = None,
        x_scale: Any = None,
    ) -> torch.Tensor:
        """The product by a variant, by default as `schedule.scheduled` has it."""
        operands = x, w.words, w.scale, w.zero, bias, x_scale
        for one in operands:
            if one is not None:
                self.add(one)
        with self.installed():
            made = host.Product(x, w, bias, variant, schedule, x_scale)(*operands)
        assert made is not None
        self.check_guards()
        return made


__all__ = ["MixedStandIn"]
