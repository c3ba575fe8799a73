"""Whether a kernel is right: the calls that it has to stand, what is found of them, the fault of the bank that it looks like.

`ao_lab.testing.probe_kernel` says it of kernels of torch and NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import numpy as np

from reference.formats.encode import decode, encode
from reference.probe.at_ties import at_ties, ties_are_the_specifications
from reference.probe.detect import BEYOND, ERRORS, SCALES, SUMS, Finding, each_output, findings, rounded
from reference.probe.each_alone import alone, of_alone
from reference.probe.each_output import sums_bound
from reference.probe.estimates import F64
from reference.probe.faults import FAULTS, Case, typical_inputs, typical_weight
from reference.probe.held_exactly import NAME as HELD
from reference.probe.held_exactly import held_exactly, of_held
from reference.schemes.schemes import Scheme

#: Sizes of a case without x or w: no multiples of tiles, and tokens for kernels that take no such number; six blocks of 128
#: along K.
TOKENS, WHOLE_TILES, OUTPUTS, CHANNELS = 251, 256, 96, 768
#: Powers of two that inputs are multiplied by, and those of float16, whose outputs would overflow.
POWERS = {"float32": (12, -12), "bfloat16": (12, -12), "float16": (4, -4)}
#: What is cut off M, and off N and K, of other lengths: the first that the schemes and the kernel take.
FEWER = (5, 16, 32, 64, 128, 0)
CUTS = ((7, 3), (7, 16), (16, 16), (16, 32), (32, 64), (32, 128), (0, 16), (0, 32), (0, 128))
#: What a kernel that does not take a length raises.
REFUSALS = (ValueError, TypeError, RuntimeError, NotImplementedError, AssertionError)
#: Calls on the same inputs, which shall give the same outputs, or right ones.
CALLS = 4
#: An operand is not quantized where outputs have at most so much of its error, and no more squared error than without it; where
#: its error is a small part of all, also no more than so much of it beside the other operand's.
PART, ENERGY, REST = 0.25, 1.05, 0.5
#: What is said of quantized values, by what elements at ties told.
TIES = {
    True: ", at ties of rounding too",
    False: " except at ties of rounding, which it rounds otherwise",
    None: " on these inputs, none of which lies on a tie of rounding",
}
#: The name of the first case.
AS_THEY_ARE = "inputs as they are"
#: Which share of a difference a fault of the bank has to explain to be named.
EXPLAINED = 0.5


@dataclass(frozen=True)
class KernelReport:
    """All findings of all cases. looks_like: the fault of the bank that explains most of the difference, "" where none explains
    half; explained: its share. refused: lengths that the kernel raised an error for, which were not tried. remarks: what is no
    fault. ties: whether elements at ties of rounding are rounded as the specification does; None where that was not tried."""

    findings: tuple[Finding, ...]
    looks_like: str = ""
    explained: float = 0.0
    refused: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    ties: bool | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.faults

    @property
    def faults(self) -> tuple[Finding, ...]:
        """What was found, the surest first."""
        return tuple(sorted((one for one in self.findings if one.found), key=lambda one: -one.sigmas))

    @property
    def same_values(self) -> bool:
        """Whether its quantized values are those of the specification, so that its sums were compared too."""
        return _sums_compared(self.findings)

    @property
    def exact_outputs(self) -> bool:
        """Whether outputs were compared on inputs that any scales hold exactly (`reference.probe.held_exactly`)."""
        return any(one.case.startswith(HELD) for one in self.findings)

    @property
    def other_scales(self) -> bool:
        """Whether its scales are of another convention than the specification's, which is no fault."""
        return any(one.test == SCALES for one in self.findings)

    def __str__(self) -> str:
        return "\n".join([*(self._right() if self.ok else self._faulty()), *self.remarks, *self.refused])

    def _right(self) -> list[str]:
        first, most = self.findings[0], max(self.findings, key=lambda one: one.sigmas)
        ratio = (
            f"{most.error / most.right:.2f} times a right kernel's error" if most.right else "an error of 0"
        )
        values = f"its quantized values are those of the specification{TIES[self.ties]}"
        if not self.same_values:
            what = (
                "scales are of another convention than the specification's"
                if self.other_scales
                else "quantized values are not all those of the specification (another convention of scales or of rounding)"
            )
            values = f"its {what}, so that {self._compared()}"
        told = len(self.findings)
        verdict = (
            f"a right kernel, as far as {told} tests tell"
            if self.same_values or self.exact_outputs
            else f"sums were not compared, and {told} tests found no fault"
        )
        return [
            f"{verdict}: {first.test} {first.error:.3g}, that of the specification {first.right:.3g}; {values}",
            f"  nearest to a fault: {most.case}: {most.test}, {most.sigmas:.1f} standard errors with {ratio}; a fault has "
            f"{ERRORS:g} and {most.more:g} times",
        ]

    def _compared(self) -> str:
        """Which inputs told of sums where quantized values are others than the specification's."""
        held = next((one.test for one in self.findings if one.case.startswith(HELD)), "")
        return (
            f"sums were compared on inputs alone that any scales hold exactly ({held})"
            if held
            else "wrong sums, tokens or channels of no more error than its rounding stay unseen"
        )

    def _faulty(self) -> list[str]:
        fault = FAULTS.get(self.looks_like)
        what = (
            "like none of the bank of faults" if fault is None else f"like {self.looks_like!r}: {fault.says}"
        )
        share = f" ({100 * self.explained:.0f}% of the difference)" if fault else ""
        return [f"a faulty kernel; it looks {what}{share}", *(f"  {one}" for one in self.faults[:5])]


@dataclass(frozen=True)
class Probed:
    """A kernel, a function of a `Case` that gives outputs (M, N), and what it is called on: x (M, K) and w (N, K), whose values
    `dtype` holds, and their schemes. refused: lengths that it raised an error for, filled as it is called."""

    kernel: Callable[[Case], Any]
    scheme: Scheme | None
    weight: Scheme
    x: Any
    w: Any
    dtype: str
    refused: list[str] = field(default_factory=list)

    def case(self, name: str, x: Any = None, w: Any = None) -> Case:
        """A case of these operands, or of others."""
        return Case(self.x if x is None else x, self.w if w is None else w, self.scheme, self.weight, name)

    def outputs(self, case: Case) -> F64:
        """Outputs (M, N)."""
        return np.asarray(self.kernel(case), np.float64)

    def attempt(self, case: Case) -> F64 | None:
        """Outputs; None where the kernel raises an error for the case, which `refused` then names."""
        try:
            return self.outputs(case)
        except REFUSALS as error:
            said = str(error).strip().partition("\n")[0]
            self.refused.append(
                f"  not tried, as it raises {type(error).__name__} ({said[:80]}): M, N, K = {case.sizes}"
            )
            return None


def judge(
    kernel: Callable[[Case], Any],
    scheme: Scheme | None,
    weight: Scheme,
    x: Any = None,
    w: Any = None,
    *,
    dtype: str = "float32",
    accumulation: str = "float32",
    quantized: bool = False,
    seed: int = 0,
) -> KernelReport:
    """Run a kernel, a function of a `Case` that gives outputs (M, N), on all cases. Arguments and errors are those of
    `ao_lab.testing.probe_kernel`; x and w are NumPy arrays."""
    probed = _with_operands(Probed(kernel, scheme, weight, x, w, dtype), seed)
    judged = _Judged(probed, accumulation, quantized, seed)
    judged.look_at_cases()
    judged.look_at_held()
    judged.look_at_calls()
    if not quantized:
        judged.look_at_values_alone()
    return judged.report(None if quantized else judged.look_at_ties())


@dataclass
class _Judged:
    """What is found of a kernel so far, and its outputs by the names of cases. accumulation, quantized, seed: as `judge`."""

    probed: Probed
    accumulation: str
    quantized: bool
    seed: int
    found: list[Finding] = field(default_factory=list)
    outputs: dict[str, tuple[Case, F64]] = field(default_factory=dict)

    @property
    def first(self) -> tuple[Case, F64]:
        """The first case and its outputs."""
        return next(iter(self.outputs.values()))

    @property
    def again(self) -> list[tuple[Case, F64]]:
        """Further calls of the first case whose outputs differ."""
        begin = f"{self.first[0].name}, call "
        return [(case, y) for case, y in self.outputs.values() if case.name.startswith(begin)]

    @property
    def is_right(self) -> bool:
        """Whether nothing was found so far."""
        return not any(one.found for one in self.found)

    def look_at_cases(self) -> None:
        """By statistics; ValueError where no output is one of the dtype."""
        dtype = self.probed.dtype
        for case, y in _calls(self.probed):
            self.outputs[case.name] = case, y
            self.found += findings(case, y, dtype, self.accumulation, quantized=self.quantized)
            if not self.found:
                raise ValueError(
                    f"no token has an output that {dtype} holds: x or w is too large; divide them, or give another dtype"
                )

    def look_at_held(self) -> None:
        """On inputs that any scales hold exactly, of each length."""
        dtype, (case, y) = self.probed.dtype, self.first
        for held in filter(None, [held_exactly(one, dtype, self.seed) for one in _of_lengths(self.outputs)]):
            self.found.append(
                of_held(*self._called(held), dtype, self.accumulation, quantized=self.quantized)
            )
        self.found += [] if self.quantized else unquantized(case, y)

    def look_at_calls(self) -> None:
        """Of calls on the same inputs."""
        self.found += apart(self.first[1], self.again, self.found, self.probed.dtype, self.accumulation)

    def look_at_values_alone(self) -> None:
        """Where nothing was found, on inputs that show each quantized value of one operand alone."""
        for shown in alone(self.first[0], self.probed.dtype, self.seed) if self.is_right else ():
            _, y = self._called(shown.case)
            same = _sums_compared(self.found)
            self.found += of_alone(shown, y, self.probed.dtype, self.accumulation, same=same)

    def look_at_ties(self) -> bool | None:
        """Whether elements at ties of rounding are rounded as the specification does; None where none can be tried."""
        dtype, tied = self.probed.dtype, at_ties(self.first[0], self.probed.dtype, self.seed)
        if tied is None:
            return None
        y = self.probed.outputs(tied)
        ties = ties_are_the_specifications(tied, y, dtype, self.accumulation, BEYOND)
        if not ties and _sums_compared(self.found) and self.is_right:
            self.outputs[tied.name] = tied, y
            self.found.append(each_output(tied, y, np.ones(len(y), bool), dtype, self.accumulation, False))
        return ties

    def report(self, ties: bool | None) -> KernelReport:
        """All of it, with the fault of the bank that the worst is like."""
        # Inputs of few values make several faults of the bank one: they are asked last.
        faults = (one for one in self.found if one.found)
        worst = max(faults, key=lambda one: (not one.case.startswith(HELD), one.sigmas), default=None)
        name, share = ("", 0.0) if worst is None else likeness(*self.outputs[worst.case], self.probed.dtype)
        refused, remarks = tuple(dict.fromkeys(self.probed.refused)), _remarks(self.first[1], self.again)
        return KernelReport(tuple(self.found), name, share, refused, remarks, ties)

    def _called(self, case: Case) -> tuple[Case, F64]:
        self.outputs[case.name] = case, self.probed.outputs(case)
        return self.outputs[case.name]


def _of_lengths(outputs: dict[str, tuple[Case, F64]]) -> list[Case]:
    """One case of each length."""
    return list({case.sizes: case for case, _ in reversed(outputs.values())}.values())[::-1]


def _sums_compared(found: Iterable[Finding]) -> bool:
    tests = {one.test for one in found}
    return SUMS in tests and SCALES not in tests


def _calls(probed: Probed) -> Iterator[tuple[Case, F64]]:
    """Outputs of all cases; of the first case those of more calls too, where they differ."""
    for number, case in enumerate(cases(probed)):
        y = probed.outputs(case)
        yield case, y
        if not number:
            yield from _again(probed, case, y)
    yield from _other_lengths(probed)


def _with_operands(probed: Probed, seed: int) -> Probed:
    """With `operands`; typical inputs have whole tiles of tokens where the kernel refuses an odd number of them."""
    x, w = operands(probed.x, probed.w, probed.dtype, seed)
    given = replace(probed, x=x, w=w)
    if probed.x is not None or given.attempt(given.case(AS_THEY_ARE)) is not None:
        return given
    whole = typical_inputs(WHOLE_TILES, x.shape[1], seed)
    return replace(given, x=operands(whole, probed.w, probed.dtype, seed)[0])


def _again(probed: Probed, case: Case, y: F64) -> Iterator[tuple[Case, F64]]:
    for call in range(2, CALLS + 1):
        other = probed.outputs(case)
        if not np.array_equal(other, y, equal_nan=True):
            yield replace(case, name=f"{case.name}, call {call}"), other


def apart(
    first: F64, again: list[tuple[Case, F64]], found: list[Finding], dtype: str, accumulation: str
) -> list[Finding]:
    """Calls on the same inputs that differ by more than two orders of the same sums, where nothing else was found of them."""
    faults, more = {one.case for one in found if one.found}, []
    for case, y in again:
        off = np.where(np.isfinite(y) & np.isfinite(first), np.abs(y - first), 0.0)
        over = off > 2 * BEYOND * sums_bound(case, dtype, accumulation)
        if case.name not in faults and over.any():
            at = tuple(int(i) for i in np.unravel_index(int(np.where(over, off, 0).argmax()), off.shape))
            said = f"output {at} is not that of the first call, by more than another order of sums makes"
            more.append(Finding(case.name, said, float(off[at]), 0.0, inf))
    return more


def _remarks(first: F64, again: list[tuple[Case, F64]]) -> tuple[str, ...]:
    """That calls on the same inputs differ."""
    if not again:
        return ()
    differ = np.any([~((y == first) | (np.isnan(y) & np.isnan(first))) for _, y in again], axis=0)
    return (
        f"  not deterministic: {int(differ.sum())} of {first.size} outputs are not the same bits in each of {CALLS} calls "
        f"on the same inputs",
    )


def cases(probed: Probed) -> Iterator[Case]:
    """The calls of these lengths that a kernel has to stand."""
    yield probed.case(AS_THEY_ARE)
    x = probed.x
    for power in POWERS[probed.dtype]:
        yield probed.case(f"inputs times 2^{power}", x * np.float32(2.0**power))
    broken = x.copy()
    broken[len(x) // 2, x.shape[1] // 3] = np.nan
    yield _with_zeros(probed.case("NaN in a token, zeros in another", broken))


def _other_lengths(probed: Probed) -> Iterator[tuple[Case, F64]]:
    """Outputs of the first other lengths that schemes and kernel take; none where they take none, which `refused` then says."""

    def tried(tokens: int, outputs: int, channels: int) -> tuple[Case, F64] | None:
        case = _shorter(probed, tokens, outputs, channels)
        y = None if case is None else probed.attempt(case)
        return None if case is None or y is None else (case, y)

    for tokens in (one for one in FEWER if len(probed.x) > 2 * one):
        # All three at once first; what is refused then is asked of M alone, and of N and K once that is taken.
        at_once = tried(tokens, *CUTS[0]) if tokens == FEWER[0] else None
        alone = tried(tokens, 0, 0) if tokens and at_once is None else None
        if at_once is None and tokens and alone is None:
            continue
        cuts = CUTS[1:] if tokens == FEWER[0] else CUTS
        found = at_once or next(filter(None, (tried(tokens, *cut) for cut in cuts)), alone)
        if found is not None:
            yield found
            return
    probed.refused.append("  no other lengths were tried: the kernel or a scheme takes none of them")


def _shorter(probed: Probed, tokens: int, outputs: int, channels: int) -> Case | None:
    """The case with so much cut off M, N and K; None where too little is left, or a scheme does not take it."""
    x, w = probed.x, probed.w
    if len(w) <= 2 * outputs or x.shape[1] <= 2 * channels:
        return None
    parts = x[: len(x) - tokens, channels:], w[: len(w) - outputs, channels:]
    case = probed.case("other lengths", *map(np.ascontiguousarray, parts))
    return case if _takes(case) else None


def _with_zeros(case: Case) -> Case:
    """With zeros in the first token and output, of those operands whose schemes give zeros a value."""
    x, w = case.x.copy(), case.w.copy()
    x[0] = w[0] = 0
    zeros = replace(case, x=x, w=w)
    of_x, of_w = (bool(np.isfinite(one[0]).all()) for one in (zeros.a, zeros.b))
    return zeros if of_x and of_w else replace(case, x=x if of_x else case.x, w=w if of_w else case.w)


def unquantized(case: Case, y: F64) -> list[Finding]:
    """Operands whose quantization error the outputs do not have: the kernel multiplies them as they are, or nearly so."""
    e, size = y - case.exact, float(np.linalg.norm(case.exact))
    of_w = np.asarray(case.x.astype(np.float64) @ (case.b - case.w).T)
    errors = {"w": of_w, "x": (case.right - case.exact) - of_w}
    if not size or not np.isfinite(e).all():
        return []
    live = {name: one for name, one in errors.items() if np.linalg.norm(one) > 1e-6 * size}
    if not live:
        return []
    parts = np.linalg.lstsq(np.stack([one.ravel() for one in live.values()], 1), e.ravel(), rcond=None)[0]
    found, right = [], float(np.linalg.norm(case.right - case.exact)) / size
    for name, part in zip(live, parts, strict=True):
        others = sum((one for other, one in live.items() if other != name), np.zeros_like(e))
        own, off, beside = (float((one**2).sum()) for one in (live[name], e, others))
        rest = off - float((e * others).sum()) ** 2 / beside if beside else off
        told = own > 2 * (ENERGY - 1) * beside or rest <= REST * own
        if part <= PART and off <= ENERGY * beside + 1e-2 * own and told:
            error = float(np.linalg.norm(e)) / size
            said = f"{name} is not quantized: error {error:.3g} without its rounding, {right:.3g} with it"
            found.append(Finding(case.name, said, error, 0.0, inf))
    return found


def _takes(case: Case) -> bool:
    """Whether the schemes take the lengths; what they make of the operands is kept."""
    try:
        return case.wq is not None and (case.scheme is None or case.xq is not None)
    except ValueError:
        return False


def operands(x: Any, w: Any, dtype: str, seed: int) -> tuple[Any, Any]:
    """x and w as float32 arrays of values that the dtype holds; ValueError for shapes that do not fit, NaN and infinity."""
    channels = next((int(one.shape[-1]) for one in (x, w) if one is not None), CHANNELS)
    given = [
        typical_inputs(TOKENS, channels, seed) if x is None else np.asarray(x, np.float32),
        typical_weight(OUTPUTS, channels, seed) if w is None else np.asarray(w, np.float32),
    ]
    shapes = [one.shape for one in given]
    if any(one.ndim != 2 for one in given) or shapes[0][1] != shapes[1][1] or min(map(min, shapes)) < 8:
        raise ValueError(
            f"x is (M, K) and w (N, K) with 8 tokens, outputs and channels at least, got {shapes[0]} and {shapes[1]}"
        )
    if not all(np.isfinite(one).all() for one in given):
        raise ValueError("x and w are finite; leave out the tokens that are not")
    return tuple(
        np.asarray(decode(encode(one, dtype), dtype)) if dtype != "float32" else one for one in given
    )  # type: ignore[return-value]


def likeness(case: Case, y: F64, dtype: str) -> tuple[str, float]:
    """The fault of the bank that a kernel's outputs are nearest to, and the share of their difference from a right kernel's
    that it explains; "" where that is less than half."""
    best = "", 0.0
    right = rounded(case.right, dtype)
    for name, fault in FAULTS.items():
        found = fault.outputs(case)
        if found is None:
            continue
        wrong = rounded(found, dtype)
        if (np.isfinite(wrong) != np.isfinite(y)).any():
            continue
        some = np.isfinite(y)
        apart = np.where(np.isfinite(right), right, 0)[some]
        whole = float(((y[some] - apart) ** 2).sum())
        share = 1 - float(((y[some] - wrong[some]) ** 2).sum()) / whole if whole else 0.0
        best = max(best, (name, share), key=lambda one: one[1])
    return best if best[1] >= EXPLAINED else ("", 0.0)


__all__ = ["KernelReport", "judge"]
