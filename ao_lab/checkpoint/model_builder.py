"""The model that a folder's tensors go into: built by transformers where none is given, and filled all at once.

A configuration is data from elsewhere. The model is first built without memory, where every parameter must be one that the
folder has; it is built again with its buffers only when all names and shapes fit. Nothing of the configuration names code:
keys that choose kernels or classes of other repositories are dropped.

generation_config.json says how `generate()` goes on and ends. What is written is what transformers' own save_pretrained
writes: the settings that differ from its defaults, and never the compile_config, which holds functions. transformers refuses
to write settings of which `generate()` ignores some, such as a temperature without do_sample, unless they are unchanged
since they were read. Here these are written and told of in a warning: they do no harm, and weights that took hours to
quantize are not to be lost over them.
"""

from __future__ import annotations

import copy
import ctypes
import math
import re
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

import ao_lab.quantization.report  # noqa: F401  F.linear of eager inference, print(model)
from ao_lab.checkpoint.io.shards import (
    Spec,
    Tensors,
    check_named_weights,
    check_pickled,
    has_weights,
    look_at,
    pickled_refusal,
)
from ao_lab.checkpoint.io.strict_json import read_object, shown
from ao_lab.install.extras import needed
from ao_lab.quantization.api import preshuffle
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from ao_lab.transforms.layers import table_or_head

CONFIG, QUANTIZATION = "config.json", "quantization_config"
#: The field by which a configuration of transformers names its file of weights.
NAMED_WEIGHTS = "transformers_weights"
#: The file by which transformers puts adapters into a model that it reads, where peft is installed.
ADAPTERS = "adapter_config.json"
#: How fields end that choose one of several functions.
IMPLEMENTATION = "_implementation"
#: Ends and names of fields that choose code.
CODE = (IMPLEMENTATION, "auto_map", "trust_remote_code", "custom_pipelines", "_implementation_internal")
#: Fields that count layers, heads, labels ... make that many objects.
LARGEST_COUNT = 2**17
COUNTS = re.compile(r"num_|.*(?:layer|depth|block|repeat|stage)")
#: Those of them that name a size: of a vocabulary, of a block of positions.
SIZES = re.compile(r".*(?:vocab|size|token|_ids?$)")
#: Lengths of parts, and of images, whose positions are listed in pairs; lengths of texts and files are none of them.
LENGTHS = re.compile(r".*(?:size|dim|width|height|hidden|channel|embd|d_model|d_ff|d_inner)")
IMAGES = re.compile(r".*(?:image|crop|patch|grid|resolution)(?!.*(?:token|_id|seq|num|pixels))")
OTHER = re.compile(
    r".*(?:vocab|position|token|window|chunk|block|max|batch|sample|step|total|data|file|param)"
)
#: The largest length of a part.
LARGEST_LENGTH = 2**20
#: The largest length of an image.
LARGEST_IMAGE = 2**14
#: Integers in lists count layers as well (`depths`), or name tokens.
LARGEST_IN_LIST = 2**20
#: Seconds of the processor for a model without memory.
SECONDS = 10.0
#: Seconds more for each tensor of its files.
SECONDS_EACH = 2e-3
#: Modules for each parameter that may be there: containers, activations and dropouts have none.
MODULES_EACH = 10
#: Weights for each byte of a dense or packed file.
ELEMENTS_EACH = 16
#: Weights that no file has: heads that are new, tables that are computed.
SPARE_ELEMENTS = 2**27
#: Buffers, which no file bounds: tables of positions and masks are below.
LARGEST_BUFFERS = 2**30
#: The last word of what a module's get_extra_state returns.
EXTRA_STATE = "_extra_state"


#: How many layers a model has: a negative number would make none, and all of their weights would be left out.
LAYERS = re.compile(r"(num|n)(_\w+)?_layers?$")


class UnusableNumber(ValueError):
    """A number of a configuration makes no model, or more than the files can fill."""


def planned_model(
    folder: Path, count: int, dtype: torch.dtype | None, default: torch.dtype | None = None
) -> nn.Module:
    """The model of the folder's configuration without memory, for a state of `count` tensors; ValueError for far more.
    `default`: its dtype where neither `dtype` nor the configuration says one.

    Numbers in it make lists and modules: what asks for more parameters or modules than the files can fill, or goes on for
    seconds, ends in a ValueError.
    """
    fields = configuration(folder)
    path = folder / CONFIG
    if "model_type" not in fields:
        raise ValueError(f"{path} describes no model of transformers; give load_pretrained a model to fill")
    _import_model(fields)
    seconds = SECONDS + SECONDS_EACH * count
    late = UnusableNumber(
        f"{path} describes a model that cannot be built in {seconds:.0f} s, without its weights; a number in it is far too "
        "large, fetch it again"
    )
    with limited_time(seconds, late), parameters_without_memory(2 * count + 64, path), torch.device("meta"):
        plan = _constructed(fields, dtype, path, default)
    size = sum(b.numel() * b.element_size() for b in plan.buffers())
    if size > LARGEST_BUFFERS:
        raise UnusableNumber(
            f"{path} asks for {size} bytes of buffers; a number in it is far too large, fetch it again"
        )
    return plan


def dense_model(folder: Path, **given: Any) -> Any:
    """What transformers' `from_pretrained(folder, **given)` makes of a dense folder. Nothing is fetched, no code of it is run.

    ValueError before, where it is more than the folder's files can fill, has a NaN for a number, or where its configuration
    names code on the Hub. What else may be wrong with its configuration is transformers' to say: what it, its validators and
    torch raise for one that makes no model (strings for numbers, factors of another length) is one ValueError, which names the
    file.
    """
    transformers = needed("transformers")
    load: Any = (model_class(read_config(folder)) or transformers.AutoModelForCausalLM).from_pretrained
    unbuilt = _unbuilt(folder)
    try:
        # Left open, transformers asks at the terminal whether to run a folder's code.
        result = load(folder, local_files_only=True, trust_remote_code=False, **given)
    except (OSError, ImportError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        told = unbuilt or pickled_refusal(folder, error)
        if told is None:
            raise
        raise told from error
    _forget_code(result[0] if isinstance(result, tuple) else result)
    return result


def _unbuilt(folder: Path) -> ValueError | None:
    """Why no model can be built of a configuration without its weights, if so; ValueError as `dense_model` has before."""
    fields = read_config(folder)
    _refuse_kernels(fields, folder / CONFIG)
    check_named_weights(folder / CONFIG, fields.get(NAMED_WEIGHTS))
    check_pickled(folder)
    if (folder / ADAPTERS).exists():
        raise ValueError(
            f"{folder / ADAPTERS} describes adapters of peft, which are read only where peft is installed; save the model that "
            "merge_and_unload() gives, or move the file away"
        )
    check_settings(folder)
    count, size = LARGEST_COUNT, sum(file.stat().st_size for file in folder.glob("*.bin"))
    if has_weights(folder):
        found = look_at(folder)
        count, size = len(found.specs), found.bytes
    try:
        plan = planned_model(folder, count, None)
    except UnusableNumber:
        raise
    except ValueError as error:
        return error
    wanted, most = sum(p.numel() for p in plan.parameters()), ELEMENTS_EACH * size + SPARE_ELEMENTS
    if wanted > most:
        raise UnusableNumber(
            f"{folder / CONFIG} describes a model of {wanted} weights, its files have {size} bytes; a number in it is far too "
            "large, fetch it again"
        )
    return None


def _refuse_kernels(value: Any, path: Path, name: str = "") -> None:
    """ValueError for an implementation that is a repository: transformers fetches such kernels, and runs them."""
    if isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else ((name, item) for item in value):
            _refuse_kernels(item, path, f"{name}.{key}" if IMPLEMENTATION in name else str(key))
    elif isinstance(value, str) and IMPLEMENTATION in name and "/" in value:
        raise ValueError(
            f"{path}: {shown(name)} names {shown(value)}, code on the Hub that transformers would fetch and run; remove "
            "the entry"
        )


def built(folder: Path, count: int, dtype: torch.dtype | None) -> nn.Module:
    """The model that `planned_model` has looked at, its parameters without memory, its buffers real."""
    path = folder / CONFIG
    with parameters_without_memory(2 * count + 64, path):
        return _constructed(configuration(folder), dtype, path).eval()


def read_config(folder: Path) -> dict[str, Any]:
    """config.json as it is; ValueError that names it where it is no JSON object."""
    return read_object(folder / CONFIG, nonfinite=True)


def configuration(folder: Path) -> dict[str, Any]:
    """config.json without its part about quantization and without what chooses code; {} where there is no file."""
    if not (folder / CONFIG).exists():
        return {}
    fields: dict[str, Any] = _plain(read_config(folder), folder / CONFIG)
    return {name: value for name, value in fields.items() if name not in (QUANTIZATION, NAMED_WEIGHTS)}


def _plain(value: Any, path: Path, name: str = "", in_list: bool = False) -> Any:
    """The value without fields that choose code; ValueError for counts that no model has, and NaN."""
    if isinstance(value, dict):
        return {key: _plain(item, path, key) for key, item in value.items() if not key.endswith(CODE)}
    if isinstance(value, list):
        return [_plain(item, path, name, True) for item in value]
    if type(value) is int:
        _check_integer(value, path, name, in_list)
    # Infinities are bounds of some models' steps.
    if isinstance(value, float) and math.isnan(value):
        raise UnusableNumber(f"{path}: {shown(name)} is NaN, no number; fetch it again")
    return value


def _check_integer(value: int, path: Path, name: str, in_list: bool) -> None:
    if LAYERS.match(name) and not in_list and value < 0:
        raise UnusableNumber(f"{path}: {shown(name)} is a count of layers, got {value}; fetch it again")
    counts = COUNTS.match(name) and not SIZES.match(name)
    if counts and not in_list and abs(value) > LARGEST_COUNT:
        raise UnusableNumber(f"{path}: {shown(name)} is a count, got {value}; fetch it again")
    images = IMAGES.match(name) and not OTHER.match(name)
    most = LARGEST_IMAGE if images else LARGEST_LENGTH
    if (images or (LENGTHS.match(name) and not OTHER.match(name))) and abs(value) > most:
        raise UnusableNumber(
            f"{path}: {shown(name)} is a length of at most {most}, got {value}; fetch it again"
        )
    if in_list and abs(value) > LARGEST_IN_LIST:
        raise UnusableNumber(
            f"{path}: {shown(name)} has {value} in a list; integers in lists are at most {LARGEST_IN_LIST} (layers of a stage, "
            "tokens); fetch it again"
        )


def _import_model(fields: Mapping[str, Any]) -> None:
    """Import what `_constructed` will, which takes seconds and is no matter of the configuration's numbers."""
    needed("transformers")
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    kind = fields.get("model_type")
    if isinstance(kind, str) and kind in CONFIG_MAPPING and model_class(fields) is None:
        MODEL_FOR_CAUSAL_LM_MAPPING.get(CONFIG_MAPPING[kind], None)


def _constructed(
    fields: dict[str, Any], dtype: torch.dtype | None, path: Path, default: torch.dtype | None = None
) -> nn.Module:
    """What transformers makes of a configuration; its own errors, of whatever kind, as one ValueError."""
    needed("transformers")
    from transformers import AutoConfig, AutoModelForCausalLM

    causal: Any = AutoModelForCausalLM
    try:
        config = AutoConfig.for_model(**fields)
        wanted = dtype or config.dtype or default or torch.float32
        known = model_class(fields)
        if known is None:
            result: nn.Module = causal.from_config(config, dtype=wanted, trust_remote_code=False)
        else:
            result = known._from_config(known.config_class(**config.to_dict()), dtype=wanted)
    except UnusableNumber:
        raise
    except Exception as error:
        # transformers, its validators and torch raise what they like for numbers that make no model.
        raise ValueError(
            f"{path} describes no model that transformers can build: {type(error).__name__}: {shown(str(error))}; give "
            "load_pretrained a model, or fetch the file again"
        ) from error
    return result


def model_class(fields: Mapping[str, Any]) -> Any:
    """The class of transformers that a configuration names; None where it names none that is a model there."""
    transformers = needed("transformers")
    names = fields.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    found = getattr(transformers, name, None) if isinstance(name, str) and name in _names_there() else None
    return found if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel) else None


@cache
def _names_there() -> frozenset[str]:
    """What transformers offers by name; to list it takes half a second."""
    import transformers

    return frozenset(dir(transformers))


@contextmanager
def parameters_without_memory(most: float = math.inf, path: Path = Path(CONFIG)) -> Iterator[None]:
    """Parameters that modules register inside lie on the meta device; buffers, which no file may have, are real.

    ValueError, which names the path, after `most` of them, and ten times the modules.
    """
    count = modules = 0

    def module_registered(owner: nn.Module, name: str, module: nn.Module | None) -> None:
        nonlocal modules
        modules += 1
        if modules > MODULES_EACH * most:
            raise UnusableNumber(
                f"{path} describes a model of more than {MODULES_EACH * most} modules; the files hold parameters of fewer; "
                "fetch it again"
            )

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        nonlocal count
        count += 1
        if count > most:
            raise UnusableNumber(
                f"{path} describes a model of more than {most} parameters; the files hold fewer; fetch it again"
            )
        if parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    hooks: tuple[Any, Any] = registered, module_registered
    handles = (
        register_module_parameter_registration_hook(hooks[0]),
        register_module_module_registration_hook(hooks[1]),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _forget_code(model: nn.Module) -> None:
    """Take what names a folder's own code off the configuration of a model of transformers' own classes."""
    for module in model.modules():
        # Some modules have a plain dictionary called config.
        fields = getattr(getattr(module, "config", module), "__dict__", {})
        for name in ("auto_map", "custom_pipelines"):
            fields.pop(name, None)


def check_state(model: nn.Module, shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    """ValueError where the model's state has other names or shapes."""
    expected = model.state_dict(keep_vars=True)
    if others := [name for name, value in expected.items() if not isinstance(value, torch.Tensor)]:
        raise ValueError(
            f"{', '.join(others[:5])} of the model are no tensors, and files hold nothing else; let get_extra_state return one"
        )
    missing = sorted(set(expected) - set(shapes) - set(tied(model, shapes)))
    unknown = sorted(set(shapes) - set(expected))
    if missing or unknown:
        lacks, has = ([shown(name) for name in names[:5]] for names in (missing, unknown))
        raise ValueError(
            f"{where} lacks {lacks} and has {has}, which the model lacks; give the model that was saved"
        )
    for name, shape in shapes.items():
        if tuple(expected[name].shape) != shape:
            raise ValueError(
                f"{name} of {where} has shape {shape}, the model's {tuple(expected[name].shape)}; give the model that was saved"
            )


def check_kinds(model: nn.Module, specs: Mapping[str, Spec], where: str) -> None:
    """ValueError where a dense tensor holds integers and the model's floats, or the other way round."""
    expected = model.state_dict(keep_vars=True)
    for name, spec in specs.items():
        wanted = expected[name].dtype
        if (spec.dtype.is_floating_point, spec.dtype.itemsize == 1) != (
            wanted.is_floating_point,
            wanted.itemsize == 1,
        ):
            raise ValueError(
                f"{name} of {where} is {spec}, the model's is {wanted}; give the model that was saved"
            )


def tied(model: nn.Module, names: Collection[str]) -> dict[str, str]:
    """Names of the model's state that are not among `names`, but share a parameter with one of these."""
    expected = model.state_dict(keep_vars=True)
    known = {id(expected[name]): name for name in names if name in expected}
    return {
        name: known[id(x)]
        for name, x in expected.items()
        if known.get(id(x), name) != name and name not in names
    }


def heads(model: nn.Module) -> list[str]:
    """The modules that compute logits over the vocabulary: transformers' output embeddings, and whatever is called lm_head."""
    head = table_or_head(model, "get_output_embeddings")
    modules = model.named_modules()
    return [name for name, one in modules if one is head or name.rpartition(".")[2] == "lm_head"]


def fill(model: nn.Module, state: Tensors) -> None:
    """Give every parameter and buffer its tensor, on the device of the one that it replaces ("meta": as it is). All are made
    before the first is put into its place."""
    expected = model.state_dict(keep_vars=True)
    state = {**state, **{name: state[other] for name, other in tied(model, state).items()}}
    parameters: dict[int, nn.Parameter] = {}
    slots: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    extra: list[tuple[nn.Module, torch.Tensor]] = []
    for name, value in state.items():
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        if leaf == EXTRA_STATE:
            extra.append((owner, value))
            continue
        if leaf in owner._buffers:
            slots.append((owner._buffers, leaf, beside(value, expected.get(name))))
            continue
        trains = (
            expected[name].requires_grad
            and not isinstance(value, QuantizedTensor)
            and value.is_floating_point()
        )
        result = parameters.get(id(value))
        if result is None:
            there = beside(value, expected[name])
            result = parameters[id(value)] = nn.Parameter(there, requires_grad=trains)
        slots.append((owner._parameters, leaf, result))
    for table, leaf, value in slots:
        table[leaf] = value
    for owner, value in extra:
        owner.set_extra_state(value)
    preshuffle(model)


def beside(value: torch.Tensor, before: Any) -> torch.Tensor:
    """A tensor on the device of the one before it; as it is where there was none with memory."""
    if not isinstance(before, torch.Tensor) or before.is_meta:
        return value
    return value.to(before.device)


SETTINGS = "generation_config.json"
#: What transformers leaves out of files.
COMPILED = "compile_config"


def settings_text(model: Any) -> str | None:
    """The JSON text of a model's generation settings; None for a model that has none.

    ValueError for settings with which transformers would not read the folder again, and for values that are no JSON. A
    UserWarning for those of which `generate()` ignores some.
    """
    given: Any = getattr(model, "generation_config", None)
    if not hasattr(given, "to_json_string"):
        return None
    config = copy.copy(given)
    config.compile_config = None
    try:
        config.validate()
        text: str = config.to_json_string(use_diff=True)
        changed = getattr(config, "_original_object_hash", None) != hash(config)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"model.generation_config cannot be saved, and nothing has been written: {error}; correct it, or delete what is "
            f"not to be saved, and save again"
        ) from error
    if changed:
        _warn_of_ignored(config)
    return text


def _warn_of_ignored(config: Any) -> None:
    """A UserWarning with what transformers says of settings that `generate()` ignores, if there are any."""
    try:
        config.validate(strict=True)
    except ValueError as error:
        warnings.warn(
            f"{SETTINGS} is written as model.generation_config is, but generate() ignores a part of it, and save_pretrained of "
            f"transformers would refuse it. {error}",
            UserWarning,
            stacklevel=5,  # the caller of save_pretrained
        )


def read_settings(folder: Path, model: Any) -> Any:
    """The generation settings of a folder, of the class of those that the model has; None where either has none.

    ValueError that names the file for what is no JSON, for values that transformers refuses, and for names that would hide a
    method of the class. A compile_config is left out: it names a compiler.
    """
    path = folder / SETTINGS
    kind: Any = type(getattr(model, "generation_config", None))
    return _settings(path, kind) if path.exists() and hasattr(kind, "from_dict") else None


def check_settings(folder: Path) -> None:
    """ValueError as `read_settings` for a dense folder, whose settings transformers reads itself: it would go on without those
    that are no JSON."""
    path = folder / SETTINGS
    if path.exists():
        _settings(path, needed("transformers").GenerationConfig)


def _settings(path: Path, kind: Any) -> Any:
    """Settings of a class; ValueError as `read_settings` says."""
    fields = read_object(path, nonfinite=True)
    fields.pop(COMPILED, None)
    if hidden := [name for name in fields if hasattr(kind, name)]:
        raise ValueError(f"{path}: {shown(hidden[0])} is no setting; fetch it again, or remove it")
    try:
        config: Any = kind.from_dict(fields)
        # As transformers notes it: what is unchanged since it was read may always be written again.
        config._original_object_hash = hash(config)
    except Exception as error:
        # transformers raises what it likes for values of another type.
        raise ValueError(
            f"{path} holds no generation settings that transformers can read: {type(error).__name__}: {shown(str(error))}; "
            "fetch it again, or remove it"
        ) from error
    return config


# A limit of time for Python code that runs on data of others: lists that a number in a configuration makes too long, say.

#: How often a thread is looked at, in seconds.
EVERY = 0.05
#: How long after an error the next one is raised, where a bare `except` has kept the first.
AGAIN = 1.0
#: Turns of a loop, at each of which an error arrives.
ARRIVES = 1000


class _OverTime(BaseException):
    """Raised inside the code that takes too long; no `except Exception` on the way keeps it."""


@contextmanager
def limited_time(seconds: float, error: Exception) -> Iterator[None]:
    """What runs inside may take so many seconds of its thread's own time; the error beyond.

    The time is the processor's where the system tells it of a thread (Linux), else the wall's: a busy machine stops nothing.
    The code is stopped between two steps of Python; one long call of C ends first.
    """
    owner, clock = threading.get_ident(), _clock()
    lock, ended, raised = threading.Lock(), threading.Event(), threading.Event()
    started = clock()

    def watch() -> None:
        pause = EVERY
        while not ended.wait(pause):
            with lock:
                if not ended.is_set() and clock() - started > seconds:
                    raised.set()
                    _raise_in(owner, _OverTime)
                    pause = AGAIN

    watcher = threading.Thread(target=watch, name="ao_lab.limited_time", daemon=True)
    watcher.start()
    try:
        try:
            yield
        finally:
            with lock:
                ended.set()
            _arrive(raised)
    except _OverTime:
        ended.set()
        raise error from None


def _arrive(raised: threading.Event) -> None:
    """Steps in which an error that was raised and has not arrived does so. It cannot be taken back: CPython 3.11 to 3.13 would
    look for one before each call and each turn of a loop from then on, as long as the process lives."""
    for _ in range(ARRIVES if raised.is_set() else 0):
        pass


def _clock() -> Callable[[], float]:
    """Seconds of this thread, to be asked by another."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.monotonic
    number = time.pthread_getcpuclockid(threading.get_ident())
    return lambda: time.clock_gettime(number)


def _raise_in(thread: int, error: type[BaseException]) -> None:
    """Raise an error in another thread at its next step."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))
