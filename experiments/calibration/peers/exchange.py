"""How a peer is asked: which interpreter has it, a job in a folder, its weights in a copy of the model.

Peers demand versions of transformers and torch that exclude each other's and ours, so each runs in a process of its own, in the
interpreter that has it: this one, or those that ``--peer-python`` names. Job and answer are files (`driver.py`).
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from experiments.calibration.peers.records import INSTALL, PEERS, PeerArm, PeerScheme, bits_per_weight
from experiments.data.evaluation import Stored, stored_plain
from experiments.harness.measuring import Values
from experiments.models.causal_lm import Undivided, linears

DRIVER = Path(__file__).with_name("driver.py")
#: Lines of a failed peer's words that its row tells.
TOLD = 1
#: Seconds that a peer gets: a thousand steps on an 8B model take a GPU an hour.
LIMIT = 3 * 3600


@dataclass(frozen=True)
class Job:
    """What ``job.json`` holds. layers: names of those that are quantized; ignored: names of linear layers that are not;
    parameters: names of all; batch: sequences at once."""

    peer: str
    model: str
    scheme: PeerScheme
    options: Mapping[str, Any]
    layers: Sequence[str]
    ignored: Sequence[str]
    parameters: Sequence[str]
    device: str
    batch: int
    seed: int


@functools.cache
def interpreters(pythons: tuple[str, ...]) -> dict[str, str]:
    """Interpreters by the peer that each has, the first that has it; ValueError where one cannot be run."""
    found: dict[str, str] = {}
    for python in (*pythons, sys.executable):
        for peer in json.loads(ask(python)):
            found.setdefault(peer, python)
    return found


def ask(python: str) -> str:
    """What the driver says of an interpreter; ValueError where there is none."""
    try:
        done = subprocess.run(
            [python, "-P", str(DRIVER)], capture_output=True, text=True, check=False, timeout=60
        )
    except OSError as error:
        raise ValueError(f"--peer-python {python} cannot be run: {error.strerror}") from error
    if done.returncode:
        raise ValueError(f"--peer-python {python} fails: {last_words(done.stderr)}")
    return done.stdout


def available(name: str, pythons: tuple[str, ...]) -> bool:
    """Whether some interpreter has an arm's peer."""
    return PEERS[name].peer in interpreters(pythons)


def missing(name: str, pythons: tuple[str, ...]) -> str:
    """Why an arm cannot run, with the command that helps; "" where it can."""
    if available(name, pythons):
        return ""
    peer = PEERS[name].peer
    return f"{peer} is not installed; in an environment of its own: {INSTALL[peer]}, then --peer-python PATH"


def quantized_by_peer(
    name: str, scheme: PeerScheme, model: nn.Module, folder: Path, batches: Sequence[Tensor], seed: int,
    pythons: tuple[str, ...],
) -> Values:  # fmt: skip
    """Put what an arm makes of the model in a folder into `model`, loaded from there; values as our methods have them.

    Undivided where groups divide no layer's inputs, RuntimeError where the peer fails: nothing is changed then.
    """
    arm, layers = PEERS[name], linears(model)
    check_divided(scheme, layers)
    ids = torch.cat([batch.cpu() for batch in batches])
    every = [one for one, module in model.named_modules() if isinstance(module, nn.Linear)]
    job = Job(
        arm.peer, str(folder.resolve()), scheme, arm.options, list(layers), [one for one in every if one not in layers],
        [one for one, _ in model.named_parameters()], next(model.parameters()).device.type, arm.batch or len(batches[0]), seed,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="ao_lab_peer_") as place:
        answer = answered(job, ids, interpreters(pythons)[arm.peer], Path(place))
        put_weights(model, load_file(Path(place) / "weights.safetensors"))
    return values_of(arm, scheme, answer, model, ids.numel())


def check_divided(scheme: PeerScheme, layers: Mapping[str, nn.Linear]) -> None:
    """Undivided where groups do not divide a layer's inputs: peers pad, refuse or leave layers out."""
    left = [name for name, layer in layers.items() if layer.in_features % scheme.group]
    if left:
        raise Undivided(
            f"groups of {scheme.group} leave {len(left)} of {len(layers)} layers dense, {left[0]} first"
        )


def answered(job: Job, ids: Tensor, python: str, place: Path) -> dict[str, Any]:
    """The answer to a job, whose weights lie in the folder then; RuntimeError where the peer fails."""
    save_file({"ids": ids.contiguous()}, place / "sequences.safetensors")
    (place / "job.json").write_text(json.dumps(asdict(job)), encoding="utf-8")
    # Peers write logs and caches where they stand.
    command = [python, "-P", str(DRIVER), str(place)]
    try:
        done = subprocess.run(
            command,
            cwd=place,
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
            timeout=LIMIT,
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{job.peer} did not end within {LIMIT} s") from error
    result = place / "result.json"
    if done.returncode or not result.is_file():
        raise RuntimeError(f"{job.peer} ended with {done.returncode}: {last_words(done.stderr)}")
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return found


def last_words(text: str) -> str:
    """The last line that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[-TOLD:]) or "it says nothing"


def put_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy every parameter, rounded to the model's dtype; RuntimeError where names, shapes or values do not fit."""
    own = dict(model.named_parameters())
    wrong = sorted(set(own) ^ set(weights)) or [
        name
        for name, one in weights.items()
        if one.shape != own[name].shape or not bool(torch.isfinite(one).all())
    ]
    if wrong:
        raise RuntimeError(f"the peer's weights do not fit the model: {', '.join(wrong[:3])}")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(weights[name])


def values_of(
    arm: PeerArm, scheme: PeerScheme, answer: Mapping[str, Any], model: nn.Module, tokens: int
) -> Values:
    """Bits and bytes as the peer's files hold them, its seconds and memory, and the versions that computed."""
    bits = bits_per_weight(arm, scheme)
    inside = {id(layer.weight): layer.weight.numel() for layer in linears(model).values()}
    others = sum((stored_plain(one) for one in model.parameters() if id(one) not in inside), Stored(0))
    found: Values = {
        "size": (others.total + bits * sum(inside.values()) / 8, "byte"),
        "bits per weight": (bits, "bit"),
        "time to quantize": (answer["seconds"], "s"),
        "tokens seen": (tokens if arm.sees_data else 0, ""),
    }
    if "memory" in answer:
        found["memory over the model"] = (answer["memory"], "byte")
    said = "; ".join(f"{name} {version}" for name, version in answer["versions"].items())
    return {**found, f"computed by: {said}": (1.0, "")}
