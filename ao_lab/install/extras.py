"""How this copy of ao_lab is installed: from a clone or from a wheel, and which of its extras are there.

Advice differs: a clone is installed with `pip install -e '.[hf]'`, a wheel with `pip install 'ao_lab[hf]'`.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ao_lab.install.versions import check_loaded

ROOT = Path(__file__).resolve().parents[2]

#: Modules that extras bring, by the extra's name in pyproject.toml.
EXTRAS = {
    "ao": ("torchao",),
    "clicks": ("pyarrow",),
    "eval": ("lm_eval",),
    # Before the experiments, which need it too.
    "plot": ("matplotlib",),
    "experiments": ("pandas", "matplotlib", "jinja2", "itables", "sympy"),
    "hf": ("transformers", "compressed_tensors"),
    "jax": ("jax", "jaxlib"),
    "models": ("transformers", "gguf", "accelerate"),
    "titan": ("torchtitan",),
    "train": ("transformers", "accelerate", "peft"),
    # Last: the others name transformers and gguf.
    "clients": ("transformers", "gguf", "onnx", "onnxscript", "onnxruntime"),
}


class WrongInput(ValueError):
    """The user asked for something that does not exist or does not fit; the command line says it in one line, exit code 2."""


@contextmanager
def wrong_input() -> Iterator[None]:
    """Where nothing but what the user gave is read, a ValueError is about that: it becomes WrongInput, of the same words."""
    try:
        yield
    except WrongInput:
        raise
    except ValueError as error:
        raise WrongInput(str(error)) from error


class MissingExtra(ModuleNotFoundError):
    """A library of an extra is not installed; the message holds the command that installs it."""


def is_clone(root: Path = ROOT) -> bool:
    """Whether the packages lie in a clone, with its pyproject.toml, and not in site-packages."""
    return (root / "pyproject.toml").is_file() and (root / "Makefile").is_file()


def pip_install(extra: str = "", *, clone: bool | None = None) -> str:
    """The command that installs ao_lab, with an extra. `clone`: None looks."""
    wanted = f"[{extra}]" if extra else ""
    if is_clone() if clone is None else clone:
        return f"pip install -e '.{wanted}'"
    return f"pip install 'ao_lab{wanted}'"


def needed(name: str) -> Any:
    """The module of this name, imported; MissingExtra with the command to run where it is not installed.

    name: a module of `EXTRAS`, or inside one, such as "transformers.utils". Other errors of its import pass through.
    """
    top = name.partition(".")[0]
    try:
        importlib.import_module(top)
    except ModuleNotFoundError as error:
        if error.name != top:
            raise
        raise MissingExtra(missing(top), name=top) from None
    module = importlib.import_module(name)
    check_loaded()
    return module


def check_extra(extra: str) -> None:
    """MissingExtra where a library of an extra is not installed, before work begins that would need it at its end."""
    if name := lacking(extra):
        raise MissingExtra(missing(name), name=name)


def lacking(extra: str) -> str:
    """The first library of an extra that is not installed; "" where all are."""
    return next((name for name in EXTRAS[extra] if importlib.util.find_spec(name) is None), "")


def explained(error: ModuleNotFoundError) -> ModuleNotFoundError:
    """The error, as MissingExtra where an extra of ours brings the library that it names."""
    top = (error.name or "").partition(".")[0]
    known = any(top in modules for modules in EXTRAS.values())
    return MissingExtra(missing(top), name=top) if known else error


def missing(name: str) -> str:
    """What to say where a library is not installed: its extra's command, or its own where no extra has it."""
    for extra, modules in EXTRAS.items():
        if name in modules:
            here = f" (in this clone: {pip_install(extra, clone=True)})" if is_clone() else ""
            return f"{name} is not installed; {pip_install(extra, clone=False)}{here}"
    return f"{name} is not installed; pip install {name}"


__all__ = [
    "EXTRAS",
    "MissingExtra",
    "WrongInput",
    "check_extra",
    "explained",
    "is_clone",
    "lacking",
    "missing",
    "needed",
    "pip_install",
    "wrong_input",
]
