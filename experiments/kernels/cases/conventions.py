"""Records of other projects that checkpoints and configurations of ao_lab mean, and a case for each.

The records come from ao_lab: those of each class of configuration that torchao has as well, with its default parameters, for
weights and inputs; and every record of the projects whose checkpoints are read (compressed-tensors, Transformer Engine).
"""

from __future__ import annotations

from collections.abc import Iterator

import ao_lab
from ao_lab.config.torchao import RECORDS_OF, as_torchao
from experiments.kernels.cases.case import Case
from experiments.kernels.cases.operations import quantize, whole
from reference import Scheme
from reference.schemes.conventions import conventions
from reference.schemes.schemes import scheme_of
from reference.schemes.torchao import torchao_conventions

#: What every convention has to reach of the copy rate.
FRACTION = 0.85


def of_configurations() -> Iterator[Scheme]:
    """The records of weights and inputs of each configuration's defaults in torchao's bits."""
    for name in RECORDS_OF:
        config = as_torchao(getattr(ao_lab, name)())
        for record in (config.scheme, config.activation_scheme):
            if record is not None:
                yield scheme_of(record)


def of_checkpoints() -> Iterator[Scheme]:
    """The records of other projects than torchao."""
    torchao = {scheme.name for scheme in torchao_conventions()}
    for scheme in conventions():
        if scheme.name not in torchao:
            yield scheme


def convention_records() -> list[Scheme]:
    """Each record once, in order of name."""
    found = {scheme.name: scheme for scheme in (*of_configurations(), *of_checkpoints())}
    return [found[name] for name in sorted(found)]


def convention_cases() -> list[Case]:
    """A case for each record; small floats packed, as checkpoints store them."""
    return [convention_case(scheme) for scheme in convention_records()]


def convention_case(scheme: Scheme) -> Case:
    """The case of a record. Where scales are quantized themselves, codes are compared on a tensor of its own."""
    if scheme.outer is not None and scheme.outer.statistic != "absmax_elements":
        return whole(scheme.name, target=FRACTION)
    packed = scheme.format.kind == "float" and scheme.format.bits < 8
    return quantize(scheme, packed=packed, target=FRACTION)
