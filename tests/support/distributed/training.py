"""Models that train in low precision on several ranks, by FSDP2 or DDP.

Losses, gradients, codes and weights are those of one process that runs the ranks' batches one after another and averages their
gradients, bit for bit. (One process that runs them as one batch has other bits: scales over the tensor and over tokens span
both batches then.)
"""

import copy
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fast
import fast.optim.update as update
from ao_lab import QuantizedTensor, convert_for_training_, precompute_float8_dynamic_scale_for_fsdp
from ao_lab.optim import AdamW8bit
from ao_lab.training import fsdp as hooks
from ao_lab.training import scales_over_ranks as over_ranks
from ao_lab.training.shard import CastOnGather
from tests.support.distributed.ranks import DEVICE, DTYPE

WIDTH = 64


class Block(nn.Module):
    """Two layers and what they are added to."""

    recomputed = False

    def __init__(self, bias):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + (checkpoint(self.inner, x, use_reentrant=False) if self.recomputed else self.inner(x))

    def inner(self, x):
        return self.down(nn.functional.silu(self.up(x)))


def blocks(count=2, bias=True):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(bias) for _ in range(count))).to(DEVICE, DTYPE)


def batch(rank, step):
    made = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
    return made.to(DEVICE, DTYPE)


def loss_of(net, x):
    return net(x).float().square().mean()


def shard(net, **options):
    for block in net:
        fully_shard(block, **options)
    return fully_shard(net, **options)


def content(t):
    """The whole plain tensor of a parameter or a gradient."""
    t = t.detach()
    t = t.full_tensor() if hasattr(t, "full_tensor") else t
    return getattr(t, "dense", t)


class Traffic(TorchDispatchMode):
    """Bytes that this rank gives to collectives, and how often, by their names."""

    def __init__(self):
        super().__init__()
        self.bytes, self.calls = {}, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            sent = args[1] if name == "_allgather_base_" else args[0]
            tensors = [t for t in (sent if isinstance(sent, list) else [sent]) if isinstance(t, torch.Tensor)]
            self.calls[name] = self.calls.get(name, 0) + 1
            self.bytes[name] = self.bytes.get(name, 0) + sum(t.nbytes for t in tensors)
        return func(*args, **(kwargs or {}))


GATHERED = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8")
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def one_process(net, step, cast=lambda x: x):
    """Losses of all ranks, and the gradients averaged: summed in the order of ranks, and divided."""
    ranks = dist.get_world_size()
    losses = [loss_of(net, cast(batch(rank, step))) for rank in range(ranks)]
    for loss in losses:
        loss.backward()
    for parameter in net.parameters():
        parameter.grad /= ranks
    return losses[dist.get_rank()].detach()


def assert_grads(one, many, what):
    for (name, a), b in zip(one.named_parameters(), many.parameters(), strict=True):
        assert torch.equal(content(b.grad), a.grad), (what, name)


def converted(recipe, gathered=True, **options):
    """A model as one process has it, and the same as ranks share it."""
    one, many = (blocks(**options) for _ in range(2))
    for net in (one, many):
        convert_for_training_(net, recipe, fsdp_float8_all_gather=gathered)
    return one, many


def compare_training(recipe, gathered, precompute):
    """Three steps."""
    one, many = converted(recipe, gathered)
    shard(many)
    optimizers = [torch.optim.AdamW(net.parameters(), 1e-2, fused=False) for net in (one, many)]
    for step in range(3):
        expected = one_process(one, step)
        found = loss_of(many, batch(dist.get_rank(), step))
        found.backward()
        assert torch.equal(found, expected), (recipe, step)
        assert_grads(one, many, (recipe, gathered, step))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if precompute:
            precompute_float8_dynamic_scale_for_fsdp(many)
        for (name, a), b in zip(one.named_parameters(), many.parameters(), strict=True):
            assert torch.equal(content(b), content(a)), (recipe, gathered, step, name)


def compare_codes(recipe, options, dtype):
    """What layers multiply with is `fast.quantize` of the whole weight in the dtype that FSDP2 gathers."""
    one, many = converted(recipe)
    shard(many, reshard_after_forward=False, **options)
    many(batch(0, 0).to(dtype))
    for a, b in zip(one.modules(), many.modules(), strict=True):
        if isinstance(a, nn.Linear):
            assert type(b.weight) is QuantizedTensor
            q = fast.quantize(content(a.weight).to(dtype), b.weight.scheme)
            assert torch.equal(b.weight.codes, q.codes), (recipe, dtype)
            assert torch.equal(b.weight.scale, q.scale), (recipe, dtype)


def compare_mixed_precision():
    """Weights in float32 that are gathered in bfloat16: codes or values, the same bits."""
    nets = [blocks().float() for _ in range(2)]
    for net, gathered in zip(nets, (True, False), strict=True):
        convert_for_training_(net, "tensorwise", fsdp_float8_all_gather=gathered)
        shard(net, mp_policy=BF16)
        loss_of(net, batch(dist.get_rank(), 0).bfloat16()).backward()
    for a, b in zip(*(net.parameters() for net in nets), strict=True):
        assert a.grad.dtype == torch.float32
        assert torch.equal(content(a.grad), content(b.grad))


def compare_bytes():
    """Of weights in bfloat16 half is sent; scales of rows add four bytes for each."""
    sent = {}
    for recipe in ("tensorwise", "rowwise"):
        for gathered in (True, False):
            net = blocks(bias=False).to(torch.bfloat16)
            convert_for_training_(net, recipe, fsdp_float8_all_gather=gathered)
            shard(net)
            with Traffic() as traffic:
                loss_of(net, batch(0, 0).bfloat16()).backward()
            sent[recipe, gathered] = traffic.bytes["_allgather_base_"]
    gathers = 2  # for the forward and for the backward pass
    share = gathers / dist.get_world_size()
    elements = sum(p.numel() for p in net.parameters()) * share
    rows = sum(p.shape[0] for p in net.parameters()) * share
    assert sent["tensorwise", False] == sent["rowwise", False] == 2 * elements
    assert sent["tensorwise", True] == elements
    assert sent["rowwise", True] == elements + 4 * rows


#: Options of torch's AdamW by which it writes to lists of weights.
STEPS = ("foreach", "fused")
#: A loop that writes nothing, for those of our optimizers, which take seconds to compile: who hears of a step is the same.
UNCOMPILED = mock.patch.object(update, "_loop_of", return_value=(lambda *given: None, None))


def compare_reductions():
    """All scales in one reduction, after which none is left; a scale that has grown old is found again."""
    _, net = converted("tensorwise")
    shard(net)

    def reductions():
        with Traffic() as traffic:
            loss_of(net, batch(0, 0)).backward()
        return traffic.calls.get("allreduce_", 0)

    assert reductions() == 4  # each its own, kept for the backward pass
    assert reductions() == 0
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    optimizer.step()
    with Traffic() as traffic:
        precompute_float8_dynamic_scale_for_fsdp(net)
    assert traffic.calls == {"allreduce_": 1}
    assert reductions() == 0
    optimizer.step()
    assert reductions() == 4
    # Ranks know of each other's steps.
    steps = AdamW8bit(net.parameters()).step, *(AdamW(net.parameters(), **{how: True}).step for how in STEPS)
    with mock.patch.object(hooks, "missing_ranks", side_effect=AssertionError), UNCOMPILED:
        for step in steps:
            step()
            assert reductions() == 4
    weight = net[0].up.weight
    stored = net.state_dict()["0.up.weight"]
    for written in (weight, weight.to_local(), stored.to_local(), stored, stored.detach(), stored.view(-1)):
        with torch.no_grad():
            written.mul_(2)
        assert reductions() == 1, type(written)
    with torch.no_grad():
        stored.copy_(weight)
    assert reductions() == 1
    net.load_state_dict(net.state_dict())
    assert reductions() == 4


def compare_quantized_once():
    """Both passes and micro-batches send what was quantized once; whatever writes to a weight makes it old."""
    _, net = converted("rowwise")
    shard(net)
    made, quantized_shard = [], hooks.quantized_shard

    def count(*given):
        made.append(1)
        return quantized_shard(*given)

    def quantized():
        made.clear()
        loss_of(net, batch(0, 0)).backward()
        return len(made)

    with mock.patch.object(hooks, "quantized_shard", count), UNCOMPILED:
        assert (quantized(), quantized()) == (4, 0)
        for optimizer in (torch.optim.AdamW, AdamW8bit):
            optimizer(net.parameters(), 1e-3).step()
            assert quantized() == 4, optimizer
        stored = net.state_dict()["0.up.weight"]
        for written in (
            net[0].up.weight,
            net[0].up.weight.to_local(),
            stored.to_local(),
            stored,
            stored.detach(),
        ):
            with torch.no_grad():
                written.mul_(2)
            assert quantized() == 1, type(written)
        stored.to_local().data.mul_(2)  # which torch does not count
        precompute_float8_dynamic_scale_for_fsdp(net)
        assert quantized() == 4


def compare_unequal_shards(recipe, rows):
    """Rows that the ranks do not divide, and fewer rows than ranks."""
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(64, rows)).to(DEVICE, DTYPE)
    convert_for_training_(one, recipe, fsdp_float8_all_gather=True, pad=True)
    many = copy.deepcopy(one)
    fully_shard(many[0])
    optimizers = [torch.optim.AdamW(net.parameters(), 1e-2) for net in (one, many)]
    for _ in range(2):
        expected, found = one(batch(0, 0)), many(batch(0, 0))
        assert torch.equal(found, expected), (recipe, rows)
        assert not found._is_view()
        for y in (expected, found):
            y.square().sum().backward()
        assert_grads(one, many, (recipe, rows))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        precompute_float8_dynamic_scale_for_fsdp(many)


def compare_bad_weights():
    """NaN and infinity in one rank's shard reach all outputs, since the tensor's scale is NaN; a weight of zeros stays zero."""
    for value in (float("nan"), float("inf"), 0.0):
        one, many = converted("tensorwise")
        shard(many)
        weight = many[0].up.weight
        with torch.no_grad():
            if value == 0:
                content(one[0].up.weight).zero_()
                weight.zero_()
            else:
                content(one[0].up.weight)[0, 0] = value
                if dist.get_rank() == 0:
                    weight._local_tensor.dense[0, 0] = value
                weight.add_(0)  # what one rank alone has written, the others do not know
        expected, found = one(batch(0, 0)), many(batch(0, 0))
        assert (
            torch.equal(found, expected) if value == 0 else not (found.isfinite() | expected.isfinite()).any()
        )


def compare_one_rank_alone():
    """What one rank reads alone changes no decision; beside its writes the others write to no row."""
    one, many = converted("tensorwise")
    shard(many)
    weight, first, given = many[0].up.weight, dist.get_rank() == 0, batch(0, 0)
    with torch.no_grad():
        many(given)
        if first:
            torch.empty_like(weight._local_tensor.dense).copy_(weight._local_tensor)
        assert torch.equal(many(given), one(given))
        content(one[0].up.weight)[0].fill_(9)
        weight.to_local()[0].fill_(9) if first else weight.to_local()[:0].zero_()
        assert torch.equal(many(given), one(given))
        content(one[0].up.weight)[1].fill_(18)
        if first:
            weight.to_local()[1].fill_(18)
            limit = mock.patch.object(over_ranks, "time_limit", return_value=timedelta(seconds=0.1))
            with limit, pytest.raises(ValueError, match="written to on this rank, and not on 1 of"):
                many(given)
        dist.barrier()
        precompute_float8_dynamic_scale_for_fsdp(many)
        assert torch.equal(many(given), one(given))
        weight.to_local()[:0].zero_()
        assert torch.equal(many(given), one(given))


def compare_accumulation(recipe):
    """Two batches a step, gradients reduced after the second."""
    one, many = converted(recipe)
    shard(many)
    for step in range(2):
        many.set_requires_gradient_sync(step == 1)
        loss_of(many, batch(dist.get_rank(), step)).backward()
    ranks = range(dist.get_world_size())
    sums = []
    for rank in ranks:
        one.zero_grad()
        for step in range(2):
            loss_of(one, batch(rank, step)).backward()
        sums.append([p.grad.clone() for p in one.parameters()])
    for parameter, *each in zip(one.parameters(), *sums, strict=True):
        parameter.grad = sum(each) / len(ranks)
    assert_grads(one, many, recipe)


def compare_recomputed(recipe):
    one, many = converted(recipe)
    for block in many:
        block.recomputed = True
    shard(many)
    one_process(one, 0)
    loss_of(many, batch(dist.get_rank(), 0)).backward()
    assert_grads(one, many, recipe)


def compare_ddp(recipe):
    one, many = converted(recipe, gathered=False)
    parallel = DistributedDataParallel(many)
    one_process(one, 0)
    loss_of(parallel, batch(dist.get_rank(), 0)).backward()
    assert_grads(one, many, recipe)


def compare_late_weights():
    """A model without memory, filled after it was sharded; and tensors that are assigned."""
    one, _ = converted("tensorwise")
    many = blocks().to("meta")
    convert_for_training_(many, "tensorwise", fsdp_float8_all_gather=True)
    shard(many)
    many.to_empty(device=DEVICE)
    whole = blocks().state_dict()
    mesh = many[0].up.weight.device_mesh
    parts = {name: distribute_tensor(t, mesh, [Shard(0)]) for name, t in whole.items()}
    for assign in (False, True):
        many.load_state_dict(parts, assign=assign)
        assert type(many[0].up.weight._local_tensor) is CastOnGather
        assert torch.equal(many(batch(0, 0)), one(batch(0, 0))), assign


def compare_compiled(recipe):
    """Blocks in one graph each, FSDP2's hooks between them; gathered anew a weight is none that is compiled for again."""
    one, many = converted(recipe, count=1)
    for block in many:
        block.compile(backend="aot_eager", fullgraph=True)
    shard(many)
    for step in range(2):
        for net in (one, many):
            net.zero_grad()
        one_process(one, step)
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            loss_of(many, batch(dist.get_rank(), step)).backward()
        assert_grads(one, many, recipe)
        with torch.no_grad():
            for net in (one, many):
                for parameter in net.parameters():
                    parameter.mul_(1.5)
        precompute_float8_dynamic_scale_for_fsdp(many)


def compare_compiled_steps():
    """A compiled optimizer makes scales old, and the compiled function finds all of them."""
    _, net = converted("tensorwise", count=1)
    shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2, fused=False)
    step, precompute = (
        torch.compile(one, backend="aot_eager")
        for one in (optimizer.step, precompute_float8_dynamic_scale_for_fsdp)
    )
    counts = []
    for prepare in (lambda: None, step, lambda: (step(), precompute(net))):
        loss_of(net, batch(dist.get_rank(), 0)).backward()
        prepare()
        with Traffic() as traffic:
            loss_of(net, batch(0, 0))
        counts.append(traffic.calls.get("allreduce_", 0))
    assert counts == [0, 2, 0]


def fsdp(*compiled):
    """With names of recipes: blocks of these, compiled; with "steps" what comes between the passes."""
    for recipe in compiled:
        compare_compiled_steps() if recipe == "steps" else compare_compiled(recipe)
    if compiled:
        return
    for recipe in GATHERED:
        compare_training(recipe, True, recipe == "tensorwise")
    for recipe in ("tensorwise", "rowwise"):
        compare_training(recipe, False, False)
        compare_codes(recipe, {}, DTYPE)
        compare_codes(recipe, {"mp_policy": BF16}, torch.bfloat16)
        for rows in (9, 1):
            compare_unequal_shards(recipe, rows)
        compare_accumulation(recipe)
        compare_recomputed(recipe)
        compare_ddp(recipe)
    compare_mixed_precision()
    compare_bytes()
    compare_reductions()
    compare_quantized_once()
    compare_bad_weights()
    compare_one_rank_alone()
    compare_late_weights()
