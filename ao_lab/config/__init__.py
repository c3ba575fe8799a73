"""Configurations of `quantize_`. Importing any of them registers all of them (`ao_lab.config.base.CONFIGS`)."""

from ao_lab.config import classes as classes
