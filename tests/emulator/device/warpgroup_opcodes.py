"""`wgmma` of a warpgroup: products wait for `wait_group`, which does the oldest first; until then operands are looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.emulator.device.opcodes import Operands, Step
from tests.emulator.device.tensor_core import dense_product, fragment_product, places, product

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


def _add(group: list[Any], names: list[int], made: np.ndarray, integer: bool) -> None:
    """Sums (64, N) to the registers of the threads."""
    old = np.array([[th.registers[place] for place in names] for th in group], np.uint32)
    given = made[places(len(names))]
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
    if operands[3:] != ("1", "1", "1", "0"):
        raise NotImplementedError(f"{opcode} with {operands[3:]}")

    def together(group: list[Any]) -> None:
        second = _one({b(th) for th in group})
        words = np.array([[th.registers[place] for place in fragment] for th in group], np.int64)

        def multiply() -> None:
            # The tensor core may read them at any time until now.
            if not np.array_equal(words, [[th.registers[place] for place in fragment] for th in group]):
                raise ValueError("an operand changed while a product reads it")
            _add(group, names, fragment_product(group[0].cta.shared.data, opcode, words, second), False)

        _products(group)[-1].append(multiply)

    return together


def _multiply_shared(opcode: str, operands: tuple[str, ...], o: Operands) -> Together:
    """Elements of 8 bits: integers have no signs of the operands."""
    names, integer = [o.at(name) for name in o.list(operands[0])], ".s32." in opcode
    a, b = (o.reader(name) for name in operands[1:3])
    if operands[3:] != (("1",) if integer else ("1", "1", "1")):
        raise NotImplementedError(f"{opcode} with {operands[3:]}")

    def together(group: list[Any]) -> None:
        first, second = _one({(a(th), b(th)) for th in group})
        shared = group[0].cta.shared.data
        _products(group)[-1].append(
            lambda: _add(group, names, dense_product(shared, opcode, first, second), integer)
        )

    return together


__all__ = ["of_warpgroup"]
