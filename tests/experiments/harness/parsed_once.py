"""Source files whose text has not changed are parsed once a process, however often pages read the source anew.

Definitions are a function of the text and its module's name, and nobody changes them, so closures and hashes stay the same.
"""

from functools import cache

from experiments.source import closure
from experiments.source.definitions import definitions_of


def install():
    """For every closure of this process, and of its forks."""
    closure.definitions_of = cache(definitions_of)
