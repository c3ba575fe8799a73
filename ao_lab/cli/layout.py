"""Which layout `ao-lab quantize` writes, decided before any work, and what it says of it.

"auto" is compressed-tensors, with the configuration changed so that transformers and vLLM compute what was quantized
(`Config.for_layout`); each change is told with its reason. "compressed-tensors" takes the configuration as it is, or refuses.
What that layout cannot say at all wants `--layout ao_lab`, which holds everything and which transformers reads after
`import ao_lab`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ao_lab.cli.terminal.output import WrongInput, console

if TYPE_CHECKING:
    from ao_lab.config.base import Config
    from ao_lab.config.recipe import Recipe

COMPRESSED, OWN = "compressed-tensors", "ao_lab"
ASK = "give --layout ao_lab, a layout that transformers reads after `import ao_lab`"
READERS = {
    COMPRESSED: "transformers (with compressed-tensors) and vLLM read it, without ao_lab",
    OWN: "transformers reads it after `import ao_lab`, and refuses it without; ao_lab.load_pretrained reads it",
}


@dataclass(frozen=True)
class SelectedLayout:
    """The layout, the configuration for it, and what was changed in that, a sentence each."""

    layout: str
    config: Config
    changes: tuple[str, ...] = ()

    def accepting(self, accepts: Callable[[Any, str], bool]) -> Any:
        """A filter like `accepts` that stops the work, before it begins, at a layer that the layout cannot hold."""
        return accepts if self.layout == OWN else Sayable(accepts, self.config.recipe())

    def told(self, limits: Sequence[str]) -> dict[str, Any]:
        """What is to be known of the folder."""
        return {
            "layout": self.layout,
            "readers": READERS[self.layout],
            "changes": list(self.changes),
            "limits": list(limits),
        }


class Sayable:
    """A filter that raises ValueError at an accepted layer whose product readers of compressed-tensors cannot compute."""

    def __init__(self, accepts: Callable[[Any, str], bool], recipe: Recipe) -> None:
        self.accepts, self.recipe = accepts, recipe
        self.leaves_routers = getattr(accepts, "leaves_routers", False)

    def __call__(self, module: Any, path: str) -> bool:
        """Whether a module is to be quantized."""
        accepted = self.accepts(module, path)
        if accepted and (reason := self.obstacle(module)) is not None:
            raise ValueError(f"{path}: {reason}; {ASK}")
        return accepted

    def obstacle(self, module: Any) -> str | None:
        """Why the layout cannot hold a module's weight; None where it can."""
        import torch

        from ao_lab.checkpoint.export.plain_reader import made_in_bfloat16, unread_zero_points
        from ao_lab.quantization.modules import is_transposed

        if is_transposed(module):
            return f"compressed-tensors holds nn.Linear, and this is a {type(module).__name__}"
        weight = getattr(module, "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
            return None
        if made_in_bfloat16(self.recipe.weight) and weight.dtype != torch.bfloat16:
            return (
                f"readers make weights of {self.recipe.weight.name} in bfloat16, and the model is saved in "
                f"{str(weight.dtype).removeprefix('torch.')} (model.to(torch.bfloat16) before saving changes that)"
            )
        return unread_zero_points(self.recipe, tuple(weight.shape)) or self._inputs(weight.shape[-1])

    def _inputs(self, length: int) -> str | None:
        scheme = self.recipe.activation
        group = 1 if scheme is None else scheme.scale.block
        if isinstance(group, int) and group > 0 and length % group:
            return f"readers want inputs in whole groups of {group}, and rows have {length}"
        return None


def select_layout(config: Config, name: str, layout: str) -> SelectedLayout:
    """The layout of what --layout and --config say; WrongInput where it cannot hold the configuration."""
    from ao_lab.checkpoint.export.plain_reader import check_recipe
    from ao_lab.config.compressed_tensors.layouts import changes

    if layout == OWN:
        return SelectedLayout(OWN, config)
    try:
        wanted = config if layout == COMPRESSED else config.for_layout(COMPRESSED)
        check_recipe(wanted.recipe())
    except ValueError as error:
        # After the reason comes the library's way out, in Python; here it is that of the command line.
        reason = str(error).partition("; ")[0]
        more = (
            "; --layout auto takes what readers compute" if layout == COMPRESSED and _by_auto(config) else ""
        )
        raise WrongInput(f"--config {name}: {reason}; {ASK}{more}") from error
    return SelectedLayout(COMPRESSED, wanted, tuple(changes(config.recipe(), wanted.recipe())))


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
    for kind in ("changes", "limits"):
        for line in told[kind]:
            out.print(f"  {line}", markup=False)
    if told["changes"]:
        out.print("  --layout ao_lab keeps the configuration as it was given", markup=False)


__all__ = ["Sayable", "SelectedLayout", "say", "select_layout"]
