"""Configurations that register what `sparsify_` does for them."""

from dataclasses import dataclass

import pytest
from torch import nn

from ao_lab import SparseTrainingConfig, SparsityReport, sparsify_
from ao_lab.sparsity.transforms import Registered, transform


@dataclass(frozen=True)
class Mine(Registered):
    pass


@dataclass(frozen=True)
class Finer(Mine):
    pass


class Unknown(Registered):
    pass


def test_a_configuration_of_ones_own():
    calls = []

    @transform(Mine)
    def do(call):
        calls.append(call)
        return SparsityReport()

    layer, keep = nn.Linear(4, 4), lambda module, name: True
    for config in (Mine(), Finer()):
        assert sparsify_(layer, config, keep, calibration=[], offload=True) == SparsityReport()
        assert (calls[-1].model, calls[-1].config, calls[-1].filter_fn) == (layer, config, keep)
        assert calls[-1].further == ("calibration", "offload")
    transform(Mine)(do)
    with pytest.raises(ValueError, match="Mine has a transform already"):
        transform(Mine)(lambda call: SparsityReport())


def test_none_is_registered():
    with pytest.raises(TypeError, match="Unknown has registered no transform"):
        sparsify_(nn.Linear(4, 4), Unknown())


def test_training_is():
    assert len(sparsify_(nn.Linear(4, 4), SparseTrainingConfig()).changed) == 1
