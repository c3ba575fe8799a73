"""Two processes that train by FSDP2 and save after every step; run by tests/ao_lab/training/test_fsdp.py.

    python -m tests.support.distributed.ranks checkpoints.run RANKS FOLDER [PLACE STEP]

Loads the last complete checkpoint of FOLDER, if any, and trains to the end. The last rank kills itself in the backward pass of
STEP ("backward"), or once it has written its part of that step's checkpoint and not yet said so ("save"). Prints "equal" where
the weights are those of a run from the start, and checkpoints load into layers of other kinds.
"""

import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from ao_lab import convert_for_training_, precompute_float8_dynamic_scale_for_fsdp
from ao_lab.training.shard import CastOnGather
from tests.support.distributed.training import batch, blocks, content, loss_of, shard

STEPS = 4


def kill():
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)


class KilledWriter(FileSystemWriter):
    """Writes this rank's part; then the last rank is gone."""

    def write_data(self, plan, planner):
        done = super().write_data(plan, planner)
        done.wait()
        kill()
        return done


class Run:
    """A model, its optimizer and how many steps they have made."""

    def __init__(self, recipe="tensorwise", gathered=True):
        self.net, self.step = blocks(), 0
        if recipe:
            convert_for_training_(self.net, recipe, fsdp_float8_all_gather=gathered)
        shard(self.net)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), 1e-2, fused=False)

    def train(self, killed=False):
        if killed:  # between the gradients of the last block, which are reduced, and those of the first
            self.net[1].register_full_backward_hook(lambda *_: kill())
        loss_of(self.net, batch(dist.get_rank(), self.step)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        precompute_float8_dynamic_scale_for_fsdp(self.net)
        self.step += 1

    def state(self):
        model, optimizer = get_state_dict(self.net, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": torch.tensor(self.step)}

    def save(self, folder, killed=False):
        path = folder / f"step_{self.step}"
        dcp.save(self.state(), storage_writer=(KilledWriter if killed else FileSystemWriter)(path))

    def load(self, path):
        state = self.state()
        dcp.load(state, checkpoint_id=path)
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.net, self.optimizer, **parts)
        self.step = int(state["step"])
        return self

    def weights(self):
        return [content(p) for p in self.net.parameters()]


def complete(folder):
    """Checkpoints that are whole, oldest first: torch writes their metadata last."""
    return sorted(path.parent for path in folder.glob("step_*/.metadata"))


def run(folder, place=None, at=-1):
    folder, at = Path(folder), int(at)
    found = complete(folder)
    mine = Run().load(found[-1]) if found else Run()
    while mine.step < STEPS:
        mine.train(killed=place == "backward" and mine.step == at)
        mine.save(folder, killed=place == "save" and mine.step == at)
    whole = Run()
    while whole.step < STEPS:
        whole.train()
    for a, b in zip(mine.weights(), whole.weights(), strict=True):
        assert torch.equal(a, b)
    load_elsewhere(whole, folder)


def load_elsewhere(trained, folder):
    """Into layers that are not gathered as codes, and into plain ones, and from these; files hold plain tensors."""
    dist.barrier()
    path = complete(folder)[-1]
    for recipe, gathered in (("rowwise", True), ("tensorwise", False), (None, False)):
        other = Run(recipe, gathered).load(path)
        assert all(torch.equal(a, b) for a, b in zip(other.weights(), trained.weights(), strict=True))
        other.train()
        place = folder / f"{recipe}_{gathered}"
        other.save(place)
        back = Run()
        back.train()  # scales of other weights
        back.load(complete(place)[-1])
        assert all(torch.equal(a, b) for a, b in zip(back.weights(), other.weights(), strict=True))
        assert type(back.net[0].up.weight._local_tensor) is CastOnGather
        again = Run().load(complete(place)[-1])
        assert torch.equal(loss_of(again.net, batch(0, 0)), loss_of(back.net, batch(0, 0)))
    if dist.get_rank() == 0:
        dcp_to_torch_save(path, folder / "whole.pt")
        stored = torch.load(folder / "whole.pt", weights_only=True)["model"]
        assert {type(t) for t in stored.values()} == {torch.Tensor}
        plain = blocks()
        plain.load_state_dict(stored)
