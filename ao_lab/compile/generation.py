"""transformers' `generate()` compiled with our options.

    ao_lab.quantize_(model, ao_lab.Int4WeightOnlyConfig())
    print(ao_lab.prepare_for_generate_(model))
    model.generate(...)

transformers compiles a model by itself, on a GPU, where its cache has a fixed size; it does so with a mode of torch.compile,
beside which torch takes no options. So the mode becomes the options that it stands for, and ours are put beside them.

Guards of a compiled program that quantized weights need not have, as option "guard_filter_fn" of `torch.compile`.

Before each call of a program torch compares what it was compiled for: of a quantized weight its class, shape, description, and
every tensor inside, several times a dense weight's time of the host (times: reports/LOG.md). Codes and scales follow from the
description, so that their guards are left out. Of parameters of modules there are none to begin with, since
`tensor.weight_guards` compares their parts in one step; left here are weights that come to a program another way.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ao_lab.compile.fused_linears import FuseLinears, compile_options, inductor_class
from ao_lab.compile.joined_linears import JoinMatmuls, join_weights_
from ao_lab.install.extras import needed

#: Parts of a weight that its shape and its description settle: presence, dtype and shape. Scales of inputs are there or not.
SETTLED = ("codes", "scale", "outer", "zero")
TENSOR, DESCRIPTION = "TENSOR_MATCH", "TENSOR_SUBCLASS_METADATA_MATCH"
#: Where the classes of quantized weights are.
HOME = "ao_lab.tensor."


class WithoutParts(str):
    """Keeps all guards but those of the parts of quantized weights.

    It is text, so that it is equal to its copies, and JSON; not "", which torch takes for no filter.
    """

    __slots__ = ()

    def __call__(self, entries: Sequence[Any]) -> list[bool]:
        """Whether to keep each guard."""
        weights = {
            entry.name
            for entry in entries
            if entry.guard_type == DESCRIPTION and type(entry.value).__module__.startswith(HOME)
        }
        return [not (entry.guard_type == TENSOR and _is_part(entry.name, weights)) for entry in entries]


class WithoutModules(str):
    """Keeps no guards of modules: of their weights, hooks and modes. Text, as the other."""

    __slots__ = ()

    def __call__(self, entries: Sequence[Any]) -> list[bool]:
        """Whether to keep each guard."""
        return [not entry.orig_guard.source.is_unspecialized_nn_module() for entry in entries]


def _is_part(name: str, weights: set[str]) -> bool:
    weight, _, part = name.rpartition(".")
    return part in SETTLED and weight in weights


def guard_options(frozen: bool) -> dict[str, Any]:
    """Options of `torch.compile`; none where this version of torch has no such option.

    frozen: no module changes any more, so that none is looked at.
    """
    import torch

    if not hasattr(torch.compiler, "skip_guard_on_all_nn_modules_unsafe"):  # came with the option
        return {}
    return {"guard_filter_fn": WithoutModules("without modules") if frozen else WithoutParts("without parts")}


CACHE, BACKEND, PASS = "static", "inductor", "post_grad_custom_pre_pass"
#: Caches of a fixed size, with which transformers compiles.
FIXED = ("static", "offloaded_static", "sliding_window", "hybrid")
#: Caches that grow; None stands for one, too.
GROWING = (None, "dynamic", "dynamic_full")


#: What the pass is called in options, and what separates that from a number.
NAME, SEPARATE = f"{FuseLinears.__module__}.{FuseLinears.__name__}", " of frozen model "
_numbers = itertools.count(1)


@dataclass(frozen=True)
class GenerationSettings:
    """What `prepare_for_generate_` has set in a model's generation_config; as a string, in a sentence.

    before: the cache that was set. options: of torch.compile, by their names, sorted.
    """

    cache: str
    before: str | None
    options: tuple[str, ...]
    #: What `use_kv_cache_` set with it, as text.
    kv_cache: str = ""
    #: Of a frozen model, whose CUDA graphs it has, as text.
    graphs: str = ""

    def __str__(self) -> str:
        changed = "as before" if self.before == self.cache else f"before: {self.before}"
        return (
            f"generate() has a {self.cache} cache ({changed}) and is compiled by transformers, on GPUs alone, with the options "
            f"{', '.join(self.options)}{''.join('; ' + one for one in (self.kv_cache, self.graphs) if one)}"
        )


def prepare_for_generate_(model: Any, *, frozen: bool = False, kv_cache: Any = None) -> GenerationSettings:
    """Let a transformers model's `generate()` run compiled with `compile_options`, in place; returns what was set.

    Sets `cache_implementation` to "static" (another fixed-size cache that is set already is kept) and `compile_config` in
    `model.generation_config`, which every later call of `generate` uses; arguments of a call take precedence. CUDA graphs are
    on unless the mode of an existing compile_config disables them; its other fields and options are kept. Values of weights are
    not changed, so call it before or after `quantize_`; a second call changes nothing, and nothing is compiled again.

    A static cache does not support assisted generation before transformers 5.24, nor a cache of the caller's
    (`past_key_values`, or `cache`): `generate(cache_implementation=None)` does not use it for one call.

    `save_pretrained`, ours and transformers', saves the generation_config with the cache and never the compile_config. So a
    loaded model has the static cache, which transformers compiles on a GPU without our options; call this again after loading.
    To save the previous setting, first put `before` of the result back into `model.generation_config.cache_implementation`.
    Pickle and `torch.save` keep the options too.

    Before each token torch checks guards on all modules and weights; parts of quantized weights are excluded from them
    (`ao_lab.compile.generation`). frozen: exclude all modules, which saves host time at every token. From the first call of
    `generate` on, weights, modes and layers must then not be changed, nothing quantized, and no module may set an attribute in
    forward that a later call reads; changes would go unnoticed and results be wrong. Hooks that are added after that call go
    unnoticed in either case, as torch.compile does not look for them. Each frozen model has programs of its own, also after
    unpickling; a deep copy shares them, and must not be changed either. `torch.compiler.reset()` makes the next call see
    changes.

    On a GPU a frozen model's forward is replayed from one CUDA graph a token (`ao_lab.compile.captured_forward`), recorded at
    the second or third token of each cache and form of inputs. Other calls (beams, assisted generation, several GPUs or
    processes) run as before, and so do models of which the result says so: encoder-decoders, caches with sliding windows or
    states, modules with hooks (also later, as long as they have them), a compile_config without CUDA graphs. Unquantized 16-bit
    weights of queries, keys and values, and of a gate and what it gates, are moved next to each other in memory, so that a step
    multiplies by them at once: a CUDA graph that someone else recorded of the model has to be recorded again.

    kv_cache: a recipe for `ao_lab.use_kv_cache_`: "bfloat16" for our attention with an unquantized cache, "fp8", "int8", "int4"
    and others for a smaller one. None leaves the cache as it is.

    TypeError for a model without generation_config, and if frozen is not a bool. ValueError for a cache that transformers does
    not compile, and for another backend than "inductor".
    """
    if not isinstance(frozen, bool):
        raise TypeError(
            f"frozen is True or False, got {frozen!r}; True is for a model that is not changed any more"
        )
    config = getattr(model, "generation_config", None)
    if config is None:
        raise TypeError(
            f"prepare_for_generate_ takes a transformers model with a generation_config, got {type(model).__name__}; compile "
            f"other loops by torch.compile(step, options=ao_lab.compile_options())"
        )
    before = getattr(config, "cache_implementation", None)
    if before not in (*FIXED, *GROWING):
        raise ValueError(
            f"transformers compiles no model with cache_implementation={before!r}; set it to None, or to one of {FIXED}"
        )
    compiled = _compile_config(getattr(config, "compile_config", None), frozen)
    stored = ""
    if kv_cache is not None:
        from ao_lab.kv_cache.cache import use_kv_cache_

        stored = str(use_kv_cache_(model, kv_cache))
    graphs = _graphs_of(model, compiled.options, frozen)
    config.cache_implementation = before if before in FIXED else CACHE
    config.compile_config, config.disable_compile = compiled, False
    return GenerationSettings(
        config.cache_implementation, before, tuple(sorted(compiled.options)), stored, graphs
    )


def _graphs_of(model: Any, options: dict[str, Any], frozen: bool) -> str:
    """Join a frozen model's weights, and let its steps be replayed; which CUDA graphs it has, in a sentence."""
    from ao_lab.compile.captured_forward import captured_, release_
    from ao_lab.kv_cache.attention import inner

    model = inner(model)
    if not frozen:
        release_(model)
        return ""
    join_weights_(model)
    return captured_(model, options)


def _compile_config(before: Any, frozen: bool) -> Any:
    """A CompileConfig with our options, and all else as in the one before, if any."""
    config = needed("transformers").CompileConfig() if before is None else copy.copy(before)
    if config.backend != BACKEND:
        raise ValueError(
            f"a compile_config for backend {config.backend!r} takes no options of ours; set generation_config.compile_config "
            f"to None, or its backend to {BACKEND!r}"
        )
    from torch._inductor import list_mode_options

    # None: its mode is among its options already.
    mode = list_mode_options(config.mode) if config.mode is not None else {}
    known = str((config.options or {}).get(PASS, ""))
    name = (known if SEPARATE in known else _another()) if frozen else NAME
    config.options = {**mode, **(config.options or {}), **_options(name), **guard_options(frozen)}
    config.mode = None
    return config


def _another() -> str:
    """A name for the options of one frozen model. torch keeps programs by code and options, and finds one by its guards:
    without those of modules it may run the program of another frozen model, whose inputs are alike."""
    return f"{NAME}{SEPARATE}{next(_numbers)}"


class NamedPass(FuseLinears, str):
    """The pass, which is text too: its name.

    transformers copies a compile_config in each call and compiles again for one that differs, and what it compares, prints and
    hashes is JSON. Text is equal to its copies, and JSON.
    """

    def __copy__(self) -> NamedPass:
        return self

    def __deepcopy__(self, memo: Any) -> NamedPass:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A call of `named_pass`: pickle does not find its class by name."""
        return named_pass, (str(self),)


class NamedJoin(NamedPass, JoinMatmuls):
    """The same of a frozen model, whose unquantized weights are joined."""


@cache
def _named_class(frozen: bool) -> type[NamedPass]:
    """NamedPass as a class of the compiler's."""
    return type(FuseLinears.__name__, (NamedJoin if frozen else NamedPass, inductor_class()), {})


def named_pass(name: str) -> NamedPass:
    """The pass that was pickled under a name; of a frozen model under another: its number is of the process that gave it."""
    return _named_pass(_another() if SEPARATE in name else NAME)


def _named_pass(name: str) -> NamedPass:
    return _named_class(SEPARATE in name)(name)


def _options(name: str) -> dict[str, Any]:
    """`compile_options`, with a pass that has a name."""
    return {**compile_options(), PASS: _named_pass(name)}


__all__ = ["GenerationSettings", "WithoutModules", "WithoutParts", "guard_options", "prepare_for_generate_"]
