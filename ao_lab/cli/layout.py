"""Which layout `ao-lab quantize` writes, decided before any work, and what it says of it.

"auto" is compressed-tensors, with the configuration changed so that transformers and vLLM compute what was quantized
(`Config.for_layout`); each change is told with its reason. What that layout cannot hold, a scheme or a layer of the model, goes
with the configuration as it was given into the layout "ao_lab", which transformers reads after `import ao_lab`; the reason is
told. "compressed-tensors" takes the configuration as it is, or refuses.

Layers are looked at without their weights: the model is built and quantized on the meta device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ao_lab.cli.terminal.output import WrongInput, console

if TYPE_CHECKING:
    from torch import nn

    from ao_lab.checkpoint.api import Saved
    from ao_lab.cli.skipped_layers import SkippedLayers
    from ao_lab.config.base import Config

COMPRESSED, OWN = "compressed-tensors", "ao_lab"
ASK = "give --layout ao_lab, a layout that transformers reads after `import ao_lab`"
READERS = {
    COMPRESSED: "transformers (with compressed-tensors) and vLLM read it, without ao_lab",
    OWN: "transformers reads it after `import ao_lab`, and refuses it without; ao_lab.load_pretrained reads it",
}
#: How many layers are named, and how many --skip options are proposed.
MOST = 3


@dataclass(frozen=True)
class SelectedLayout:
    """The layout, the configuration for it, and what was changed in that, a sentence each."""

    layout: str
    config: Config
    changes: tuple[str, ...] = ()
    #: Why "auto" is not compressed-tensors.
    reasons: tuple[str, ...] = ()
    #: Under "auto" the configuration as it was given; None where the layout was named.
    given: Config | None = None

    def for_model(self, source: Path, accepts: SkippedLayers) -> SelectedLayout:
        """The layout for the layers of a folder's model that a filter accepts, before a weight is read.

        WrongInput where the named layout cannot hold one of them, and for names of --skip that there are not; ValueError as
        `quantize_` raises for the configuration, and for layers of the files that config.json leaves out.
        """
        model = without_weights(source)
        if model is None:
            return self
        check_layers(source, model)
        from ao_lab.checkpoint.api import obstacles
        from ao_lab.quantization.api import quantize_

        quantize_(model, self.config, accepts)
        accepts.check()
        found = obstacles(model) if self.layout == COMPRESSED else []
        if not found:
            return self
        kept = ways_out(model, found, [name for name in accepts.skip if name in accepts.met])
        if self.given is None:
            more = f"{kept} leaves what is in the way in high precision, or " if kept else ""
            raise WrongInput(f"{in_words(found)}; {more}{ASK}")
        more = f"; {kept} leaves what is in the way in high precision" if kept else ""
        return self.fallen_back(in_words(found) + more)

    def fallen_back(self, reason: str) -> SelectedLayout:
        """The layout that holds everything, and the configuration as it was given."""
        given = self.config if self.given is None else self.given
        return replace(self, layout=OWN, config=given, changes=(), reasons=(*self.reasons, reason))

    def saved(
        self, model: nn.Module, target: Path, beside: Mapping[str, Any] | None = None
    ) -> tuple[SelectedLayout, Saved]:
        """What was written, and in which layout: values may be none that compressed-tensors has (NaN, extreme scales).

        `beside`: tensors of the model's files that transformers does not load.
        """
        from ao_lab.checkpoint.api import write_model

        try:
            return self, write_model(model, target, self.layout, beside=beside)
        except ValueError as error:
            if self.layout == OWN:
                raise
            if self.given is None:
                raise ValueError(f"{plain(str(error))}; {ASK}") from error
            own = replace(self, layout=OWN, reasons=(*self.reasons, plain(str(error))))
            return own, write_model(model, target, OWN, beside=beside)

    def told(self, limits: Sequence[str]) -> dict[str, Any]:
        """What is to be known of the folder."""
        return {
            "layout": self.layout,
            "readers": READERS[self.layout],
            "changes": list(self.changes),
            "reasons": list(self.reasons),
            "limits": list(limits),
        }


def without_weights(source: Path) -> nn.Module | None:
    """The model of a folder on the meta device; None for one that is quantized already, or that its loader is to refuse."""
    from ao_lab.checkpoint.io.shards import has_weights, look_at
    from ao_lab.checkpoint.model_builder import LARGEST_COUNT, planned_model
    from ao_lab.checkpoint.streaming import is_quantized
    from ao_lab.install.extras import needed

    needed("transformers")
    try:
        if is_quantized(source):
            return None
        specs = look_at(source).specs if has_weights(source) else {}
        floats = (spec.dtype for spec in specs.values() if spec.dtype.is_floating_point)
        return planned_model(source, len(specs) or LARGEST_COUNT, None, next(floats, None))
    except ValueError:
        return None


def check_layers(source: Path, model: nn.Module) -> None:
    """WrongInput where the files have whole layers that the model of their configuration lacks: it is another model."""
    from ao_lab.checkpoint.experts.conversion import left_out_layers
    from ao_lab.checkpoint.io.shards import has_weights, look_at

    found = left_out_layers(look_at(source), model) if has_weights(source) else []
    if found:
        more = f" and {len(found) - MOST} more" if len(found) > MOST else ""
        raise WrongInput(
            f"{source} has weights of {', '.join(found[:MOST])}{more}, which its config.json leaves out; correct the number of "
            "layers there, or, where fewer are wanted, load the folder with transformers and save it again"
        )


def plain(reason: str) -> str:
    """A reason of the library without its way out, which is Python."""
    from ao_lab.checkpoint.export.plain_reader import WAY_OUT

    return reason.replace(f"; {WAY_OUT}", "").partition("; ")[0]


def in_words(reasons: Sequence[str]) -> str:
    """The first reasons, and how many more there are."""
    more = f"; and {len(reasons) - MOST} more like these" if len(reasons) > MOST else ""
    return "; ".join(dict.fromkeys(map(plain, reasons[:MOST]))) + more


def ways_out(model: nn.Module, reasons: Sequence[str], skip: Sequence[str]) -> str:
    """The --skip options that leave out what reasons name; none where they name no layers, too many of them, or all."""
    from ao_lab.tensor.quantized_tensor import QuantizedTensor

    modules = dict(model.named_modules())
    found = [reason.partition(": ")[0] for reason in reasons]
    places = [name if name in modules else name.rpartition(".")[0] for name in found]
    every = [name for name, p in model.named_parameters() if isinstance(p, QuantizedTensor)]
    left = [name for name in every if not any(f"{name}.".startswith(f"{place}.") for place in places)]
    if not left or not all(place in modules for place in places):
        return ""
    # A nested model by its path; layers of many blocks by what they are called.
    names = {place if len(places) == 1 else place.rpartition(".")[2] for place in places}
    if len(names) > MOST or any(name.isdigit() for name in names):
        return ""
    return " ".join(f"--skip {name}" for name in dict.fromkeys([*skip, *sorted(names)]))


def select_layout(config: Config, name: str, layout: str) -> SelectedLayout:
    """The layout of what --layout and --config say; WrongInput where a named one cannot hold the configuration."""
    from ao_lab.checkpoint.export.plain_reader import check_recipe
    from ao_lab.config.compressed_tensors import changes

    if layout == OWN:
        return SelectedLayout(OWN, config)
    try:
        wanted = config if layout == COMPRESSED else config.for_layout(COMPRESSED)
        check_recipe(wanted.recipe())
    except ValueError as error:
        # After the reason comes the library's way out, in Python; here it is that of the command line.
        reason = plain(str(error))
        if layout != COMPRESSED:
            return SelectedLayout(OWN, config, reasons=(reason,), given=config)
        more = "; --layout auto takes what readers compute" if _by_auto(config) else ""
        raise WrongInput(f"--config {name}: {reason}; {ASK}{more}") from error
    told = tuple(changes(config.recipe(), wanted.recipe()))
    return SelectedLayout(COMPRESSED, wanted, told, given=None if layout == COMPRESSED else config)


def _by_auto(config: Config) -> bool:
    """Whether --layout auto has something for a configuration."""
    from ao_lab.checkpoint.export.plain_reader import check_recipe

    try:
        check_recipe(config.for_layout(COMPRESSED).recipe())
    except ValueError:
        return False
    return True


def say(told: dict[str, Any]) -> None:
    """The layout, its readers, what was changed and what to know, as lines on stdout."""
    out = console()
    out.print(f"layout: {told['layout']}; {told['readers']}", markup=False)
    for line in told["reasons"]:
        out.print(f"  not in compressed-tensors: {line}", markup=False)
    for kind in ("changes", "limits", "tensors", "files"):
        for line in told.get(kind, ()):
            out.print(f"  {line}", markup=False)
    if told["changes"] and told["layout"] != OWN:
        out.print("  --layout ao_lab keeps the configuration as it was given", markup=False)


__all__ = ["SelectedLayout", "say", "select_layout"]
