"""`--skip`: which layers of a model stay as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ao_lab.cli.terminal.output import WrongInput

if TYPE_CHECKING:
    from ao_lab.quantization.report import Layer


class SkippedLayers:
    """A filter of linear layers and batched experts but those that `--skip` names; it remembers which names were met. Routers
    stay dense.

    A name is that of a layer, of a part of the model that holds it, or the end of either, whole between dots: vision_tower,
    layers.0, q_proj. "re:" and a regular expression is for whole paths. A head that is tied to the embedding stays dense too.
    `default`: what is left where --skip is not given, and may not be there.
    """

    leaves_routers = leaves_tied = True

    def __init__(self, skip: list[str] | None, default: Sequence[str] = ()) -> None:
        from ao_lab.config.fqn import PATTERN, compiled_pattern

        self.given, self.met = skip is not None, set[str]()
        self.skip = list(default) if skip is None else skip
        try:
            self.patterns = {n: compiled_pattern(n) for n in self.skip if n.startswith(PATTERN)}
        except ValueError as error:
            raise WrongInput(f"--skip: {str(error).removeprefix('FqnToConfig: ')}") from error

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
        skipped = self.names(layer.name.rpartition(".")[0])
        kinds = "only linear layers and experts are quantized"
        refused = f"--skip {skipped[0]}" if skipped else f"{layer.kind}: {kinds}"
        return layer.reason.replace("accepted by filter_fn", layer.kind).replace(
            "refused by filter_fn", refused
        )

    def check(self) -> None:
        """WrongInput for names that were given and that no layer has."""
        missing = [name for name in self.skip if name not in self.met]
        if self.given and missing:
            raise WrongInput(
                f"--skip {', '.join(missing)}: no layer is called that, or lies in what is called so"
            )


__all__ = ["SkippedLayers"]
