"""Names that a shell completes: of configurations, schemes, formats and methods. Imports no torch: a key press waits for it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from glob import escape, glob
from pathlib import Path


def beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    """Names that begin so, whatever the case; of several between commas the last is completed."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in names if name.lower().startswith(last.lower())]


def config_names(incomplete: str) -> list[str]:
    """Configurations, then schemes."""
    from ao_lab.cli.listings import config_classes

    return [*beginning(incomplete, config_classes()), *scheme_names(incomplete)]


def configs_and_folders(incomplete: str) -> list[str]:
    """The same, and folders that hold a model, or others."""
    return [*config_names(incomplete), *folders(incomplete)]


def folders(incomplete: str) -> list[str]:
    """Folders, sorted, with a slash behind each."""
    return sorted(f"{path}/" for path in map(Path, glob(f"{escape(incomplete)}*")) if path.is_dir())


def models_and_folders(incomplete: str) -> list[str]:
    """Names of models that registered packages know (the entry points of a group), then folders."""
    from ao_lab.cli.plugins import MODEL_NAMES, load, registered

    names = list[str]()
    for target in registered(group=MODEL_NAMES).values():
        with suppress(ImportError):
            names += load(target)(incomplete)
    return [*names, *folders(incomplete)]


def scheme_names(incomplete: str) -> list[str]:
    """Schemes; those of other libraries once their prefix is typed."""
    from reference import SCHEMES

    other = "." in incomplete
    return beginning(incomplete, (name for name in SCHEMES if other or "." not in name))


def method_names(incomplete: str) -> list[str]:
    """Methods of calibration; no option of one."""
    from ao_lab.calibration.methods import METHODS

    return beginning(incomplete, METHODS)


def format_names(incomplete: str) -> list[str]:
    """Formats."""
    from reference import FORMATS

    return beginning(incomplete, FORMATS)


__all__ = [
    "beginning", "config_names", "configs_and_folders", "folders", "format_names", "method_names",
    "models_and_folders", "scheme_names",
]  # fmt: skip
