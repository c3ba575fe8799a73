"""`load_gguf`: a model from a GGUF file, its blocks as quantized weights where a scheme here has their values.

transformers' own loader reads the configuration; it would dequantize every tensor. Here Q8_0, Q5_0, Q4_0, Q5_1, Q4_1 and MXFP4
stay as they are stored, in `QuantizedTensor`s of linear layers. Other types (K-quants) and embeddings become values.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ao_lab.checkpoint.model_builder import parameters_without_memory
from ao_lab.clients.gguf.architectures import ARCHITECTURES, architecture_of, row_order, tensor_names
from ao_lab.clients.gguf.blocks import TYPES, Blocks, from_blocks
from ao_lab.config.recipe import Recipe
from ao_lab.install.extras import needed
from ao_lab.tensor.quantized_tensor import QuantizedTensor, from_quantized
from reference import Quantized

BLOCKS = (*TYPES, "MXFP4")
#: Fields of a configuration that no metadata has, and a tensor that is there where they are true.
BIASES = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}


def load_gguf(path: str | Path, *, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Load the causal language model of a GGUF file (llama, mistral, qwen2, qwen3), in evaluation mode.

    Weights of linear layers in Q8_0, Q5_0, Q4_0, Q5_1, Q4_1 and MXFP4 become `QuantizedTensor`s with the file's quantized
    values and scales, bitwise equal to the file when dequantized in float32; every other tensor is dequantized and rounded to
    `dtype` (float32, bfloat16 or float16), with a UserWarning that names the types of such linear layers.

    FileNotFoundError for a missing file, ValueError for a broken file, for another architecture and for a file whose tensors
    are not those of the model. No code of the file is executed.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is no file")
    file = _opened(path)
    tensors = {one.name: one for one in file.tensors}
    model = _model(path, file, dtype)
    config: Any = model.config
    arch = architecture_of(config)
    linear = {f"{name}.weight" for name, one in model.named_modules() if isinstance(one, nn.Linear)}
    state = dict(model.named_parameters())
    names = tensor_names(needed("gguf"), arch, config.num_hidden_layers, list(state))
    _check(names, tensors, path)
    dense: set[str] = set()
    found = {}
    for name, parameter in state.items():
        given = tensors[names[name]]
        blocks = Blocks(given.tensor_type.name, np.asarray(given.data))
        order = row_order(name, config, arch, parameter.shape[0], reading=True)
        found[name] = _weight(blocks, order, name in linear, dtype, dense)
        if found[name].shape != parameter.shape:
            raise ValueError(
                f"{path}: {names[name]} is {tuple(found[name].shape)}, the model's {tuple(parameter.shape)}"
            )
    _fill(model, found)
    if dense:
        warnings.warn(
            f"{path.name} has linear layers in {', '.join(sorted(dense))}, which no scheme of ao_lab stores: they are dense in "
            f"{str(dtype).removeprefix('torch.')}",
            stacklevel=2,
        )
    result: nn.Module = model.eval()
    return result


def _opened(path: Path) -> Any:
    """The file's header and tensors, mapped; ValueError where it is no whole GGUF file."""
    gguf = needed("gguf")
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, TypeError, MemoryError) as error:
        raise ValueError(
            f"{path} is no whole GGUF file ({type(error).__name__}: {error}); fetch it again"
        ) from error


def _weight(
    blocks: Blocks, order: Any, linear: bool, dtype: torch.dtype, dense: set[str]
) -> torch.Tensor | QuantizedTensor:
    data = blocks.data if order is None else blocks.data[order]
    blocks = Blocks(blocks.type, data)
    q = from_blocks(blocks) if linear and blocks.type in BLOCKS else None
    if q is not None:
        return from_quantized(_torch_parts(q), Recipe(weight=q.scheme), dtype)
    if linear and blocks.type not in ("F32", "F16", "BF16"):
        dense.add(blocks.type)
    gguf = needed("gguf")
    values = gguf.quants.dequantize(np.ascontiguousarray(data), gguf.GGMLQuantizationType[blocks.type])
    return torch.from_numpy(np.array(values, np.float32)).to(dtype)


def _torch_parts(q: Quantized) -> Quantized:
    """q with torch tensors of memory of their own: the file is mapped, and may go."""
    given = {name: getattr(q, name) for name in ("codes", "scale", "zero")}
    parts: dict[str, Any] = {
        name: None if part is None else torch.from_numpy(np.array(part)) for name, part in given.items()
    }
    return replace(q, **parts)


def _model(path: Path, file: Any, dtype: torch.dtype) -> Any:
    """The model that the file describes, its values not yet set.

    transformers' loader leaves the width of heads and biases at its classes' defaults.
    """
    transformers = needed("transformers")
    with _quietly(transformers):
        config = transformers.AutoConfig.from_pretrained(
            path.parent, gguf_file=path.name, local_files_only=True
        )
    if config.model_type not in ARCHITECTURES:
        raise ValueError(
            f"{path}: load_gguf reads {', '.join(ARCHITECTURES)}, not {config.model_type!r}; transformers reads it dense with "
            "from_pretrained(folder, gguf_file=...)"
        )
    kind = file.fields["general.architecture"].contents()
    if (width := file.fields.get(f"{kind}.attention.key_length")) is not None:
        config.head_dim = int(width.contents())
    for field, name in BIASES.items():
        if hasattr(config, field):
            setattr(config, field, any(one.name == name for one in file.tensors))
    _check_numbers(path, config, file.tensors)
    with parameters_without_memory(2 * len(file.tensors) + 64, path):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)


def _check_numbers(path: Path, config: Any, tensors: Any) -> None:
    """ValueError where the metadata says other sizes than the tensors have: the model is built by these numbers."""
    shapes = {one.name: tuple(int(n) for n in reversed(one.shape)) for one in tensors}
    width, heads = config.hidden_size, config.num_attention_heads
    head = getattr(config, "head_dim", None) or width // max(heads, 1)
    wanted = {
        "token_embd.weight": (config.vocab_size, width),
        "blk.0.ffn_up.weight": (config.intermediate_size, width),
        "blk.0.attn_q.weight": (heads * head, width),
        "blk.0.attn_k.weight": (config.num_key_value_heads * head, width),
    }
    for name, shape in wanted.items():
        if shapes.get(name) != shape:
            raise ValueError(
                f"{path}: the metadata makes {name} {shape}, and the file has {shapes.get(name)}; fetch it again"
            )
    blocks = {name.split(".")[1] for name in shapes if name.startswith("blk.")}
    if len(blocks) != config.num_hidden_layers:
        raise ValueError(
            f"{path} has {len(blocks)} blocks of layers, and says {config.num_hidden_layers}; fetch it again"
        )


def _check(names: dict[str, str], tensors: dict[str, Any], path: Path) -> None:
    if missing := [name for name in names.values() if name not in tensors]:
        raise ValueError(f"{path} has no tensor {missing[0]}, which the model needs; fetch it again")
    known = {*names.values(), "rope_freqs.weight"}
    if spare := [name for name in tensors if name not in known]:
        raise ValueError(f"{path} has a tensor {spare[0]}, which the model has no place for")


def _fill(model: Any, state: dict[str, torch.Tensor]) -> None:
    for name, value in state.items():
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, nn.Parameter(value, requires_grad=False))
    if model.config.tie_word_embeddings:
        model.tie_weights()


@contextmanager
def _quietly(transformers: Any) -> Iterator[None]:
    said = transformers.utils.logging
    level = said.get_verbosity()
    said.set_verbosity_error()
    try:
        yield
    finally:
        said.set_verbosity(level)


__all__ = ["load_gguf"]
