"""Instructions of memory, barriers, copies and tensor cores; see the PTX ISA. "waits" as a result: try again later.

`wgmma` of a warpgroup: products wait for `wait_group`, which does the oldest first; until then operands are looked at.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.emulator.device.memory import RANK, Barrier
from tests.emulator.device.opcodes import WIDTHS, Operands, Step, signed
from tests.emulator.device.tensor_core import dense_product, fragment_product, places, product, swizzled

LOW = (1 << RANK) - 1


def special(opcode: str, operands: tuple[str, ...], o: Operands, at: int) -> Step | None:
    """The function of an instruction, or None where it is not known. at: its number."""
    parts = opcode.split(".")
    if parts[0] in ("ld", "st"):
        return _access(parts, operands, o)
    if opcode.startswith("mbarrier"):
        return _mbarrier(opcode, operands, o)
    if opcode.startswith(("cp.async.bulk.tensor.2d.global", "cp.async.bulk.commit", "cp.async.bulk.wait")):
        return written(opcode, operands, o)
    if opcode.startswith("stmatrix"):
        return _store_matrices(opcode, operands, o, at)
    if opcode.startswith("cp.async.bulk"):
        return _copy(opcode, operands, o)
    if opcode.startswith("wgmma"):
        return of_warpgroup(opcode, operands, o, at, meet)
    if opcode.startswith("barrier.cluster"):
        return _cluster_arrive if "arrive" in opcode else _cluster_wait
    if opcode == "mapa.shared::cluster.u32":
        target, address, rank = o.at(operands[0]), o.reader(operands[1]), o.reader(operands[2])

        def mapa(th: Any) -> None:
            th.registers[target] = address(th) & LOW | rank(th) << RANK | 1 << 31

        return mapa
    if opcode in ("shfl.sync.idx.b32", "shfl.sync.bfly.b32"):
        return _shuffle(operands, o, at, ".bfly." in opcode)
    if opcode == "bar.arrive":
        return _bar_arrive(operands, o)
    if opcode == "bar.sync":
        return _bar(operands, o, at)
    if opcode == "bar.warp.sync":
        return lambda th: meet(th, ("warp", at, th.tid_x // 32), 32, lambda group: None)
    if opcode.startswith(("setmaxnreg", "fence.mbarrier_init", "fence.proxy.async")):
        return lambda th: None
    if opcode == "ret":
        return _ret
    return None


def _ret(th: Any) -> int:
    if any(getattr(th, "written", ())):
        raise ValueError("a thread ends while what it writes is read")
    th.done = True
    return int(th.pc)


def meet(th: Any, where: Any, count: int, together: Callable[[list[Any]], None]) -> str | None:
    """Wait for `count` threads of the program; the last one does what they do together."""
    if th.arrived is not None:
        opened, th.arrived = th.arrived[0], th.arrived if not th.arrived[0] else None
        return None if opened else "waits"
    meeting = th.cta.meetings.setdefault(where, [])
    th.arrived = [False]
    meeting.append(th)
    if len(meeting) == count:
        del th.cta.meetings[where]
        together(sorted(meeting, key=lambda one: one.tid_x))
        for one in meeting:
            one.arrived[0] = True
        th.arrived = None
        return None
    return "waits"


def _bar(operands: tuple[str, ...], o: Operands, at: int) -> Step:
    which, count = o.reader(operands[0]), o.reader(operands[1]) if len(operands) > 1 else None
    return lambda th: meet(
        th, ("bar", which(th)), count(th) if count else len(th.cta.threads), lambda group: None
    )


class _Passed:
    """A thread that arrived and went on."""

    def __init__(self, th: Any) -> None:
        self.cta, self.tid_x, self.arrived = th.cta, th.tid_x, None


def _bar_arrive(operands: tuple[str, ...], o: Operands) -> Step:
    which, count = o.reader(operands[0]), o.reader(operands[1])

    def step(th: Any) -> None:
        meet(_Passed(th), ("bar", which(th)), count(th), lambda group: None)

    return step


def _shuffle(operands: tuple[str, ...], o: Operands, at: int, butterfly: bool) -> Step:
    names = [o.at(name) for name in operands[0].split("|")]
    value, lane = o.reader(operands[1]), o.reader(operands[2])

    def step(th: Any) -> str | None:
        def together(group: list[Any]) -> None:
            given = [value(one) for one in group]
            for place, one in enumerate(group):
                one.registers[names[0]] = given[place ^ lane(one) if butterfly else lane(one) & 31]
                for rest in names[1:]:
                    one.registers[rest] = True

        return meet(th, ("shuffle", at, th.tid_x // 32), 32, together)

    return step


def _cluster_arrive(th: Any) -> None:
    cluster = th.cta.cluster
    th.generation = cluster.generation
    cluster.arrivals += 1
    if cluster.arrivals == sum(len(cta.threads) for cta in cluster.ctas):
        cluster.arrivals, cluster.generation = 0, cluster.generation + 1


def _cluster_wait(th: Any) -> str | None:
    return None if th.cta.cluster.generation > th.generation else "waits"


def _owner(th: Any, address: int) -> tuple[Any, int]:
    """The program whose shared memory an address names, and the address in it."""
    if address >> 31:
        return th.cta.cluster.ctas[address >> RANK & 0x7F], address & LOW
    return th.cta, address


def _access(parts: list[str], operands: tuple[str, ...], o: Operands) -> Step:
    """Loads and stores of 8 to 64 bits and of vectors; a load that acquires waits until it finds something but 0.

    Registers are wider than bytes: a signed one is extended to 32 bits.
    """
    count = next((int(part[1:]) for part in parts if part in ("v2", "v4")), 1)
    layout = struct.Struct("<" + count * FORMATS[1 if parts[-1] == "s8" else WIDTHS[parts[-1]]])
    text, registers = (operands[1], operands[0]) if parts[0] == "ld" else (operands[0], operands[1])
    view = _viewed(parts[1], o.address(text), layout.size)
    if parts[0] == "ld":
        return _load(view, [o.at(n) for n in o.list(registers)], layout, "acquire" in parts)
    reads, mask = [o.reader(n) for n in o.list(registers)], (1 << WIDTHS[parts[-1]]) - 1

    def store(th: Any) -> None:
        layout.pack_into(view(th), 0, *(read(th) & mask for read in reads))

    return store


#: Layouts of numbers by their bits; 1: of those of 8 bits that have a sign.
FORMATS = {1: "b", 8: "B", 16: "H", 32: "I", 64: "Q"}


def _viewed(where: str, address: Step, size: int) -> Step:
    """The bytes that an access names."""

    def shared(th: Any) -> Any:
        cta, place = _owner(th, address(th))
        return cta.shared.view(place, size)

    if where.startswith("shared"):
        return shared
    return lambda th: th.cta.cluster.machine.memory.view(address(th), size)


def _load(view: Step, names: list[int], layout: struct.Struct, acquires: bool) -> Step:
    def load(th: Any) -> str | None:
        data = view(th)
        if acquires and not data.any():
            return "waits"
        for place, value in zip(names, layout.unpack(data), strict=True):
            th.registers[place] = value & 0xFFFFFFFF if value < 0 else value
        return None

    return load


def _mbarrier(opcode: str, operands: tuple[str, ...], o: Operands) -> Step:
    if ".try_wait" in opcode:
        target, address, parity = o.at(operands[0]), o.address(operands[1]), o.reader(operands[2])

        def wait(th: Any) -> str | None:
            cta, place = _owner(th, address(th))
            if not cta.shared.barriers[place].passed(parity(th)):
                return "waits"
            th.registers[target] = True
            return None

        return wait
    if ".init" in opcode:
        address, number = o.address(operands[0]), o.reader(operands[1])

        def init(th: Any) -> None:
            cta, place = _owner(th, address(th))
            cta.shared.view(place, 8)
            cta.shared.barriers[place] = Barrier(number(th))

        return init
    address, size = o.address(operands[1]), o.reader(operands[2]) if "expect_tx" in opcode else lambda th: 0

    def arrive(th: Any) -> None:
        cta, place = _owner(th, address(th))
        cta.shared.barriers[place].change(1, size(th))

    return arrive


def _copy(opcode: str, operands: tuple[str, ...], o: Operands) -> Step:
    """Bulk copies, of bytes or of a box of a tensor map, to one program or several."""
    tensor = ".tensor.2d" in opcode
    to, bar = o.address(operands[0]), o.address(operands[2 if tensor else 3])
    many = o.reader(operands[3]) if "multicast" in opcode else None
    if tensor:
        base, _, coordinates = operands[1].strip("[]").partition(",")
        source, (x, y) = o.reader(base.strip()), [o.reader(part) for part in o.list(coordinates.strip())]
    else:
        source, length = o.address(operands[1]), o.reader(operands[2])

    def step(th: Any) -> None:
        cluster = th.cta.cluster
        if tensor:
            one = cluster.machine.maps[source(th)]
            data = one.read(signed(x(th), 32), signed(y(th), 32))
            width = one.box[1]
        else:
            data, width = _aligned(cluster.machine.memory.view(source(th), length(th)), source(th)), 0
        targets = [th.cta] if many is None else [c for c in cluster.ctas if many(th) >> c.rank & 1]
        for cta in targets:
            place, barrier = to(th) & LOW, cta.shared.barriers[bar(th) & LOW]
            cluster.copy(lambda c=cta, p=place, b=barrier: _arrives(c, p, b, data.reshape(-1).copy(), width))

    return step


def _aligned(data: Any, address: int) -> Any:
    if address % 16 or len(data) % 16:
        raise ValueError(f"a bulk copy of {len(data)} bytes from {address:#x} is not aligned")
    return data


def _arrives(cta: Any, place: int, barrier: Barrier, data: Any, width: int) -> None:
    """Bytes into shared memory, swizzled where the box has a width."""
    if place % (8 * width or 16):
        raise ValueError(f"a copy to {place:#x} does not begin at a repetition of its swizzle")
    cta.shared.view(place, len(data))
    at = place + np.arange(len(data))
    cta.shared.data[swizzled(at, width) if width else at] = data
    barrier.change(0, -len(data))


def _store_matrices(opcode: str, operands: tuple[str, ...], o: Operands, at: int) -> Step:
    """Matrices of 8 by 8: thread i has of matrix m, transposed, rows 2 (i % 4) and the next of column i / 4; threads 8 m to
    8 m + 7 say where rows are."""
    if opcode != "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16":
        raise NotImplementedError(opcode)
    address, reads = o.address(operands[0]), [o.reader(name) for name in o.list(operands[1])]

    def together(group: list[Any]) -> None:
        for lane, th in enumerate(group):
            for m, read in enumerate(reads):
                for half in range(2):
                    row = address(group[8 * m + 2 * (lane % 4) + half])
                    value = read(th) >> 16 * half & 0xFFFF
                    th.cta.shared.view(row, 16)[2 * (lane // 4) :][:2] = (value & 255, value >> 8)

    return lambda th: meet(th, ("stmatrix", at, th.tid_x // 32), 32, together)


Together = Callable[[list[Any]], None]


def of_warpgroup(opcode: str, operands: tuple[str, ...], o: Operands, at: int, meet: Any) -> Step:
    """The function of an instruction. meet: `shared_opcodes.meet`."""
    if ".mma_async" in opcode:
        dense = _multiply_fragments if operands[1].startswith("{") else _multiply_shared
        together: Together = (_multiply_sparse if ".sp." in opcode else dense)(opcode, operands, o)
    elif ".commit_group" in opcode:
        together = lambda group: _products(group).append([])  # noqa: E731
    elif ".wait_group" in opcode:
        last = int(operands[0])

        def together(group: list[Any]) -> None:
            waiting = _products(group)
            while len(waiting) > last + 1:
                for one in waiting.pop(0):
                    one()

    else:
        return lambda th: None
    return lambda th: meet(th, ("wgmma", at, th.tid_x // 128), 128, together)


def _products(group: list[Any]) -> list[list[Callable[[], None]]]:
    made: list[list[Callable[[], None]]] = group[0].cta.products.setdefault(group[0].tid_x // 128, [[]])
    return made


def _one(values: set[Any]) -> Any:
    """What all threads of a warpgroup have."""
    if len(values) != 1:
        raise ValueError("threads of a warpgroup disagree about the operands")
    return values.pop()


def _add(group: list[Any], names: list[int], made: np.ndarray, integer: bool, fresh: bool = False) -> None:
    """Sums (64, N) to the registers of the threads; fresh: which begin at zero."""
    given = made[places(len(names))]
    if fresh:
        old = np.zeros(given.shape, np.uint32)
    else:
        old = np.array([[th.registers[place] for place in names] for th in group], np.uint32)
    if integer:
        new = (old + given).astype(np.uint32)
    else:
        with np.errstate(over="ignore", invalid="ignore"):
            total = (old.view(np.float32) + given).astype(np.float32)
        new = np.where(np.isnan(total), np.uint32(0x7FFFFFFF), total.view(np.uint32))
    for th, own in zip(group, new.tolist(), strict=True):
        for place, value in zip(names, own, strict=True):
            th.registers[place] = value


def _multiply_sparse(opcode: str, operands: tuple[str, ...], o: Operands) -> Together:
    names = [o.at(name) for name in o.list(operands[0])]
    a, b, metadata = (o.reader(name) for name in operands[1:4])
    if operands[4:6] != ("0", "1") or set(operands[6:8]) - {"1"} or set(operands[8:]) - {"0"}:
        raise NotImplementedError(f"{opcode} with {operands[4:]}")

    def together(group: list[Any]) -> None:
        first, second = _one({(a(th), b(th)) for th in group})
        words = np.array([metadata(th) for th in group], np.int64)

        def multiply() -> None:
            # The tensor core may read them at any time until now.
            if not np.array_equal(words, [metadata(th) for th in group]):
                raise ValueError("metadata changed while a product reads it")
            made = product(group[0].cta.shared.data, opcode, first, second, words)
            _add(group, names, made, ".s32." in opcode)

        _products(group)[-1].append(multiply)

    return together


def _multiply_fragments(opcode: str, operands: tuple[str, ...], o: Operands) -> Together:
    names, fragment = ([o.at(name) for name in o.list(text)] for text in operands[:2])
    b = o.reader(operands[2])
    if operands[4:] != (("1", "1") if ".e4m3." in opcode else ("1", "1", "0")) or operands[3] not in (
        "0",
        "1",
    ):
        raise NotImplementedError(f"{opcode} with {operands[3:]}")
    fresh = operands[3] == "0"

    def together(group: list[Any]) -> None:
        second = _one({b(th) for th in group})
        words = np.array([[th.registers[place] for place in fragment] for th in group], np.int64)

        def multiply() -> None:
            # The tensor core may read them at any time until now.
            if not np.array_equal(words, [[th.registers[place] for place in fragment] for th in group]):
                raise ValueError("an operand changed while a product reads it")
            made = fragment_product(group[0].cta.shared.data, opcode, words, second)
            _add(group, names, made, False, fresh)

        _products(group)[-1].append(multiply)

    return together


def _multiply_shared(opcode: str, operands: tuple[str, ...], o: Operands) -> Together:
    """Elements of 8 bits: integers have no signs of the operands."""
    names, integer = [o.at(name) for name in o.list(operands[0])], ".s32." in opcode
    a, b = (o.reader(name) for name in operands[1:3])
    if operands[4:] != (() if integer else ("1", "1")) or operands[3] not in ("0", "1"):
        raise NotImplementedError(f"{opcode} with {operands[3:]}")
    fresh = operands[3] == "0"

    def together(group: list[Any]) -> None:
        first, second = _one({(a(th), b(th)) for th in group})
        shared = group[0].cta.shared.data
        _products(group)[-1].append(
            lambda: _add(group, names, dense_product(shared, opcode, first, second), integer, fresh)
        )

    return together


# Boxes that the copy engine writes from shared memory; it reads that as late as it may: when their thread waits for it.


def written(opcode: str, operands: tuple[str, ...], o: Operands) -> Step:
    """The function of an instruction of such boxes."""
    if ".commit_group" in opcode:
        return lambda th: _groups(th).append([])
    if ".wait_group" in opcode:
        left = int(operands[0])

        def wait(th: Any) -> None:
            while len(_groups(th)) > left + 1:
                for write in _groups(th).pop(0):
                    write()

        return wait
    base, _, coordinates = operands[0].strip("[]").partition(",")
    target, (x, y), source = (
        o.reader(base.strip()),
        [o.reader(one) for one in o.list(coordinates.strip())],
        o.address(operands[1]),
    )

    def begin(th: Any) -> None:
        one, place = th.cta.cluster.machine.maps[target(th)], source(th)
        rows, width = one.box
        if place % (8 * width):
            raise ValueError(f"a copy from {place:#x} does not begin at a repetition of its swizzle")
        at, corner = swizzled(place + np.arange(rows * width), width), (signed(x(th), 32), signed(y(th), 32))
        th.cta.shared.view(place, rows * width)
        _groups(th)[-1].append(lambda: one.write(*corner, th.cta.shared.data[at].reshape(rows, width)))

    return begin


def _groups(th: Any) -> list[list[Callable[[], None]]]:
    """Of a thread, the last one open."""
    if not hasattr(th, "written"):
        th.written = [[]]
    found: list[list[Callable[[], None]]] = th.written
    return found


__all__ = ["meet", "special"]
