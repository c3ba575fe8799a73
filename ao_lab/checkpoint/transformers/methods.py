"""Methods of transformers' models and of its `Trainer`, for quantized weights; other models go on as ever.

*Saving.* transformers' own writer names the file of weights itself, writes tensors that it can take apart no further, and
undoes what its reader has renamed, parts of quantized weights included: what comes out is no model. So quantized models are
written in our layout: models of `quantize_` and of `HfConfig`, copies of them, by `Trainer` and `push_to_hub` too. Layers in
quantization-aware or sparse training have dense weights, which go the way they always went, with learned scales, masks and
counts beside them, once for layers that share a weight. Adapters beside quantized weights are written with these in our
layout: `Trainer` resumes from it, `from_pretrained` reads the quantized model that they train beside, and
`ao_lab.load_pretrained` refuses it unless a prepared model is given.

*Sizes.* `get_memory_footprint()` counts bytes as they are stored. `resize_token_embeddings` draws new rows from the
dequantized ones and leaves the table and the head quantized by their own schemes: rows that stay keep their codes and scales
where a scale belongs to rows of its own, else the whole is quantized again. A table or a head in training stays the layer
that it is; one with tensors of its rows beside its weight (learned scales, adapters, masks) is refused before anything
changes.

*Trainer* looks for files of its own names, and says of a folder of ours that it is no checkpoint. So weights in our layout
are read by `ao_lab.checkpoint` and copied into the model's, quantized ones part by part, bit for bit.

*Sharding* (`tp_plan`, `DistributedConfig`). transformers makes DTensors of a model's parameters and reads of each tensor in
the files the slice that belongs to this rank. Slices of codes, scales and zero points are not those of a weight. So tensors
of quantized weights are read whole, and of the whole weight each rank keeps its shard: the codes and scales of one process.
A weight whose blocks the plan would cut in two is a ValueError that names it.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ao_lab.checkpoint.formats import records_of
from ao_lab.checkpoint.io.shards import OWN_INDEX, OWN_SINGLE, look_at
from ao_lab.checkpoint.io.strict_json import shown
from ao_lab.checkpoint.records import whole_weights
from ao_lab.checkpoint.save_checks import unwrapped
from ao_lab.qat.layers import ADDED, QATModule
from ao_lab.qat.lora import LoRALinear
from ao_lab.sparsity.training.layers import ADDED as SPARSE_ADDED
from ao_lab.sparsity.training.layers import SparseLinear
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from ao_lab.tensor.slicing import block_sizes, has_pieces, is_flat
from ao_lab.transforms.layers import is_converted
from ao_lab.transforms.report import folded_names
from ao_lab.transforms.training_records import warn_of_other_training, write_training

#: Arguments of transformers' save_pretrained that choose another format, and when they are not used.
OTHER_FORMATS: dict[str, tuple[Any, ...]] = {
    "variant": (None,), "distributed_checkpoint": (False,), "push_to_hub": (False,),
}  # fmt: skip
#: Parameters that a warning names at most.
MOST_NAMES = 6
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def put_in() -> None:
    """Put these in place of `PreTrainedModel`'s in transformers; a second call does nothing."""
    from transformers.modeling_utils import PreTrainedModel

    kind: Any = PreTrainedModel
    if getattr(kind.save_pretrained, "of_ao_lab", False):
        return
    changed = {
        "save_pretrained": _saving,
        "get_memory_footprint": _footprint,
        "_resize_token_embeddings": _checking,
    }
    changed |= {"_get_resized_embeddings": _resizing, "_get_resized_lm_head": _resizing}
    for name, change in changed.items():
        method = change(getattr(kind, name))
        method.of_ao_lab = True
        setattr(kind, name, method)


def _saving(dense: Any) -> Any:
    """`save_pretrained` that writes quantized models by `saved`."""

    @functools.wraps(dense)
    def save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        adapters = getattr(self, "_hf_peft_config_loaded", False)
        is_main = args[0] if args else kwargs.get("is_main_process", True)
        if adapters or not any(map(holds_quantized, self.parameters())):
            warn_of_training(self)
            if len(args) < 2 and any(isinstance(m, (QATModule, SparseLinear)) for m in self.modules()):
                state = kwargs.get("state_dict")
                kwargs["state_dict"] = once(self.state_dict() if state is None else state)
            result = dense(self, save_directory, *args, **kwargs)
            if is_main:
                write_training(self, save_directory)
            return result
        if any(isinstance(module, LoRALinear) for module in self.modules()):
            warn_of_adapters(self)
            with as_plain(self):
                saved(self, save_directory, *args, **kwargs)
            if is_main:
                write_training(self, save_directory)
            return None
        return saved(self, save_directory, *args, **kwargs)

    return save_pretrained


def saved(model: Any, save_directory: Any, is_main_process: bool = True, *args: Any, **kwargs: Any) -> None:
    """Write a quantized model in our layout, with its generation settings; see `ao_lab.save_pretrained`.

    Weights that are sharded (`tp_plan`, FSDP2) are gathered, which every rank has to call; of several ranks the first writes.
    `max_shard_size` is understood, and what says nothing about files. ValueError for arguments that ask for another format.
    """
    if args:
        raise ValueError(
            "save_pretrained of a quantized model takes its arguments by name; use ao_lab.save_pretrained"
        )
    for name, unused in OTHER_FORMATS.items():
        if kwargs.get(name, unused[0]) not in unused:
            raise ValueError(
                f"{name}= is not supported for quantized weights of ao_lab; save without it, use model.push_to_hub, or "
                "ao_lab.save_pretrained"
            )
    state = kwargs.get("state_dict")
    if state is not None and not is_own(model, state):
        raise ValueError(
            "state_dict= is not supported for quantized weights of ao_lab unless it is model.state_dict(); save without it "
            "(sharded weights are gathered), or by ao_lab.save_pretrained"
        )
    from ao_lab.checkpoint.api import save_pretrained

    limit = bytes_of(kwargs.get("max_shard_size", 5 * 10**9))
    with gathered(model) as is_writing:
        if is_main_process and is_writing:
            save_pretrained(model, Path(save_directory), layout="ao_lab", max_shard_bytes=limit)


def is_own(model: Any, state: Mapping[str, Any]) -> bool:
    """Whether a state is what the model's state_dict() gives, over the same memory: accelerate's get_state_dict gives it."""
    own = model.state_dict()
    return own.keys() == state.keys() and all(_memory(own[name]) == _memory(state[name]) for name in own)


def _memory(value: Any) -> object:
    held = getattr(value, "codes", value)
    return held.data_ptr() if isinstance(held, torch.Tensor) and not is_sharded(held) else id(value)


def bytes_of(size: int | str) -> int:
    """A number of bytes, or text as transformers takes it ("5GB", "200KB"); ValueError for other text."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    if found is None or found[2].upper() not in UNITS:
        raise ValueError(f"max_shard_size is a number of bytes, or text such as '5GB'; got {size!r}")
    return max(1, int(float(found[1]) * UNITS[found[2].upper()]))


#: Names of what layers in training have beside their weights.
STATE = (*ADDED, *SPARSE_ADDED)
WEIGHTS = "model.safetensors"


def warn_of_training(model: Any) -> None:
    """A UserWarning where dense weights are written of layers in training, which compute with other values."""
    prepared = [name for name, m in model.named_modules() if isinstance(m, (QATModule, LoRALinear))]
    sparse = [name for name, m in model.named_modules() if isinstance(m, SparseLinear)]
    if prepared:
        _warn(
            model,
            f"a training checkpoint: {len(prepared)} layers ({prepared[0]}, ...) are prepared for QAT, and their weights are "
            f"saved dense; quantize_(model, QATConfig(config, step='convert')) before saving gives the quantized model"
            f"{_state(model)}",
        )
    elif sparse:
        _warn(
            model,
            f"{len(sparse)} layers ({sparse[0]}, ...) train sparse, and the folder holds their weights without their masks "
            f"applied: call sparsify_ again after loading to go on training, or finish_sparsity_(model) and save to keep the "
            f"sparse model{_state(model)}",
        )


#: What each model has been told of already: a run that saves a hundred checkpoints hears it once.
_told: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()


def _warn(model: Any, text: str) -> None:
    told = _told.setdefault(model, set())
    if text not in told:
        told.add(text)
        warnings.warn(text, UserWarning, stacklevel=4)


def _state(model: Any) -> str:
    """What else is in the folder, and how it is read."""
    leaves = {name.rpartition(".")[2] for name in model.state_dict()}
    found = [name for name in STATE if name in leaves]
    return (
        f". from_pretrained leaves {', '.join(found)} out: prepare the model again to go on with them; then Trainer reads them "
        f"(resume_from_checkpoint=True), and without Trainer load {WEIGHTS} by load_state_dict(..., strict=False)"
        if found
        else ""
    )


def once(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state_dict in which the state of layers that share a weight is under the first of its names alone."""
    seen: set[tuple[object, ...]] = set()
    result = {}
    for name, value in state.items():
        if name.rpartition(".")[2] in STATE and not value.is_meta and value.numel():
            key = (value.device, value.data_ptr(), value.shape)
            if key in seen:
                continue
            seen.add(key)
        result[name] = value
    return result


@contextmanager
def as_plain(model: nn.Module) -> Iterator[None]:
    """Layers with adapters as linear layers that have two parameters more, which is what their folder says of them."""
    layers = [layer for layer in model.modules() if isinstance(layer, LoRALinear)]
    kinds = [type(layer) for layer in layers]
    try:
        for layer in layers:
            layer.__class__ = nn.Linear  # type: ignore[assignment]
        yield
    finally:
        for layer, kind in zip(layers, kinds, strict=True):
            layer.__class__ = kind


def warn_of_adapters(model: Any) -> None:
    """A UserWarning that says which file of a model with adapters holds what."""
    adapted = [name for name, m in model.named_modules() if isinstance(m, LoRALinear)]
    _warn(
        model,
        f"{len(adapted)} layers ({adapted[0]}, ...) have adapters in training: the folder has these beside the quantized "
        f"weights, and from_pretrained leaves them out. Trainer resumes from it. ao_lab.save_adapter(model, folder) writes "
        f"them alone, for peft and for ao_lab.load_adapter. To keep one quantized model, call "
        f"quantize_(model, QATConfig(config, step='convert')), which merges, and save",
    )


def _footprint(plain: Any) -> Any:
    @functools.wraps(plain)
    def get_memory_footprint(self: Any, return_buffers: bool = True) -> Any:
        weights = [p for p in self.parameters() if holds_quantized(p)]
        return plain(self, return_buffers) + sum(
            _stored(p) - p.nelement() * p.element_size() for p in weights
        )

    return get_memory_footprint


def _stored(weight: Any) -> int:
    """Bytes of a weight as it is stored; of a sharded one those of all ranks, as transformers counts dense ones."""
    shard = getattr(weight, "_local_tensor", weight)
    return int(shard.nbytes * weight.nelement() // max(shard.nelement(), 1))


def _checking(plain: Any) -> Any:
    @functools.wraps(plain)
    def _resize_token_embeddings(
        self: Any,
        new_num_tokens: int | None,
        pad_to_multiple_of: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        rows = len(self.get_input_embeddings().weight)
        wanted, step = new_num_tokens or rows, pad_to_multiple_of or 1
        if -(-wanted // step) * step != rows:
            _check_rows_alone(self)
        return plain(self, new_num_tokens, pad_to_multiple_of, *args, **kwargs)

    return _resize_token_embeddings


def _check_rows_alone(model: Any) -> None:
    """ValueError where a table or a head in training has more tensors than its weight and bias, which would keep their rows."""
    resized = (model.get_input_embeddings(), model.get_output_embeddings())
    for name, module in model.named_modules():
        if not any(module is one for one in resized) or not is_converted(module):
            continue
        held = [*module._parameters.items(), *module._buffers.items()]
        beside = [each for each, tensor in held if tensor is not None and each not in ("weight", "bias")]
        if beside:
            raise ValueError(
                f"resize_token_embeddings: {name} has {', '.join(beside)} beside its weight, of as many rows as it has; resize "
                "before the model is prepared (quantize_, sparsify_), or leave this layer out"
            )


def _resizing(plain: Any) -> Any:
    @functools.wraps(plain)
    def resized(self: Any, old: nn.Module, *args: Any, **kwargs: Any) -> Any:
        weight: Any = getattr(old, "weight", None)
        if not isinstance(weight, QuantizedTensor):
            return _in_place(old, plain(self, old, *args, **kwargs))
        old.weight = nn.Parameter(weight.dequantize(), requires_grad=False)
        try:
            new = plain(self, old, *args, **kwargs)
            result = new.weight.detach()
        finally:
            old.weight = weight
        if result.shape != weight.shape:
            kept: Any = weight.detach()
            new.weight = nn.Parameter(joined(kept, result), requires_grad=False)
        return new

    return resized


def _in_place(old: nn.Module, new: Any) -> Any:
    """A head in training takes the rows of the plain one that transformers has made; as it does itself with tables."""
    if new is old or not is_converted(old):
        return new
    for name, parameter in old.named_parameters(recurse=False):
        parameter.data, parameter.grad = getattr(new, name).data, None
    old.out_features = new.out_features
    return old


def joined(kept: QuantizedTensor, dense: torch.Tensor) -> QuantizedTensor:
    """`dense` in the scheme of `kept`, whose first rows (as many as both have) it has."""
    rows = min(len(kept), len(dense))
    if not _has_rows(kept) or kept.shape[1] != dense.shape[1]:
        return kept.like(dense)
    parts = [kept[:rows]]
    if rows < len(dense):
        parts.append(kept.like(dense[rows:]))
    result: QuantizedTensor = torch.cat(parts) if len(parts) > 1 else parts[0].clone()  # type: ignore[assignment]
    return result


def _has_rows(weight: QuantizedTensor) -> bool:
    """Whether each row has scales and zero points of its own."""
    held = [name for name in ("scale", "outer", "zero") if weight.parts[name] is not None]
    turned = weight.meta.transposed or weight.meta.axis != -1
    if turned or is_flat(weight):
        return False
    return block_sizes(weight)[0] == 1 and all(has_pieces(weight, name, 0) for name in held)


def is_ours(folder: str | Path) -> bool:
    """Whether a checkpoint's weights are in our layout."""
    return any((Path(folder) / name).is_file() for name in (OWN_SINGLE, OWN_INDEX))


def load_into(model: Any, folder: str | Path) -> Any:
    """Copy a folder's weights into a model that has them; what `load_state_dict` says of missing and unexpected names.

    ValueError for a weight that is quantized in another way than the model's.
    """
    found = look_at(Path(folder))
    return unwrapped(model).load_state_dict(whole_weights(found, records_of(found)), strict=False)


#: What `Trainer` is told of before it trains a model whose layers are quantized, and nothing that is made for that.
FROZEN = (
    "Trainer: {} of the model are quantized and frozen, and there are no adapters: only {} train ({}). To fine-tune the layers "
    "too, add adapters (peft.get_peft_model), or train before quantizing (QATConfig(config, step='prepare'))"
)


def warn_of_frozen(model: Any) -> None:
    """A UserWarning where `Trainer` is given a quantized model without adapters: it would train norms and tables alone."""
    adapters = getattr(model, "_hf_peft_config_loaded", False) or hasattr(model, "peft_config")
    frozen = sum(map(holds_quantized, model.parameters()))
    if (
        not frozen
        or adapters
        or any(isinstance(module, (QATModule, LoRALinear)) for module in model.modules())
    ):
        return
    train = dict.fromkeys((name for name, one in model.named_parameters() if one.requires_grad), "")
    names, matrices = folded_names(train), f"{frozen} weights"
    told = ", ".join(names[:MOST_NAMES]) + (", ..." if len(names) > MOST_NAMES else "")
    said = FROZEN.format(matrices, f"{len(train)} unquantized parameters", told or "none")
    warnings.warn(said, stacklevel=4)


def register() -> None:
    """Let `Trainer` resume from folders in our layout, and find its best model there, and say what it will not train; a second
    call does nothing."""
    from transformers import trainer

    kind: Any = trainer.Trainer
    resume, best = kind._load_from_checkpoint, kind._load_best_model
    if getattr(resume, "of_ao_lab", False):
        return

    @functools.wraps(resume)
    def _load_from_checkpoint(self: Any, resume_from_checkpoint: str, model: Any = None) -> None:
        warn_of_other_training(unwrapped(self.model), resume_from_checkpoint)
        if is_ours(resume_from_checkpoint):
            result = load_into(self.model if model is None else model, resume_from_checkpoint)
            self._issue_warnings_after_load(result)
        else:
            resume(self, resume_from_checkpoint, model)

    @functools.wraps(best)
    def _load_best_model(self: Any) -> None:
        folder = self.state.best_model_checkpoint
        if is_ours(folder):
            self._issue_warnings_after_load(load_into(self.model, folder))
        else:
            best(self)

    known: Any = trainer
    keep = kind._save_checkpoint

    @functools.wraps(keep)
    def _save_checkpoint(self: Any, model: Any, trial: Any) -> None:
        keep(self, model, trial)
        # Of models of other classes, and of sharded files, which save_pretrained did not write.
        if self.args.should_save:
            name = f"{known.PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            write_training(unwrapped(self.model), Path(self._get_output_dir(trial=trial)) / name)

    checked = known.validate_quantization_for_training

    @functools.wraps(checked)
    def validate_quantization_for_training(model: Any) -> None:
        checked(model)
        warn_of_frozen(model)

    known.validate_quantization_for_training = validate_quantization_for_training
    _load_from_checkpoint.of_ao_lab = True  # type: ignore[attr-defined]
    kind._load_from_checkpoint, kind._load_best_model = _load_from_checkpoint, _load_best_model
    kind._save_checkpoint = _save_checkpoint


#: What an error about a slice says to do, which is nothing that one can do here.
WAY_OUT = re.compile(r"[;,] (or )?dequantize\(\) first$")


class ShardedReading:
    """The quantized weights (by their names) of a model that is being read.

    To be made before transformers shards the model; `shards` and `close` do nothing where it does not.
    """

    def __init__(self, model: Any, changes: Callable[[str], bool]) -> None:
        self.model = model
        self.error: ValueError | None = None
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if changes(name):
                parameter.requires_grad_(False)

        def whole(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
            for name, value in state.items():
                if is_sharded(value) and changes(name):
                    state[name] = torch.empty(value.shape, dtype=value.dtype, device="meta")

        # transformers asks state_dict() which of the tensors that it reads are sharded.
        self._hook = model.register_state_dict_post_hook(whole)

    def shards(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's shards of whole weights, those that are sharded. After an error nothing: `close` raises it."""
        result = {}
        for name, weight in weights.items():
            try:
                result[name] = self._shard(name, weight)
            except ValueError as error:
                self.error = self.error or error
        return {} if self.error else result

    def _shard(self, name: str, weight: Any) -> Any:
        placed = self.model.get_parameter(name)
        if not isinstance(weight, QuantizedTensor) or not is_sharded(placed):
            return weight
        return nn.Parameter(shard_of(name, weight, placed), requires_grad=False)

    def close(self) -> None:
        """Leave the model as it was found; the first error, if there was one."""
        self._hook.remove()
        if self.error is not None:
            raise self.error


def is_sharded(value: Any) -> bool:
    """Whether a tensor is a DTensor."""
    return isinstance(value, torch.Tensor) and hasattr(value, "full_tensor")


def shard_of(name: str, weight: QuantizedTensor, placed: Any) -> QuantizedTensor:
    """This rank's piece of a weight, placed as the DTensor `placed`; ValueError where that cuts a block in two."""
    from transformers.distributed.sharding_utils import DtensorShardOperation

    try:
        piece: Any = DtensorShardOperation(placed).shard_tensor(weight)
    except ValueError as error:
        reason, ranks = WAY_OUT.sub("", str(error)), placed.device_mesh.size()
        raise ValueError(
            f"{shown(name)} in {weight.scheme.name} is not sharded as {list(placed.placements)} over {ranks} processes: "
            f"{reason}; leave the layer dense, quantize it by a scheme whose blocks are not cut, or choose another number of "
            "processes or another tp_plan"
        ) from error
    # Of its own memory, so that the whole weight can be freed, in rows, as collectives send it.
    return piece.mapped(lambda part: part.clone(memory_format=torch.contiguous_format))  # type: ignore[no-any-return]


def full_weight(parameter: Any) -> Any:
    """The whole of a parameter, gathered where it is sharded: every rank has to call this."""
    return parameter.full_tensor() if is_sharded(parameter) else parameter


def placed_as(name: str, weight: nn.Parameter, placed: Any) -> nn.Parameter:
    """A whole quantized weight sharded as the DTensor `placed`; itself where that is none."""
    if not is_sharded(placed):
        return weight
    whole: Any = weight
    return nn.Parameter(_placed(shard_of(name, whole.detach(), placed), placed), requires_grad=False)


def dense(weight: Any, dtype: torch.dtype | None) -> torch.Tensor:
    """The values of a quantized weight, sharded as it is."""
    if not is_sharded(weight):
        return QuantizedTensor.dequantize(weight, dtype)
    return _placed(weight._local_tensor.dequantize(dtype), weight)


def _placed(piece: torch.Tensor, like: Any) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    options: dict[str, Any] = {"run_check": False, "shape": like.shape, "stride": like.stride()}
    result: torch.Tensor = DTensor.from_local(piece, like.device_mesh, like.placements, **options)
    return result


def holds_quantized(parameter: Any) -> bool:
    """Whether a parameter is a quantized weight, or this rank's shard is one of."""
    return isinstance(getattr(parameter, "_local_tensor", parameter), QuantizedTensor)


@contextmanager
def gathered(model: nn.Module) -> Iterator[bool]:
    """Whole weights in place of sharded ones, which every rank has to ask for; yields whether this rank is to write them."""
    for module in model.modules():
        reshard: Any = getattr(module, "reshard", None)
        if reshard is not None:  # FSDP2 leaves the root's weights whole after a forward
            reshard()
    places = [
        (module, name, p)
        for module in model.modules()
        for name, p in module._parameters.items()
        if is_sharded(p)
    ]
    known: dict[int, nn.Parameter] = {}
    for _, _, p in places:
        if id(p) not in known:
            known[id(p)] = nn.Parameter(full_weight(p).detach(), requires_grad=False)
    try:
        for module, name, p in places:
            module._parameters[name] = known[id(p)]
        alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
        yield alone or torch.distributed.get_rank() == 0
    finally:
        for module, name, p in places:
            module._parameters[name] = p
        if places:
            torch.distributed.barrier()
