"""Times of several GPUs: training steps by FSDP2 whose weights are gathered as codes, decoding with weights split over ranks,
and the exchange of embedding rows, each beside bfloat16 in turn.

Peers are timed in turn in one process a GPU, round by round, all ranks beginning together; a time is the first rank's by its
GPU's events, the median of rounds with 20/80 quantiles. Bytes are those that a rank gives to collectives. On CPU ranks the
same runs on tiny shapes, whose bytes mean what they say and whose times mean nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from experiments.distributed.cases import SPEED, Case, Rank, Tally
from experiments.fp8_training import blocks
from experiments.harness.bench import summary
from experiments.harness.measuring import Values
from experiments.models.llama import LLAMA_3_8B_TWO_LAYERS, TINY_TWO_LAYERS

#: The setting of the row that says how a case ended.
IN_TURN = "peers in turn"
RATIO = "speed over bfloat16"
SENT = "sent by a rank"
#: The least cosine of what quantized layers add with what layers in bfloat16 do: int4 in groups of 128 has 0.996 on a CPU.
CLOSE = 0.98


def step_of_blocks(rank: Rank, tally: Tally, layers: int, batch: int, length: int, compiled: bool) -> None:
    """Forward, backward, AdamW and scales of decoder blocks of Llama-3-8B, of tiny ones on a CPU (`fp8_training.blocks`)."""
    cuda = rank.device.type == "cuda"
    shape = replace(LLAMA_3_8B_TWO_LAYERS if cuda else TINY_TWO_LAYERS, layers=layers)
    length, rounds = (length, 15) if cuda else (64, 2)
    case = blocks.Case(shape, batch, length, rank.device.type, compiled and cuda, rounds)
    with torch.random.fork_rng(devices=[rank.device] if cuda else []):
        steps = {side: blocks.Step(side, case, rank.rank) for side in blocks.SIDES}
        found = blocks.values_of(steps, case)
    for method, values in found.items():
        tally.lines(method, values)


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder layer, the layers that are timed, and the tokens that caches hold."""

    width: int
    heads: int
    kv_heads: int
    feed_forward: int
    layers: int
    context: int

    @property
    def head(self) -> int:
        """Features of a head."""
        return self.width // self.heads


#: Layers of Llama-3-70B; a stand-in.
LLAMA_70B = Shape(8192, 64, 8, 28672, 4, 1024)
TINY = Shape(256, 4, 2, 512, 1, 16)


class Layer(nn.Module):
    """A rank's part of a decoder layer at one token a line: heads and hidden features are split, two sums over ranks."""

    def __init__(self, shape: Shape, rank: Rank, batch: int) -> None:
        super().__init__()
        n, w, head = rank.size, shape.width, shape.head
        options: dict[str, Any] = {"bias": False, "device": rank.device, "dtype": torch.bfloat16}
        self.heads, self.kv_heads, self.head = shape.heads // n, shape.kv_heads // n, head
        self.qkv = nn.Linear(w, (self.heads + 2 * self.kv_heads) * head, **options)
        self.out = nn.Linear(self.heads * head, w, **options)
        self.gate_up = nn.Linear(w, 2 * shape.feed_forward // n, **options)
        self.down = nn.Linear(shape.feed_forward // n, w, **options)
        size = (2, batch, self.kv_heads, shape.context, head)
        self.cache = torch.randn(size, device=rank.device, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) to the same shape."""
        sizes = [self.heads * self.head, *[self.kv_heads * self.head] * 2]
        q, k, v = self.qkv(functional.rms_norm(x, x.shape[-1:])).split(sizes, -1)
        for place, part in zip(self.cache, (k, v), strict=True):
            place[:, :, -1] = part.unflatten(-1, (self.kv_heads, self.head))
        q = q.unflatten(-1, (self.heads, 1, self.head))
        y = functional.scaled_dot_product_attention(q, *self.cache, enable_gqa=True)
        x = x + added(self.out(y.flatten(1)))
        gate, up = self.gate_up(functional.rms_norm(x, x.shape[-1:])).chunk(2, -1)
        return x + added(self.down(functional.silu(gate) * up))


def added(y: Tensor) -> Tensor:
    """The sum over ranks."""
    dist.all_reduce(y)
    return y


def decoders(rank: Rank, shape: Shape, batch: int) -> dict[str, nn.Module]:
    """The same layers in bfloat16 and quantized."""
    import ao_lab

    configs = {
        "bfloat16": None,
        "int4": ao_lab.Int4WeightOnlyConfig(),
        "fp8": ao_lab.Float8WeightOnlyConfig(),
        "fp8, inputs too": ao_lab.Float8DynamicActivationFloat8WeightConfig(granularity=ao_lab.PerRow()),
    }
    made: dict[str, nn.Module] = {}
    for name, config in configs.items():
        torch.manual_seed(rank.rank)
        net = nn.Sequential(*(Layer(shape, rank, batch) for _ in range(shape.layers))).requires_grad_(False)
        if config is not None:
            ao_lab.quantize_(net, config)
        made[name] = net
    return made


def decode(rank: Rank, tally: Tally, batch: int) -> None:
    """A token of each line through layers of Llama-3-70B, split over ranks, replayed from CUDA graphs."""
    cuda = rank.device.type == "cuda"
    shape = LLAMA_70B if cuda else TINY
    nets = decoders(rank, shape, batch)
    x = rank.random(batch, shape.width, dtype=torch.bfloat16)
    with torch.no_grad():
        plain = change(nets["bfloat16"], x)
        for name, net in nets.items():
            near = float(functional.cosine_similarity(change(net, x), plain, 0))
            tally.true(f"what layers add in {name} has cosine {near:.4f} with bfloat16's", near > CLOSE)
        calls = {name: captured(rank, partial(net, x)) for name, net in nets.items()}
        times = in_turn(rank, calls, 15 if cuda else 2, 8 if cuda else 1)
    for name, values in timed(times, "bfloat16", shape.layers).items():
        weights = sum(part.nbytes for p in nets[name].parameters() for part in parts_of(p))
        tally.lines(name, {**values, "weights of a rank": (weights / 1e6, "MB")})


def change(net: nn.Module, x: Tensor) -> Tensor:
    """What layers add to their input: beside the input itself it is small, and layers of zeros would give almost its cosine."""
    return (net(x).float() - x.float()).flatten()


def parts_of(weight: Any) -> list[Tensor]:
    """The plain tensors of a weight."""
    parts = getattr(weight, "parts", None)
    return [weight] if parts is None else [part for part in parts.values() if part is not None]


def captured(rank: Rank, call: Callable[[], Any]) -> Callable[[], Any]:
    """A call replayed from a CUDA graph; itself on a CPU."""
    if rank.device.type != "cuda":
        return call
    from experiments.harness.cuda_graph import recorded

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    rank.wait()
    graph = torch.cuda.CUDAGraph()
    with recorded(graph, stream):
        call()
    torch.cuda.synchronize()
    return graph.replay


def in_turn(
    rank: Rank, calls: Mapping[str, Callable[[], Any]], rounds: int, repeat: int
) -> dict[str, list[float]]:
    """Seconds of each call, a value a round; every rank makes the same calls in the same order."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            rank.wait()
            seconds = span(rank, call, repeat)
            if number:
                times[name].append(seconds)
    return times


def span(rank: Rank, call: Callable[[], Any], repeat: int) -> float:
    """Seconds of a call, one of so many behind another that begins them."""
    if rank.device.type != "cuda":
        started = time.perf_counter()
        call()
        return time.perf_counter() - started
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    start.record()
    for _ in range(repeat):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / repeat


def timed(times: Mapping[str, list[float]], base: str, share: int = 1) -> dict[str, Values]:
    """Median and quantiles of each peer, of one of `share` equal parts, and its speed over the base's."""
    plain = summary(times[base]).median
    found: dict[str, Values] = {}
    for name, taken in times.items():
        found[name] = {
            **summary([value / share for value in taken]).values(),
            RATIO: (plain / summary(taken).median, "ratio"),
        }
    return found


#: Tables, features of a row, and samples of all ranks.
TABLES, FEATURES, SAMPLES = 26, 128, 8192
EXCHANGED = {"bfloat16": None, "fp8": "fp8_rowwise", "int8": "int8_rowwise"}


def exchange(rank: Rank, tally: Tally, graph: bool) -> None:
    """Sums of bags of 26 tables on all ranks, 8192 samples, to the ranks of the samples: quantized, sent, dequantized."""
    import fast
    from ao_lab.tensor.all_to_all import all_to_all_rows, row_bytes

    samples = (SAMPLES if rank.device.type == "cuda" else 64) // rank.size
    tables = [TABLES // rank.size + (of < TABLES % rank.size) for of in range(rank.size)]
    send, receive = [tables[rank.rank] * samples] * rank.size, [count * samples for count in tables]
    x = rank.random(sum(send), FEATURES, seed=rank.rank, dtype=torch.bfloat16)
    calls: dict[str, Callable[[], Any]] = {}
    with torch.no_grad():
        for name, scheme in EXCHANGED.items():
            found = all_to_all_rows(x, send, receive, scheme)
            own = x[sum(send[: rank.rank]) :][: send[rank.rank]]
            kept = found[sum(receive[: rank.rank]) :][: receive[rank.rank]]
            expected = own if scheme is None else fast.dequantize(fast.quantize(own, scheme), own.dtype)
            tally.bits(f"this rank's own rows in {name}", kept, expected)
            call = partial(all_to_all_rows, x, send, receive, scheme)
            calls[name] = captured(rank, call) if graph else call
        cuda = rank.device.type == "cuda"
        times = in_turn(rank, calls, 20 if cuda else 2, 10 if cuda else 1)
    others = sum(count for of, count in enumerate(send) if of != rank.rank)
    for name, values in timed(times, "bfloat16").items():
        scheme = EXCHANGED[name]
        width = 2 * FEATURES if scheme is None else row_bytes(scheme, FEATURES)
        tally.lines(name, {**values, SENT: (others * width / 1e6, "MB")})


#: (blocks, batch, tokens of a line, compiled) of FSDP2's steps: the fewer tokens, the more of a gather is exposed.
STEPS = (
    (2, 1, 256, False), (2, 1, 1024, False), (2, 1, 4096, False), (2, 1, 8192, False), (6, 1, 512, False),
    (2, 1, 1024, True), (2, 1, 8192, True),
)  # fmt: skip


CASES = (
    *(
        Case(f"decoding of 70B shapes, batch {batch}", partial(decode, batch=batch), IN_TURN, SPEED)
        for batch in (1, 16, 64)
    ),
    *(
        Case(f"embedding all-to-all, {'CUDA graphs' if graph else 'eager'}", partial(exchange, graph=graph), IN_TURN, SPEED,
             "" if not graph else "CUDA graphs are of GPUs")
        for graph in (False, True)
    ),
    *(
        Case(
            f"FSDP2 step, {layers} blocks of 8B, {batch} x {length} tokens a rank, {'compiled' if compiled else 'eager'}",
            partial(step_of_blocks, layers=layers, batch=batch, length=length, compiled=compiled), IN_TURN, SPEED,
            "inductor's programs are of GPUs" if compiled else "", limit=200 if compiled else 75,
        )
        for layers, batch, length, compiled in STEPS
    ),
)  # fmt: skip
