"""What guards of compiled programs ask of a weight at every call: its description and the names of its parts."""

import copy
from dataclasses import replace

import torch

from ao_lab import quantized
from ao_lab.tensor.metadata import Meta


class Watched(Meta):
    """A description that notes who looks at its fields."""

    looked = 0

    @property
    def _fields(self):
        Watched.looked += 1
        return super()._fields


def weight():
    return quantized(torch.ones(8, 64), "int4_g32")


def test_a_description_is_compared_with_itself_by_identity():
    meta = weight().meta
    watched = Watched(*meta._fields)
    kept = copy.deepcopy(watched)
    assert kept is watched
    assert watched == kept
    assert Watched.looked == 0


def test_equal_descriptions_are_equal_and_others_not():
    meta, other = weight().meta, quantized(torch.ones(4, 64), "int4_g32").meta
    assert (meta == other, hash(meta) == hash(other)) == (True, True)
    assert meta != replace(meta, transposed=not meta.transposed)
    assert meta != quantized(torch.ones(8, 64), "int4_g64").meta
    assert meta != "meta"


def test_names_of_parts_are_kept_until_the_data_changes():
    w = weight()
    first = w.__tensor_flatten__()
    assert w.__tensor_flatten__() is first
    parameter = torch.nn.Parameter(w, requires_grad=False)
    parameter.__tensor_flatten__()
    parameter.data = quantized(torch.ones(8, 64), "int4_g32_asymmetric")
    names, meta = parameter.__tensor_flatten__()
    assert "zero" in names
    assert meta.recipe.weight.name == "int4_g32_asymmetric"
