"""What runs in the interpreter of a peer: one job, in a process of its own. ``python driver.py JOB``.

This file imports nothing of this project, so that versions which exclude each other do not matter; the peer's own modules are
imported where its name is asked for. The folder JOB holds ``job.json`` (`experiments.calibration.peers.exchange.Job` says what)
and ``sequences.safetensors`` (`ids`, integers (sequences, tokens)). The answer stands beside: ``weights.safetensors``, every
parameter of the model by its name, those of quantized layers as the peer dequantizes them, and ``result.json``, with seconds,
memory and versions. Peers run as their documentation says, from a loaded model to a quantized one.

``python driver.py`` without a job prints which peers this interpreter has: distributions with their versions, as JSON.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import operator
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

#: Peers by the module that is imported: the distribution whose version rows carry.
DISTRIBUTIONS = {
    "llmcompressor": "llmcompressor",
    "gptqmodel": "gptqmodel",
    "auto_round": "auto-round",
    "hqq": "hqq",
}
#: What else decides about their numbers.
BESIDE = ("torch", "transformers", "compressed-tensors")
Weights = Iterator[tuple[str, Any]]


def main(arguments: list[str]) -> int:
    """Do a job, or say what could be done here."""
    if not arguments:
        sys.stdout.write(json.dumps(installed()))
        return 0
    folder = Path(arguments[0])
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    write(folder, job, *measured(folder, job))
    return 0


def installed() -> dict[str, str]:
    """Versions of the peers that are installed here, by module."""
    found = {}
    for module, distribution in DISTRIBUTIONS.items():
        if importlib.util.find_spec(module) is not None:
            found[module] = version(distribution)
    return found


def version(distribution: str) -> str:
    """An installed version; "" where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def measured(folder: Path, job: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights by name, and what the answer says beside them."""
    import torch
    from safetensors.torch import load_file

    torch.manual_seed(job["seed"])
    ids = load_file(folder / "sequences.safetensors")["ids"]
    work: Work = WORK[job["peer"]]
    quantize, weights = work(job, ids, folder)
    cuda = job["device"] == "cuda"
    if cuda:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    quantize()
    if cuda:
        torch.cuda.synchronize()
    found = {"seconds": time.perf_counter() - started}
    if cuda:
        found["memory"] = torch.cuda.max_memory_allocated() - before
    return {name: one.detach().cpu().contiguous() for name, one in weights()}, found


def write(folder: Path, job: dict[str, Any], weights: dict[str, Any], found: dict[str, Any]) -> None:
    """The answer; the file that says so last, so that a broken one is none."""
    from safetensors.torch import save_file

    save_file({name: one.clone() for name, one in weights.items()}, folder / "weights.safetensors")
    names = (DISTRIBUTIONS[job["peer"]], *BESIDE)
    answer = {**found, "versions": {name: version(name) for name in names if version(name)}}
    (folder / "result.json").write_text(json.dumps(answer), encoding="utf-8")


#: From a job, its token ids and a folder: what quantizes, and what then gives the weights.
Work = Callable[[dict[str, Any], Any, Path], tuple[Callable[[], object], Callable[[], Weights]]]


def loaded(job: dict[str, Any], device: str = "cpu") -> Any:
    """The model of a job in bfloat16; most peers take it from the host and move it themselves."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.bfloat16)
    return model.eval().requires_grad_(False).to(device)


def layers(model: Any, job: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The layers that are to be quantized, by name."""
    for name in job["layers"]:
        yield name, model.get_submodule(name)


def rest(model: Any, job: dict[str, Any]) -> Weights:
    """Parameters that no quantized layer holds as its weight."""
    quantized = {f"{name}.weight" for name in job["layers"]}
    for name in job["parameters"]:
        if name not in quantized:
            yield name, operator.attrgetter(name)(model)


def llmcompressor(job: dict[str, Any], ids: Any, folder: Path) -> Any:
    """`oneshot` with GPTQModifier, AWQModifier or QuantizationModifier: its default sequential pipeline over the blocks."""
    entry, datasets = importlib.import_module("llmcompressor"), importlib.import_module("datasets")
    scheme, options = job["scheme"], job["options"]
    args: dict[str, Any] = {"num_bits": scheme["bits"], "symmetric": scheme["symmetric"], "dynamic": False}
    args |= {"group_size": scheme["group"], "type": "float" if scheme["element"] else "int"}
    args["strategy"] = "tensor_group" if scheme["element"] == "nvfp4" else "group"
    if scheme["element"]:
        torch = importlib.import_module("torch")
        kind = torch.uint8 if scheme["element"] == "mxfp4" else torch.float8_e4m3fn
        args |= {"scale_dtype": kind, "zp_dtype": kind}
    args |= {name: options[name] for name in ("observer", "observer_kwargs") if name in options}
    groups = {"group_0": {"targets": ["Linear"], "weights": args}}
    ignore = [f"re:.*{name}$" for name in job["ignored"]]
    recipe = []
    if job["device"] == "cpu":
        # AWQModifier pins memory for a GPU, which is an error where there is none.
        cache = importlib.import_module("llmcompressor.pipelines.cache").IntermediatesCache
        cache.pin_memory = lambda self, *arguments: None
    if "awq" in options:
        awq = importlib.import_module("llmcompressor.modifiers.transform.awq")
        recipe.append(awq.AWQModifier(**options["awq"]))
    if "gptq" in options:
        gptq = importlib.import_module("llmcompressor.modifiers.gptq")
        recipe.append(gptq.GPTQModifier(config_groups=groups, ignore=ignore, **options["gptq"]))
    else:
        plain = importlib.import_module("llmcompressor.modifiers.quantization")
        recipe.append(plain.QuantizationModifier(config_groups=groups, ignore=ignore))
    model = loaded(job)
    rows = {"input_ids": ids.tolist(), "attention_mask": [[1] * ids.shape[1]] * len(ids)}
    data = datasets.Dataset.from_dict(rows)

    def quantize() -> None:
        entry.oneshot(model=model, dataset=data, recipe=recipe, batch_size=job["batch"],
                      max_seq_length=ids.shape[1], num_calibration_samples=len(ids))  # fmt: skip

    def weights() -> Weights:
        forward = importlib.import_module("compressed_tensors.quantization.lifecycle.forward")
        for name, layer in layers(model, job):
            given = layer.quantization_scheme.weights
            yield f"{name}.weight", forward.forward_quantize(layer, layer.weight, "weight", given)
        yield from rest(model, job)

    return quantize, weights


def gptqmodel(job: dict[str, Any], ids: Any, folder: Path) -> Any:
    """`GPTQModel.load` and `quantize`, packed and multiplied by its torch kernel, whose weights are read."""
    # Its pool of two workers that load does not fit into a machine of two cores otherwise.
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
    package = importlib.import_module("gptqmodel")
    scheme = job["scheme"]
    config = package.QuantizeConfig(bits=scheme["bits"], group_size=scheme["group"], sym=scheme["symmetric"],
                                    offload_to_disk=False, device=job["device"], **job["options"])  # fmt: skip
    model = package.GPTQModel.load(job["model"], config)
    data = [{"input_ids": row.tolist(), "attention_mask": [1] * len(row)} for row in ids]

    def quantize() -> None:
        model.quantize(data, batch_size=job["batch"], backend=package.BACKEND.TORCH)

    def weights() -> Weights:
        # As a user reads it: zero points are stored less one, and loading adds it.
        model.save(str(folder / "saved"))
        read = package.GPTQModel.load(
            str(folder / "saved"), backend=package.BACKEND.TORCH, device=job["device"]
        )
        for name, layer in layers(read.model, job):
            yield f"{name}.weight", layer.dequantize_weight().T
        yield from rest(read.model, job)

    return quantize, weights


def auto_round(job: dict[str, Any], ids: Any, folder: Path) -> Any:
    """`AutoRound(...).quantize()`, whose layers hold the dequantized weights then."""
    package = importlib.import_module("auto_round")
    transformers = importlib.import_module("transformers")
    scheme = job["scheme"]
    kind = {"": "int", "mxfp4": "mx_fp", "nvfp4": "nv_fp"}[scheme["element"]]
    asked = {
        "bits": scheme["bits"],
        "group_size": scheme["group"],
        "sym": scheme["symmetric"],
        "data_type": kind,
    }
    tokenizer = transformers.AutoTokenizer.from_pretrained(job["model"])
    batches = [{"input_ids": one} for one in ids.split(job["batch"])]
    rounder = package.AutoRound(
        loaded(job), tokenizer, scheme={**asked, "act_bits": 16}, dataset=batches, seqlen=ids.shape[1],
        nsamples=len(ids), batch_size=job["batch"], seed=job["seed"], device_map=job["device"], **job["options"])  # fmt: skip
    found: list[Any] = []

    def weights() -> Weights:
        for name, layer in layers(found[0], job):
            yield f"{name}.weight", layer.weight
        yield from rest(found[0], job)

    return lambda: found.extend(rounder.quantize()), weights


def hqq(job: dict[str, Any], ids: Any, folder: Path) -> Any:
    """`AutoHQQHFModel.quantize_model`, which sees no data."""
    torch, scheme = importlib.import_module("torch"), job["scheme"]
    config = importlib.import_module("hqq.core.quantize").BaseQuantizeConfig(
        nbits=scheme["bits"], group_size=scheme["group"], axis=1, **job["options"]
    )
    base = importlib.import_module("hqq.models.hf.base")
    model = loaded(job, job["device"])

    def quantize() -> None:
        base.AutoHQQHFModel.quantize_model(
            model, quant_config=config, compute_dtype=torch.bfloat16, device=job["device"]
        )

    def weights() -> Weights:
        for name, layer in layers(model, job):
            yield f"{name}.weight", layer.dequantize()
        yield from rest(model, job)

    return quantize, weights


WORK: dict[str, Work] = {
    "llmcompressor": llmcompressor,
    "gptqmodel": gptqmodel,
    "auto_round": auto_round,
    "hqq": hqq,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
