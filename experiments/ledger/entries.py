"""The entries of the ledger: a function with kernels, the code that it reaches, and whether what a GPU found is still valid.

An entry holds the hash of the definitions that its function reaches (the same rule as that of rows,
`experiments.source.closure`; with it the files of CUDA C++ that these definitions name), a short hash for each module among
them (to say what changed), the modules whose kernels it launches, the date, the GPU, its driver and the library versions, and
the outcome of its GPU tests. Its benchmarks are rows of ``reports/data/kernels.csv``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from experiments.harness import provenance
from experiments.harness.rows import Row
from experiments.source.closure import Closure

Entries = dict[str, dict[str, Any]]
#: What has kernels of its own besides the public functions: its module, and the first word of the families that test it.
ROOMS = {"jax": ("ao_lab.jax", "jax"), "saturation": ("fast.quantize.saturation", "saturation")}
#: Modules that are named as changed; of more, the number.
NAMED = 4
#: Digits of the hash of a file.
DIGITS = 12


@cache
def functions() -> dict[str, str]:
    """Entries by name, with the dotted name that their code starts from: public functions that launch kernels, and ROOMS."""
    # Read, not imported: `ao-lab ledger` needs no torch to say what is stale.
    public = {name: f"fast.{name}" for name in sorted(provenance.read_sources().exports("fast"))}
    rooms = {name: module for name, (module, _) in ROOMS.items()}
    return {name: root for name, root in {**public, **rooms}.items() if kernels_of(closure(root))}


def closure(root: str) -> Closure:
    """What a function reaches, as the code is now."""
    return provenance.closure((root,))


def kernels_of(reached: Closure) -> list[str]:
    """Modules of the Triton functions among some definitions, and those that name a file of CUDA C++."""
    triton = {module for module, name in reached.numbers if name and is_kernel(reached, module, name)}
    return sorted(triton.union(cuda_sources(reached)))


def cuda_sources(reached: Closure) -> dict[str, list[Path]]:
    """Files of CUDA C++ beside modules among some definitions, by the module, where it names them."""
    found: dict[str, list[Path]] = {}
    for module in sorted({module for module, name in reached.numbers if name}):
        path = reached.tree.root.joinpath(*module.split(".")).with_suffix(".py")
        beside = sorted(path.parent.glob("*.cu")) if path.is_file() else []
        text = path.read_text(encoding="utf-8") if beside else ""
        if named := [source for source in beside if f'"{source.name}"' in text]:
            found[module] = named
    return found


def cuda_hashes(reached: Closure) -> dict[str, str]:
    """Hashes of the CUDA C++ that some definitions compile, by file."""
    sources = sorted({source for some in cuda_sources(reached).values() for source in some})
    root = reached.tree.root
    return {
        source.relative_to(root).as_posix(): hashlib.sha256(source.read_bytes()).hexdigest()
        for source in sources
    }


def hash_of(reached: Closure) -> str:
    """The hash of some definitions, and of the CUDA C++ that they compile."""
    files = "".join(cuda_hashes(reached).values())
    return hashlib.sha256((reached.hash + files).encode()).hexdigest() if files else reached.hash


def modules_of(reached: Closure) -> dict[str, str]:
    """A short hash for each module among some definitions and each file of CUDA C++ that they compile."""
    return {**reached.modules, **{name: one[:DIGITS] for name, one in cuda_hashes(reached).items()}}


def is_kernel(reached: Closure, module: str, name: str) -> bool:
    """Whether a definition stands under a decorator called jit."""
    found = reached.tree.module(module)
    decorators = found.definitions[name].decorators if found else []
    return any(ref.attributes[-1:] == ("jit",) and not ref.module.startswith("jax") for ref in decorators)


def code_of(name: str) -> dict[str, Any]:
    """The part of an entry that says which code it is about."""
    reached = closure(functions()[name])
    return {"source_hash": hash_of(reached), "kernels": kernels_of(reached), "modules": modules_of(reached)}


def entry_of(test: str) -> str:
    """The entry that a test belongs to, by its name: ``family/function``."""
    family, _, function = test.rpartition("/")
    first = family.partition(" ")[0]
    return next((name for name, (_, word) in ROOMS.items() if word == first), function)


def is_fresh(name: str, entry: Mapping[str, Any] | None) -> bool:
    """Whether a GPU tested the code as it is now."""
    return entry is not None and entry["source_hash"] == hash_of(closure(functions()[name]))


def problem(name: str, entry: Mapping[str, Any] | None, measured: Sequence[Row]) -> str:
    """Why an entry is not valid, or nothing. `measured`: rows of all benchmarks, looked at where the tests say nothing."""
    if entry is None:
        return "missing: never tested on a GPU"
    if not is_fresh(name, entry):
        return "stale: " + changed(entry["modules"], modules_of(closure(functions()[name])))
    tests = entry["tests"]
    if tests["failed"]:
        return f"failed: {len(tests['failed'])} of {tests['run']} tests ({', '.join(tests['failed'][:3])})"
    if not tests["passed"]:
        return f"untested: {tests['state']}"
    return benchmark_problem(benchmarks_of(name, measured))


def benchmark_problem(rows: Sequence[Row]) -> str:
    """What is wrong with the benchmarks of a function: results that differ, or rows of other code."""
    wrong = sorted({row.method for row in rows if row.metric.startswith(("status: wrong", "status: error"))})
    if wrong:
        return f"failed: benchmarks {', '.join(wrong[:3])}"
    stale = sorted({row.method for row in rows if not provenance.is_current(row)})
    if stale:
        return f"stale: {len(stale)} of {len({row.method for row in rows})} benchmarks, such as {stale[0]}"
    return ""


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """The modules that differ, in words."""
    names = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    more = f" and {len(names) - NAMED} more modules" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more} changed" if names else "definitions moved"


def outcome(tests: Iterable[Mapping[str, Any]], state: str) -> dict[str, Any]:
    """Counts of some tests, and the names of those that did not pass."""
    tests = list(tests)
    ran = [one for one in tests if one["status"] != "skipped"]
    failed = [one["name"] for one in ran if not passed(one)]
    return {
        "state": state if ran else f"no test of it ran ({state})",
        "run": len(ran),
        "passed": len(ran) - len(failed),
        "failed": failed,
        "compared": sum(int(one.get("count") or 0) for one in tests),
        "different": sum(int(one.get("different") or 0) for one in tests),
        # Calls that fast gave to the reference compare it with itself: they say nothing of a kernel.
        "by_the_reference": sum(int(one.get("handed_on") or 0) for one in tests),
        "families": sorted({one["name"].rpartition("/")[0] for one in tests}),
    }


def passed(test: Mapping[str, Any]) -> bool:
    """Whether a test says that it passed and found no difference."""
    return test["status"] == "ok" and not test.get("different")


def benchmarks_of(name: str, rows: Iterable[Row]) -> list[Row]:
    """Rows of the cases that measure a function: the first that they need."""
    from experiments.kernels.cases.all_cases import CASES
    from experiments.kernels.outcome import KERNELS

    kind = "jax" if name == "jax" else KERNELS
    mine = {case.name for case in CASES.values() if entry_of_need(case.needs[0]) == name}
    return [row for row in rows if row.table.startswith(f"{kind}/") and (name == "jax" or row.method in mine)]


def entry_of_need(need: str) -> str:
    """The entry of a function that a case needs: of a module with an entry of its own the module."""
    function = need.partition(":")[0]
    return next((name for name in ROOMS if name in function.split(".")), function)


__all__ = [
    "ROOMS",
    "Entries",
    "benchmarks_of",
    "code_of",
    "entry_of",
    "functions",
    "is_fresh",
    "outcome",
    "problem",
]
