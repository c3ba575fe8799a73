"""What a model card says of where a quantized model comes from: its base, the command, calibration and training.

`history_of` reads what a model remembers of its calls (`quantize_` keeps its report with it), so that the card of a folder that
was saved from Python says what the one of `ao-lab quantize` does.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from torch import nn

from ao_lab.calibration.result import LayerResult
from ao_lab.checkpoint.io.files import ON_HUB
from ao_lab.checkpoint.io.markdown import LONGEST_NOTE, number, one_line, prose, span
from ao_lab.checkpoint.io.strict_json import read_object
from ao_lab.checkpoint.records import Weight
from ao_lab.config.compressed_tensors import common_name
from ao_lab.quantization.report import Report
from ao_lab.transforms.report import ATTRIBUTE, CHANGES, CONFIGURATIONS, LOADED, folded_names

#: A file of a model that `ao-lab` converted: where its weights come from.
FACTS = "pretrained.json"
#: Names of layers that a sentence gives at most.
MOST_LAYERS = 12
#: How a model was trained for its scheme, which is named between the two.
TRAINED = {
    "qat": ("trained with QAT", "then converted"),
    "lora": ("LoRA adapters trained", "then merged and quantized"),
}


@dataclass(frozen=True)
class History:
    """What a model remembers of how it was quantized."""

    #: "qat" or "lora", as `trained_by` says; "" where it was not trained for its scheme.
    trained: str = ""
    #: What calibration won, a record for each layer that methods quantized.
    calibrated: tuple[LayerResult, ...] = ()
    #: Layers that were rounded to nearest beside those.
    rounded: tuple[str, ...] = ()
    #: What `Config.for_layout` changed in the configuration, a sentence each.
    changes: tuple[str, ...] = ()
    #: The configurations that `quantize_` was given, as text.
    configurations: tuple[str, ...] = ()
    #: Whether all quantized weights were rounded to nearest here, and none was found by methods or loaded.
    nearest: bool = False

    @property
    def methods(self) -> dict[str, int]:
        """Methods as a report names them, and of how many layers each made the values, most first."""
        return dict(Counter(one.method for one in self.calibrated).most_common())

    @property
    def tokens(self) -> int:
        """Tokens of the calibration data, those that judged included; 0 where methods read none."""
        return max((one.tokens + one.held_out for one in self.calibrated), default=0)


#: Of a model that remembers nothing.
NOTHING = History()


def history_of(model: nn.Module) -> History:
    """What the report that `quantize_` left with a model says; nothing of one that has none."""
    report: Report = getattr(model, ATTRIBUTE, Report())
    calibrated = tuple(one.calibrated for one in report.changed if one.calibrated is not None)
    rounded = tuple(one.name for one in report.changed if one.calibrated is None) if calibrated else ()
    trained = trained_by(one.reason for one in report.layers)
    asked = getattr(model, CONFIGURATIONS, ())
    here = bool(asked) and not any(one.reason.startswith(LOADED) for one in report.changed)
    return History(
        trained,
        calibrated,
        rounded,
        getattr(model, CHANGES, ()),
        asked,
        here and not calibrated and not trained,
    )


def trained_by(reasons: Iterable[str]) -> str:
    """ "qat" or "lora" where reasons of a report say that layers were trained for their scheme; else ""."""
    found = [reason for reason in reasons if reason.startswith("trained by QAT")]
    return ("lora" if any("adapters" in reason for reason in found) else "qat") if found else ""


def linked(base: str) -> str:
    """The name of a model, with a link to its card on the public Hub where it has one there."""
    if not ON_HUB.fullmatch(base) or "HF_ENDPOINT" in os.environ or find_spec("huggingface_hub") is None:
        return span(base)
    from huggingface_hub import constants

    return f"[{span(base)}]({constants.ENDPOINT}/{base})"


def quantized_before(folders: Iterable[Path | None]) -> list[str]:
    """A sentence on how the base model's weights had been quantized before, as the first folder with a pretrained.json says.

    Its `grid` names the types of the file that it was converted from, GGUF's, or says "none"; [] for that, and without one.
    """
    for folder in folders:
        file = None if folder is None else folder / FACTS
        if file is None or not file.is_file() or file.is_symlink():
            continue
        try:
            grid = read_object(file).get("grid")
        except ValueError:
            continue
        if isinstance(grid, str) and grid and not grid.startswith("none"):
            told = prose(one_line(grid, LONGEST_NOTE))
            return [
                f"The weights that were quantized here had been quantized before: {told} in the base model's file. They are "
                "not the weights as trained, and losses measured against them leave out what that cost."
            ]
    return []


def made_of(
    weights: Collection[Weight],
    base: str,
    command: str | None,
    history: History = NOTHING,
    local: bool = False,
) -> str:
    """One sentence on where it comes from, and how, as far as the command, calibration or training say that.

    local: whether `base` is a folder of whoever quantized it, which nobody else has.
    """
    asked = command or " and ".join(f"ao_lab.quantize_(model, {one})" for one in history.configurations)
    by = f" with `{one_line(asked, LONGEST_NOTE).replace('`', '')}`" if asked else ""
    source = f"Quantized from {linked(base)}" if base else "Quantized" if by else "A quantized model"
    source += " (a local folder)" if base and local else ""
    data = data_of(command, history)
    words = methods_of(command, history, data)
    if history.trained:
        schemes = (prose(common_name(weight.meta.recipe)) for weight in weights)
        how, end = TRAINED[history.trained]
        words = [f"{how} ({'; '.join(dict.fromkeys(schemes))})", end]
    if any("input_scale" in weight.names for weight in weights):
        words.append("static activation scales")
    elif (command or history.nearest) and not data:
        words.append("without calibration data")
    return f"{source}{by}: {', '.join(words)}." if words else f"{source}{by}."


def data_of(command: str | None, history: History) -> str:
    """That there were calibration data, and how many tokens where the model remembers it; "" where there were none."""
    if history.tokens:
        return f" on {number(history.tokens)} tokens of calibration data"
    return " with calibration data" if command and "--calibration" in command else ""


def methods_of(command: str | None, history: History, data: str) -> list[str]:
    """How weights were quantized: by which methods, on what, and which layers were rounded nonetheless."""
    asked = ["".join(one) for one in re.findall(r"--method[ =](?:'([^']+)'|(\w+))", command or "")]
    counted = [f"{prose(name)} ({count} layer{'s' * (count > 1)})" for name, count in history.methods.items()]
    if not asked and not counted:
        plain = history.nearest if command is None else "--plan" not in command
        return ["weights rounded to nearest"] if plain else []
    words = [f"weights quantized by {', '.join(asked or counted)}{data}"]
    if asked and counted:
        words.append(f"kept: {', '.join(counted)}")
    names = folded_names(dict.fromkeys(history.rounded, ""))
    return words + ([f"but {', '.join(map(span, names[:MOST_LAYERS]))} rounded to nearest"] if names else [])


__all__ = ["NOTHING", "History", "history_of", "made_of", "quantized_before", "trained_by"]
