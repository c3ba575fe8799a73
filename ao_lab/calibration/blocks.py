"""Where a model's blocks are: the list of layers of one kind that its forward runs through, one after the other.

Candidates are every `nn.ModuleList` whose entries have one class and hold linear layers, but those inside another candidate (a
block's experts). The longest is the list; where two are equally long (an encoder and a decoder) the caller names one.
"""

from __future__ import annotations

from torch import nn

#: The name that makes the whole model one block.
WHOLE = ""


def block_lists(model: nn.Module) -> dict[str, nn.ModuleList]:
    """The candidates by name, in the order of the model's modules."""
    found: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if name and not inside and isinstance(module, nn.ModuleList) and _is_list_of_blocks(module):
            found[name] = module
    return found


def _is_list_of_blocks(modules: nn.ModuleList) -> bool:
    """One class, with linear layers inside; a list of linear layers or of norms is no list of blocks."""
    return len({type(module) for module in modules}) == 1 and any(map(_holds_linears, modules))


def _holds_linears(block: nn.Module) -> bool:
    return any(_is_linear(module) for module in block.modules() if module is not block)


def _is_linear(module: nn.Module) -> bool:
    """nn.Linear, or transformers' Conv1D by its name."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def find_blocks(model: nn.Module, blocks: str | None = None) -> dict[str, nn.Module]:
    """The blocks by full name, in order. `blocks`: the name of their nn.ModuleList or nn.Sequential, "" for the whole model as
    one block; None looks for the longest list.

    Raises ValueError where there is no list, where two are equally long, and for a name that is none; TypeError for no string.
    """
    if blocks is None:
        blocks = _longest(model)
    if not isinstance(blocks, str):
        raise TypeError(
            f"blocks is the name of a list of modules, got {type(blocks).__name__}: {blocks!r:.60}"
        )
    if blocks == WHOLE:
        return {WHOLE: model}
    module = dict(model.named_modules()).get(blocks)
    if not isinstance(module, (nn.ModuleList, nn.Sequential)) or not len(module):
        kind = (
            "no module" if module is None else f"a {type(module).__name__} of {len(list(module.children()))}"
        )
        raise ValueError(
            f"blocks={blocks!r} is {kind} of this model; name an nn.ModuleList or nn.Sequential that its forward runs through"
            f"{_known(model)}, or give blocks='' to take the whole model as one block"
        )
    return {f"{blocks}.{name}": block for name, block in module.named_children()}


def _longest(model: nn.Module) -> str:
    """The name of the longest list; ValueError for none, or for several."""
    lists = block_lists(model)
    most = max(map(len, lists.values()), default=0)
    longest = [name for name, modules in lists.items() if len(modules) == most]
    if len(longest) == 1:
        return longest[0]
    if not longest:
        raise ValueError(
            f"{type(model).__name__} has no nn.ModuleList of blocks of one class that hold linear layers; name the list by "
            f"blocks=, or give blocks='' to take the whole model as one block"
        )
    raise ValueError(
        f"{' and '.join(longest)} are lists of {most} blocks each, so that it is open which one to walk; name it by blocks="
    )


def _known(model: nn.Module) -> str:
    names = list(block_lists(model))
    return f" (here {', '.join(names[:5])})" if names else ""


__all__ = ["WHOLE", "block_lists", "find_blocks"]
