"""What a run ran on: recorded beside the rows, one entry per experiment, scale and device."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from experiments.data.corpora.record import DEFAULT
from experiments.harness.paths import Paths
from experiments.harness.provenance import experiment_hash
from experiments.harness.registry import EXPERIMENTS
from experiments.harness.rows import write_text
from experiments.harness.run_records import read_runs, run_name
from experiments.harness.workers import cores
from experiments.runs.settings import Settings

#: The entry of a record that counts published values of the run's scale and device that are of other libraries or processors.
FOREIGN = "rows_of_other_machines"
LIBRARIES = ("torch", "triton", "numpy", "ml_dtypes", "sympy", "jax", "torchao", "matplotlib")


def record_run(
    paths: Paths,
    experiment: str,
    settings: Settings,
    seconds: float,
    rows: int,
    resumed: int,
    foreign: int | None = None,
) -> Path:
    """Add a run to ``reports/data/environment.json`` and write its corpus, if any, beside it; returns the former.

    A run that found all its rows finished (`resumed` of them were) leaves the record of the run that measured them, if that
    one lived to write it: a record of other code or other libraries is of another run. foreign: of an experiment that goes on
    from published rows, how many of this scale and device are of other or unknown libraries (`experiments.runs.resume`).
    """
    path = paths.data / "environment.json"
    runs = read_runs(path)
    trained = EXPERIMENTS[experiment].trained
    name = record_name(experiment, settings)
    before = runs.get(name, {})
    code, versions = experiment_hash(experiment), libraries()
    if rows == resumed and (before.get("source_hash"), before.get("libraries")) == (code, versions):
        return path
    runs[name] = {
        "experiment": experiment,
        "scale": settings.scale,
        "device": settings.device_name,
        "finished": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "seconds": round(seconds, 1),
        "rows": rows,
        "rows_from_an_interrupted_run": resumed,
        **({} if foreign is None else {FOREIGN: foreign}),
        "seed": settings.seed,
        "source_hash": code,
        "machine": machine(),
        "libraries": versions,
        **(about(experiment, settings) if trained else {"corpus": None}),
    }
    write_text(path, json.dumps(dict(sorted(runs.items())), indent=2) + "\n")
    if trained:
        corpus = settings.corpus.describe()
        write_text(paths.data / f"{corpus['name']}.json", json.dumps(corpus, indent=2) + "\n")
    return path


def record_name(experiment: str, settings: Settings) -> str:
    """How the record of a run is called."""
    other = EXPERIMENTS[experiment].trained and settings.corpus.source != DEFAULT
    corpus_name = settings.corpus.source if other else ""
    return run_name(experiment, settings.scale, settings.device_name, corpus_name)


def about(experiment: str, settings: Settings) -> dict[str, Any]:
    """What an experiment's function `about` says of what it trained, or `about_model`."""
    said: dict[str, Any] = getattr(EXPERIMENTS[experiment].run_module(), "about", about_model)(settings)
    return said


def about_model(settings: Settings) -> dict[str, Any]:
    """The trained model and the multiple-choice settings, where this run used them, and the shape of synthetic tensors."""
    corpus = settings.corpus
    model = settings.trained.facts if "trained" in settings.__dict__ else {"key": settings.model_key}
    return {
        "corpus": {"name": corpus.name, "sha256": corpus.sha256, "files": len(corpus.documents)},
        "model": model,
        "multiple_choice": asdict(settings.multiple_choice),
        "synthetic_shape": list(settings.shape),
    }


def machine() -> dict[str, Any]:
    """Processor, cores, threads, system."""
    return {
        "processor": processor(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def processor() -> str:
    """The processor's name, as the system gives it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def libraries() -> dict[str, str]:
    """Versions of those libraries that are installed."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
