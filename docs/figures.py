"""The figure of a step of an example, which sphinx-gallery puts below its code."""

from __future__ import annotations

from typing import Any

from sphinx_gallery.scrapers import figure_rst

from ao_lab.plot import save


def scrape(block: Any, variables: dict[str, Any], settings: dict[str, Any]) -> str:
    """Save what the step has called `figure`, once, and return the markup that shows it."""
    figure = variables["example_globals"].pop("figure", None)
    if figure is None:
        return ""
    path = next(variables["image_path_iterator"])
    save(figure, path)
    return figure_rst([path], settings["src_dir"])
