"""Guards of quantized weights in compiled programs: one comparison of identity, and no look at the parts.

Before each call of a program torch compares each parameter of a module with what was compiled for. Of a tensor subclass that is
the names of its parts, its description, and of every part all that a tensor has, in all some 25 guards, part of them Python.
Here all of that is one object, the weight's form, of which there is one for each combination; a guard asks for its identity.

That makes the guarded weight a leaf. torch 2.11 by itself skips the guards of whole modules while no dict in them changes, but
only where their tensors are leaves; else it compares all of the modules, dense weights and hooks included. A weight that
becomes another in place changes no dict, so `changes_in_place` does. It is on with the versions of TESTED alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch

MODULE = "torch._dynamo.guards"
#: Beginnings of versions of torch that the tests have covered.
TESTED = ("2.11.", "2.13.")
#: Guards by the names of what makes them: of a subclass's description, of a tensor (a part), of the list of parts' names.
DESCRIPTION, TENSOR, EQUAL = "TENSOR_SUBCLASS_METADATA_MATCH", "TENSOR_MATCH", "EQUALS_MATCH"
NAMES = "SubclassAttrListSource"
#: The attribute of torch's builder of guards where the weights are that are compared by form: their parts' names by source.
COVERED = "_ao_lab_weights"

#: Modules whose weights are compared so, with their names there.
GUARDED: WeakKeyDictionary[torch.nn.Module, set[str]] = WeakKeyDictionary()
_forms: dict[Any, Form] = {}


class Form:
    """What programs may depend on: the description, and of each part what torch compares of a tensor. Compared by identity."""

    def __call__(self, weight: Any) -> bool:
        """Whether a weight has this form."""
        return (weight._form or form_of(weight)) is self

    def __deepcopy__(self, memo: object) -> None:
        """Of a weight's copy: none yet, since parts may be copied as what they were not (inference mode's are)."""


def form_of(weight: Any) -> Form:
    """The form of a weight; found once, and kept with it until its parts are others'."""
    names, meta = weight.__tensor_flatten__()
    key = type(weight), meta, *(_described(name, getattr(weight, name)) for name in names)
    form = weight._form = _forms.setdefault(key, Form())
    return form


def _described(name: str, part: torch.Tensor) -> tuple[Any, ...]:
    keys = torch._C._dispatch_keys(part).raw_repr()
    return name, type(part), part.dtype, part.device, part.shape, part.stride(), part.requires_grad, keys


def guard_by_form(kind: type[Any]) -> None:
    """Let torch guard weights of `kind` and its subclasses by their form; after `MODULE` is imported.

    With a torch whose guards this was not tested with nothing changes: a guard too few would let a program run that was
    compiled for another weight.
    """
    if not torch.__version__.startswith(TESTED):
        return
    guard: Any = sys.modules["torch._guards"].Guard
    guard.create = creating(guard.create, kind)


def creating(plain: Callable[[Any, Any], Any], kind: type[Any]) -> Callable[[Any, Any], Any]:
    """torch's `Guard.create`, but for what is in the form of a weight of `kind`, a module's parameter of known sizes."""

    def create(guard: Any, builder: Any) -> Any:
        name, source = guard.create_fn_name(), guard.originating_source
        if name == DESCRIPTION and covers(guard, builder, kind):
            return None
        covered = builder.__dict__.get(COVERED, {})
        if name == EQUAL and type(source).__name__ == NAMES and source.base in covered and may_be_leaf():
            return None
        is_part = type(source).__name__ == "AttrSource" and source.member in covered.get(source.base, ())
        if name == TENSOR and is_part:
            return None
        return plain(guard, builder)

    return create


def covers(guard: Any, builder: Any, kind: type[Any]) -> bool:
    """Guard a weight by its form, in place of its description; False, and nothing done, where torch has to look itself.

    It has to for other tensors, for those that no module's `_parameters` hold, for open sizes, and where guards are saved.
    """
    source, graph = guard.originating_source, builder.check_fn_manager.output_graph
    if graph is None or graph.export or builder.save_guards:
        return False
    module = module_of(source, builder)
    weight: Any = None if module is None else module._parameters.get(source.index)
    if module is None or not isinstance(weight, kind):
        return False
    names = weight.__tensor_flatten__()[0]
    plain = all(type(getattr(weight, name)) is torch.Tensor for name in names)
    if not plain or not _are_known(graph, source, names):
        return False
    from torch._dynamo.guards import get_verbose_code_parts

    text = get_verbose_code_parts(f"the description and the parts' forms of {guard.name} are the same", guard)
    builder.get_guard_manager(guard).add_lambda_guard(form_of(weight), text, guard.user_stack)
    builder.__dict__.setdefault(COVERED, {})[source] = tuple(names)
    GUARDED.setdefault(module, set()).add(source.index)
    return True


def may_be_leaf() -> bool:
    """Whether torch takes no weak references to the tensors of modules that it skips, as it does from 2.12 on, if it skips any.

    `torch.utils.swap_tensors`, by which `module.to()` exchanges quantized weights, refuses tensors that have some.
    """
    skips = getattr(torch._dynamo.config, "use_recursive_dict_tags_for_guards", False)
    return not skips or torch.__version__ < "2.12"


def module_of(source: Any, builder: Any) -> torch.nn.Module | None:
    """The module of a source `module._parameters[name]`; None for other sources."""
    base: Any = getattr(source, "base", None)
    if getattr(base, "member", None) != "_parameters" or not isinstance(getattr(source, "index", None), str):
        return None
    module = builder.get(base.base)
    return module if isinstance(module, torch.nn.Module) else None


def _are_known(graph: Any, source: Any, names: list[str]) -> bool:
    """Whether a program was compiled for the numbers that the sizes and strides of a weight and its parts are."""
    from torch._dynamo.source import AttrSource

    known = graph.input_source_to_sizes_strides
    for one in (source, *(AttrSource(source, name) for name in names)):
        found = known.get(one)
        if found is None or not all(type(size) is int for size in (*found["size"], *found["stride"])):
            return False
    return True


def changes_in_place(weight: Any) -> None:
    """Let programs look at a weight again that is about to become another, or has.

    A dict's watchers, and its version, notice only values that are other objects; so for a moment it holds an equal weight.
    """
    for module, names in list(GUARDED.items()):
        for name in names:
            held: Any = module._parameters.get(name)
            if held is weight:
                module._parameters[name] = held.remade(held.parts)
                module._parameters[name] = held


__all__ = ["GUARDED", "MODULE", "Form", "changes_in_place", "creating", "form_of", "guard_by_form"]
