"""The experiments, each a folder of this package that holds a record of itself: ``EXPERIMENT = Experiment(...)`` in its
``__init__``.

Such a folder has a module `run` with `run(settings, journal) -> rows` and `subject(settings)` (what a journal can be resumed
for), and a page module with `TITLE` and `sections(rows)`, which says in tables and figures what the rows hold. Where lines of a
table are measured together, so that ratios are of one run, `run` has `measured_whole(row)`: rows with the same answer come and
go together (`experiments.runs.run`).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType


@dataclass(frozen=True, kw_only=True)
class Windows:
    """What an experiment evaluates real models on, by scale, unless `--windows` and `--length` say otherwise.

    count, length: windows of a text, and tokens of each. texts: how many of the texts at most; of a scale without, all.

    Published rows on others are not taken as measured (`experiments.runs.windows`).
    """

    count: Mapping[str, int]
    length: Mapping[str, int]
    texts: Mapping[str, int] = field(default_factory=dict)


#: Windows of most experiments.
WINDOWS = Windows(count={"quick": 4, "full": 32}, length={"quick": 512, "full": 2048})


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What an experiment says of itself.

    order: where it stands among the others, in a run and on the page. always: whether it runs when none is named. trained:
    whether it uses the corpus and the small language model. part_of: the experiment whose name runs this one too. folders:
    whose changes pages tell of, beside what experiments share and the folder of its own. compressed: whether its rows are
    published as ``.csv.gz``. windows: what it evaluates pretrained models on, and anyone's by `--model`; None: it measures
    none. tasks: what these may do (`experiments.models.pretrained`). parts: what --only names, where that is known without
    torch; schemes: whether it names schemes too. name: the folder's, filled in when it is found.
    """

    order: int
    always: bool = True
    trained: bool = True
    part_of: str = ""
    folders: tuple[str, ...] = ("reference", "fast", "ao_lab")
    compressed: bool = False
    windows: Windows | None = None
    tasks: tuple[str, ...] = ("language model",)
    parts: tuple[str, ...] = ()
    schemes: bool = False
    name: str = ""

    def run_module(self) -> ModuleType:
        """The module that measures."""
        return importlib.import_module(f"{PACKAGE}.{self.name}.run")

    def page_module(self) -> ModuleType:
        """The module that says what the rows hold."""
        return importlib.import_module(f"{PACKAGE}.{self.name}.page")


PACKAGE = __name__.removesuffix(".harness.registry")
#: What every experiment measures with.
SHARED = tuple(f"experiments/{name}" for name in ("data", "harness", "models", "runs"))


def discover(paths: Iterable[str] | None = None) -> dict[str, Experiment]:
    """The experiments by name, in their order: folders with an EXPERIMENT, in `paths` (by default this package's)."""
    paths = importlib.import_module(PACKAGE).__path__ if paths is None else paths
    found = []
    for module in pkgutil.iter_modules(paths):
        if module.ispkg and module.name != "harness":
            record = getattr(importlib.import_module(f"{PACKAGE}.{module.name}"), "EXPERIMENT", None)
            if record:
                folders = (*record.folders, *SHARED, f"experiments/{module.name}")
                found.append(replace(record, name=module.name, folders=folders))
    return {one.name: one for one in sorted(found, key=lambda one: (one.order, one.name))}


EXPERIMENTS = discover()
#: Those that can be limited to parts or to seconds.
LIMITED = (
    "ptq",
    "calibration",
    "fp8_training",
    "sparsity",
    "linear",
    "generate",
    "qat_overhead",
    "optimizers",
    "kv_cache",
    "prefill_attention",
    "ladder",
    "loka",
    "distributed",
)
#: Those whose trainings can run in several processes.
SEVERAL = ("fp8_training", "sparsity", "loka", "optimizers")


def chosen(tables: Sequence[str] | None) -> list[str]:
    """The experiments to run, in their order; ValueError with the nearest and all names for an unknown one."""
    from reference.arrays.namespace import and_nearest

    for name in tables or ():
        if name not in EXPERIMENTS:
            near = and_nearest(name, EXPERIMENTS, 3, 0.4)
            raise ValueError(f"unknown table {name!r}{near}; the tables are {', '.join(EXPERIMENTS)}")
    return [
        name
        for name, experiment in EXPERIMENTS.items()
        if (name in tables or experiment.part_of in tables if tables else experiment.always)
    ]


def check_only(experiment: str, only: Iterable[str], of_models: bool) -> None:
    """ValueError, without torch, for a name that is surely no part of an experiment, and no scheme where it takes schemes.

    of_models: of models that are given, of which --only names schemes or recipes alone. The module that measures looks again.
    """
    from reference import SCHEMES

    record = EXPERIMENTS[experiment]
    if record.parts and (record.schemes or not of_models):
        more = SCHEMES if record.schemes else ()
        check_known(experiment, record.parts, [name for name in only if name not in more], more)


def check_known(
    experiment: str, parts: Iterable[str], names: Iterable[str], schemes: Iterable[str] = ()
) -> None:
    """ValueError, with the nearest, for a name that is no part of an experiment. schemes: names that are near too."""
    from reference.arrays.namespace import nearest_names, told_nearest

    parts, schemes = list(parts), list(schemes)
    listed = ("; " if any("," in part for part in parts) else ", ").join(parts)
    for name in names:
        if name not in parts:
            # What begins with the word is meant before what is alike.
            begun = sorted((one for one in [*parts, *schemes] if one.startswith(name)), key=len)[:3]
            near = told_nearest(begun or nearest_names(name, [*parts, *schemes]))
            more = "; schemes too (ao-lab schemes lists them)" if schemes else ""
            raise ValueError(f"unknown part {name!r} of {experiment}{near}; the parts are {listed}{more}")
