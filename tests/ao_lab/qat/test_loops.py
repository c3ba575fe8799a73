"""Other people's loops and torch's transforms over layers in training: what each answers, for every kind of layer.

`TABLE` states one answer for each pair of a loop and a kind: it works as with dense layers, or raises one error that begins so.
"""

import copy
import io
import pickle

import accelerate
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.func import functional_call, grad, jacrev, jvp, vmap

import ao_lab
from ao_lab import (
    IntxWeightOnlyConfig,
    LoRA,
    QATConfig,
    SparseTrainingConfig,
    quantize_,
    sparsify_,
    step_sparsity_,
)
from ao_lab.sparsity.training.layers import SparseLinear
from tests.ao_lab.quantization.test_models import transformers

WEIGHTS, DYNAMIC = IntxWeightOnlyConfig("int8"), ao_lab.Int8DynamicActivationInt8WeightConfig()
KINDS = {
    "plain": QATConfig(DYNAMIC),
    "learned scales": QATConfig(WEIGHTS, learn_scales=True),
    "late start": QATConfig(DYNAMIC, start_step=1),
    "adapters": QATConfig(DYNAMIC, lora=LoRA(2, dtype=torch.float32)),
    "rounded sum": QATConfig(DYNAMIC, lora=LoRA(2, dtype=torch.float32, rounds="sum")),
    "sparse": SparseTrainingConfig(),
    "recomputed masks": SparseTrainingConfig(masks="recomputed", every=2),
}
PARTS = "QuantizedTensor.* is several tensors"
JOINS = (
    "Must flatten tensors with uniform `requires_grad`"  # torch's, as of every model that is partly frozen
)
VALUES = "a FakeTensor holds its values elsewhere"
#: By loop: what is no "works".
TABLE = {
    "Trainer": {}, "Trainer, tied": {}, "save_state": {"adapters": PARTS}, "dcp": {}, "copies": {},
    "FSDP1": {}, "FSDP1, joined": {"adapters": JOINS, "rounded sum": JOINS},
    "fake": {"sparse": VALUES, "recomputed masks": VALUES}, "fake inputs": {},
    "torch.func": {}, "torch.jit.trace": {}, "torch.export": {}, "torch.export, not strict": {},
    "tensor parallelism": dict.fromkeys(KINDS, "the weight is a DTensor; shard layers by fully_shard.*Tensor parallelism has"),
}  # fmt: skip
#: What runs by day: each structure once; strict export is by night.
DAY = {
    ("Trainer", "adapters"), ("Trainer, tied", "learned scales"), ("save_state", "adapters"), ("save_state", "late start"),
    ("dcp", "learned scales"), ("copies", "recomputed masks"), ("FSDP1", "adapters"), ("FSDP1, joined", "plain"),
    ("fake", "rounded sum"), ("fake", "sparse"), ("fake inputs", "sparse"), ("torch.func", "adapters"),
    ("torch.jit.trace", "learned scales"), ("torch.export, not strict", "plain"), ("tensor parallelism", "learned scales"),
    ("tensor parallelism", "adapters"),
}  # fmt: skip
CASES = [
    pytest.param(loop, kind, marks=[] if (loop, kind) in DAY else pytest.mark.nightly)
    for loop in TABLE
    for kind in KINDS
]
X = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))


def prepared(kind, net=None, accepts=None):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8)) if net is None else net
    (sparsify_ if kind in ("sparse", "recomputed masks") else quantize_)(net, KINDS[kind], accepts)
    return net


def advance(net):
    ao_lab.advance_qat(net)
    if any(isinstance(module, SparseLinear) for module in net.modules()):
        step_sparsity_(net)


def steps(net, inner=None, count=2):
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    for _ in range(count):
        net(X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        advance(net if inner is None else inner)
    return net


def language_model(kind, tied):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=32, num_hidden_layers=1, tie_word_embeddings=tied, **sizes)
    model = transformers.LlamaForCausalLM(config)
    both = tied and kind in ("plain", "learned scales", "late start")
    accepts = (lambda module, name: isinstance(module, (nn.Linear, nn.Embedding))) if both else None
    return prepared(kind, model, accepts)


def trainer(model, folder):
    class Advance(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            advance(model)

    random = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 32, (6,), generator=random) for _ in range(8)]
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=4, save_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        disable_tqdm=True, learning_rate=0.01, logging_strategy="no",
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in rows]
    return transformers.Trainer(model, arguments, train_dataset=data, callbacks=[Advance()])


def numbers(net):
    return {name: getattr(value, "codes", value) for name, value in net.state_dict().items()}


def assert_same(one, two):
    for (name, a), b in zip(numbers(one).items(), numbers(two).values(), strict=True):
        assert torch.equal(a, b), name


def run_trainer(kind, folder, tied=False):
    """What is resumed ends as what was not interrupted, bit for bit."""
    whole, resumed = language_model(kind, tied), language_model(kind, tied)
    trainer(whole, folder).train()
    trainer(resumed, folder).train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert_same(whole, resumed)


def run_save_state(kind, folder):
    net = steps(prepared(kind))
    accelerator = accelerate.Accelerator(cpu=True)
    net = accelerator.prepare(net)
    before = copy.deepcopy(net)
    accelerator.save_state(str(folder))
    steps(net)
    accelerator.load_state(str(folder))
    assert_same(before, net)


def run_dcp(kind, folder):
    net, other = steps(prepared(kind)), prepared(kind)
    dcp.save(net.state_dict(), checkpoint_id=folder, no_dist=True)
    state = other.state_dict()
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    other.load_state_dict(state)
    assert_same(net, other)


def run_copies(kind, folder):
    net = steps(prepared(kind))
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert_same(net, other)
        assert torch.equal(other(X), net(X))
    file, other = io.BytesIO(), prepared(kind)
    torch.save(net.state_dict(), file)
    other.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    assert torch.equal(other(X), net(X))


def run_fsdp1(kind, folder, orig=True):
    """On one rank the same training."""
    expected, net = steps(prepared(kind)), prepared(kind)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'ranks'}", rank=0, world_size=1)
    try:
        whole = FullyShardedDataParallel(net, use_orig_params=orig, device_id=torch.device("cpu"))
        steps(whole, net)
        torch.testing.assert_close(whole(X), expected(X))
    finally:
        dist.destroy_process_group()


def run_tensor_parallel(kind, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder / 'ranks'}", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        net = parallelize_module(prepared(kind), mesh, {"0": ColwiseParallel()})
        net(X)
    finally:
        dist.destroy_process_group()


def run_fake(kind, folder, inside=True):
    net = None if inside else prepared(kind)
    with FakeTensorMode(allow_non_fake_inputs=not inside):
        net = prepared(kind) if net is None else net
        y = net(torch.randn(4, 32))
        y.sum().backward()
        assert y.shape == (4, 8)


def run_func(kind, folder):
    net = prepared(kind)
    trained = {name: p.detach() for name, p in net.named_parameters() if p.requires_grad}

    def loss(parameters, x):
        return functional_call(net, parameters, (x,)).square().mean()

    each = vmap(grad(loss), (None, 0))(trained, X[:, None])
    assert all(each[name].shape == (4, *value.shape) for name, value in trained.items())
    torch.testing.assert_close(
        jvp(net, (X,), (X,))[1], torch.einsum("abcd,cd->ab", jacrev(net)(X), X), rtol=1e-4, atol=1e-5
    )


def run_trace(kind, folder):
    net = prepared(kind)
    torch.testing.assert_close(torch.jit.trace(net, (X,))(X[:3] * 2), net(X[:3] * 2))


def run_export(kind, folder, strict=True):
    net = prepared(kind)
    assert torch.equal(torch.export.export(net, (X,), strict=strict).module()(X), net(X))


LOOPS = {
    "Trainer": run_trainer,
    "Trainer, tied": lambda kind, folder: run_trainer(kind, folder, True),
    "save_state": run_save_state,
    "dcp": run_dcp,
    "copies": run_copies,
    "FSDP1": run_fsdp1,
    "FSDP1, joined": lambda kind, folder: run_fsdp1(kind, folder, False),
    "tensor parallelism": run_tensor_parallel,
    "fake": run_fake,
    "fake inputs": lambda kind, folder: run_fake(kind, folder, False),
    "torch.func": run_func,
    "torch.jit.trace": run_trace,
    "torch.export": run_export,
    "torch.export, not strict": lambda kind, folder: run_export(kind, folder, False),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(("loop", "kind"), CASES)
def test_every_loop(loop, kind, tmp_path):
    refusal = TABLE[loop].get(kind)
    if refusal is None:
        LOOPS[loop](kind, tmp_path)
        return
    with pytest.raises((TypeError, ValueError), match=refusal):
        LOOPS[loop](kind, tmp_path)
