"""What causal attention of prompts takes in 8 bits, quantization included and alone, beside torch's over bfloat16.

All calls of a size take turns in one process, replayed from CUDA graphs and launched one by one. What is compared with is the
quickest backend of scaled_dot_product_attention. Stand-in: on a CPU a few tokens, where attention is that of the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ao_lab.measure.turns import Call, Plan, Span, Watch, interleaved, prepare, summary, watch_of
from experiments.harness.bench import repeated
from experiments.harness.cuda_graph import launched
from experiments.harness.measuring import Values, attempt, kernel
from experiments.kv_cache.decode_attention import Heads, Size
from fast.attention.quantized import quantized_attention
from reference.attention.quantized import ATTENTION_RECIPES

SPEED, DATA = "speed", "normal-states"
TIME, GRAPH, QUANTIZATION, COSINE, RATE = ("time", ", graph", "quantization alone, ", "cosine", "matmuls")
#: Queries at the end of which the cosine is of.
LAST = 64
HEADS = {"cuda": Heads(), "cpu": Heads(4, 2, 64)}
SIZES = {
    "cuda": tuple(Size(1, tokens) for tokens in (8192, 16384, 32768)),
    "cpu": (Size(1, 96),),
}
PLANS = {
    "cuda": Plan(rounds=20, warmup=2, span=1e-9, seconds=2.0),
    "cpu": Plan(rounds=3, warmup=1, span=1e-9),
}
PEERS = {"SDPA, cuDNN": SDPBackend.CUDNN_ATTENTION, "SDPA, flash": SDPBackend.FLASH_ATTENTION}
ON_CPUS = ("SDPA, flash",)


def states(size: Size, heads: Heads, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k and v as views of (B, T, heads, width), bfloat16; keys have a mean that differs by channel."""

    def made(count: int) -> Tensor:
        shape = (size.batch, size.tokens, count, heads.width)
        return torch.randn(shape, device=device, dtype=torch.bfloat16).transpose(1, 2)

    mean = 2 * torch.randn(heads.width, device=device, dtype=torch.bfloat16)
    return made(heads.queries), made(heads.keys) + mean, made(heads.keys)


def by_backend(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend) -> Tensor:
    """Causal attention by one of torch's backends alone."""
    with sdpa_kernel(backend):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def calls_of(q: Tensor, k: Tensor, v: Tensor, recipes: Sequence[str]) -> dict[str, Callable[[], Tensor]]:
    """Peers and recipes of a device."""
    peers = PEERS if q.is_cuda else {name: PEERS[name] for name in ON_CPUS}
    return {
        **{name: partial(by_backend, q, k, v, backend) for name, backend in peers.items()},
        **{name: partial(quantized_attention, q, k, v, name, causal=True) for name in recipes},
    }


def measure(size: Size, heads: Heads, device: str, recipes: Sequence[str]) -> Mapping[str, Values]:
    """Values of recipes and peers at a size, timed in turn; of one that fails its status."""
    watch, plan = watch_of(device), PLANS[device]
    q, k, v = states(size, heads, device)
    spans: dict[str, Span] = {}
    results: dict[str, Values] = {}
    for name, call in calls_of(q, k, v, recipes).items():
        results[name] = attempt(partial(_begin, watch, plan, spans, name, call, (q, k, v)))
    if device == "cuda":
        alone = {name: _quantization(q, k, v, name) for name in recipes if name in spans}
        spans |= {f"{QUANTIZATION}{name}": prepare(watch, [call], plan) for name, call in alone.items()}
    for graph in (True, False) if device == "cuda" else (False,):
        times = interleaved(watch, spans, plan, graph=graph) if spans else {}
        for name in spans:
            method, what = name.removeprefix(QUANTIZATION), QUANTIZATION * name.startswith(QUANTIZATION)
            found = summary(times[name]).values("us").items()
            results[method] |= {f"{what}{metric}{GRAPH * graph}": value for metric, value in found}
        first = next(iter(spans), None)
        if first is not None and graph == (device == "cuda"):
            results[first] |= repeated(times, first)
    for name, values in results.items():
        if (us := values.get(f"{TIME}{GRAPH}")) is not None and name in spans:
            results[name] |= {RATE: (operations(size, heads) / us[0] / 1e6, "TFLOP/s")}
    return results


def operations(size: Size, heads: Heads) -> int:
    """Of both matmuls of causal attention: a multiply-add is two."""
    return 2 * size.batch * heads.queries * size.tokens * (size.tokens + 1) * heads.width


def _begin(
    watch: Watch,
    plan: Plan,
    spans: dict[str, Span],
    name: str,
    call: Callable[[], Tensor],
    states: tuple[Tensor, ...],
) -> Values:
    """Compile, warm up and capture a call; the kernel, and the cosine with float32 of what it returns."""
    found = {COSINE: (cosine(call(), *states), "")}
    named = kernel(launched(call))
    spans[name] = prepare(watch, [call], plan)
    return {**found, **named}


def _quantization(q: Tensor, k: Tensor, v: Tensor, recipe: str) -> Call:
    """What a recipe does before its matmuls, on a GPU."""
    from fast.kernels.attention import prefill, sm90

    record = ATTENTION_RECIPES[recipe]
    served = sm90.refusal(q, v, record, None, None) is None
    return partial(prefill.operands, q, k, v, record, None, sm90.SERVED if served else None)


def cosine(y: Tensor, q: Tensor, k: Tensor, v: Tensor) -> float:
    """Of the last queries' attention y with that in float32."""
    keys, values = (x.float().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    tokens = q.shape[2]
    at = torch.arange(max(0, tokens - LAST), tokens, device=q.device)
    scores = q[:, :, at].float() @ keys.mT * q.shape[-1] ** -0.5
    scores.masked_fill_(torch.arange(tokens, device=q.device) > at[:, None], -torch.inf)
    exact, made = (torch.softmax(scores, -1) @ values).flatten(), y[:, :, at].float().flatten()
    return float(torch.nn.functional.cosine_similarity(exact, made, 0))


__all__ = ["HEADS", "SIZES", "SPEED", "TIME", "cosine", "measure", "states"]
