"""Which code made a row, as a hash in the row: the row is current as long as that code is what it was.

A row's hash is that of the definitions that its measurement reaches (`experiments.source.closure` has the rules: no comment,
docstring or name counts, and nothing that the measurement does not use). An experiment's rows start from its function `run`,
with the model and the settings where it uses them. An experiment of many parts says for each row what it starts from: its
module `run` has `sources(kind, setting, method)`, which returns dotted names, or none for rows of what no longer exists.
"""

from __future__ import annotations

from functools import cache, lru_cache

from experiments.harness.registry import EXPERIMENTS
from experiments.harness.rows import ROOT, Row, table_parts
from experiments.source.closure import Closure, SourceTree

PACKAGES = ("reference", "fast", "ao_lab", "experiments")
#: What keeps books, draws pages, names files, installs or speaks to a terminal: it makes no number, whatever it contains.
BOOKKEEPING = (
    *(
        f"experiments.harness.{name}"
        for name in ("paths", "progress", "provenance", "registry", "rows", "run_records")
    ),
    *(f"experiments.runs.{name}" for name in ("environment", "run")),
    *("experiments.commands", "experiments.ledger", "experiments.report", "experiments.source"),
    *("experiments.models.train.cache_key", "ao_lab.cli", "ao_lab.install", "reference.renamed"),
)
#: What enters operators into torch's tables, and the decorator of the specification's functions, which enters them nowhere.
REGISTRARS = ("fast.ops.register", "reference.arrays.torch_bridge.bridged")
#: Where rows of a trained model start from, besides the function that measures.
TRAINED = ("experiments.runs.settings.settings_for",)
#: Programs outside of the experiments that publish rows, with what their rows start from.
PROGRAMS = {"exhaustive_float32": ("reference.encode",)}
#: Digits of a hash in a row.
DIGITS = 12


@lru_cache(maxsize=1)
def read_sources() -> SourceTree:
    """The source of this clone, as it was at the first call."""
    return SourceTree(ROOT, PACKAGES, BOOKKEEPING, registrars=REGISTRARS)


def forget() -> None:
    """Read the source again at the next call: it may have changed since."""
    for one in (read_sources, closure, sources_of, row_hash):
        one.cache_clear()


@cache
def closure(roots: tuple[str, ...]) -> Closure:
    """What some dotted names reach in this clone; ValueError where one names nothing."""
    return Closure(read_sources(), roots)


def source_hash(*roots: str) -> str:
    """The hash of what some modules, functions or classes of this clone reach, by their dotted names; 12 digits."""
    return closure(roots).hash[:DIGITS]


def experiment_hash(experiment: str) -> str:
    """The hash of all code of an experiment."""
    return source_hash(*experiment_roots(experiment))


def experiment_roots(experiment: str) -> tuple[str, ...]:
    """What an experiment's rows start from: the function that measures, and the model and settings where it uses them."""
    if experiment in PROGRAMS:
        return PROGRAMS[experiment]
    known = EXPERIMENTS[experiment]
    return f"experiments.{experiment}.{known.run}.run", *(TRAINED if known.trained else ())


@cache
def sources_of(experiment: str) -> object:
    """An experiment's function `sources`, or None where all its rows start from the same."""
    known = EXPERIMENTS.get(experiment)
    return getattr(known.run_module(), "sources", None) if known else None


@cache
def row_hash(experiment: str, kind: str, setting: str, method: str) -> str:
    """The hash of the code behind a row as the code is now; nothing where there is no such experiment, method or setting."""
    if experiment not in EXPERIMENTS and experiment not in PROGRAMS:
        return ""
    sources = sources_of(experiment)
    roots = sources(kind, setting, method) if callable(sources) else experiment_roots(experiment)
    return source_hash(*roots) if roots else ""


def is_current(row: Row) -> bool:
    """Whether a row was made by the code as it is now."""
    kind, _, _ = table_parts(row.table)
    return row.source_hash == row_hash(row.experiment, kind, row.setting, row.method)


__all__ = ["closure", "experiment_hash", "forget", "is_current", "read_sources", "row_hash", "source_hash"]
