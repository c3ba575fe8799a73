"""What is kept of a model while a run that was stopped may go on with it: blocks that a method has finished, what rounding does
in each scheme, and choices.

All lie in the cache, in a folder named by a digest of what they depend on: code, libraries, device, the model's files,
sequences, and scheme and methods of blocks. A run that goes on has the same bits.

Blocks, of a model by `--model`, are as `quantize_(..., resume=)` writes them. What a run that goes on says of seconds and
memory would be of its last part alone, so it says neither. When a method was measured, or failed, its folder goes.

The automatic choices of all budgets are made by one call before the first is measured, and kept whole, in any run, with the
seconds of that call. What rounding does is kept in any run too, text by text, by window. When all that was asked of a model is
measured, or failed, both go.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

from ao_lab.choose.result import Choice
from ao_lab.cli.terminal import finished_blocks, say
from ao_lab.eval import Sums
from experiments.harness.measuring import Values, is_late
from experiments.harness.revision import state
from experiments.harness.rows import Row, library_versions, write_text
from experiments.models.causal_lm import MODEL, RealModel
from experiments.models.sentence_encoder import Judged
from experiments.runs.real_models import real_subject
from experiments.runs.settings import Settings

#: What is known of a quantized model on a text, or on a task of encoders.
Kind = TypeVar("Kind", Sums, Judged)
#: What rounding does in a method's scheme.
ROUNDED = "rounding.json"
#: The choice under each budget, and what was measured of the call that made them.
CHOICES = "choices.json"


@dataclass(frozen=True)
class Unfinished:
    """The folder of one method in one scheme, and how many blocks lay in it when the run came to it."""

    folder: Path
    before: int

    @classmethod
    def of(cls, settings: Settings, model: RealModel, *method: object) -> Unfinished | None:
        """Of a method that is told by its records and scheme; None in a run that is not of models by `--model`, whose seconds
        are those of the method without what is kept."""
        if settings.asked is None:
            return None
        folder = folder_of(settings, model, method)
        return cls(folder, finished_blocks(folder))

    def tell(self, what: str, blocks: int | None) -> None:
        """Say how many blocks, of so many that the model has, are kept; nothing where none is."""
        if self.before:
            of = "" if blocks is None else f" of {blocks}"
            say(f"{what}: {self.before}{of} finished blocks are kept; it goes on after them")

    def measured(self, what: str, found: Mapping[str, Values], seconds: float | None) -> None:
        """Where the run's seconds ended a method say what is kept of it, or that they are too few; else remove the folder."""
        if not any(is_late(metric) for metric in found[MODEL]):
            shutil.rmtree(self.folder, ignore_errors=True)
            return
        if done := finished_blocks(self.folder):
            more = "" if done > self.before else ", none of them by this run"
            say(f"{what}: {done} finished blocks are kept{more}; the same command goes on after them")
        if finished_blocks(self.folder) == self.before and seconds is not None:
            say(
                f"{what}: no block was finished in {seconds:.0f} s, and in as many none will be; give "
                f"--seconds {2 * seconds:.0f} or more"
            )


@dataclass(frozen=True)
class KeptRounding:
    """The folder of what rounding does in a scheme, with which methods are compared; no seed draws it."""

    folder: Path

    @classmethod
    def of(cls, settings: Settings, model: RealModel, case: object) -> KeptRounding:
        """Of a scheme by its record."""
        return cls(folder_of(replace(settings, seed=0), model, (case, ROUNDED)))

    def remember(self, rounded: Mapping[str, Sums] | Mapping[str, Judged]) -> None:
        """Keep what rounding does, by text or task."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(self.folder / ROUNDED, json.dumps({name: asdict(sums) for name, sums in rounded.items()}))

    def remembered(self, kind: type[Kind]) -> dict[str, Kind]:
        """What `remember` kept of this kind, to the last bit; nothing where it kept nothing."""
        path = self.folder / ROUNDED
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return {name: kind(**fields) for name, fields in found.items()}

    def measured(self, failed: Iterable[Row]) -> None:
        """Remove the folder, where the run's seconds ended nothing that was asked of the model."""
        remove_unless_late(self.folder, failed)


@dataclass(frozen=True)
class KeptChoices:
    """The folder of the choices of a model."""

    folder: Path

    @classmethod
    def of(cls, settings: Settings, model: RealModel, *given: object) -> KeptChoices:
        """Of choices that are told by what `choose_` was given: options, budgets, sequences."""
        return cls(folder_of(settings, model, given))

    def remember(self, choices: Mapping[float, Choice], facts: Values) -> None:
        """Keep the choice under each budget of bits, and what was measured of making them."""
        self.folder.mkdir(parents=True, exist_ok=True)
        made = [[bits, one.to_json()] for bits, one in choices.items()]
        write_text(self.folder / CHOICES, json.dumps({"choices": made, "facts": facts}))

    def remembered(self) -> tuple[dict[float, Choice], Values]:
        """What `remember` kept, to the last bit; nothing where it kept nothing."""
        path = self.folder / CHOICES
        if not path.exists():
            return {}, {}
        found = json.loads(path.read_text(encoding="utf-8"))
        say("the automatic choices of a run that was stopped are kept; none is made again")
        facts = {name: (value, unit) for name, (value, unit) in found["facts"].items()}
        return {bits: Choice.from_json(text) for bits, text in found["choices"]}, facts

    def measured(self, failed: Iterable[Row]) -> None:
        """Remove the folder, where the run's seconds ended nothing that was asked of the model."""
        remove_unless_late(self.folder, failed)


def remove_unless_late(folder: Path, failed: Iterable[Row]) -> None:
    """Remove what is kept, where a run's seconds did not end any of what failed."""
    if not any(is_late(row.metric) for row in failed):
        shutil.rmtree(folder, ignore_errors=True)


def folder_of(settings: Settings, model: RealModel, told: tuple[object, ...]) -> Path:
    """Where a run keeps what is told by these records, of the same code, libraries, device, files and sequences."""
    files = [(one.name, one.stat().st_size, one.stat().st_mtime_ns) for one in weights_of(model.folder)]
    parts = (state(), library_versions(), settings.device_name, settings.scale, settings.seed)
    key = repr((*parts, real_subject(settings), str(model.folder.resolve()), files, told))
    return settings.cache / "calibrations" / hashlib.sha256(key.encode()).hexdigest()[:16]


def weights_of(folder: Path) -> Sequence[Path]:
    """Files of weights, in order."""
    return sorted(path for kind in ("*.safetensors", "*.bin") for path in folder.glob(kind))
