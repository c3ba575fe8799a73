"""Other formats for the default 8-bit states, at equal bytes: how far updates lie from those with float32 states.

    python -m experiments.optimizers.candidates [--steps 60] [--ratios 1 10 100 1000 10000]

Moments are stored by the rules of the default states (scales of powers of two for 256 elements, stochastic rounding, the root
of the second moment, never below its smallest normal number), in other element formats. The sign bit of a root is always 0, so
that eight bits hold an unsigned e4m4 or e3m5 as well as an e4m3; these are measured as nine bits whose first is 0. A line a
pair of formats: rms difference of updates and largest update over float32's, by ratio of gradients; steps count from the 11th
on, of more than 60 the last tenth. Nothing is written; the default states stay what they are.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import cache

from experiments.optimizers.updates import FIRST, LARGEST, RMS, STEPS, Setting, compared, stored_states
from reference.formats.formats import FORMATS, Format
from reference.optim.states import FLOAT32, ROOT_FLOOR, STATES, State, States
from reference.schemes.schemes import Scale, Scheme, register

#: Exponent and mantissa bits of candidates that no format of the library has.
SHAPES = {"e3m4": (3, 4), "e4m4": (4, 4), "e3m5": (3, 5)}


@cache
def element(name: str) -> Format:
    """The format of a candidate, known to schemes from then on."""
    if name in FORMATS:
        return FORMATS[name]
    exponent, mantissa = SHAPES[name]
    record = Format(
        name=f"state_{name}", kind="float", bits=1 + exponent + mantissa, exponent_bits=exponent,
        mantissa_bits=mantissa, specials="nan_ones",
    )  # fmt: skip
    register(record)
    return record


def scheme(name: str, floor: tuple[str, float | str]) -> Scheme:
    """Blocks of 256 under the default states' scales, rounded stochastically."""
    made = element(name)
    scale = Scale(block=256, target=made.max, rule="ratio_pow2", floor=floor, partial=True)
    return Scheme(name=f"candidate_{made.name}", element=made.name, scale=scale, rounding="stochastic")


def first(name: str) -> State:
    """A first moment."""
    return State(name=name, scheme=scheme(name, ("stored", 2.0**-126)))


def root(name: str) -> State:
    """The root of a second moment, never below the smallest normal number (of integers below 1)."""
    made = element(name)
    least = 1 << made.mantissa_bits
    return State(name=f"sqrt_{name}", transform="sqrt", least=least, scheme=scheme(name, ROOT_FLOOR))


def candidates() -> dict[str, States]:
    """Pairs of formats by what they are called; the last ones show what each moment adds."""
    ours, theirs = STATES["8bit"], STATES["torchao.8bit"]
    pairs = {
        "m e4m3, root of v e4m3 (default)": (ours.first, ours.second),
        "m e4m3, root of v unsigned e4m4": (ours.first, root("e4m4")),
        "m e4m3, root of v unsigned e3m5": (ours.first, root("e3m5")),
        "m e3m4, root of v e4m3": (first("e3m4"), ours.second),
        "m e3m4, root of v unsigned e4m4": (first("e3m4"), root("e4m4")),
        "m int8, root of v unsigned e4m4": (first("int8"), root("e4m4")),
        "m float32, root of v e4m3": (FLOAT32, ours.second),
        "m float32, root of v unsigned e4m4": (FLOAT32, root("e4m4")),
        "m e4m3, v float32": (ours.first, FLOAT32),
    }
    made = {name: States(name=name, first=one, second=other) for name, (one, other) in pairs.items()}
    return {**made, "torchao's 8 bits (its map, to nearest)": theirs}


def numbers(states: States, ratio: int, steps: int, seed: int = 0) -> tuple[float, float]:
    """(rms difference, largest update over float32's) of one ratio."""
    setting = Setting(ratio, False, steps, max(FIRST, steps - steps // 10) if steps > STEPS else FIRST)
    found = compared(setting, stored_states(states, seed), seed)
    return found[RMS][0], found[LARGEST][0]


def main(given: Sequence[str] | None = None) -> None:
    """Print a line for each candidate."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--ratios", type=int, nargs="+", default=[1, 10, 100, 1000, 10_000])
    asked = parser.parse_args(given)
    if asked.steps < FIRST:
        parser.error(f"--steps {asked.steps}: steps count from the {FIRST}th on; give {FIRST} or more")
    if min(asked.ratios) < 1:
        parser.error(f"--ratios {min(asked.ratios)}: the largest gradients over the others; give 1 or more")
    line("rms difference (largest update)", [f"ratio {one}" for one in asked.ratios])
    for name, states in candidates().items():
        cells = [numbers(states, ratio, asked.steps) for ratio in asked.ratios]
        line(name, [f"{rms:.3f} ({most:.1f})" for rms, most in cells])


def line(name: str, cells: Sequence[str]) -> None:
    """A line of the table."""
    sys.stdout.write(" ".join([f"{name:42}", *(f"{cell:>16}" for cell in cells)]) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
