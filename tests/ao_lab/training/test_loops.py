"""Loops and transforms of other libraries around a model that trains by a recipe, and the one answer that each has.

Linear layers of every recipe, and experts; what is not here is in `transforms`, `conversion` and `distributed`.
"""

import copy
import pickle
import tempfile

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import ao_lab
from ao_lab.training.layers import LowPrecisionLinear
from reference.training.recipe import RECIPES
from tests.ao_lab.training.grouped.test_experts import Layer
from tests.support.distributed.ranks import check_on_ranks

X = torch.randn(32, 32, generator=torch.Generator().manual_seed(1))


def linear():
    return nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32))


def experts():
    return nn.Sequential(Layer(), nn.Linear(32, 32))


STRUCTURES = {"linear": linear, "experts": experts}


def converted(structure, recipe):
    torch.manual_seed(0)
    net = STRUCTURES[structure]()
    ao_lab.convert_for_training_(net, recipe, pad=True)
    return net


def step(net, x=X):
    """Output and gradients, under one seed."""
    torch.manual_seed(5)
    net.zero_grad()
    y = net(x.clone().requires_grad_())
    y.square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in net.parameters())]


def same(found, wanted):
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def copied(net):
    return same(step(copy.deepcopy(net)), step(net))


def pickled(net):
    return same(step(pickle.loads(pickle.dumps(net))), step(net))


def averaged(net):
    average = AveragedModel(net)
    average.update_parameters(net)
    return torch.equal(average.eval()(X), net.eval()(X))


def recomputed(net):
    """Both ways of activation checkpointing."""
    wanted = step(net)
    return all(same(step(Recomputed(net, reentrant)), wanted) for reentrant in (False, True))


class Recomputed(nn.Module):
    def __init__(self, net, reentrant):
        super().__init__()
        self.net, self.reentrant = net, reentrant

    def forward(self, x):
        return checkpoint(self.net, x, use_reentrant=self.reentrant)


def wrapped(net):
    """torch's own wrapper of layers."""
    wanted = step(net)
    net[1 if isinstance(net[0], Layer) else 0] = checkpoint_wrapper(
        net[1 if isinstance(net[0], Layer) else 0]
    )
    return same(step(net), wanted)


def pruned(net):
    """Masks of torch.nn.utils.prune, which make the weight anew in a hook; the plain layer has them too."""
    prune.l1_unstructured(net[-1], "weight", 0.5)
    step(net)
    ao_lab.convert_from_training_(net)
    prune.remove(net[-1], "weight")
    return type(net[-1]) is nn.Linear and float((net[-1].weight == 0).float().mean()) == 0.5


def exported(net):
    """torch.export of what evaluates; a forward of experts has sizes that depend on routing, in one program too."""
    program = torch.export.export(net.eval(), (X,))
    return torch.equal(program.module()(X), net(X))


def accelerated(net):
    """accelerate: prepare, a step, save_state, another step, load_state."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True)
    own, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), 1e-2))
    return own is not None and trained_again(accelerator, own, optimizer)


def trained_again(accelerator, net, optimizer):
    def one():
        optimizer.zero_grad()
        accelerator.backward(net(X).square().sum())
        optimizer.step()
        return copy.deepcopy(net.state_dict())

    one()
    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_state(folder)
        wanted = one()
        accelerator.load_state(folder)
        found = one()
    return same(found.values(), wanted.values())


def offloaded(net):
    """accelerate's hooks, which bring a weight when its layer runs."""
    from accelerate import cpu_offload

    wanted = net.eval()(X)
    cpu_offload(net, execution_device=torch.device("cpu"))
    return torch.equal(net(X), wanted)


#: What a loop or transform does with a converted model: the same as with one that is left alone.
WORKS = {
    "copy.deepcopy": copied,
    "pickle": pickled,
    "AveragedModel": averaged,
    "checkpoint": recomputed,
    "checkpoint_wrapper": wrapped,
    "prune": pruned,
    "torch.export": exported,
    "accelerate": accelerated,
    "cpu_offload": offloaded,
}
#: One recipe for each structure by day, all by night.
DAY = {"linear": "nvfp4", "experts": "rowwise"}
NIGHT = [(s, r) for s in STRUCTURES for r in RECIPES if DAY[s] != r]


@pytest.mark.parametrize("loop", WORKS)
@pytest.mark.parametrize(
    ("structure", "recipe"),
    [*DAY.items(), *(pytest.param(*one, marks=pytest.mark.nightly, id="-".join(one)) for one in NIGHT)],
)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_loops(loop, structure, recipe):
    assert WORKS[loop](converted(structure, recipe)), (loop, structure, recipe)


def test_sharded_and_saved():
    """FSDP1 (with codes it is refused), DCP, FSDP2 whose layers become plain again, DDP."""
    check_on_ranks("training_loops.run", ranks=1)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("recipe", RECIPES)
def test_trainer(recipe, tmp_path):
    """transformers' Trainer: what is resumed ends with the bits of what was not stopped; the folder loads as a plain model."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, vocab_size=64
    )  # fmt: skip
    torch.manual_seed(0)
    first = LlamaForCausalLM(config)
    ao_lab.convert_for_training_(first, recipe, pad=True)
    second = copy.deepcopy(first)
    tokens = torch.randint(0, 64, (8, 16))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, max_steps=4, save_steps=2, use_cpu=True, report_to=[], disable_tqdm=True
    )  # fmt: skip
    Trainer(first, arguments, train_dataset=data).train()
    Trainer(second, arguments, train_dataset=data).train(
        resume_from_checkpoint=str(tmp_path / "checkpoint-2")
    )
    assert same(second.state_dict().values(), first.state_dict().values())
    plain = LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    assert not any(isinstance(module, LowPrecisionLinear) for module in plain.modules())
    assert same(plain.state_dict().values(), first.state_dict().values())


def test_adapters():
    """peft: an adapter over a converted layer, trained and merged into its weight."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    ao_lab.convert_for_training_(net, "rowwise")
    tuned = get_peft_model(net, LoraConfig(r=4, target_modules=["0"], init_lora_weights=False))
    tuned(X).square().sum().backward()
    before = net[0].weight.detach().clone() if hasattr(net[0], "weight") else None
    merged = tuned.merge_and_unload()
    assert type(merged[0]) is LowPrecisionLinear
    assert before is None or not torch.equal(merged[0].weight, before)
    assert ao_lab.convert_from_training_(merged) == ("0", "1")


def test_adapters_stay_unless_they_are_selected():
    """peft before converting: `lora_A` and `lora_B` train in their own dtype, which the report says."""
    from peft import LoraConfig, get_peft_model

    def tuned():
        net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        return get_peft_model(net, LoraConfig(r=4, target_modules=["0"], init_lora_weights=False))

    report = ao_lab.convert_for_training_(tuned(), "rowwise", pad=True)
    assert [name.rpartition("model.")[2] for name in report.changed] == ["0.base_layer", "1"]
    said = "an adapter trains in its own dtype; a filter_fn that selects it converts it too"
    assert list(report.left.values()) == [said, said]
    every = ao_lab.convert_for_training_(
        tuned(), "rowwise", lambda m, name: isinstance(m, nn.Linear), pad=True
    )
    assert len(every.changed) == 4
