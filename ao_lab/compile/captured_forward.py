"""A frozen model's forward as one CUDA graph a token, in transformers' `generate()`.

    ao_lab.prepare_for_generate_(model, frozen=True)
    model.generate(...)

transformers asks `model.get_compiled_call(compile_config)` once in each call of `generate()`, and calls what it gets for every
token behind the prompt. Graphs of torch.compile check and copy every input of a program at each token, weights and caches among
them, which takes a token of a large model a fifth of its time. Here (`FrozenCalls`) the compiled forward is recorded from
outside (`CapturedForward`): tensors that come with a token (ids, positions, a mask) are copied into buffers, and one launch
replays all else, which stays at its address: weights, keys, values and how many there are.

A step is recorded anew for inputs of another form (batch, kind of mask, flags), for a cache at other addresses, in another
state of torch (deterministic algorithms, TF32, ...), and after `torch.compiler.reset()` or where weights lie elsewhere. Before
that it runs uncaptured, on the tokens themselves, until it has not waited for the device once: recording launches nothing, so
that no token is counted twice. A replay runs no Python: models with hooks, and caches of classes that are not known here, are
not captured.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.guards import GlobalStateGuard

from ao_lab.compile.joined_linears import JoinMatmuls, join_weights_
from ao_lab.install.extras import needed
from ao_lab.kv_cache.cache import KVCache
from ao_lab.kv_cache.layer import KVLayer

#: Graphs that a model keeps; runs of a step in which it may wait for the device, as it does while it is compiled.
GRAPHS, TRIES = 8, 4
GRAPHS_OPTION, PASS = "triton.cudagraphs", "post_grad_custom_pre_pass"
#: What torch warns of where the host waits, with its sync debug mode.
WAITS = "synchronizing CUDA operation"
#: Stands in a step's result where the cache was, which is the caller's.
CACHE = "the cache"
Run = Callable[[], Any]
#: Held where a step is run to see whether it waits, and where it is recorded: torch's debug mode is one of the process, and all
#: models of a device are recorded on one stream.
ONE_AT_A_TIME = threading.RLock()


class CUDAGraphs:
    """Records on the current GPU; tests have another, which replays by calling."""

    #: The type of devices.
    device = "cuda"

    def watched(self, run: Run) -> tuple[Any, bool]:
        """The result of a run, and whether the host waited for the device in it, as far as torch notices."""
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                result = run()
            finally:
                torch.cuda.set_sync_debug_mode(before)
        waits = [one for one in found if WAITS in str(one.message)]
        for one in found:
            if one not in waits and "Synchronization debug mode" not in str(one.message):
                warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
        return result, bool(waits)

    def record(self, run: Run, device: torch.device) -> tuple[Callable[[], None], Any]:
        """What replays a run on a device, and the result that each replay overwrites. Nothing is computed.

        Not by `torch.cuda.graph`, which first gives the allocator's free memory back: the next cache would be made elsewhere.
        """
        current, stream, graph = torch.cuda.current_stream(device), stream_of(device), torch.cuda.CUDAGraph()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                result = run()
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        current.wait_stream(stream)
        return graph.replay, result


@cache
def stream_of(device: torch.device) -> torch.cuda.Stream:
    """On which all is recorded: libraries keep a workspace for each stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@dataclass
class Given:
    """What a call is given, taken apart. key: the form of its inputs and where the cache lies."""

    key: tuple[Any, ...]
    tensors: list[Tensor]
    cache: Any


def leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What is in dictionaries, lists and tuples, by a path; of each of these its kind and length."""
    if isinstance(value, dict):
        yield name, f"{type(value).__name__} of {len(value)}"
        for key, one in value.items():
            yield from leaves(f"{name}.{key}", one)
    elif type(value) in (list, tuple):
        yield name, f"{type(value).__name__} of {len(value)}"
        for at, one in enumerate(value):
            yield from leaves(f"{name}.{at}", one)
    else:
        yield name, value


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same dictionaries, lists and tuples with other leaves, which are changed in the order of `leaves`."""
    if isinstance(value, dict):
        made = {key: mapped(one, change) for key, one in value.items()}
        return made if type(value) is dict else type(value)(**made)  # transformers' outputs take fields
    if type(value) in (list, tuple):
        return type(value)(mapped(one, change) for one in value)
    return change(value)


def is_plain(value: Any) -> bool:
    """Whether a leaf is a constant that a key can hold."""
    return value is None or type(value) in (bool, int, float, str)


def cache_key(cache: Any, device: torch.device) -> tuple[Any, ...] | None:
    """Where the tensors of a cache lie and how they are stored; None where a step of it cannot be replayed: a cache or layers
    of other classes, which may count on the host, and layers that are offloaded, lie elsewhere, or are empty."""
    caches = needed("transformers.cache_utils")
    found: list[Any] = [type(cache)]
    known = type(cache) in (caches.Cache, caches.StaticCache, KVCache)
    if not known or getattr(cache, "offloading", False) or not cache.layers:
        return None
    for layer in cache.layers:
        if type(layer) not in (caches.StaticLayer, KVLayer) or not layer.is_initialized:
            return None
        tensors = [layer.keys, layer.values, layer.cumulative_length]
        if type(layer) is KVLayer:
            tensors = layer.recorded()
            found.append(layer.recipe)
        if not tensors or any(tensor.device != device for tensor in tensors):
            return None
        found += [(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors]
    return tuple(found)


class Step:
    """A call of one form over one cache: run until it does not wait for the device, then recorded, then replayed."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        with torch.inference_mode(False):  # buffers are written in any mode
            self.buffers = [tensor.clone() for tensor in tensors]
        #: What programs of torch.compile are compiled anew for, beside their inputs.
        self.state = GlobalStateGuard()
        self.runs, self.is_clean = 0, False
        self.replay: Callable[[], None] | None = None
        self.result: Any = None

    @property
    def is_refused(self) -> bool:
        """Whether it has waited in each of its runs."""
        return not self.is_clean and self.runs >= TRIES

    def __call__(self, call: Callable[..., Any], recorder: Any, inputs: dict[str, Any], given: Given) -> Any:
        """The result of a call, in memory of its own."""
        for buffer, tensor in zip(self.buffers, given.tensors, strict=True):
            buffer.copy_(tensor)
        if self.replay is None:
            held = iter(self.buffers)
            run = partial(call, **mapped(inputs, lambda one: next(held) if isinstance(one, Tensor) else one))
            if not self.is_clean:
                return self._watched(run, recorder, given)
            with ONE_AT_A_TIME:
                self.replay, result = recorder.record(run, given.tensors[0].device)
            self.result = mapped(result, lambda one: CACHE if one is given.cache else one)
        self.replay()
        return mapped(self.result, partial(_renewed, cache=given.cache))

    def _watched(self, run: Run, recorder: Any, given: Given) -> Any:
        with ONE_AT_A_TIME:
            result, waited = recorder.watched(run)
        known = all(
            isinstance(one, Tensor) or one is given.cache or is_plain(one) for _, one in leaves("", result)
        )
        self.runs, self.is_clean = self.runs + 1, known and not waited
        return mapped(result, partial(_renewed, cache=given.cache))


def _renewed(leaf: Any, cache: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.clone()
    return cache if type(leaf) is str and leaf == CACHE else leaf


class CapturedForward:
    """A compiled forward, recorded once for each form of its inputs and each cache, and replayed.

    call: the forward, compiled without CUDA graphs of the compiler's. plain: makes what takes all other calls. name: of the
    model, for messages. At most GRAPHS steps are kept, those that were called last.
    """

    def __init__(
        self, call: Callable[..., Any], plain: Callable[[], Callable[..., Any]], recorder: Any, name: str = ""
    ) -> None:
        self.call, self.plain, self.recorder, self.name = call, plain, recorder, name
        self.steps: OrderedDict[Any, Step] = OrderedDict()
        #: The form of all calls besides their inputs: the model's attention.
        self.form: Any = None
        self._seen: tuple[Any, Any] | None = None

    def begin(self, form: Any) -> None:
        """Before a call of `generate()`: its cache is looked at again."""
        self.form, self._seen = form, None

    def forget(self) -> None:
        """Free all graphs."""
        self.steps.clear()

    def __call__(self, **inputs: Any) -> Any:
        """As the forward; tensors of the result are the caller's."""
        given = self._taken(inputs)
        step = None if given is None else self._step(given)
        if step is None or given is None or step.is_refused:
            return self.plain()(**inputs)
        if step.is_clean:
            return self._replayed(step, inputs, given)
        result = step(self.call, self.recorder, inputs, given)
        self._warn(step)
        return result

    def _replayed(self, step: Step, inputs: dict[str, Any], given: Given) -> Any:
        try:
            return step(self.call, self.recorder, inputs, given)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if step.replay is not None:
                raise
            raise RuntimeError(
                f"a step of {self.name} could not be recorded as a CUDA graph: {error}; call prepare_for_generate_(model) "
                "without frozen=True, in a new process"
            ) from error

    def _warn(self, step: Step) -> None:
        if step.is_refused:
            warnings.warn(
                f"a step of {self.name} waits for the device, or returns more than tensors, so that it is not replayed from "
                "one CUDA graph; generate() goes on with those of torch.compile",
                stacklevel=3,
            )

    def _taken(self, inputs: dict[str, Any]) -> Given | None:
        """None for a call that is not captured: with gradients, several tokens, another cache, inputs on the host."""
        ids = inputs.get("input_ids")
        if torch.is_grad_enabled() or type(ids) is not Tensor or ids.dim() != 2 or ids.shape[1] != 1:
            return None
        cast = torch.is_autocast_enabled(self.recorder.device)
        key: list[Any] = [self.form, torch.is_inference_mode_enabled(), cast]
        key.append(torch.get_autocast_dtype(self.recorder.device) if cast else None)
        tensors, caches = [], []
        for name, leaf in leaves("", inputs):
            if type(leaf) is Tensor and leaf.device == ids.device:
                tensors.append(leaf)
                key.append((name, leaf.shape, leaf.stride(), leaf.dtype))
            elif is_plain(leaf):
                key.append((name, type(leaf), leaf))
            else:
                caches.append(leaf)
        where = self._where(caches[0], ids.device) if len(caches) == 1 else None
        return None if where is None else Given((*key, where), tensors, caches[0])

    def _where(self, cache: Any, device: torch.device) -> Any:
        """The cache's key, looked up once in a call of `generate()`. The cache is not kept."""
        seen = self._seen
        if seen is None or seen[0]() is not cache:
            if not isinstance(cache, needed("transformers.cache_utils").Cache):
                return None
            seen = self._seen = weakref.ref(cache), cache_key(cache, device)
        return seen[1]

    def _step(self, given: Given) -> Step:
        step = self.steps.pop(given.key, None)
        if step is None or not step.state.check():
            while len(self.steps) >= GRAPHS:
                self.steps.popitem(last=False)
            step = Step(given.tensors)
        self.steps[given.key] = step
        return step


class FrozenCalls:
    """`get_compiled_call` of a frozen model, beside its class's own, which takes what is not captured.

    Copies and pickles of it hold the model alone: graphs and programs are of one model in one process.
    """

    def __init__(self, model: Any, recorder: Any = None) -> None:
        self.model, self.recorder = model, recorder or CUDAGraphs()
        self._config: Any = None
        self._forward: CapturedForward | None = None
        self._known: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self.model}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["model"])  # type: ignore[misc]

    def __call__(self, compile_config: Any) -> Callable[..., Any]:
        """What `generate()` calls for each token of one call."""
        model = self.model
        devices = {tensor.device for tensor in chain(model.parameters(), model.buffers())}
        there = len(devices) == 1 and next(iter(devices)).type == self.recorder.device
        if not there or in_processes() or refusal(model, getattr(compile_config, "options", None) or {}):
            return self._plain(compile_config)
        if self._forward is None or self._config != compile_config:
            self._config, self._known = compile_config, None
            call = torch.compile(model.__call__, **without_graphs(compile_config))
            self._forward = CapturedForward(
                call, partial(self._plain, compile_config), self.recorder, type(model).__name__
            )
        self._look()
        self._forward.begin(model.config.get_text_config(decoder=True)._attn_implementation)
        return self._forward

    def _plain(self, compile_config: Any) -> Callable[..., Any]:
        call: Callable[..., Any] = type(self.model).get_compiled_call(self.model, compile_config)
        return call

    def _look(self) -> None:
        """Forget what was recorded of weights at other addresses, or before torch forgot its programs. Weights that lie apart,
        as those of a copy do, are joined."""
        known = resets(), addresses(self.model)
        if known != self._known and self._forward is not None:
            self._forward.forget()
            join_weights_(self.model)
            self._known = resets(), addresses(self.model)


def in_processes() -> bool:
    """Whether the model may be one of several processes', which wait for each other."""
    group = torch.distributed
    return group.is_available() and group.is_initialized() and group.get_world_size() > 1


def without_graphs(compile_config: Any) -> dict[str, Any]:
    """Arguments of torch.compile: those of a CompileConfig, without CUDA graphs of the compiler's."""
    given: dict[str, Any] = compile_config.to_dict()
    return {**given, "options": {**given["options"], GRAPHS_OPTION: False}}


def addresses(model: torch.nn.Module) -> list[int]:
    """Where parameters and buffers lie; of quantized ones their parts."""
    return [
        part.data_ptr() for tensor in chain(model.parameters(), model.buffers()) for part in parts_of(tensor)
    ]


def parts_of(tensor: Any) -> Iterator[Tensor]:
    """The tensors in a tensor of a subclass, or itself."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from parts_of(getattr(tensor, name))


_resets = 0


def resets() -> int:
    """How often torch has forgotten its programs (`torch.compiler.reset()`), as far as it was asked here.

    It clears the codes that it knows; this function's is added, so that its absence tells.
    """
    global _resets
    from torch._dynamo.convert_frame import input_codes

    if resets.__code__ not in input_codes:
        input_codes.add(resets.__code__)
        _resets += 1
    return _resets


def refusal(model: Any, options: dict[str, Any]) -> str:
    """Why no step of a model is recorded with these options of torch.compile; "" where it is."""
    if not isinstance(options.get(PASS), JoinMatmuls):
        return "its compile_config is not that of a frozen model"
    if not options.get(GRAPHS_OPTION):
        return "its compile_config turns CUDA graphs off"
    if model.config.is_encoder_decoder:
        return "an encoder-decoder model has caches of other kinds"
    if not getattr(model, "_can_compile_fullgraph", False) or not hasattr(type(model), "get_compiled_call"):
        return "transformers does not compile it as one program"
    caches = needed("transformers.cache_utils")
    layers = caches.StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=1).layers
    others = sorted({type(layer).__name__ for layer in layers if type(layer) is not caches.StaticLayer})
    if others:
        return f"caches of its layers count tokens on the host ({', '.join(others)})"
    hooked = next(hooked_modules(model), None)
    return "" if hooked is None else f"{hooked} has a hook, which is to be called at every token"


def hooked_modules(model: torch.nn.Module) -> Iterator[str]:
    """The names of modules with forward hooks, but those of transformers, which put into a result what it is asked for."""
    for name, module in model.named_modules():
        hooks = chain(module._forward_pre_hooks.values(), module._forward_hooks.values())
        if any(not str(getattr(one, "__module__", "")).startswith("transformers.") for one in hooks):
            yield name or type(module).__name__


def captured_(model: Any, options: dict[str, Any]) -> str:
    """Let a model's `generate()` replay its steps, where that is supported; what is so, in a sentence."""
    reason = refusal(model, options)
    release_(model)
    if reason:
        return f"CUDA graphs are those of torch.compile, since {reason}"
    model.get_compiled_call = FrozenCalls(model)
    return "the forward of a token is replayed from one CUDA graph"


def release_(model: Any) -> None:
    """As it was before `captured_`."""
    if isinstance(vars(model).get("get_compiled_call"), FrozenCalls):
        del model.get_compiled_call


__all__ = ["CUDAGraphs", "CapturedForward", "FrozenCalls", "captured_", "refusal", "release_"]
