"""What a transform does for a class of configurations, and how weights are changed: all or none, with a note of how far."""

from dataclasses import dataclass

import pytest
from torch import nn

from ao_lab import SparseTrainingConfig, SparsityReport, sparsify_
from ao_lab.sparsity.plan import TRANSFORMS
from ao_lab.transforms.plan import all_or_none, noting


@dataclass(frozen=True)
class Mine:
    pass


@dataclass(frozen=True)
class Finer(Mine):
    pass


def test_a_configuration_of_ones_own():
    calls = []

    @TRANSFORMS.register(Mine)
    def do(*call):
        calls.append(call)
        return SparsityReport()

    layer, keep = nn.Linear(4, 4), lambda module, name: True
    for config in (Mine(), Finer()):
        assert sparsify_(layer, config, keep, calibration=[], offload=True) == SparsityReport()
        assert calls[-1] == (layer, config, keep, ("calibration", "offload"))
    TRANSFORMS.register(Mine)(do)
    with pytest.raises(ValueError, match="Mine has a transform already"):
        TRANSFORMS.register(Mine)(lambda *call: SparsityReport())


def test_training_is_one():
    assert len(sparsify_(nn.Linear(4, 4), SparseTrainingConfig()).changed) == 1


def test_after_an_error_what_was_begun_is_restored():
    restored = []

    def changes():
        with noting(lambda: "1 of 2"), all_or_none(restored.append) as begun:
            begun.append("first")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        changes()
    assert (restored, caught.value.__notes__) == (["first"], ["1 of 2"])
