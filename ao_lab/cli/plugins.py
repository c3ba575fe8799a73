"""Commands that packages above `ao_lab` bring: it names none of them and imports them by what they registered.

A package registers a command as an entry point of the group "ao_lab.commands", in its pyproject.toml: ::

    [project.entry-points."ao_lab.commands"]
    reproduce = "ao_lab.experiments.commands.cli:reproduce"

The value is a function with Typer's annotations. Of installed packages `importlib.metadata` knows the entry points; in a clone
that is not installed ours are read from the same lines of its pyproject.toml.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import runpy
import tomllib
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from ao_lab.cli.shown_help import laid_out
from ao_lab.install import packages
from ao_lab.install.extras import ROOT, WrongInput, is_clone
from ao_lab.install.packages import NAMES

GROUP = "ao_lab.commands"
#: Functions that make a folder of a model's name; None for names that they do not know.
MODELS = "ao_lab.models"
#: Functions that list such names for a shell, those that begin as what is typed.
MODEL_NAMES = "ao_lab.model_names"
#: Where the help lists commands that are not of `ao_lab` itself.
DEVELOPERS, OTHERS = "Experiments, for developers of ao_lab", "Commands of other packages"


@cache
def registered(root: Path = ROOT, group: str = GROUP) -> dict[str, str]:
    """Commands by name, each with the ``module:function`` that it is; or what else is of a group."""
    found = {one.name: one.value for one in importlib.metadata.entry_points(group=group)}
    if is_clone(root):
        with (root / "pyproject.toml").open("rb") as file:
            found |= tomllib.load(file)["project"].get("entry-points", {}).get(group, {})
    return found


def load(target: str) -> Any:
    """The object of a ``module:function``; ImportError where a user's own file stands in the place of one of our packages."""
    module, _, name = target.partition(":")
    package = module.removeprefix("ao_lab.").partition(".")[0]
    if package in NAMES:
        packages.check(package)
    return getattr(importlib.import_module(module), name)


def run_file(path: Path) -> None:
    """Run a user's file, which registers formats, schemes and configurations of its own, before a command looks for them.

    WrongInput where there is no such file, and for what the library refuses in it; other errors of the file are its own and
    keep their traceback.
    """
    if not path.is_file():
        raise WrongInput(f"--import {path} is no file; give a Python file that calls ao_lab.register")
    try:
        runpy.run_path(str(path), run_name="ao_lab_import")
    except ValueError as error:
        raise WrongInput(f"--import {path}: {error}") from error


class Commands(TyperGroup):
    """Commands of `ao_lab`, then those that are registered, which are imported when they are looked at."""

    def list_commands(self, ctx: Any) -> list[str]:
        """All names."""
        own = super().list_commands(ctx)
        return [*own, *(name for name in registered() if name not in own)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of a name, or None."""
        own = super().get_command(ctx, cmd_name)
        if own is not None or cmd_name not in registered():
            return None if own is None else laid_out(own, ctx)
        settings: dict[str, Any] = {}
        try:
            function = load(registered()[cmd_name])
        except ImportError as error:
            # Whatever is typed behind it, the answer is the same.
            function, settings = (
                unavailable(error),
                {"allow_extra_args": True, "ignore_unknown_options": True},
            )
        app = typer.Typer(add_completion=False)
        panel = DEVELOPERS if "experiments" in registered()[cmd_name].partition(":")[0].split(".") else OTHERS
        app.command(cmd_name, context_settings=settings, rich_help_panel=panel)(function)
        return laid_out(typer.main.get_command(app), ctx)


def unavailable(error: ImportError) -> Any:
    """A command that says why it cannot be imported when it is called, so that the others can be."""

    def command() -> None:
        raise error

    command.__doc__ = f"Not available: {error}"
    return command


# What a wrong command line is answered beside the words of Typer.

#: What other programs call a command of this one.
SYNONYMS = {
    "info": "doctor", "env": "doctor", "check": "doctor", "convert": "quantize", "evaluate": "eval", "benchmark": "bench",
    "perplexity": "eval", "list": "configs", "models": "pretrained",
}  # fmt: skip


def helped(error: Any) -> str:
    """The command whose help has the options that a wrong command line lacks."""
    context, names = getattr(error, "ctx", None), list[str]()
    while context is not None and context.parent is not None:
        names.insert(0, str(context.info_name))
        context = context.parent
    return " ".join(["ao-lab", *names])


def way_out(error: Any) -> str:
    """For an option of a configuration that was given as one of the command, and for another program's name of a command: how
    it is written here; "" for others."""
    option, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    if option is None:
        asked = next(
            (new for old, new in SYNONYMS.items() if f"command {old!r}" in error.format_message()), None
        )
        return "" if asked is None else f"; ao-lab {asked} does that"
    known = [] if context is None else [parameter.name for parameter in context.command.params]
    found = _option_of_configurations(option) if "config" in known else None
    return (
        "" if found is None else f"; for an option of the configuration write --config 'NAME {found}=VALUE'"
    )


def _option_of_configurations(option: str) -> str | None:
    """The option of a configuration that is meant, with dashes or without; None where no configuration has one like it."""
    from ao_lab.cli.listings import config_classes, options_of

    names = dict.fromkeys(name for kind in config_classes().values() for name in options_of(kind))
    plain = {name.replace("_", ""): name for name in names}
    close = get_close_matches(
        option.strip("-").replace("-", "").replace("_", "").lower(), plain, n=1, cutoff=0.8
    )
    return plain[close[0]] if close else None
