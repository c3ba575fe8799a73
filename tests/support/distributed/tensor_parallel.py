"""Two processes that share quantized weights by DTensor; run by test_collectives.

    python -m tests.support.distributed.ranks tensor_parallel.recorded RANKS DIRECTORY [day]

Prints "equal" where everything has the bits of one process. A product over a cut axis is a sum of the ranks' products, in one
process as here: `F.linear` of each slice of the input and the weight, with its share of the bias. Checkpoints go to DIRECTORY.
"""

import copy
import re
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ao_lab import QuantizedTensor, Recipe, quantized
from reference import SCHEMES, Scales
from tests.support.quantized_weights import COLLECTIVES, recorded_operations, same, weight

# One of each kind, the last with inputs quantized too.
RECIPES = tuple(
    Recipe(weight=SCHEMES[w], activation=None if a is None else SCHEMES[a])
    for w, a in (
        ("int8_rowwise", None),
        ("int4_g32", None),
        ("int4_g32_asymmetric", None),
        ("mxfp4", None),
        ("nf4", None),
        ("int8_rowwise", "int8_rowwise"),
        ("fp8_rowwise", "fp8_rowwise"),
        ("fp8_tensorwise", "fp8_tensorwise"),
        ("mxfp8_e4m3", "mxfp8_e4m3"),
        ("nvfp4", "nvfp4"),
    )
)
# Torch 2.11 gathers what is contiguous, which a transposed weight is not: it would have to be quantized again.
GATHERS_TRANSPOSED = hasattr(dist._functional_collectives, "all_gather_single")
MODELS = (RECIPES[2], RECIPES[5], RECIPES[9])
PLAN = {
    "embed": RowwiseParallel(input_layouts=Replicate()),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
}


class Model(nn.Module):
    """Each of the three ways to cut a layer."""

    def __init__(self, recipe):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.up, self.down = nn.Embedding(64, 128), nn.Linear(128, 256), nn.Linear(256, 128)
        for layer in (self.embed, self.up, self.down):
            used = recipe if layer is not self.embed else Recipe(weight=recipe.weight)
            made = quantized(layer.weight.detach(), used)
            layer.weight = nn.Parameter(made, requires_grad=False)

    def forward(self, index):
        return self.down(F.silu(self.up(self.embed(index))))


def columns(recipe):
    """Whether pieces of columns are pieces of the weight."""
    return recipe.weight.name != "nf4"


def refused(call, error, text):
    """That this rank meets the error."""
    with pytest.raises(error, match=re.escape(text)):
        call()


def check_placements(recipe, mesh):
    t = quantized(weight(256, 256), recipe)
    rank = dist.get_rank()
    places = [Replicate(), Shard(0)] + [Shard(1)] * columns(recipe)
    for place in places:
        piece = t if place == Replicate() else t.chunk(mesh.size(), place.dim)[rank]
        for source in (0, None):
            made = distribute_tensor(t, mesh, [place], src_data_rank=source)
            assert torch.equal(made.to_local(), piece), (recipe, place)
        again = DTensor.from_local(piece, mesh, [place])
        for other in (made, again, made.detach(), copy.deepcopy(made)):
            assert torch.equal(other.full_tensor(), t), (recipe, place)
        assert torch.equal(made.t().to_local(), piece.t()), (recipe, place)
        if recipe.weight.scale.block == 32 and GATHERS_TRANSPOSED:
            assert torch.equal(made.t().full_tensor(), t.t()), (recipe, place)
        assert torch.equal(made.to(torch.bfloat16).full_tensor(), t.to(torch.bfloat16)), (recipe, place)
        for target in places:
            moved = made.redistribute(mesh, [target])
            assert torch.equal(moved.full_tensor(), t), (recipe, place, target)


def check_products(recipe, mesh, input_scales=None):
    """Rows of the weight on each rank: the bits of one process. Columns: of the sum over slices."""
    made = quantized(weight(256, 256), recipe, input_scales=input_scales)
    t = nn.Parameter(made, requires_grad=False)
    x, bias, ranks = weight(5, 256, seed=1), weight(256, seed=2), mesh.size()
    inputs = DTensor.from_local(x, mesh, [Replicate()])
    rows = distribute_tensor(t, mesh, [Shard(0)])
    shared = distribute_tensor(bias, mesh, [Shard(0)])
    products = {
        F.linear(x, t): F.linear(inputs, rows),
        F.linear(x, t, bias): F.linear(inputs, rows, shared),
        torch.mm(x, t.t()): torch.mm(inputs, rows.t()),
        torch.addmm(bias, x, t.t()): torch.addmm(shared, inputs, rows.t()),
    }
    for expected, got in products.items():
        assert got.placements == (Shard(1),)
        assert same(got.full_tensor(), expected), recipe
    if columns(recipe):
        cut = distribute_tensor(t, mesh, [Shard(1)])
        pieces = [(a.contiguous(), b) for a, b in zip(x.chunk(ranks, 1), t.chunk(ranks, 1), strict=True)]
        inputs = distribute_tensor(x, mesh, [Shard(1)])
        assert same(F.linear(inputs, cut).full_tensor(), sum(F.linear(a, b) for a, b in pieces)), recipe
        given = distribute_tensor(bias, mesh, [Replicate()])
        expected = sum(F.linear(a, b, bias / ranks) for a, b in pieces)
        got = F.linear(inputs, cut, given)
        # Under inference mode DTensor may gather weight and input and cut the rows: the bits of one process again.
        expected = expected if got.placements == (Partial(),) else F.linear(x, t, bias)
        assert same(got.full_tensor(), expected), recipe
    index = torch.arange(15).reshape(3, 5) * 17
    looked = DTensor.from_local(index, mesh, [Replicate()])
    for place in [Shard(0)] + [Shard(1)] * columns(recipe):
        found = F.embedding(looked, distribute_tensor(t, mesh, [place]))
        assert same(found.full_tensor(), F.embedding(index, t)), (recipe, place)


def check_model(recipe, mesh, directory):
    one = Model(recipe)
    many = parallelize_module(copy.deepcopy(one), mesh, PLAN)
    index = torch.arange(35).reshape(5, 7)
    expected = in_slices(one, index, mesh.size())
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert same(many(index) + 0, expected), recipe
            compiled = torch.compile(many, backend="aot_eager", fullgraph=True)
            assert same(compiled(index) + 0, expected), recipe
    check_states(one, many, mesh, directory)
    check_beside_fsdp(one, mesh, index, expected)


def in_slices(model, index, ranks):
    """The model's output, its last layer a sum over slices of columns."""
    x, down = F.silu(model.up(model.embed(index))), model.down
    slices = zip(x.chunk(ranks, -1), down.weight.chunk(ranks, 1), strict=True)
    return sum(F.linear(a.contiguous(), b, down.bias / ranks) for a, b in slices)


def check_states(one, many, mesh, directory):
    """State of sharded models: gathered, set, saved and read back, in shards and whole."""
    state = one.state_dict()
    for options in ({}, {"cpu_offload": True}):
        full = get_model_state_dict(many, options=StateDictOptions(full_state_dict=True, **options))
        assert all(torch.equal(value, state[name]) for name, value in full.items())
        assert full.keys() == (state.keys() if dist.get_rank() == 0 or not options else set())
    dcp.save(many.state_dict(), checkpoint_id=directory)
    other = parallelize_module(copy.deepcopy(one), mesh, PLAN)
    for made, load in (
        (
            other,
            lambda: set_model_state_dict(other, dict(state), options=StateDictOptions(full_state_dict=True)),
        ),
        (other, lambda: dcp.load(other.state_dict(), checkpoint_id=directory)),
        (copy.deepcopy(one), None),
    ):
        cleared = made.state_dict()
        clear(cleared)
        load() if load else dcp.load(cleared, checkpoint_id=directory)
        assert all(torch.equal(whole(value), state[name]) for name, value in made.state_dict().items())


def clear(state):
    for value in state.values():
        local = value.to_local() if isinstance(value, DTensor) else value
        parts = local.parts.values() if isinstance(local, QuantizedTensor) else [local]
        for part in parts:
            if part is not None:
                part.zero_()


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def check_beside_fsdp(one, mesh, index, expected):
    """FSDP2 over one axis of a mesh, tensor parallelism over the other: here one of them has one rank."""
    for shape in ((mesh.size(), 1), (1, mesh.size())):
        both = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
        many = parallelize_module(copy.deepcopy(one), both["tensor"], PLAN)
        for layer in (many.embed, many.up, many.down, many):
            fully_shard(layer, mesh=both["data"])
        wanted = expected if shape[0] == 1 else one(index)
        for _ in range(2):
            assert same(many(index) + 0, wanted)


def check_uneven(mesh):
    """Shards of 5 and 4, and of 1 and 0 rows or experts; of 129 and 128 columns under scales that hold for whole rows."""
    for scheme in ("int8_rowwise", "int4_g32_asymmetric", "nvfp4", "fp8_tensorwise"):
        for rows in (9, 1):
            check_restored(quantized(weight(rows, 64), scheme), mesh, 0)
            check_restored(quantized(weight(rows, 8, 64), scheme), mesh, 0)
    for scheme in ("int8_rowwise", "int8_rowwise_asymmetric", "fp8_tensorwise"):
        check_restored(quantized(weight(16, 257), scheme), mesh, 1)


def check_restored(t, mesh, dim):
    for source in (0, None):
        made = distribute_tensor(t, mesh, [Shard(dim)], src_data_rank=source)
        assert torch.equal(made.to_local(), t.tensor_split([-(-t.shape[dim] // 2)], dim)[dist.get_rank()])
        assert torch.equal(made.full_tensor(), t)


def check_collectives(mesh):
    """torch.distributed without DTensor; and what DTensor uses on GPUs alone."""
    rank, ranks = dist.get_rank(), mesh.size()
    for scheme in ("int4_g32_asymmetric", "nvfp4"):
        each = [quantized(weight(32, 64, seed=seed), scheme) for seed in range(ranks)]
        got = torch.empty_like(each[0])
        dist.scatter(got, each if rank == 0 else None, src=0)
        assert torch.equal(got, each[rank])
        dist.broadcast(got, src=1)
        assert torch.equal(got, each[1])
        everyone = [torch.empty_like(got) for _ in range(ranks)]
        dist.all_gather(everyone, each[rank])
        assert all(torch.equal(a, b) for a, b in zip(everyone, each, strict=True))
        sent = dist._functional_collectives.broadcast(each[rank], 1, mesh)
        assert torch.equal(sent, each[1])
        sent = torch.ops._c10d_functional.broadcast(each[rank], 1, mesh.get_group().group_name)
        assert torch.equal(dist._functional_collectives.wait_tensor(sent), each[1])
    t = quantized(weight(32, 64), "int4_g32_asymmetric")
    group = mesh.get_group().group_name
    moved = torch.ops._dtensor.shard_dim_alltoall(t.chunk(ranks, 1)[rank], 1, 0, group)
    assert torch.equal(moved, t.chunk(ranks, 0)[rank])
    each = [quantized(weight(32, 128, seed=seed), "int4_g32_asymmetric") for seed in range(ranks)]
    columns_of_own = each[rank][:, :64].t()
    dist.broadcast(columns_of_own, src=0)
    assert torch.equal(each[rank][:, :64], each[0][:, :64])
    assert torch.equal(each[1][:, 64:], quantized(weight(32, 128, seed=1), "int4_g32_asymmetric")[:, 64:])


def check_refusals(mesh):
    """The same error on every rank, before anything is sent or after everything was."""
    t = quantized(weight(64, 96), "int4_g32")
    for source in (0, None):
        refused(
            lambda source=source: distribute_tensor(t, mesh, [Shard(1)], src_data_rank=source),
            ValueError,
            "cut at multiples of 32 (among ranks: as many as divide 3)",
        )
    rows = distribute_tensor(quantized(weight(32, 64), "int8_rowwise"), mesh, [Shard(0)])
    if GATHERS_TRANSPOSED:
        refused(rows.t().full_tensor, ValueError, "its own scale")
    own = quantized(weight(32, 64, seed=dist.get_rank()), "fp8_tensorwise")
    refused(DTensor.from_local(own, mesh, [Shard(0)]).full_tensor, ValueError, "its own scale")
    static = [
        quantized(weight(32, 64), "int8_rowwise", input_scales=Scales(torch.tensor(s))) for s in (1.0, 2.0)
    ]
    made = DTensor.from_local(static[dist.get_rank()], mesh, [Shard(0)])
    refused(made.full_tensor, ValueError, "its own input_scale")
    other = [quantized(weight(32, 64), scheme) for scheme in ("int8_rowwise", "fp8_rowwise")]
    refused(lambda: dist.all_gather(other, other[0]), ValueError, "one recipe and one shape")
    dense = distribute_tensor(weight(32, 64), mesh, [Shard(0)])
    refused(lambda: quantized(dense, "int8_rowwise"), TypeError, "quantize the model first")
    refused(lambda: dist.all_reduce(own), NotImplementedError, "allreduce")


def check_hashes(mesh):
    """torch.compile keeps programs by these; tracers ask for the parts first."""
    made = [
        distribute_tensor(quantized(weight(32, 64), name), mesh, [Shard(0)])
        for name in ("int8_rowwise", "mxfp4")
    ]
    made[0].to_local().__tensor_flatten__()
    if hasattr(DTensor, "_stable_hash_for_caching"):
        first, second = (tensor._stable_hash_for_caching() for tensor in made)
        assert first != second
        assert first == copy.deepcopy(made[0])._stable_hash_for_caching()
        dense = distribute_tensor(weight(32, 64), mesh, [Shard(0)])
        assert first.startswith(dense._stable_hash_for_caching())


def run(directory, part=""):
    """Everything; by day one model, whose weights have a second-level scale and whose inputs are quantized."""
    warnings.filterwarnings("ignore")
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    check_hashes(mesh)
    check_refusals(mesh)
    check_collectives(mesh)
    check_uneven(mesh)
    for recipe in RECIPES:
        check_placements(recipe, mesh)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                check_products(recipe, mesh)
    static = Recipe(weight=SCHEMES["int8_rowwise"], activation=SCHEMES["int8_tensorwise"])
    check_products(static, mesh, Scales(torch.tensor(0.05)))
    for number, recipe in enumerate(MODELS[-1:] if part == "day" else MODELS):
        check_model(recipe, mesh, f"{directory}/{number}")


def recorded(directory, part=""):
    """`run`, and that it met every collective of the table."""
    used = set()
    with pytest.MonkeyPatch().context() as patch, recorded_operations(patch, used):
        run(directory, part)
    assert used >= COLLECTIVES, COLLECTIVES - used
