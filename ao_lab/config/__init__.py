"""Configurations of `quantize_`. Importing any of them registers all of them (`ao_lab.config.base.CONFIGS`)."""

from ao_lab.config import float8 as float8
from ao_lab.config import fqn as fqn
from ao_lab.config import integer as integer
from ao_lab.config import low_bit as low_bit
from ao_lab.config import mx as mx
