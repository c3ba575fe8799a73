"""Records that are made of others while a program is traced."""

from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._dynamo.exc import InternalTorchDynamoError

import ao_lab
import fast
from fast.ops import constant_record, derived
from reference import SCHEMES
from reference.schemes.schemes import record_of
from tests.support.traced import keys_without_origin

# Layers whose gradients have none of their own.

INT8 = ao_lab.Int8WeightOnlyConfig()


def fake_quantized(model):
    model[0].register_forward_hook(lambda module, args, y: fast.fake_quantize(y, "int8_rowwise"))


CHANGES = {
    "training": lambda model: ao_lab.convert_for_training_(model, "rowwise"),
    "QAT": lambda model: ao_lab.quantize_(model, ao_lab.QATConfig(INT8, step="prepare")),
    "LoRA": lambda model: ao_lab.quantize_(
        model, ao_lab.QATConfig(INT8, step="prepare", lora=ao_lab.LoRA(rank=2))
    ),
    "sparse": lambda model: ao_lab.sparsify_(model, ao_lab.SparseTrainingConfig()),
    "fake_quantize": fake_quantized,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_gradients_of_a_linear_loss_are_no_constants(change):
    """The gradient that arrives is one: torch's own decorator would leave the weight's part out, without a word."""
    model = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64))
    change(model)
    x = torch.randn(2, 64).requires_grad_()
    (dx,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"has no second derivatives.* before quantize_"):
        dx.square().sum().backward()
    model(x).sum().backward()


def test_a_record_is_made_once():
    made = []

    @derived
    def renamed(key, number):
        """Its text."""
        made.append(number)
        return replace(record_of(key), name=f"renamed_{number}")

    assert renamed("mxfp8_e4m3", 1) is renamed("mxfp8_e4m3", 1)
    assert renamed("mxfp8_e4m3", 2).name == "renamed_2"
    assert (made, renamed.__doc__) == ([1, 2], "Its text.")


@derived
def numbered(key, number):
    return replace(record_of(key), name=f"numbered_{number}")


@torch.compiler.assume_constant_result
def length(text):
    return len(text)


def test_a_traced_program_reads_keys_of_records_that_are_made_meanwhile(monkeypatch):
    """Two of them: the second was not there yet when the program read the first."""
    read = keys_without_origin(monkeypatch)

    def program(x):
        return x + length(numbered("mxfp8_e4m3", 1).key) + length(numbered("mxfp8_e4m3", 22).key)

    made = torch.compile(program, backend="eager", fullgraph=True)(torch.zeros(()))
    keys = [numbered("mxfp8_e4m3", number).key for number in (1, 22)]
    assert (float(made), read) == (sum(map(len, keys)), [])


def test_keys_without_origin_are_seen(monkeypatch):
    read = keys_without_origin(monkeypatch)
    program = lambda x: x + length(constant_record("mxfp8_e4m3").key)  # noqa: E731
    with suppress(InternalTorchDynamoError):  # torch 2.11
        torch.compile(program, backend="eager", fullgraph=True)(torch.zeros(()))
    assert read == ["mxfp8_e4m3"]


def test_keywords_are_refused_and_types_told_apart():
    made = []
    record = derived(lambda *given: made.append(given) or SCHEMES["mxfp8_e4m3"])
    record(1)
    record(True)
    record(1)
    assert made == [(1,), (True,)]
    with pytest.raises(TypeError, match="positional arguments, got key"):
        record(key=1)
