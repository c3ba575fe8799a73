"""Tables: what all methods are timed at, in turn in one process, whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from experiments.generate.methods import AO, BASE, METHODS, TORCHAO, Method
from experiments.generate.stage import Stage

KIND = "generate"
DECODE, EAGER_DECODE, PREFILL = "decode", "eager", "prefill"
#: The whole model, of which those that say most are measured; a quarter of it, with more methods; and one layer, whose
#: token takes hardly more than transformers' own loop on the host, below which no weights bring a step.
WHOLE, DEPTH, LEAST = 32, 8, 1
LONG = 2048
COMPILED, EAGER = "compiled", "not compiled"


@dataclass(frozen=True)
class Table:
    """What is timed. part: one of the names of `--only`; length: of a prefill. needed: seconds of a method.

    beside: what it is one more run of a setting with, torchao or one of its methods, whose compilers take minutes; of ours it
    has their recipes.
    """

    stage: Stage
    part: str
    methods: tuple[Method, ...]
    batch: int = 1
    length: int = 0
    beside: str = ""

    @property
    def compiled(self) -> bool:
        """Whether transformers compiles the steps of decoding."""
        return self.part == DECODE

    @property
    def setting(self) -> str:
        """The setting of its rows."""
        if self.part == PREFILL:
            return f"prefill of {self.length} tokens"
        return f"batch {self.batch}, {COMPILED if self.compiled else EAGER}" + (
            f", beside {self.beside}" if self.beside else ""
        )

    @property
    def needed(self) -> float:
        """About how many seconds it takes on an H200: compiling takes a method one and a fifth a layer."""
        each = 6.0 + (1.2 * self.stage.layers if self.compiled else 0.0)
        others = [one for one in self.methods if one.library == TORCHAO]
        return each * len(self.methods) + (70.0 * len(others) if self.compiled else 0.0)


def beside(*names: str) -> tuple[Method, ...]:
    """bfloat16, these methods of torchao's, and ours of their recipes."""
    return tuple(one for one in METHODS if one is BASE or one.peer in names or one.name in names)


def tables_of(parts: Sequence[str], device: str) -> Iterator[Table]:
    """At full scale: what is not compiled comes first, in a process that has compiled nothing, as its users have it."""
    least, stage, whole = Stage(LEAST, device), Stage(DEPTH, device), Stage(WHOLE, device)
    eager = replace(stage, new=32, calls=16)
    deep = tuple(one for one in METHODS if one.deep)
    ours = tuple(one for one in METHODS if one.library != TORCHAO)
    unprepared = tuple(one for one in METHODS if one.frozen is None)
    found = (
        Table(eager, EAGER_DECODE, unprepared, 1),
        Table(replace(stage, calls=24), PREFILL, unprepared, length=LONG),
        Table(eager, EAGER_DECODE, unprepared, 16),
        Table(eager, EAGER_DECODE, unprepared, 64),
        Table(whole, DECODE, deep, 1),
        Table(whole, DECODE, deep, 16),
        Table(stage, DECODE, ours, 1),
        Table(stage, DECODE, ours, 16),
        Table(stage, DECODE, ours, 64),
        Table(least, DECODE, deep, 1),
        Table(stage, DECODE, beside(*AO), 1, beside=TORCHAO),
        Table(stage, DECODE, beside(*AO), 16, beside=TORCHAO),
        # Its methods by themselves, each of which compiles for minutes; int8 takes half a second a token there.
        *(Table(replace(stage, new=16, calls=8), DECODE, beside(one), 64, beside=one) for one in AO),
    )
    return (one for one in found if one.part in parts)


def stand_ins(parts: Sequence[str], device: str) -> Iterator[Table]:
    """A tiny model's, whose times mean nothing: what is measured at full scale runs here too, but for the compiler."""
    stage = Stage(1, device, divide=32, new=8, calls=1)
    ours = tuple(one for one in METHODS if one.frozen is None and one.library == BASE.library)
    found = (
        Table(stage, EAGER_DECODE, ours, 2),
        Table(stage, PREFILL, ours, length=64),
    )
    return (one for one in found if one.part in parts)


__all__ = [
    "COMPILED",
    "DECODE",
    "DEPTH",
    "EAGER",
    "EAGER_DECODE",
    "KIND",
    "LEAST",
    "LONG",
    "PREFILL",
    "WHOLE",
    "Table",
    "stand_ins",
    "tables_of",
]
