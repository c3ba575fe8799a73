"""What a run of experiment `calibration` measures, in order: methods in schemes, by their names in rows, and draws.

Methods are records of `ao_lab.calibration.methods`; beside them stand other projects' (`experiments.calibration.peers`), and
choices under budgets of bits (`experiments.calibration.choice`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ao_lab.calibration import methods as records
from experiments.calibration import choice, shapes
from experiments.calibration.peers.exchange import available, missing
from experiments.calibration.peers.records import DEFAULT, PEERS, peer_scheme
from experiments.harness.registry import check_known
from experiments.models.quantized_model import activation_scheme
from experiments.runs.settings import Settings

EXPERIMENT = "calibration"
ROUNDING = "rounding"
Arguments = Mapping[str, Any]
#: Methods by their names in rows: records of `ao_lab.calibration.methods` by class, with arguments.
ARMS: dict[str, tuple[tuple[str, Arguments], ...]] = {
    ROUNDING: (),
    "search": (("Clip", {"weights": "none"}),),
    "search by inputs": (("Clip", {}),),
    "hqq": (("HQQ", {}),),
    "smooth": (("Smooth", {}),),
    "awq": (("AWQ", {}),),
    "awq + search": (("AWQ", {}), ("Clip", {})),
    "gptq": (("Clip", {}), ("GPTQ", {})),
    "gptq, damping 0.01": (("Clip", {}), ("GPTQ", {"damping": 0.01})),
    "low rank": (("LowRank", {}),),
    "gptq + low rank": (("Clip", {}), ("GPTQ", {}), ("LowRank", {})),
    "awq + gptq": (("AWQ", {}), ("Clip", {}), ("GPTQ", {})),
    "smooth + gptq": (("Smooth", {}), ("Clip", {}), ("GPTQ", {})),
    "rotate + gptq": (("Rotate", {}), ("Clip", {}), ("GPTQ", {})),
    "rotate + awq + gptq": (("Rotate", {}), ("AWQ", {}), ("Clip", {}), ("GPTQ", {})),
    "rotate offline + gptq": (("Rotate", {"kind": "offline"}), ("Clip", {}), ("GPTQ", {})),
    "rotate heads + gptq": (("Rotate", {"kind": "heads"}), ("Clip", {}), ("GPTQ", {})),
    "autoround": (("AutoRound", {}),),
    "search + autoround": (("Clip", {}), ("AutoRound", {})),
    "gptq + autoround": (("Clip", {}), ("GPTQ", {}), ("AutoRound", {})),
    "awq + gptq + autoround": (("AWQ", {}), ("Clip", {}), ("GPTQ", {}), ("AutoRound", {})),
    "rotate + gptq + autoround": (("Rotate", {}), ("Clip", {}), ("GPTQ", {}), ("AutoRound", {})),
}
#: Methods for schemes that quantize inputs too.
WITH_INPUTS = ("smooth", "smooth + gptq")
#: Schemes of the weights, and of the inputs or None, by scale, the most telling first.
CASES: dict[str, tuple[tuple[str, str | None], ...]] = {
    "quick": (("int3_g64_asymmetric", None), ("mxfp4_rceil", None)),
    "full": (
        ("int3_g64_asymmetric", None),
        ("mxfp4_rceil", None),
        ("mxfp4_rceil", "mxfp4_rceil"),
        ("nvfp4", "nvfp4"),
        ("int2_g64_asymmetric", None),
        ("int4_g64", None),
        ("nvfp4", None),
        ("int4_g128", None),
        ("int2_g32_asymmetric", None),
        ("int8_rowwise", "int8_rowwise"),
        ("hqq.int4_g64", None),
    ),
}
#: Methods that are measured on so many draws of sequences in all, in these schemes: what a draw moves. The part that measures
#: them alone, and what it measures at a scale whose whole run has none.
DRAWS, DRAWS_PART = 5, "draws"
DRAWN: dict[str, tuple[tuple[str, str], ...]] = {
    "quick": (),
    "full": (
        ("int3_g64_asymmetric", "gptq"),
        ("mxfp4_rceil", "gptq"),
        ("int3_g64_asymmetric", "search by inputs"),
        ("int3_g64_asymmetric", "awq + gptq"),
        ("int3_g64_asymmetric", "rotate + gptq"),
        ("int3_g64_asymmetric", "gptq + autoround"),
        ("int2_g64_asymmetric", "gptq"),
        ("int2_g64_asymmetric", "gptq + autoround"),
    ),
}
SHORT_DRAWN = (("int3_g64_asymmetric", "gptq"), ("int3_g64_asymmetric", "autoround"))
QUICK_ARMS = (ROUNDING, "search by inputs", "gptq")


@dataclass(frozen=True)
class Case:
    """A scheme of the weights, and one of the inputs or None; or schemes that are chosen within a budget of bits."""

    weights: str
    inputs: str | None
    budget: float | None = None
    #: One of `choice.RULES` in place of the choice.
    rule: str = ""

    @property
    def setting(self) -> str:
        """The setting of its rows."""
        return self.weights if self.inputs is None else f"{self.weights}, inputs {self.inputs}"


#: A case, a method, and the seed that draws the sequences.
Task = tuple[Case, str, int]


def check_parts(names: Sequence[str]) -> None:
    """ValueError for names that are neither methods nor schemes, and for parts at large shapes beside methods and schemes."""
    if any(name in shapes.PARTS for name in names) and not {*names} <= {*shapes.PARTS}:
        raise ValueError(
            f"{' and '.join(shapes.PARTS)} have methods and schemes of their own; name them without others"
        )
    others = [name for name in names if name in (*PEERS, choice.NAME)]
    if DRAWS_PART in names and others:
        raise ValueError(
            f"{DRAWS_PART} are of schemes and methods of ours, not of {others[0]}; leave one out"
        )
    for name in names:
        if name not in (*ARMS, *PEERS, choice.NAME, DRAWS_PART, *shapes.PARTS):
            try:
                activation_scheme(name)
            except ValueError:
                check_known(
                    EXPERIMENT,
                    [
                        *ARMS,
                        *PEERS,
                        choice.NAME,
                        DRAWS_PART,
                        *shapes.PARTS,
                        *dict.fromkeys(one for one, _ in CASES["full"]),
                    ],
                    [name],
                )


def cases_of(settings: Settings) -> list[Case]:
    """The schemes of a run: the scale's, or those that `settings.only` names."""
    choices = [
        Case(choice.setting(bits, rule or choice.NAME), None, bits, rule)
        for rule in ("", *choice.RULES)
        for bits in choice.BUDGETS
    ]
    wanted = [name for name in settings.only if name not in (*ARMS, *PEERS, DRAWS_PART)]
    if not wanted:
        return [Case(*one) for one in CASES[settings.scale]] + (choices if settings.scale == "full" else [])
    known = [Case(*one) for one in CASES["full"]]
    others = [name for name in wanted if name != choice.NAME and all(case.weights != name for case in known)]
    found = [case for case in known if case.weights in wanted] + [Case(name, None) for name in others]
    return found + (choices if choice.NAME in wanted else [])


def arms_of(settings: Settings, case: Case) -> list[str]:
    """The methods of a run in a scheme, rounding first."""
    wanted = [name for name in settings.only if name in (*ARMS, *PEERS)]
    names = [name for name in wanted if name in ARMS]
    names = names if wanted else (QUICK_ARMS if settings.scale == "quick" else ARMS)
    if case.budget is not None:
        names = [name for name in (choice.RULE_ARMS if case.rule else choice.ARMS) if name in names]
    return [
        ROUNDING,
        *(n for n in names if n != ROUNDING and (case.inputs is not None or n not in WITH_INPUTS)),
        *peers_of(settings, case),
    ]


def peers_of(settings: Settings, case: Case) -> list[str]:
    """Other projects' arms in a scheme of weights: those that are named, else those that the interpreters of `--model` have."""
    named = [name for name in settings.only if name in PEERS]
    if not named and settings.asked is not None and not any(name in ARMS for name in settings.only):
        named = [name for name in DEFAULT if available(name, settings.asked.peers)]
    scheme = peer_scheme(case.weights) if case.inputs is None and case.budget is None else None
    return [name for name in named if PEERS[name].takes(scheme)]


def planned(scale: str) -> list[tuple[str, str]]:
    """Settings and methods that a whole run of a scale measures, in order."""
    everything = Settings(scale=scale, device="cpu", cache=Path(), schemes=(), served=())
    return [(case.setting, arm) for case in cases_of(everything) for arm in arms_of(everything, case)]


def tasks_of_run(settings: Settings) -> list[Task]:
    """Schemes, methods and seeds of the sequences; further draws come last, seed by seed."""
    if DRAWS_PART in settings.only:
        again = drawn(settings)
        rounded = dict.fromkeys(case for case, _ in again)
        tasks = [(case, ROUNDING, settings.seed) for case in rounded]
        tasks += [(case, arm, settings.seed) for case, arm in again]
    else:
        tasks = [(case, arm, settings.seed) for case in cases_of(settings) for arm in arms_of(settings, case)]
        again = [(case, arm) for case, arm, _ in tasks if (case.setting, arm) in DRAWN[settings.scale]]
    return tasks + [(case, arm, settings.seed + draw) for draw in range(1, DRAWS) for case, arm in again]


def drawn(settings: Settings) -> list[tuple[Case, str]]:
    """Schemes and methods of the part of draws; where schemes or methods are named beside it, these, in all combinations."""
    pairs = DRAWN[settings.scale] or SHORT_DRAWN
    arms = [name for name in settings.only if name in ARMS]
    schemes = [name for name in settings.only if name not in (*ARMS, DRAWS_PART)]
    if not arms and not schemes:
        return [(Case(scheme, None), arm) for scheme, arm in pairs]
    schemes = schemes or list(dict.fromkeys(scheme for scheme, _ in pairs))
    arms = arms or list(dict.fromkeys(arm for _, arm in pairs))
    return [(Case(scheme, None), arm) for scheme in schemes for arm in arms if arm != ROUNDING]


def not_there(settings: Settings, arm: str) -> str | None:
    """The status of a method that cannot be measured here; None where it can."""
    reason = ""
    if arm in PEERS:
        reason = missing(arm, pythons_of(settings))
    else:
        try:
            methods_of(arm)
        except ValueError as error:
            reason = str(error)
    return f"missing: {reason}" if reason else None


def pythons_of(settings: Settings) -> tuple[str, ...]:
    """Interpreters of other projects that a run was told of."""
    return settings.asked.peers if settings.asked is not None else ()


def methods_of(arm: str, seed: int = 0) -> tuple[Any, ...]:
    """The records of a method, those that draw with this seed; ValueError where ao_lab has none of that class."""
    made = []
    for name, arguments in ARMS[arm]:
        kind = getattr(records, name, None)
        if kind is None:
            raise ValueError(f"ao_lab has no method {name}")
        draws = {"seed": seed} if "seed" in kind.__dataclass_fields__ else {}
        made.append(kind(**draws, **arguments))
    return tuple(made)
