"""Files of a probe: safetensors with the kept tokens of each site, or models of them, and what else a probe goes on from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ao_lab.checkpoint.io.files import file_to_write
from ao_lab.probe.measure import host
from ao_lab.probe.reservoir import Chosen, Reservoir
from ao_lab.probe.sites import Site
from reference.arrays.namespace import choice
from reference.probe import inputs as models

FORMAT = "1"
INPUTS = ("tokens", "gaussian", "elliptical", "copula", "low_rank")
#: Arrays of a model of inputs.
PARTS = ("mean", "factor", "deviation", "radii", "marginals")


def digest(sites: Sequence[Site]) -> str:
    """Of the names and shapes of sites, which stay as a model trains."""
    return hashlib.sha256(json.dumps([(site.name, site.shape) for site in sites]).encode()).hexdigest()[:16]


def fitted(x: Any, inputs: str) -> models.InputModel:
    """A model of tokens (n, K) by its name."""
    if inputs == "gaussian":
        return models.gaussian(models.moments_of(models.tokens_of(x)))
    if inputs == "low_rank":
        return models.low_rank(models.sketch_of(x))
    return (models.elliptical if inputs == "elliptical" else models.copula)(x)


@dataclass
class State:
    """What a probe goes on from. noise: as `Probe.noise` has it; batch: tokens of a batch at each site."""

    steps: int
    skipped: int
    samples: dict[str, Reservoir]
    noise: dict[tuple[str, str], list[tuple[float, float]]]
    batch: dict[str, int]


def write_state(path: Path, sites: Sequence[Site], state: State, inputs: str) -> None:
    """See `Probe.save`."""
    choice(inputs, INPUTS, "inputs")
    file_to_write(path)
    tensors: dict[str, torch.Tensor] = {}
    told: dict[str, Any] = {}
    for i, site in enumerate(sites):
        sample = state.samples[site.name]
        told[site.name] = {
            "shape": site.shape,
            "count": sample.count,
            "draws": sample.draws,
            "dtype": str(sample.x.dtype),
        }
        if not sample.count:
            continue
        tensors[f"{i}.keys"] = torch.from_numpy(
            sample.keys.copy()
        )  # sites share them, tensors of a file may not
        if inputs == "tokens":
            tensors[f"{i}.x"] = sample.x.cpu().contiguous()
            if sample.g is not None:
                tensors[f"{i}.g"] = sample.g.cpu().contiguous()
            continue
        model = fitted(host(sample.x), inputs)
        told[site.name]["live"] = model.live
        for part in PARTS:
            if (value := getattr(model, part)) is not None:
                tensors[f"{i}.{part}"] = torch.from_numpy(np.ascontiguousarray(value, np.float32))
    noise = [[*key, values] for key, values in state.noise.items()]
    facts = {
        "inputs": inputs,
        "steps": state.steps,
        "skipped": state.skipped,
        "sites": told,
        "noise": noise,
        "batch": state.batch,
    }
    metadata = {"ao_lab_probe": FORMAT, "model": digest(sites), "facts": json.dumps(facts)}
    partial = path.with_name(path.name + ".partial")
    try:
        save_file(tensors, partial, metadata)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_state(path: Path, sites: Sequence[Site], before: Mapping[str, Reservoir]) -> State:
    """See `Probe.load`. before: reservoirs whose sizes and seeds the read ones have."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no mapping
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} is no file of a probe: {error}") from error
    if metadata.get("ao_lab_probe") != FORMAT:
        raise ValueError(f"{path} is no file that Probe.save of this version wrote; probe the model again")
    try:
        facts, model = json.loads(metadata["facts"]), metadata["model"]
        if model == digest(sites):
            return _state(facts, tensors, sites, before)
        told = _difference(facts["sites"], sites)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{path} is damaged, or no file that Probe.save wrote ({type(error).__name__}: {error}); nothing was loaded"
        ) from error
    raise ValueError(f"{path} is of another model: {told}; nothing was loaded")


def _state(
    facts: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    sites: Sequence[Site],
    before: Mapping[str, Reservoir],
) -> State:
    shared: dict[bytes, np.ndarray[Any, Any]] = {}
    samples = {
        site.name: _sample(before[site.name], i, tensors, facts["sites"][site.name], shared)
        for i, site in enumerate(sites)
    }
    noise = {(one, site): [(a, b) for a, b in values] for one, site, values in facts["noise"]}
    return State(facts["steps"], facts["skipped"], samples, noise, dict(facts["batch"]))


def _sample(
    before: Reservoir,
    i: int,
    tensors: dict[str, torch.Tensor],
    told: dict[str, Any],
    shared: dict[bytes, np.ndarray[Any, Any]],
) -> Reservoir:
    """The i-th site's. shared: keys of sites before, which sites that kept the same have in common again."""
    sample = Reservoir(before.size, seed=before.seed, stream=before.stream, half_life=before.half_life)
    if told["count"]:
        keys = tensors[f"{i}.keys"].numpy()
        keys = shared.setdefault(keys.tobytes(), keys)
        if f"{i}.x" in tensors:
            x = tensors[f"{i}.x"]
        else:
            arrays = {
                part: tensors[f"{i}.{part}"].double().numpy() for part in PARTS if f"{i}.{part}" in tensors
            }
            drawn = models.InputModel(**arrays, live=told["live"]).sample(len(keys), before.seed + i)
            x = torch.from_numpy(drawn).to(getattr(torch, told["dtype"].removeprefix("torch.")))
        sample.add(Chosen(x, tensors.get(f"{i}.g"), keys, told["count"]))
    sample.draws = told["draws"]
    return sample


def _difference(told: dict[str, Any], sites: Sequence[Site]) -> str:
    own = {site.name: list(site.shape) for site in sites}
    for name, one in told.items():
        if name not in own:
            return f"it has a site {name}, which this model lacks"
        if own[name] != one["shape"]:
            return (
                f"{name} is {'x'.join(map(str, one['shape']))} there and {'x'.join(map(str, own[name]))} here"
            )
    missing = next(name for name in own if name not in told) if len(own) > len(told) else next(iter(own))
    return f"it lacks {missing}, or has its sites in another order"
