"""A small model of every architecture that transformers can build: its class, a configuration shrunk by names, inputs.

Nothing here knows an architecture: sizes are shrunk by what their fields are called, and inputs are made of what a forward asks
for. What cannot be built so, or does not run so, says why.

What becomes of an architecture: built small, saved, `ao-lab quantize`, read by transformers and by ao_lab, run.

    python -m tests.support.models.architectures > tests/ao_lab/checkpoint/architectures.csv
    python -m tests.support.models.architectures xlnet swinv2

Each in a fork of its own with a limit of time. Prints one line of CSV an architecture.
"""

from __future__ import annotations

import contextlib
import csv
import inspect
import io
import json
import os
import re
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto import modeling_auto

from tests.support.models.hf_models import transformers

COLUMNS = ("type", "class", "dense", "int8", "int4")
CONFIGS = {
    "int8": ("Int8WeightOnlyConfig", []),
    "int4": ("Int4WeightOnlyConfig", ["group_size=32"]),
}
#: Characters of a reason in the table.
LENGTH = 100
#: How far outputs of two readers may lie apart, of the largest output.
NEAR = 1e-3


def row(kind: str, configs: Iterable[str] = ("int8", "int4")) -> dict[str, str]:
    """What becomes of one, under some of `CONFIGS`."""
    from tests.support.models.hf_models import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    result = {"type": kind, "class": architectures()[kind], "dense": "", "int8": "", "int4": ""}
    try:
        small = small_model(kind)
    except ValueError as error:
        return {**result, "dense": f"not built: {error}"[:LENGTH]}
    model, inputs = small.model, small.inputs
    result["dense"] = f"not run: {small.reason}"[:LENGTH] if small.reason else "runs"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "dense"
        try:
            model.save_pretrained(source)
            type(model).from_pretrained(source)
        except Exception as error:  # noqa: BLE001  (whatever it is, it is told)
            return {**result, "dense": f"not saved and loaded: {text(error)}"[:LENGTH]}
        for name in configs:
            result[name] = outcome(source, Path(folder) / name, name, type(model), inputs)
    return result


def outcome(source: Path, target: Path, name: str, model_class: Any, inputs: dict[str, torch.Tensor]) -> str:
    """What becomes of a folder under a configuration: "refused: ...", or the layout and who reads it."""
    from ao_lab.cli.quantize import run_quantize
    from ao_lab.cli.terminal import WrongInput

    config, options = CONFIGS[name]
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            run_quantize(
                source, target, config, activation=None, options=options, skip=None, sparsity=None, layout="auto", as_json=True
            )  # fmt: skip
    except WrongInput as error:
        return f"refused: {text(error).removeprefix('WrongInput: ')[:LENGTH]}"
    except Exception as error:  # noqa: BLE001  (whatever it is, it is told)
        return f"CRASH: {text(error)}"
    described = json.loads((target / "config.json").read_text()).get("quantization_config", {})
    method = described.get("quant_method", "none")
    return f"{method}: {read(target, model_class, inputs)}"


def read(folder: Path, model_class: Any, inputs: dict[str, torch.Tensor]) -> str:
    """Whether transformers and ao_lab read a folder whole, and agree."""
    import ao_lab

    try:
        model, told = model_class.from_pretrained(folder, output_loading_info=True)
    except Exception as error:  # noqa: BLE001  (whatever it is, it is told)
        return f"NOT LOADED: {text(error)}"
    if wrong := {
        key: sorted(map(str, value))[:2] for key, value in told.items() if value and key.endswith("keys")
    }:
        return f"NOT WHOLE: {wrong}"
    try:
        ours = ao_lab.load_pretrained(folder)
    except Exception as error:  # noqa: BLE001  (whatever it is, it is told)
        return f"NOT LOADED BY ao_lab: {text(error)}"
    if not inputs:
        return "loads"
    try:
        one, two = outputs(model.eval(), inputs), outputs(ours.eval(), inputs)
    except Exception as error:  # noqa: BLE001  (whatever it is, it is told)
        return f"NOT RUN: {text(error)}"
    apart = (one - two).abs().max() / one.abs().max().clamp_min(1e-9)
    return (
        "loads, runs"
        if apart <= NEAR or (one.isnan().equal(two.isnan()) and one.isnan().all())
        else f"APART: {apart:.3f}"
    )


def in_fork(kind: str, seconds: int = 60) -> dict[str, str]:
    """`row`, in a process of its own."""
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        signal.alarm(seconds)
        os.close(reading)
        with contextlib.suppress(BaseException), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            torch.set_num_threads(1)
            os.write(writing, json.dumps(row(kind)).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read()
    os.waitpid(process, 0)
    if told:
        return dict(json.loads(told))
    return {
        "type": kind,
        "class": architectures()[kind],
        "dense": f"not within {seconds} s",
        "int8": "",
        "int4": "",
    }


def main(kinds: list[str]) -> None:
    """Rows of these architectures, or of all."""
    small_model("llama")  # imports what all need

    torch.set_num_threads(1)
    writer = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for kind in kinds or architectures():
        writer.writerow(in_fork(kind))
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])


#: Tasks whose classes are taken before others: those that generate or classify, then the bare model.
TASKS = (
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM", "MODEL_FOR_IMAGE_TEXT_TO_TEXT", "MODEL_FOR_SPEECH_SEQ_2_SEQ", "MODEL_FOR_CAUSAL_LM",
    "MODEL_FOR_MULTIMODAL_LM", "MODEL_FOR_MASKED_LM", "MODEL_FOR_CTC", "MODEL_FOR_IMAGE_CLASSIFICATION",
    "MODEL_FOR_AUDIO_CLASSIFICATION", "MODEL_FOR_OBJECT_DETECTION", "MODEL_FOR_SEMANTIC_SEGMENTATION",
    "MODEL_FOR_PRETRAINING", "MODEL",
)  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])


#: Tasks whose classes are taken before others: those that generate or classify, then the bare model.
TASKS = (
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM", "MODEL_FOR_IMAGE_TEXT_TO_TEXT", "MODEL_FOR_SPEECH_SEQ_2_SEQ", "MODEL_FOR_CAUSAL_LM",
    "MODEL_FOR_MULTIMODAL_LM", "MODEL_FOR_MASKED_LM", "MODEL_FOR_CTC", "MODEL_FOR_IMAGE_CLASSIFICATION",
    "MODEL_FOR_AUDIO_CLASSIFICATION", "MODEL_FOR_OBJECT_DETECTION", "MODEL_FOR_SEMANTIC_SEGMENTATION",
    "MODEL_FOR_PRETRAINING", "MODEL",
)  # fmt: skip
#: Sizes by the names of fields, the first that matches; multiples of 32, so that groups of 32 fit.
SIZES = {
    r"(q|kv)_lora_rank|.*lora_rank|dt_rank|time_step_rank": 32,
    r"qk_head_dim": 999,
    r"qk_rope_head_dim": 16,
    r"qk_nope_head_dim|v_head_dim|index_head_dim": 32,
    r"(linear_)?(key|value)_head_dim|linear_(key|value)_head_dim|.*head_dim|d_kv|attention_head_size|d_head|.*head_size": 16,
    r"linear_num_(key|value)_heads": 4,
    r"(num_key_value_heads|num_kv_heads|n_head_kv|multi_query_group_num|.*_num_key_value_heads)": 2,
    r"(num_attention_heads|n_heads?|num_heads|.*_attention_heads|.*num_attention_heads|attention_heads|.*_num_heads)": 4,
    r"num_feat_extract_layers|num_adapter_layers": 99,
    r"(num_hidden_layers|n_layers?|num_layers|.*_layers|.*num_hidden_layers|depth|.*_depth)": 2,
    r"vocab_size.*|.*vocab_size|n_vocab": 256,
    r"(image_token_id|video_token_id|audio_token_id|image_token_index|.*_token_(id|index))": 3,
    r"(n_positions|max_position_embeddings|max_(source|target)_positions|n_ctx|.*max_position_embeddings)": 64,
    r"(image_size|img_size|.*image_size)": 64,
    r"(patch_size|.*patch_size)": 4,
    r"window_size": 2,
    r"(num_experts_per_tok|top_k|moe_topk|num_selected_experts|.*_top_k|moe_k)": 2,
    r"(num_experts|n_routed_experts|num_local_experts|moe_num_experts|.*num_experts|n_experts)": 4,
    r"(n_group|topk_group|n_shared_experts|num_nextn_predict_layers|first_k_dense_replace)": 1,
    r".*(intermediate_size|ffn_dim|d_ff|d_inner|n_inner|mlp_dim|ffn_hidden_size|intermediate_dim).*": 128,
    r".*(hidden_size|d_model|embed_dim|n_embd|hidden_dim|embedding_size|projection_dim|embed_dims|width).*|dim|d_embed": 64,
    r"lru_width|.*_dim": 64,
}  # fmt: skip
#: Entries of lists.
LISTS = {r".*depths.*|.*num_blocks|block_sizes|.*_layers|num_hidden_layers": 1, r".*num_.*heads.*": 2}


def architectures() -> dict[str, str]:
    """By model type the name of the class that is taken for it, in alphabetical order."""
    result: dict[str, str] = {}
    for task in TASKS:
        for kind, names in getattr(modeling_auto, f"{task}_MAPPING_NAMES").items():
            result.setdefault(kind, names if isinstance(names, str) else names[0])
    return dict(sorted(result.items()))


@dataclass
class Small:
    """A small model, inputs that it takes (none where it was not brought to run) and why it does not run."""

    model: Any
    inputs: dict[str, torch.Tensor]
    reason: str = ""


def small_model(kind: str) -> Small:
    """A model of a type, its parameters random from seed 0, in evaluation mode; ValueError with what building it raises.

    Of several ways to shrink its configuration the first whose model runs, else the first whose model can be built.
    """
    first, errors = None, []
    for shrinking in (all_parts, small_fields, wide_heads, fewer_layers):
        try:
            model = built(getattr(transformers, architectures()[kind]), shrinking)
        except Exception as error:  # noqa: BLE001  (whatever a class raises for sizes that do not fit each other)
            errors.append(text(error))
            continue
        inputs: dict[str, torch.Tensor] = {}
        try:
            inputs = inputs_of(model)
            outputs(model, inputs)
            return Small(model, inputs)
        except Exception as error:  # noqa: BLE001  (as above, for inputs)
            first = first or Small(model, {}, text(error))
    if first is None:
        raise ValueError(errors[0])
    return first


def built(model_class: Any, shrinking: Callable[[dict[str, Any], Any], dict[str, Any]]) -> Any:
    """A model of a class with a shrunk configuration; ValueError where it is still large."""
    config_class = model_class.config_class
    config = config_class(**shrinking(config_class().to_dict(), config_class))
    with torch.device("meta"):
        size = sum(p.numel() for p in model_class(config).parameters())
    if size > MOST:
        raise ValueError(f"{size} parameters at its smallest")
    torch.manual_seed(0)
    return model_class(config).eval()


def outputs(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The first floating-point output."""
    torch.manual_seed(0)
    with torch.no_grad():
        made = model(**inputs)
    values = list(
        made.values() if hasattr(made, "values") else made if isinstance(made, (tuple, list)) else [made]
    )
    while values and isinstance(values[0], (tuple, list)):
        values = [*values[0], *values[1:]]
    return next(x for x in values if isinstance(x, torch.Tensor) and x.is_floating_point()).float()


def text(error: BaseException) -> str:
    """A short line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]


#: Parameters of a model that is small.
MOST = 20_000_000


def all_parts(fields: dict[str, Any], config_class: Any) -> dict[str, Any]:
    """`small_fields`, with configurations of parts that are none by default."""
    filled = dict(fields)
    for name, part in getattr(config_class, "sub_configs", {}).items():
        if fields.get(name) is None and hasattr(part, "model_type"):
            filled[name] = part().to_dict()
    return small_fields(filled, config_class)


def small_fields(fields: dict[str, Any], config_class: Any) -> dict[str, Any]:
    """Those of a configuration's fields that have sizes, shrunk; of its parts too."""
    return {name: value for name, old in fields.items() if (value := shrunk(name, old, fields)) is not None}


def wide_heads(fields: dict[str, Any], config_class: Any) -> dict[str, Any]:
    """`all_parts` with heads of 128, for rotary embeddings whose sections are not among the fields."""
    small = all_parts(fields, config_class)
    for part in (small, *(one for one in small.values() if isinstance(one, dict))):
        if part.get("num_attention_heads") and part.get("hidden_size") and "patch_size" not in part:
            part.update(hidden_size=128 * part["num_attention_heads"])
            part.update({"head_dim": 128} if "head_dim" in part else {})
    return small


def fewer_layers(fields: dict[str, Any], config_class: Any) -> dict[str, Any]:
    """Only layers, vocabularies and experts."""
    words = re.compile(r".*(layers|depth|vocab_size|num_experts|routed_experts|local_experts)$|layer_types")
    return {
        name: value for name, value in small_fields(fields, config_class).items() if words.fullmatch(name)
    }


def shrunk(name: str, old: Any, fields: dict[str, Any]) -> Any:
    """A smaller value of a field; None where it stays."""
    if name == "per_layer_config":
        return {layer: value for layer, value in old.items() if int(layer) < 2} if old else None
    if isinstance(old, dict) and "mrope_section" in old:
        return {**old, "mrope_section": [2, 3, 3]}
    if isinstance(old, dict):
        if "model_type" not in old:
            return None
        return {**old, **{k: v for k, x in old.items() if (v := shrunk(k, x, old)) is not None}}
    if isinstance(old, bool) or old is None:
        return None
    if name in ("layer_types", "mlp_layer_types", "layers_block_type", "block_types"):
        return spread(old)
    if isinstance(old, (list, tuple)):
        for pattern, most in LISTS.items():
            if re.fullmatch(pattern, name) and all(isinstance(x, int) for x in old):
                return type(old)(min(x, most) for x in old)
        return None
    if not isinstance(old, int):
        return None
    if name == "num_key_value_heads" and "kv_lora_rank" in fields:
        return min(old, 4)
    for pattern, size in SIZES.items():
        if re.fullmatch(pattern, name):
            if size >= 99 and size % 32:
                return None
            return min(old, size) if old >= 0 else None
    return None


def spread(kinds: list[str]) -> list[str]:
    """Two layers of a list of kinds, of as many kinds as it has."""
    different = list(dict.fromkeys(kinds))
    return (different * 2)[:2]


def inputs_of(model: Any) -> dict[str, torch.Tensor]:
    """Small inputs by the names that its forward has."""
    names = inspect.signature(model.forward).parameters
    main = model.main_input_name
    wanted = [name for name in (main, "input_ids", "decoder_input_ids", "bbox") if name in names]
    made = {name: tensor(name, model) for name in dict.fromkeys(wanted)}
    if main != "input_ids" and "input_ids" in made and "pixel_values" not in made:
        del made["input_ids"]
    if not getattr(model.config, "is_encoder_decoder", False):
        made.pop("decoder_input_ids", None)
    return made


def tensor(name: str, model: Any) -> torch.Tensor:
    """An input by its name."""
    if name in ("input_ids", "decoder_input_ids"):
        return torch.arange(5, 13)[None]
    if name == "bbox":
        return torch.zeros(1, 8, 4, dtype=torch.long)
    if name.startswith("pixel_values"):
        fields = {**getattr(model.config, "vision_config", model.config).to_dict()}
        size, channels = (
            fields.get("image_size") or 64,
            fields.get("num_channels") or fields.get("in_channels") or 3,
        )
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        return torch.linspace(-1, 1, channels * height * width).reshape(1, channels, height, width)
    if name == "input_features":
        bins = (
            getattr(model.config, "num_mel_bins", None) or getattr(model.config, "feature_size", None) or 80
        )
        length = 2 * getattr(model.config, "max_source_positions", 32)
        return torch.linspace(-1, 1, bins * length).reshape(1, bins, length)
    return torch.linspace(-1, 1, 4000).sin()[None]


__all__ = ["Small", "architectures", "outputs", "small_model", "text"]
