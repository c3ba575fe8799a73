"""CPU tensors that pass for a GPU's: what the functions of `fast` would launch is recorded, and nothing runs.

Triton's JIT and the C function under its launcher are replaced; everything between a public function and those two is real.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction

from fast import dispatch
from fast.kernels import exact_inputs as exact_inputs_host
from fast.kernels.triton_gemv import select
from fast.kernels.triton_scaled_mm import host as scaled_mm_host
from fast.kernels.triton_small_m import host as linear_small_host
from fast.kernels.triton_small_m import pair as linear_small_pair
from fast.launch import launcher as launching
from fast.launch.launcher import Call

# Shared by JIT and C function: how Triton names what it compiled.
FUNCTION, METADATA = 1234, (4, 1, 0)


class Flat:
    """The launcher of Triton 3.6: all arguments of a kernel after those of the launch."""

    global_scratch_size = profile_scratch_size = 0

    def __init__(self, record: Any) -> None:
        self.launch = lambda *given: record(given[:5], given[13:])

    def __call__(self, x: int, y: int, z: int, stream: Any, function: int, *rest: Any) -> None:
        self.launch(x, y, z, stream, function, False, False, None, None, *rest)


class Nested(Flat):
    """The launcher of Triton 3.7: the arguments of a kernel as one tuple."""

    def __init__(self, record: Any) -> None:
        self.launch = lambda *given: record(given[:5], given[-1])

    def __call__(self, x: int, y: int, z: int, stream: Any, function: int, *rest: Any) -> None:
        self.launch(x, y, z, stream, function, False, False, *rest[:4], None, None, [], b"", rest[4:])


class Opaque:
    """A launcher of which nothing is known but how it is called."""

    def __init__(self, record: Any) -> None:
        self.record = record

    def __call__(self, x: int, y: int, z: int, stream: Any, function: int, *rest: Any) -> None:
        self.record((x, y, z, stream, function), rest[4:])


class Recorded:
    """Launches in order: arguments of the kernels, as the JIT got them, and as the C function got them."""

    def __init__(self, monkeypatch: Any, launcher: Any) -> None:
        self.jit: list[tuple[Any, ...]] = []
        self.straight: list[tuple[Any, ...]] = []
        self.heads: list[tuple[Any, ...]] = []
        self.grids: list[tuple[int, ...]] = []
        self.device, self.entered = -1, []
        compiled = type("Compiled", (), {"function": FUNCTION, "packed_metadata": METADATA})
        compiled.run = launcher(lambda head, given: self.note(head, given))

        def run(kernel: Any, *given: Any, grid: Any, **_: Any) -> Any:
            self.jit.append(given)
            self.grids.append(grid)
            return compiled

        monkeypatch.setattr(JITFunction, "run", run)
        monkeypatch.setattr(launching, "current_device", lambda: self.device)
        monkeypatch.setattr(launching, "current_stream", lambda device: 7)
        monkeypatch.setattr(torch.cuda, "device", self.guard)
        monkeypatch.setattr(dispatch, "has_kernels", lambda x: True)
        monkeypatch.setattr(dispatch, "CALLS", {})
        # Launches that are kept would keep what passes for compiled here.
        for module, name in (
            (select, "_launch"), (select, "_pair_launch"), (select, "_w8a8_launch"), (scaled_mm_host, "_launches"),
            (linear_small_host, "_launch"), (linear_small_pair, "_launch"), (exact_inputs_host, "_launch"),
        ):  # fmt: skip
            monkeypatch.setattr(module, name, getattr(module, name).__wrapped__)

    def note(self, head: tuple[Any, ...], given: tuple[Any, ...]) -> None:
        """What the C function does here."""
        self.heads.append(head)
        self.straight.append(given)

    def guard(self, index: int) -> Any:
        """`torch.cuda.device`."""
        recorded = self

        class Guard:
            def __enter__(self) -> None:
                self.before, recorded.device = recorded.device, index
                recorded.entered.append(index)

            def __exit__(self, *_: Any) -> None:
                recorded.device = self.before

        return Guard()

    def refuse_repetitions(self, monkeypatch: Any) -> None:
        """No call that was remembered launches its kernels again from here on."""
        run = Call._run

        def refusing(call: Call, inputs: Any, sizes: Any) -> Any:
            call._launches = [(lambda *_: pytest.fail("repeated another call"), lambda addresses: None)]
            return run(call, inputs, sizes)

        monkeypatch.setattr(Call, "_run", refusing)

    def counts(self) -> tuple[int, int]:
        """Launches through the JIT, and straight ones."""
        return len(self.jit), len(self.straight)
