"""The configuration that `--config` names: a class or a scheme with its options. Imports no torch: a wrong name is said at
once."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from ao_lab.checkpoint.io.strict_json import shown
from ao_lab.cli.listings import check_name, config_classes, options_of
from ao_lab.install.extras import WrongInput

if TYPE_CHECKING:
    from ao_lab.config.base import Config

GRANULARITY = re.compile(r"(Per\w+)(?:\(([\d\s,-]*)\))?")


def with_options(text: str, options: list[str]) -> tuple[str, list[str]]:
    """A configuration's name, and all its options: those behind the name, 'NAME key=value ...', and those of --option."""
    try:
        name, *more = shlex.split(text)
    except ValueError as error:
        raise WrongInput(f"--config {text}: write NAME, or 'NAME key=value ...' ({error})") from error
    return name, [*more, *options]


def config_of(name: str, activation: str | None, options: list[str]) -> Config:
    """The configuration of a class's name or of a scheme's; WrongInput with what there is."""
    from ao_lab.config.base import SchemeConfig
    from ao_lab.config.recipe import named

    given, classes = dict(map(parsed_option, options)), config_classes()
    try:
        scheme = None if name in classes else named(name)
    except ValueError:
        check_separator(name)
        check_name(name)
        raise
    kind = classes.get(name, SchemeConfig)
    check_options(name, kind, given)
    fixed = {} if scheme is None else {"scheme": scheme}
    try:
        return kind(**{**fixed, "activation_scheme": activation, **given})
    except (TypeError, ValueError) as error:
        raise WrongInput(f"--config {name}: {str(error).removeprefix(f'{kind.__name__}: ')}") from error


def check_options(name: str, kind: type[Config], given: Collection[str]) -> None:
    """WrongInput, with the options that there are, for one that the configuration lacks."""
    from reference.arrays.namespace import and_nearest

    known = [field.name for field in fields(kind) if field.init]
    if unknown := [option for option in given if option not in known]:
        # A scheme that was named is none to be chosen.
        there = [one for one in options_of(kind) if one != "scheme" or kind.__name__ == name]
        raise WrongInput(
            f"--config {name} has no option {', '.join(unknown)}{and_nearest(unknown[0], there)}; it has {', '.join(there)} "
            "(ao-lab configs shows their defaults)"
        )


def parsed_option(option: str) -> tuple[str, Any]:
    """key=value, the value as JSON where it is that, a granularity where it is called so: PerRow, PerGroup(64)."""
    from ao_lab.config import granularity

    key, equals, value = option.partition("=")
    if not equals or not key.isidentifier():
        raise WrongInput(
            f"--option {option}: write key=value, for instance --option group_size=32, or --config 'NAME group_size=32'"
        )
    if (found := GRANULARITY.fullmatch(value)) and found[1] in granularity.NAMES:
        try:
            numbers = tuple(map(int, re.findall(r"-?\d+", found[2] or "")))
            arguments = (numbers,) if found[1] == "PerBlock" else numbers
            return key, getattr(granularity, found[1])(*arguments)
        except (TypeError, ValueError) as error:
            raise WrongInput(
                f"--option {shown(option)}: write it with its numbers, PerGroup(64) or PerBlock(128, 128)"
            ) from error
    try:
        return key, json.loads(value)
    except (ValueError, RecursionError):
        return key, value


def check_separator(name: str) -> None:
    """WrongInput for a name with its options behind a comma."""
    first, comma, rest = name.partition(",")
    if comma:
        raise WrongInput(
            f"--config {name}: options follow the name after a space, in quotes: --config '{first} {rest.replace(',', ' ')}'"
        )
