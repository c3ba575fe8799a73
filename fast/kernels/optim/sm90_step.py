"""A step of the default states in CUDA C++ for Hopper: what is taken, compiled and launched.

It reads the tables of `host` and writes the same bits as `kernel.step_kernel`, which steps what this does not take, and states
in 8 bits, where it is as quick (`QUICKER`). There a block of 128 is half a warp and elements go one by one through instructions
of whole registers; here half as many instructions do (`reports/LOG.md`), and each warp reads ahead on its own.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from fast.kernels.optim.records import Kind
from fast.launch import cuda
from fast.launch.cuda import CudaLaunch, Kernel, is_served
from reference.formats.encode import MASK, ROUNDS, WEYL
from reference.optim.states import STATES

#: Elements of a lane, and the sizes of blocks that a warp has whole.
EACH = 16
BLOCKS = (32, 64, 128, 256, 512)
#: The states that it has, and the bits of their codes.
BITS = {"4bit": 4, "8bit": 8}
#: Pointers of a launch, and how its numbers lie: the keys of each round of Philox.
POINTERS = ("tiles", "tensors", "numbers")
NUMBERS = f"{2 * ROUNDS}I2I"


class Problem(NamedTuple):
    """What a step does: bits of codes, their block, whether its decay is Adam's, whether parameters are rounded stochastically,
    bits of the errors beside them."""

    bits: int
    block: int
    adam: bool
    rounds: bool
    master: int


class Variant(NamedTuple):
    """warps: of a program. turns: of a warp, one after the other. resident: programs of a multiprocessor. stages: turns
    of which a warp reads ahead, less one."""

    warps: int
    turns: int
    resident: int
    stages: int = 3

    @property
    def cluster(self) -> int:
        """Programs of a cluster."""
        return 1

    @property
    def threads(self) -> int:
        """Threads of a program."""
        return 32 * self.warps


#: By bits of codes.
VARIANTS = {4: Variant(1, 8, 24), 8: Variant(1, 16, 20, 2)}
#: Bits of codes that it is known to step faster than Triton's kernel does (reports/LOG.md).
QUICKER = {4}


def _defines(variant: Variant, problem: Problem) -> dict[str, int]:
    return {
        "BITS": problem.bits, "BLOCK": problem.block, "ADAM": int(problem.adam), "ROUNDS": int(problem.rounds),
        "MASTER": problem.master, "WARPS": variant.warps, "TURNS": variant.turns, "RESIDENT": variant.resident,
        "STAGES": variant.stages,
    }  # fmt: skip


KERNEL = Kernel(
    "sm90_step", Path(__file__).parent, _defines, shared=(), instead="Triton's kernel steps", fails_whole=True
)


def problem_of(kind: Kind) -> Problem | None:
    """Of what a step is compiled for; None where Triton's kernel steps it: other states than the default ones, dtypes but
    bfloat16, rows that are no multiples of blocks, addresses that are none of 16 bytes, numbers with rare exponents."""
    plain = kind.kind in ("adam", "adamw") and kind.p == kind.g == torch.bfloat16
    if not (plain and kind.aligned and not kind.ragged and kind.fast and kind.size in BLOCKS):
        return None
    for name, bits in BITS.items():
        states = STATES[name].with_block(kind.size)
        if (kind.first, kind.second) == (states.first, states.second):
            return Problem(bits, kind.size, kind.kind == "adam", kind.rounds, kind.master)
    return None


def taken(kind: Kind, tensor: torch.Tensor) -> Problem | None:
    """The problem of a step on a tensor's device, where this kernel takes it, is the faster one, compiles and loads there."""
    problem = problem_of(kind) if is_served(tensor) else None
    if problem is None or problem.bits not in QUICKER:
        return None
    device = tensor.get_device()
    return problem if cuda.is_loadable(KERNEL, VARIANTS[problem.bits], problem, device) else None


def blocks_of(problem: Problem, variant: Variant | None = None) -> int:
    """Blocks of a program."""
    variant = variant or VARIANTS[problem.bits]
    return variant.threads * variant.turns * EACH // problem.block


def stage_of(problem: Problem) -> int:
    """Bytes of a turn of a warp in shared memory: parameters and gradients, codes, errors, scales."""
    return 32 * EACH * (32 + 2 * problem.bits + problem.master) // 8 + 256


def launch(
    problem: Problem,
    tiles: torch.Tensor,
    tensors: torch.Tensor,
    numbers: torch.Tensor,
    seed: int,
    variant: Variant | None = None,
) -> None:
    """Step parameters by the tables of `host.Tables`, whose tiles have `blocks_of` blocks and whose numbers are written.
    variant: for measurements."""
    one = _launch(problem, variant or VARIANTS[problem.bits], len(tiles), seed)
    one.run((tiles, tensors, numbers), numbers.get_device())


@lru_cache(maxsize=256)
def _launch(problem: Problem, variant: Variant, programs: int, seed: int) -> CudaLaunch:
    shared = variant.warps * variant.stages * stage_of(problem)
    numbers = (*keys_of(seed), 4, 256)
    return CudaLaunch(KERNEL, variant, problem, POINTERS, programs, shared, (NUMBERS, numbers))


def keys_of(seed: int) -> tuple[int, ...]:
    """The keys of each round of Philox under a seed: all first ones, then all second ones."""
    halves = (seed & MASK, seed >> 32 & MASK)
    return tuple(
        half + step * at & MASK for half, step in zip(halves, WEYL, strict=True) for at in range(ROUNDS)
    )


__all__ = [
    "BLOCKS",
    "KERNEL",
    "VARIANTS",
    "Problem",
    "Variant",
    "blocks_of",
    "keys_of",
    "launch",
    "problem_of",
    "taken",
]
