"""Which layout `ao-lab quantize` writes, decided before any work, and what it says of it.

"auto" is compressed-tensors, with the configuration changed so that transformers and vLLM compute what was quantized
(`Config.for_layout`); each change is told with its reason. What that layout cannot hold, a scheme or a layer of the model, goes
with the configuration as it was given into the layout "ao_lab", which transformers reads after `import ao_lab`; the reason is
told. "compressed-tensors" takes the configuration as it is, or refuses.

Layers are looked at without their weights: the model is built and quantized on the meta device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ao_lab.cli.terminal import WrongInput, console
from ao_lab.measure.comparison import COMPRESSED, OWN, clients_of

if TYPE_CHECKING:
    from torch import nn

    from ao_lab.checkpoint.api import Saved
    from ao_lab.config.base import Config
    from ao_lab.quantization.report import Layer
    from ao_lab.transforms.plan import Progress


ASK = "give --layout ao_lab, a layout that transformers loads after `import ao_lab`"
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
    #: What `for_model` found of layers that its groups do not divide; "" where it divides all.
    undivided: str = ""

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
        from ao_lab.quantization.groups import told_elsewhere

        with told_elsewhere():
            report = quantize_(model, self.config, accepts)
        accepts.check()
        plan = replace(self, undivided=undivided_note(report.layers, self.config))
        found = obstacles(model) if self.layout == COMPRESSED else []
        if not found:
            return plan
        kept = ways_out(model, found, [name for name in accepts.skip if name in accepts.met])
        if self.given is None:
            more = f"{kept} leaves these layers unquantized, or " if kept else ""
            raise WrongInput(f"{in_words(found)}; {more}{ASK}")
        more = f"; {kept} leaves these layers unquantized" if kept else ""
        return plan.fallen_back(in_words(found) + more)

    def for_methods(self, methods: Sequence[str]) -> SelectedLayout:
        """The layout for what methods make: residuals have a place in our own alone. WrongInput where the other is named."""
        if not any(one.split()[:1] == ["lowrank"] for one in methods) or self.layout == OWN:
            return self
        reason = "low-rank residuals have no place in compressed-tensors"
        if self.given is None:
            raise WrongInput(f"--method lowrank: {reason}; {ASK}")
        return self.fallen_back(reason)

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

    def told(self, limits: Sequence[str], target: Path) -> dict[str, Any]:
        """What is to be known of the folder that was written."""
        return {
            "layout": self.layout,
            "readers": readers_of(self.layout, target),
            "changes": list(self.changes),
            "reasons": list(self.reasons),
            "limits": list(limits),
        }


def readers_of(layout: str, target: Path) -> str:
    """Who loads a folder; of vLLM what it lists no kernel for."""
    from ao_lab.checkpoint.model_card import unserved_weights

    return clients_of(layout, unserved_weights(target) if layout == COMPRESSED else "")


def undivided_note(layers: Sequence[Layer], config: Config) -> str:
    """How many layers stay dense because the groups of a configuration do not divide them, and the option that changes it."""
    from ao_lab.quantization.groups import UNDIVIDED, undivided_layers

    linear = {one.name: one for one in layers if one.changed or UNDIVIDED.search(one.reason)}
    sizes, told = undivided_layers(
        {name: (one.shape, "" if one.changed else one.reason) for name, one in linear.items()}
    )
    if not told or not sizes:
        return told
    has_option = any(one.name == "group_size" for one in fields(config))
    way = f"--option group_size={sizes[0]}" if has_option else f"a scheme with groups of {sizes[0]}"
    return f"{told}; {way} quantizes all of them"


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
    from ao_lab.checkpoint.experts import left_out_layers
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
    from ao_lab.checkpoint.plain_readers import WAY_OUT

    return reason.replace(f"; {WAY_OUT}", "").partition("; ")[0]


def in_words(reasons: Sequence[str]) -> str:
    """The first reasons, each with the first layer that it is of, and how many more there are."""
    groups: dict[str, list[str]] = {}
    for reason in map(plain, reasons):
        name, colon, why = reason.partition(": ")
        groups.setdefault(why if colon else reason, []).append(name if colon else "")
    told = [
        f"{names[0]}{f' and {len(names) - 1} more' * (len(names) > 1)}: {why}" if names[0] else why
        for why, names in groups.items()
    ]
    more = f"; and {len(told) - MOST} other reasons" if len(told) > MOST else ""
    return "; ".join(told[:MOST]) + more


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
    # A nested model by its path; layers of many blocks by what they are called, as long as that names no others.
    names = {place if len(places) == 1 else ending(place, left) for place in places}
    if len(names) > MOST or any(name.isdigit() for name in names):
        return ""
    return " ".join(f"--skip {name}" for name in dict.fromkeys([*skip, *sorted(names)]))


def ending(place: str, others: Sequence[str]) -> str:
    """The shortest end of a module's path, whole between dots, that is part of no other path."""
    parts = place.split(".")
    ends = (".".join(parts[-count:]) for count in range(1, len(parts)))
    return next((end for end in ends if not any(f".{end}." in f".{other}." for other in others)), place)


def select_layout(config: Config, name: str, layout: str) -> SelectedLayout:
    """The layout of what --layout and --config say; WrongInput where a named one cannot hold the configuration."""
    from ao_lab.checkpoint.plain_readers import check_recipe
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
        more = "; --layout auto adapts the configuration to what loaders compute" if _by_auto(config) else ""
        raise WrongInput(f"--config {name}: {reason}; {ASK}{more}") from error
    told = tuple(changes(config.recipe(), wanted.recipe()))
    return SelectedLayout(COMPRESSED, wanted, told, given=None if layout == COMPRESSED else config)


def _by_auto(config: Config) -> bool:
    """Whether --layout auto has something for a configuration."""
    from ao_lab.checkpoint.plain_readers import check_recipe

    try:
        check_recipe(config.for_layout(COMPRESSED).recipe())
    except ValueError:
        return False
    return True


def say(told: dict[str, Any]) -> None:
    """The layout, its readers and what was changed, as lines on stdout; what readers' kernels do with -v alone."""
    out, verbose = console(), logging.getLogger("ao_lab").isEnabledFor(logging.INFO)
    out.print(f"layout: {told['layout']}; {told['readers']}", markup=False)
    for line in told["reasons"]:
        out.print(f"  not in compressed-tensors: {line}", markup=False)
    for kind in ("changes", *(["limits"] if verbose else []), "tensors", "beside"):
        for line in told.get(kind, ()):
            out.print(f"  {line}", markup=False)
    if told["changes"] and told["layout"] != OWN:
        zeros = any(
            " because transformers 5.23 does not load packed zero points" in one for one in told["changes"]
        )
        also = (
            ", --layout compressed-tensors too (zero points, with dequantize=True in config.json)"
            if zeros
            else ""
        )
        out.print(f"  --layout ao_lab stores the configuration unchanged{also}", markup=False)
    if told["limits"] and not verbose:
        out.print(
            "  README.md in the folder has notes on what readers compute (here: ao-lab -v)", markup=False
        )


# `ao-lab quantize --sparsity`: a dense model pruned by magnitude, quantized, its weights stored as their kept codes.

#: What the layout says of it.
CHANGE = (
    "weights are pruned to {} by magnitude and stored compressed, for which compressed-tensors has no format"
)


def select_sparse_layout(config: Config, sparsity: str, layout: str) -> SelectedLayout:
    """Our own layout, and the configuration in 2:4 storage; WrongInput where either cannot be."""
    if layout == COMPRESSED:
        raise WrongInput(
            f"--sparsity {sparsity}: compressed-tensors has no format for 2:4 weights; drop --layout compressed-tensors"
        )
    try:
        sparse = replace(config, sparsity=sparsity)
    except ValueError as error:
        raise WrongInput(f"--sparsity {sparsity}: {error}") from error
    return SelectedLayout(OWN, sparse, (CHANGE.format(sparsity),) if layout != OWN else ())


#: What pruning leaves where --skip does not say it, as papers do.
HEAD = ("lm_head",)


def sparse_model(
    source: Path, config: Config, accepts: Callable[[Any, str], bool], progress: Progress | None
) -> Any:
    """The model of a folder, pruned and quantized in memory: its linear layers that `accepts` takes; experts stay dense."""
    from ao_lab.measure.folders import by_transformers
    from ao_lab.quantization.api import quantize_
    from ao_lab.sparsity.api import sparsify_
    from ao_lab.sparsity.config import SparsityConfig
    from ao_lab.transforms.layers import is_linear, tied_layers

    def linear(module: Any, path: str) -> bool:
        return accepts(module, path) and is_linear(module) and path not in tied

    linear.leaves_routers = True  # type: ignore[attr-defined]
    model = by_transformers(source, None)
    check_layers(source, model)
    tied = tied_layers(model)
    sparsify_(model, SparsityConfig(config.sparsity or "2:4"), linear)
    quantize_(model, config, linear, progress=progress)
    return model


# `--skip`: which layers of a model stay as they are.


class SkippedLayers:
    """A filter of linear layers and batched experts but those that `--skip` names; it remembers which names were met. Routers
    stay dense.

    A name is that of a layer, of a part of the model that holds it, or the end of either, whole between dots: vision_tower,
    layers.0, q_proj. "re:" and a regular expression is for whole paths. A head that is tied to the embedding stays dense too.
    `default`: what is left where --skip is not given, and may not be there.
    """

    leaves_routers = leaves_tied = True

    def __init__(self, skip: list[str] | None, default: Sequence[str] = ()) -> None:
        from ao_lab.config.base import PATTERN, compiled_pattern

        self.given, self.met = skip is not None, set[str]()
        self.skip = list(default) if skip is None else skip
        try:
            self.patterns = {n: compiled_pattern(n) for n in self.skip if n.startswith(PATTERN)}
        except ValueError as error:
            raise WrongInput(f"--skip: {error}") from error

    def __call__(self, module: Any, path: str) -> bool:
        """Whether a module is to be quantized."""
        from ao_lab.transforms.layers import linear_and_experts

        found = self.names(path)
        self.met.update(found)
        return linear_and_experts(module, path) and not found

    def names(self, path: str) -> list[str]:
        """Which of --skip name a module."""
        return [
            name
            for name in self.skip
            if (self.patterns[name].fullmatch(path) if name in self.patterns else f".{name}." in f".{path}.")
        ]

    def told(self, layer: Layer) -> str:
        """A report's reason in the words of the command line."""
        from ao_lab.quantization.groups import without_groups
        from ao_lab.transforms.plan import PYTHON_ADVICE

        skipped = self.names(layer.name.rpartition(".")[0])
        kinds = "only linear layers and experts are quantized"
        refused = f"{layer.kind}: {kinds}"
        if skipped:
            refused = f"--skip {skipped[0]}" if self.given else "left unquantized by default with --sparsity"
        reason = without_groups(layer.reason.partition(PYTHON_ADVICE)[0])
        return reason.replace("accepted by filter_fn", layer.kind).replace("refused by filter_fn", refused)

    def check_in(self, model: nn.Module) -> None:
        """WrongInput for names that were given and that no layer of a model has."""
        for path, _ in model.named_modules():
            self.met.update(self.names(path))
        self.check()

    def check(self) -> None:
        """WrongInput for names that were given and that no layer has."""
        missing = [name for name in self.skip if name not in self.met]
        if self.given and missing:
            raise WrongInput(f"--skip {', '.join(missing)}: no layer or submodule has this name")
