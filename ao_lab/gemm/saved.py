"""The file of a device's choices: one for each device and its library versions, written whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ao_lab.gemm.problem import DIRECTIONS, SUBSETS, Candidate, Choice, Problem
from fast.user_cache import cache_folder, read_own, write_own

#: Version of the file's layout and of what its entries mean: files of others are not read, but for `BEFORE`.
FORMAT = 3
#: The one whose products had no accumulation. Of such a file choices of "inference", which have none, are read; those of
#: training products do not say which of two they were measured with, and those of a whole step were timed with them.
BEFORE = 2


def device_name(device: torch.device) -> str:
    """What a choice depends on beside the problem: the device, and the libraries whose kernels are chosen among."""
    # Tracers follow programs of GPUs on machines that have none.
    named = device.type == "cuda" and torch.cuda.is_available()
    name = torch.cuda.get_device_name(device) if named else device.type
    libraries = ", ".join(f"{package} {_version(package)}" for package in ("triton", "ao-lab"))
    built = f" (CUDA {torch.version.cuda})" if device.type == "cuda" else ""
    return f"{name}, torch {torch.__version__}{built}, {libraries}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def folder() -> Path:
    """Where choices are saved: AO_LAB_CACHE, else the user's cache; `NoCacheFolder` where there is no place for one."""
    return cache_folder() / "tuned"


def path_of(device: torch.device) -> Path:
    """The file of a device."""
    safe = "".join(c if c.isalnum() or c in ".-+" else "_" for c in device_name(device))
    return folder() / f"{safe}.json"


def read(path: Path, device: str) -> list[Choice]:
    """The choices in a file, none where there is no file; ValueError for one that is broken or of another device.

    OSError for one that cannot be read, `UntrustedFile` among them where another user could have written it.
    """
    try:
        return choices_of(json.loads(read_own(path)), device)
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} holds no choices of ao_lab.tune for this device ({error}); remove it, or call ao_lab.tune with a "
            f"model whose layers are quantized, or train in low precision: that replaces it"
        ) from None


def choices_of(content: Mapping[str, Any], device: str) -> list[Choice]:
    """The choices of a file's content; ValueError, KeyError or TypeError where the content is no such file's."""
    written = content.get("format")
    if written not in (FORMAT, BEFORE):
        raise ValueError(f"its format is {written!r}, not {FORMAT}")
    if content["device"] != device:
        raise ValueError(f"it is of {content['device']!r}, not of {device!r}")
    found = [_checked(one) for one in content["choices"]]
    return found if written == FORMAT else [one for one in found if one.problem.direction == "inference"]


def _checked(one: Mapping[str, Any]) -> Choice:
    problem = Problem(**one["problem"])
    lengths = (problem.n, problem.k, problem.rows, problem.experts)
    if problem.direction not in DIRECTIONS or not all(type(n) is int and n >= 0 for n in lengths):
        raise ValueError(f"{problem} is no product")
    kernel = one["kernel"]
    if problem.direction == "training" and kernel not in SUBSETS:
        raise ValueError(f"{kernel!r} names no products of a training step")
    candidates = tuple(Candidate(**candidate) for candidate in one["candidates"])
    if kernel not in {c.kernel for c in candidates}:
        raise ValueError(f"{kernel!r} was chosen and is none of the candidates")
    return Choice(problem, kernel, candidates)


def save(choices: Iterable[Choice], path: Path, device: str) -> None:
    """Write choices to a file, beside those of other problems that it holds; a file that cannot be read is replaced."""
    try:
        all_of_them = {choice.problem: choice for choice in read(path, device)}
    except (OSError, ValueError):
        all_of_them = {}
    all_of_them |= {choice.problem: choice for choice in choices}
    content = {
        "format": FORMAT,
        "device": device,
        "choices": [asdict(choice) for choice in all_of_them.values()],
    }
    write_own(path, json.dumps(content, indent=1).encode())


__all__ = ["device_name", "path_of", "read", "save"]
