"""Tables of addresses and counts of the parameters of a step, and its two launches.

Tables are made when a parameter's tensors have moved (gradients are often allocated anew) and copied from pinned memory, so
that nothing waits; as long as none has moved they stay. While a CUDA graph is captured, what it copies from is never changed
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import triton.language as tl

from fast.kernels.optim import sm90_step
from fast.kernels.optim.kernel import COLUMNS, NUMBERS, numbers_kernel, step_kernel
from fast.kernels.optim.records import Kind, Rule, Slot
from fast.kernels.scheme.constants import SchemeConstants, constants_of, element_of
from fast.launch.launcher import ALIGNMENT, UNFUSED, interpreted
from reference.optim.states import State
from reference.quantize.scales import floor_value

TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


class Plan(NamedTuple):
    """How a step is launched: elements of a tile, warps, tiles that follow each other in a program, and how many of them are in
    flight, the one that is computed included."""

    elements: int
    warps: int
    repeat: int
    stages: int


#: By bits of the first moment, measured on an H200 (reports/LOG.md); float32 states were not.
PLANS = {8: Plan(1024, 2, 8, 3), 4: Plan(512, 1, 16, 2), 32: Plan(2048, 4, 4, 1)}
#: Parameters of a program that computes their numbers.
ROWS = 32


class Tables:
    """What a launch reads: rows of parameters, tiles, numbers; on one device. problem: of the kernel in CUDA C++, where that
    one steps them."""

    def __init__(self, device: torch.device, problem: sm90_step.Problem | None = None) -> None:
        self.device, self.problem = device, problem
        self.rows: np.ndarray = np.zeros((0, len(COLUMNS)), np.int64)
        self.tensors = self.tiles = self.numbers = torch.zeros(0, device=device)
        #: Memory that captured graphs copy from.
        self.held: list[torch.Tensor] = []

    def put(self, rows: np.ndarray, blocks: int) -> None:
        """Make the tables those of these rows; blocks: of a program."""
        if self.rows.shape == rows.shape and np.array_equal(self.rows, rows):
            return
        column = COLUMNS.index("blocks")
        counts = rows[:, column]
        if self.rows.shape != rows.shape or not np.array_equal(self.rows[:, column], counts):
            self.tiles = self._on_device(tiles_of(counts, blocks))
            self.numbers = torch.zeros((len(rows), int(NUMBERS)), dtype=torch.float32, device=self.device)
            self.tensors = torch.zeros(rows.shape, dtype=torch.int64, device=self.device)
        self.tensors.copy_(self._pinned(rows), non_blocking=True)
        self.rows = rows

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return self._pinned(array).to(self.device, non_blocking=True)

    def _pinned(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type != "cuda":
            return tensor
        tensor = tensor.pin_memory()
        if torch.cuda.is_current_stream_capturing():
            self.held.append(tensor)
        return tensor


def tiles_of(counts: np.ndarray, blocks: int) -> np.ndarray:
    """(row, first block) of every tile, int32 (tiles, 2), of parameters with so many blocks."""
    number = -(-counts // blocks)
    row = np.repeat(np.arange(len(counts)), number)
    first = (np.arange(number.sum()) - np.repeat(np.cumsum(number) - number, number)) * blocks
    return np.stack([row, first], axis=1).astype(np.int32)


def row_of(slot: Slot, rule: Rule) -> list[int]:
    """The row of a parameter: addresses (0 where there is no tensor), then counts."""
    block = rule.states.first.block
    rows, length = slot.matrix(block)
    in_row = -(-length // block)
    second = slot.second_moment
    tensors = (
        slot.p, slot.g, slot.first_moment.codes, slot.first_moment.scale, None if second is None else second.codes,
        None if second is None else second.scale, slot.error, slot.step,
    )  # fmt: skip
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    return [*addresses, rows * in_row, length, in_row, slot.parameter, slot.first]


def kind_of(slot: Slot, rule: Rule) -> Kind:
    """What the kernel is compiled for of a parameter."""
    length = slot.matrix(rule.states.first.block)[1]
    master = 0 if slot.error is None else 8 * slot.error.element_size()
    rounds = rule.stochastic_round and slot.p.dtype == torch.bfloat16 and not master
    ragged = length % rule.states.first.block != 0
    return Kind(
        rule.kind,
        slot.p.dtype,
        slot.g.dtype,
        rule.states.first,
        rule.states.second,
        rounds,
        master,
        ragged,
        not ragged and is_aligned(slot),
        is_ordinary(rule),
    )


def is_ordinary(rule: Rule) -> bool:
    """Whether second moments are 2**-101 or more, and what updates are divided by lies between 2**-126 and 2**125.

    A root that is stored is the floor of scales times the least code or more, a second moment b2 times its square. Of a step t
    it is divided by sqrt(1 - b2^t), which is 2**-27 or more as b2 is at most 1 - 2**-53.
    """
    second = rule.states.second
    if rule.kind == "lion" or second.transform != "sqrt" or second.scheme is None:
        return False
    floor, value = second.scheme.scale.floor or ("stored", 0.0)
    least = floor_value(value, "float32") if floor == "stored" else 0.0
    root = least * float(second.scheme.format.values[second.least])
    return rule.betas[1] * root**2 >= 2.0**-101 and rule.eps <= 2.0**100


def is_aligned(slot: Slot) -> bool:
    """Whether all elements lie at multiples of 16 bytes."""
    second = slot.second_moment
    tensors = (
        slot.p,
        slot.g,
        slot.first_moment.codes,
        slot.p if second is None else second.codes,
        slot.p if slot.error is None else slot.error,
    )
    return not any(tensor.data_ptr() % ALIGNMENT for tensor in tensors)


def in_words(state: State) -> bool:
    """Whether `fast.kernels.optim.nibbles` has its codes: those of the default states in 4 bits."""
    scheme = state.scheme
    if scheme is None or scheme.rounding != "stochastic" or scheme.apply != "reciprocal":
        return False
    fmt, rule, target = scheme.format, scheme.scale.rule, scheme.scale.target
    if fmt.bits != 4 or target != fmt.max or state.fraction:
        return False
    if fmt.kind == "int":
        plain = not fmt.signed and not fmt.fraction_bits
        return plain and state.transform == "sqrt" and rule == "ratio" and state.least == 1
    e2m1 = (
        fmt.kind == "float" and fmt.signed and (fmt.mantissa_bits, fmt.emin, fmt.specials) == (1, 0, "none")
    )
    return e2m1 and state.transform == "none" and rule == "ratio_pow2" and not state.least


@lru_cache(maxsize=64)
def constants(state: State, hardware: bool) -> SchemeConstants | None:
    """A state as the kernel reads it."""
    return None if state.scheme is None else constants_of(state.scheme, "float32", hardware)


@lru_cache(maxsize=64)
def table(state: State, device: torch.device) -> torch.Tensor:
    """Values of a codebook, and behind them the largest float32 of each code but the last; else one 0."""
    if state.scheme is None or state.scheme.format.kind != "codebook":
        return torch.zeros(1, device=device)
    fmt = state.scheme.format
    return torch.tensor([*fmt.table, *element_of(fmt).thresholds], dtype=torch.float32, device=device)


class Launches:
    """The launches of an optimizer's parameters, with their tables; one for each `Kind` and rule."""

    def __init__(self) -> None:
        self.tables: dict[tuple[Any, ...], Tables] = {}
        self.constants: dict[tuple[Any, ...], torch.Tensor] = {}
        self.rates: dict[tuple[Any, ...], tuple[float, torch.Tensor]] = {}

    def update(
        self, slots: Sequence[Slot], rule: Rule, group: int = 0, skip: torch.Tensor | None = None
    ) -> None:
        """One step of CUDA parameters. group: tells rules apart. skip: float32 of one element, not 0 to leave the step out."""
        by_kind: dict[tuple[Any, ...], list[Slot]] = {}
        for slot in slots:
            by_kind.setdefault((group, slot.p.device, kind_of(slot, rule)), []).append(slot)
        for key, part in by_kind.items():
            with torch.cuda.device(part[0].p.get_device()):  # Triton launches on the current one
                self._launch(key, part, rule, skip)

    def _launch(
        self, key: tuple[Any, ...], slots: Sequence[Slot], rule: Rule, skip: torch.Tensor | None
    ) -> None:
        group, device, kind = key
        plan = plan_of(kind)
        if key not in self.tables:
            self.tables[key] = Tables(device, sm90_step.taken(kind, slots[0].p))
        tables, problem = self.tables[key], self.tables[key].problem
        tables.put(
            np.array([row_of(slot, rule) for slot in slots], np.int64),
            plan.repeat * blocks_of(plan, kind) if problem is None else sm90_step.blocks_of(problem),
        )
        launch_numbers(
            kind.kind, tables, self._constants(rule, device), self._rate(group, rule, device),
            self._no_skip(device) if skip is None else skip,
        )  # fmt: skip
        if problem is not None and len(tables.tiles):
            sm90_step.launch(problem, tables.tiles, tables.tensors, tables.numbers, rule.seed)
        else:
            launch_step(kind, tables, plan, rule.seed)

    def _constants(self, rule: Rule, device: torch.device) -> torch.Tensor:
        numbers = (
            *(float(beta) for beta in rule.betas), float(np.float32(rule.eps)), float(np.float32(rule.weight_decay)),
        )  # fmt: skip
        known = self.constants.get((device, numbers))
        if known is None:
            known = self.constants[device, numbers] = torch.tensor(
                numbers, dtype=torch.float64, device=device
            )
        return known

    def _rate(self, group: int, rule: Rule, device: torch.device) -> torch.Tensor:
        lr = rule.lr
        if isinstance(lr, torch.Tensor) and lr.device == device and lr.dtype == torch.float32:
            return lr
        value = float(lr)
        known = self.rates.get((group, device))
        if known is None or known[0] != value:
            tensor = (
                torch.full((1,), value, dtype=torch.float32, device=device)
                if known is None
                else known[1].fill_(value)
            )
            known = self.rates[group, device] = (value, tensor)
        return known[1]

    def _no_skip(self, device: torch.device) -> torch.Tensor:
        known = self.constants.get((device, "skip"))
        if known is None:
            known = self.constants[device, "skip"] = torch.zeros(1, device=device)
        return known


def plan_of(kind: Kind) -> Plan:
    """For states of this width."""
    return PLANS[32 if kind.first.scheme is None else kind.first.scheme.format.bits]


def blocks_of(plan: Plan, kind: Kind) -> int:
    """Blocks of a tile."""
    return max(plan.elements // kind.size, 1)


def launch_numbers(
    kind: str, tables: Tables, numbers: torch.Tensor, rate: torch.Tensor, skip: torch.Tensor
) -> None:
    """The first launch of a step, which counts it, of shards without elements too."""
    rows = len(tables.tensors)
    numbers_kernel[(-(-rows // ROWS),)](
        tables.tensors, numbers, rate, skip, tables.numbers, rows, kind == "lion", kind == "adam", ROWS,
        **({} if interpreted() else {**UNFUSED, "num_warps": 1}),
    )  # fmt: skip


def launch_step(kind: Kind, tables: Tables, plan: Plan, seed: int = 0) -> None:
    """The second launch, by Triton; none where no parameter has an element."""
    hardware = not interpreted()
    lion = kind.kind == "lion"
    options: dict[str, Any] = {**UNFUSED, "num_warps": plan.warps} if hardware else {}
    count = len(tables.tiles)
    if not count:
        return
    draws = kind.rounds or kind.first.stochastic or kind.second.stochastic
    first, second = constants(kind.first, hardware), None if lion else constants(kind.second, hardware)
    step_kernel[(count,)](
        tables.tiles, tables.tensors, tables.numbers, table(kind.first, tables.device),
        table(kind.second, tables.device), *key_of(seed), kind.kind, TYPES[kind.p], TYPES[kind.g], first, second,
        kind.first.fraction, kind.second.transform == "sqrt", kind.second.least, kind.fast and hardware, draws,
        kind.rounds, kind.master, kind.ragged, kind.aligned, hardware, hardware and kind.aligned and in_words(kind.first),
        hardware and kind.aligned and in_words(kind.second), kind.size, blocks_of(plan, kind), plan.repeat, plan.stages,
        **options,
    )  # fmt: skip


def key_of(seed: int) -> tuple[int, int]:
    """Both halves of a seed as signed int32, so that every seed has arguments of one type."""
    low, high = seed & 0xFFFFFFFF, seed >> 32
    return low - ((low >> 31) << 32), high - ((high >> 31) << 32)


__all__ = ["Launches", "Tables", "launch_numbers", "launch_step", "tiles_of"]
