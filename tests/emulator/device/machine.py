"""Runs the clusters of a kernel, thread by thread, in an order drawn by a seed: barriers, copies and tensor cores as a GPU may
do them.

What the hardware may do at any time is done at the worst: products of the tensor core read shared memory when somebody waits
for them; copies arrive at once (`early`) or when no thread can go on. So a stage that is handed back or read too soon shows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache
from itertools import count
from typing import Any

import numpy as np

from tests.emulator.device.memory import BASE, Memory, Shared
from tests.emulator.device.opcodes import Operands, compiled
from tests.emulator.device.program import parameters_of, parsed
from tests.emulator.device.shared_opcodes import meet, special
from tests.emulator.device.translated import runs
from tests.emulator.device.warp_opcodes import of_warp

#: Slow warps go on in one of so many turns.
LATE = 6


class Thread:
    """Registers, the next instruction, and who it is."""

    def __init__(self, cta: Cta, index: int, registers: int) -> None:
        self.cta, self.tid_x, self.registers = cta, index, [None] * registers
        self.ctaid_x, self.nctaid_x, self.cluster_ctarank = cta.index, cta.cluster.programs, cta.rank
        self.pc, self.done = 0, False
        self.arrived: Any = None  # at which barrier, until it opens


class Cta:
    """A program: its shared memory and those of its threads that meet somewhere."""

    def __init__(self, cluster: Cluster, index: int, rank: int, shared: int) -> None:
        self.cluster, self.index, self.rank = cluster, index, rank
        self.shared = Shared(shared)
        self.meetings: dict[Any, list[Thread]] = {}
        # Products of each warpgroup: groups of products, the last not committed yet.
        self.products: dict[int, list[list[Callable[[], None]]]] = {}
        self.threads: list[Thread] = []


class Cluster:
    """The programs of a cluster, copies on their way, and arrivals at the cluster's barrier."""

    def __init__(self, machine: Machine, first: int, size: int) -> None:
        self.machine, self.programs = machine, machine.programs
        self.copies: list[Callable[[], None]] = []
        self.arrivals, self.generation = 0, 0
        self.ctas = [Cta(self, first + rank, rank, machine.shared) for rank in range(size)]
        for cta in self.ctas:
            cta.threads = [Thread(cta, i, machine.registers) for i in range(machine.threads)]

    def copy(self, make: Callable[[], None]) -> None:
        """Begin a copy."""
        if self.machine.early:
            make()
        else:
            self.copies.append(make)


@lru_cache(maxsize=8)
def code_of(
    ptx: str, symbols: tuple[tuple[str, int], ...], step_of: Callable[..., Any]
) -> tuple[list[str], list[Callable[[Thread], Any]], int]:
    """A kernel's instructions as text and as what its threads do, and the number of registers.

    Kept, because kernels run again with other inputs; step_of: of an instruction.
    """
    program = parsed(ptx)
    operands = Operands(program.labels, dict(symbols))
    listing = [f"{one.opcode} {one.operands}" for one in program.instructions]
    steps = [step_of(one, operands, at) for at, one in enumerate(program.instructions)]
    code = runs(program.instructions, steps, operands)
    return listing, code, len(operands.numbers)


class Machine:
    """A kernel with its arguments. arguments: bytes of each parameter; maps: tensor maps by their address in the parameters."""

    def __init__(
        self, ptx: str, memory: Memory, arguments: list[np.ndarray], maps: dict[tuple[int, int], Any], *, threads: int,
        shared: int, early: bool, seed: int = 0,
    ) -> None:  # fmt: skip
        self.memory, self.threads, self.shared, self.early = memory, threads, shared, early
        self.random, self.programs = random.Random(seed), 0
        self.front: Callable[[], None] | None = None
        names = parameters_of(ptx)
        addresses = [memory.give(data) for data in arguments]
        self.maps = {addresses[argument] + offset: one for (argument, offset), one in maps.items()}
        symbols = (*zip(names, addresses, strict=True), ("memory", BASE))
        self.listing, self.code, self.registers = code_of(ptx, symbols, type(self)._step)

    @staticmethod
    def _step(one: Any, operands: Operands, at: int) -> Callable[[Thread], Any]:
        step = (
            of_warp(one.opcode, one.operands, operands, at, meet)
            or compiled(one.opcode, one.operands, operands)
            or special(one.opcode, one.operands, operands, at)
        )
        if step is None:
            raise NotImplementedError(f"PTX instruction {one.opcode} {one.operands}")
        if one.guard is None:
            return step
        place, wanted = operands.at(one.guard.lstrip("!")), not one.guard.startswith("!")
        return lambda th: step(th) if th.registers[place] == wanted else None

    def advance(self, thread: Thread) -> int:
        """Run a thread until it waits; the number of runs and instructions."""
        code, done = self.code, 0
        while not thread.done:
            result = code[thread.pc](thread)
            if result is None:
                thread.pc += 1
            elif result == "waits":
                break
            else:
                thread.pc = result
            done += 1
        return done

    def _slow(self, threads: list[Thread]) -> set[Thread]:
        """A quarter of the warps, which clusters that run at once are not to count on."""
        warps = sorted({(one.cta.index, one.tid_x // 32) for one in threads})
        drawn = set(self.random.sample(warps, len(warps) // 4))
        return {one for one in threads if (one.cta.index, one.tid_x // 32) in drawn}

    def run(self, programs: int, cluster: int, at_once: int = 1) -> None:
        """All clusters, so many at once, the others after them. RuntimeError where no thread can go on."""
        self.programs = programs
        with np.errstate(over="ignore", invalid="ignore"):
            self._run(programs, cluster, at_once)
        self.wait_for_front()

    def wait_for_front(self) -> None:
        """Do the launch in front, if that is still to be done."""
        front, self.front = self.front, None
        if front is not None:
            front()

    def _run(self, programs: int, cluster: int, at_once: int) -> None:
        for first in range(0, programs, cluster * at_once):
            last = min(programs, first + cluster * at_once)
            self._finish([Cluster(self, at, cluster) for at in range(first, last, cluster)])

    def _finish(self, clusters: list[Cluster]) -> None:
        threads = [thread for one in clusters for cta in one.ctas for thread in cta.threads]
        slow = self._slow(threads) if len(clusters) > 1 else set()
        for turn in count():
            if not threads:
                break
            self.random.shuffle(threads)
            late = slow if turn % LATE else set()
            moved = sum(self.advance(thread) for thread in threads if thread not in late)
            threads = [thread for thread in threads if not thread.done]
            if not moved and threads and not late:
                copies = [one.copies for one in clusters if one.copies]
                if not copies:
                    at = sorted({self.listing[thread.pc] for thread in threads})
                    raise RuntimeError(f"no thread can go on: {at}")
                some = self.random.choice(copies)
                some.pop(self.random.randrange(len(some)))()
        if any(one.copies for one in clusters):
            raise RuntimeError("programs ended before their copies")


__all__ = ["Cluster", "Cta", "Machine", "Thread"]
