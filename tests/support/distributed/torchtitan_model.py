"""Two processes that train torchtitan's debug model under its own FSDP2; run by tests/ao_lab/training/test_torchtitan.

    python -m tests.support.distributed.ranks torchtitan_model.run RANKS GATHERED

Prints "equal" where two steps lower the loss and the state is plain.
"""

import warnings

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.parallelize import parallelize_llama

from ao_lab.training.shard import CastOnGather
from ao_lab.training.torchtitan import LowPrecisionLinearConverter


def attention(self, q, k, v, *args, **kwargs):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def sharded(gathered):
    parallelism = ParallelismConfig(spmd_backend="partial_dtensor")
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    dims.build_mesh()
    converter = LowPrecisionLinearConverter.Config(filter_fqns=["lm_head"], fsdp_float8_all_gather=gathered)
    with torch.device("meta"):
        model = model_registry("debugmodel", converters=[converter]).model.build()
    training = TrainingConfig(local_batch_size=1, seq_len=128)
    options = {"parallel_dims": dims, "training": training, "parallelism": parallelism}
    model = parallelize_llama(
        model, **options, compile_config=CompileConfig(), ac_config=None, dump_folder="."
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other
    model.to_empty(device="cpu")
    model.init_states(buffer_device=torch.device("cpu"))
    return model


def run(gathered):
    warnings.simplefilter("ignore")
    FlexAttention.forward, parallel_dims.device_type = attention, "cpu"
    model = sharded(gathered == "1")
    assert isinstance(model.layers["0"].feed_forward.w1.weight._local_tensor, CastOnGather) == (
        gathered == "1"
    )
    tokens, positions = torch.randint(2048, (1, 128)), torch.arange(128)[None]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses = []
    for _ in range(3):
        logits = model(tokens, positions=positions)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]
    assert {type(t.to_local()) for t in model.state_dict().values()} == {torch.Tensor}
