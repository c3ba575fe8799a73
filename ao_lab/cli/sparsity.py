"""`ao-lab quantize --sparsity`: a dense model pruned by magnitude, quantized, its weights stored as their kept codes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ao_lab.cli.layout import COMPRESSED, OWN, SelectedLayout, check_layers
from ao_lab.cli.terminal.output import WrongInput

if TYPE_CHECKING:
    from ao_lab.config.base import Config
    from ao_lab.quantization.api import Progress

#: What the layout says of it.
CHANGE = "weights are pruned to {} by magnitude and stored as their kept codes, which compressed-tensors has no format for"


def select_sparse_layout(config: Config, sparsity: str, layout: str) -> SelectedLayout:
    """Our own layout, and the configuration in 2:4 storage; WrongInput where either cannot be."""
    if layout == COMPRESSED:
        raise WrongInput(
            f"--sparsity {sparsity}: compressed-tensors has no format of 2:4 weights; leave --layout out"
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
    from ao_lab.cli.evaluate import by_transformers
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


__all__ = ["HEAD", "select_sparse_layout", "sparse_model"]
