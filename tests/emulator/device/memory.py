"""Memory of a device: global regions, parameters, and shared memory of the programs of a cluster; barriers in it.

Addresses of shared memory are those of the cluster: a program's own begin at rank << 24, and below 1 << 24 they are a program's
own. Everything outside of what was given is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
RANK = 24
#: Where dynamic shared memory begins: not aligned to more than 16 bytes.
BASE = 0x410
POISON = 0xA5


@dataclass
class Memory:
    """Global regions by their first address."""

    regions: dict[int, Bytes] = field(default_factory=dict)
    next: int = 1 << 40

    def give(self, data: Bytes) -> int:
        """The address of an array of bytes, which stays the array's memory."""
        address = self.next
        self.regions[address] = data
        self.next += (len(data) + 0xFFFF) // 0x10000 * 0x10000 + 0x10000
        return address

    def view(self, address: int, size: int) -> Bytes:
        """Bytes at an address, aligned to their number up to 16."""
        if address % min(size, 16):
            raise ValueError(f"{size} bytes at {address:#x} are not aligned")
        for first, data in self.regions.items():
            if first <= address and address + size <= first + len(data):
                return data[address - first : address - first + size]
        raise ValueError(f"{size} bytes at {address:#x} are outside of what was given")


@dataclass
class Barrier:
    """An mbarrier: arrivals that are missing, bytes that are, and the parity of its phase."""

    count: int
    missing: int = 0
    bytes: int = 0
    parity: int = 0

    def __post_init__(self) -> None:
        self.missing = self.count

    def change(self, arrivals: int, size: int) -> None:
        """Note arrivals, bytes that are to come (positive) or came (negative)."""
        self.missing -= arrivals
        self.bytes += size
        if self.missing < 0:
            raise ValueError("more arrivals at a barrier than it counts")
        if self.missing == 0 and self.bytes == 0:
            self.missing, self.parity = self.count, self.parity ^ 1

    def passed(self, parity: int) -> bool:
        """Whether the phase of this parity is complete."""
        return self.parity != parity


class Shared:
    """Shared memory of one program."""

    def __init__(self, size: int) -> None:
        self.data = np.full(BASE + size, POISON, np.uint8)
        self.barriers: dict[int, Barrier] = {}

    def view(self, address: int, size: int) -> Bytes:
        """Bytes at an address of its own."""
        if address % min(size, 16) or not BASE <= address <= len(self.data) - size:
            raise ValueError(f"{size} bytes at {address:#x} are not in shared memory or not aligned")
        return self.data[address : address + size]


@dataclass(frozen=True)
class TensorMap:
    """A matrix (rows, length) of bytes as the copy engine reads boxes (rows, bytes) of it."""

    data: Bytes
    box: tuple[int, int]

    def read(self, x: int, y: int) -> Bytes:
        """The box at byte x of row y, zeros outside of the matrix."""
        made = np.zeros(self.box, np.uint8)
        rows, length = self.data.shape
        part = self.data[y : y + self.box[0], x : x + self.box[1]] if y < rows and x < length else None
        if part is not None:
            made[: part.shape[0], : part.shape[1]] = part
        return made

    def write(self, x: int, y: int, box: Bytes) -> None:
        """A box (rows, bytes) at byte x of row y, what is within the matrix."""
        rows, length = self.data.shape
        if 0 <= y < rows and 0 <= x < length:
            part = self.data[y : y + self.box[0], x : x + self.box[1]]
            part[:] = box[: part.shape[0], : part.shape[1]]


__all__ = ["BASE", "RANK", "Barrier", "Memory", "Shared", "TensorMap"]
