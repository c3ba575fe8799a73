"""On a GPU: attention over stored keys and values, against the reference and against torch's, and `generate()` with it.

    PYTHONPATH=. python tests/gpu/attention/decode.py [--part bits writes sweep variants]
        [--sizes 64x8192 1x32768] [--seconds 60] [--out FOLDER]
        [--kinds value fp8 fp8_residual int8 int8_channels int4 int4_tokens int4_plain int4_g64]

Kinds are recipes (int4: keys by channel, first and last tokens as computed; int4_tokens: a scale a token, and these), "value",
and schemes alone (int4_plain, int4_g64). writes: codes, scales and tokens as computed after a prompt and tokens one by one, the
bits of a CPU. bits: kernels within `attention_error_bound` of reference, masks, several tokens, parts. sweep, variants: tiles
of Triton's kernel and of that in CUDA C++, of one layer, 32 query heads over 8 key heads of 128 channels, --sizes (sequences x
tokens), in CUDA graphs over as many caches as the second-level cache cannot hold. A line a check or time, and rows in
FOLDER/kv_cache.csv (else $OUT). Times by recipe beside other attention, and of `generate()`, are experiment `kv_cache`:
`ao-lab reproduce kv_cache --scale full --only speed --only generate`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from triton.runtime.errors import OutOfResources

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from ao_lab.kv_cache.recipe import INT4, RECIPES, KVRecipe
from experiments.kv_cache.decode_attention import Heads, Size, Stored, rooms, several
from fast.attention.stored import append_, computed_values, quantized_tokens, signed, token_values
from fast.kernels.attention import decode, sm90_decode
from fast.layers.hadamard import hadamard
from reference.attention.attention import attention, attention_error_bound
from tests.gpu.harness.lines import differs, say, write_rows
from tests.gpu.harness.timing import captured, elapsed
from tests.support.zero_points import RAISED, zero_values

KINDS: dict[str, KVRecipe] = {
    "value": RECIPES["bfloat16"],
    **{name: RECIPES[name] for name in ("fp8", "fp8_residual", "int8", "int8_channels", "int4", "int4_tokens")},
    "int4_plain": KVRecipe(key=INT4, value=INT4), "int4_g64": KVRecipe(key="int4_g64", value="int4_g64"),
}  # fmt: skip
HEADS, KV_HEADS, WIDTH = 32, 8, 128
#: Graphs replayed.
REPLAYS = 20


def stored(kind: str, batch: int, length: int, room: int, kv: int = KV_HEADS, width: int = WIDTH):
    """Keys and values of random tokens, and what they are stored as."""
    k = torch.randn((batch, kv, length, width), device="cuda", dtype=torch.bfloat16)
    v = torch.randn((batch, kv, length, width), device="cuda", dtype=torch.bfloat16)
    keys, values = rooms(KINDS[kind], k, v, room)
    count = torch.zeros((), dtype=torch.int64, device="cuda")
    append_(keys, values, k, v, count, KINDS[kind].rotate)
    return k, v, keys, values, count


def writes(kinds: list[str]) -> None:
    """After a prompt of 50 tokens and 90 more one by one: the bits of a CPU, of keys by channel those of full groups."""
    for kind in kinds:
        torch.manual_seed(0)
        k, v = (torch.randn((2, 4, 140, 128)).bfloat16() + 2 for _ in range(2))
        held = {}
        for device in ("cpu", "cuda"):
            count = torch.zeros((), dtype=torch.int64, device=device)
            keys, values = rooms(KINDS[kind], k.to(device), v.to(device), 192)
            for first, last in ((0, 50), *((at, at + 1) for at in range(50, 140))):
                append_(
                    keys,
                    values,
                    k[:, :, first:last].to(device),
                    v[:, :, first:last].to(device),
                    count,
                    KINDS[kind].rotate,
                )
            held[device] = [t.cpu() for x in (keys, values) for t in _whole(x, 140)]
        same = all(torch.equal(x, y) for x, y in zip(held["cpu"], held["cuda"], strict=True))
        say("writes", f"{kind} 50 tokens, then 90 one by one", float(same), "same bits", ok=same)


def _whole(stored, length: int) -> list[torch.Tensor]:
    """What of it is final: all that is written, or full groups."""
    group = stored.window.group if stored.axis == 2 else 1
    full = length // group
    parts = [stored.codes[:, :, : full * group]]
    parts += [signed(t)[:, :, :full] for t in (stored.scale, stored.zero) if t is not None]
    return [*parts, *([] if stored.computed is None else [stored.computed])]


def bits(kinds: list[str]) -> None:
    """Errors over their bound."""
    cases = [(2, 8, 2, 1, 64, 128, 77, True), (1, 4, 1, 1, 128, 1280, 1130, False), (1, 4, 2, 3, 128, 416, 130, True),
             (3, 32, 8, 1, 128, 640, 640, False), (1, 4, 4, 1, 256, 512, 311, True)]  # fmt: skip
    for kind, (batch, heads, kv, tokens, width, room, length, masked) in itertools.product(kinds, cases):
        window = KINDS[kind].window
        if (kind == "int4_g64" and width == 256) or (window.slots and tokens > 1):
            continue
        torch.manual_seed(0)
        k, v, keys, values, count = stored(kind, batch, length, room, kv, width)
        q = torch.randn((batch, tokens, heads, width), device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        mask = None
        if masked:
            mask = torch.ones((batch, 1, tokens, room), dtype=torch.bool, device="cuda")
            mask[0, ..., :3] = False
        y = decode.attention(q, keys, values, count, mask, width**-0.5, True).float().cpu()
        again = [
            decode.attention(q, keys, values, count, mask, width**-0.5, True).float().cpu() for _ in range(20)
        ]
        same = all(torch.equal(y, other) for other in again)
        if window.slots:
            near = torch.from_numpy(window.seen(1, length, length, True))[0, 0, 0, :, None]
            mixed = hadamard(k, width) if KINDS[kind].rotate else k
            held = tuple(torch.where(near, x.cpu().float(), token_values(y, length).cpu())
                         for x, y in zip((mixed, v), (keys, values), strict=True))  # fmt: skip
        elif kind == "value":
            held = k.cpu(), v.cpu()
        else:
            held = tuple(_cpu(quantized_tokens(x, length)) for x in (keys, values))
        seen = None if mask is None else mask[..., :length].cpu().numpy()
        expected = attention(q.cpu(), *held, causal=True, mask=seen, out_dtype="float64")
        # Tokens as computed are multiplied by weights in bfloat16; queries are rounded with the scales of channels.
        rule = "bfloat16" if kind == "value" or window.slots else "float16"
        rules = {
            "weights": rule,
            "products": 2.0**-10 * (window.group > 1),
            "zeros": zero_values(keys, length, RAISED),
        }
        bound = attention_error_bound(q.cpu(), *held, causal=True, mask=seen, **rules)
        worst = float(((y.double() - expected).abs() / torch.from_numpy(bound)).max())
        what = f"{kind} B{batch} H{heads}/{kv} T{tokens} D{width} {length} of {room}{' masked' if masked else ''}"
        say("bits", what, worst, "of the bound", ok=worst <= 1, repeatable=same)


def _cpu(q):
    return replace(q, codes=q.codes.cpu(), scale=q.scale.cpu(), zero=None if q.zero is None else q.zero.cpu())


def graph_time(calls: list) -> float:
    """Microseconds of one of the calls, all of them in a CUDA graph; the median of replays."""
    graph, count = captured(calls)
    return statistics.median(elapsed(graph.replay) for _ in range(REPLAYS)) / count


def caches(kind: str, batch: int, length: int) -> tuple[int, list[Stored]]:
    """Bytes of a cache, and as many as the second-level cache cannot hold."""
    held = several(KINDS[kind], Size(batch, length), Heads(HEADS, KV_HEADS, WIDTH), "cuda")
    return held[0].nbytes, held


#: Tokens of a step, warps and stages that are tried.
TILES = {
    "value": [(64, 4, 3), (64, 4, 2), (128, 4, 2), (32, 4, 4)],
    "fp8": [(64, 4, 3), (64, 4, 2), (128, 4, 2), (64, 2, 3), (128, 8, 2)],
    "int8": [(64, 4, 3), (128, 4, 2), (64, 2, 3)],
    "int8_channels": [(64, 4, 2), (64, 4, 3), (64, 2, 3)],
    "int4_plain": [(64, 4, 3), (128, 4, 2), (128, 4, 3), (64, 2, 3), (64, 4, 4)],
    "int4_tokens": [(64, 4, 3), (128, 4, 2), (128, 4, 3)],
    "int4": [(64, 4, 2), (64, 4, 3), (64, 2, 3), (64, 4, 4)],
    "int4_g64": [(64, 1, 3), (32, 1, 4), (64, 2, 3)],
}


def sweep(kinds: list[str], deadline: float, sizes: list[tuple[int, int]]) -> None:
    """Tiles, warps, stages and programs; at one sequence the error too."""
    for kind, (batch, length) in itertools.product(kinds, sizes):
        q = torch.randn((batch, 1, HEADS, WIDTH), device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        size, held = caches(kind, batch, length)
        keys, values, count = held[0]
        if batch == 1:
            k, v = (
                computed_values(x, token_values(x, length), count)
                .double()
                .repeat_interleave(HEADS // KV_HEADS, 1)
                for x in (keys, values)
            )
            expected = torch.softmax(q.double() @ k.mT * WIDTH**-0.5, -1) @ v
        for (block, warps, stages), programs in itertools.product(
            TILES.get(kind, TILES["fp8"]), (264, 528, 1056)
        ):
            splits = max(1, min(-(-programs // (batch * KV_HEADS)), -(-length // 128)))
            if time.monotonic() > deadline or (splits == 1 and programs > 264):
                continue
            plan = decode.Plan(splits, block, warps, stages)
            try:
                us = graph_time([
                    lambda k=keys, v=values, n=count, p=plan, q=q: decode.attention(q, k, v, n, None, WIDTH**-0.5, True, p)
                    for keys, values, count in held
                ])  # fmt: skip
            except OutOfResources as error:
                print("sweep", kind, plan, str(error)[:80], flush=True)
                continue
            more: dict[str, object] = {"TBps": round(size / us / 1e6, 3)}
            if batch == 1:
                y = decode.attention(q, keys, values, count, None, WIDTH**-0.5, True, plan)
                error = float((y.double() - expected).norm() / expected.norm())
                more |= {"error": round(error, 5), "ok": error < 4e-3}
            say("sweep", f"{kind} B{batch} {length} {plan}", us, "us", **more)
        del held
        torch.cuda.empty_cache()


#: Tokens of a warp's step and programs of a multiprocessor of the kernel in CUDA C++ that are tried.
VARIANTS = {
    "value": [(16, 2), (16, 3), (16, 4), (32, 2)],
    "int4": [(32, 2), (32, 3), (32, 4)],
    "int4_tokens": [(32, 2), (32, 3), (32, 4)],
}
EIGHT_BITS = [(32, 2), (16, 3), (16, 4)]


def variants(kinds: list[str], deadline: float, sizes: list[tuple[int, int]]) -> None:
    """Of the kernel in CUDA C++; parts of a context as it chooses them, added by a second kernel and, where they are few, in
    clusters."""
    for (batch, length), kind in itertools.product(sizes, kinds):
        q = torch.randn((batch, 1, HEADS, WIDTH), device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        size, held = caches(kind, batch, length)
        for variant, cluster in itertools.product(VARIANTS.get(kind, EIGHT_BITS), (False, True)):
            if time.monotonic() > deadline:
                say("variants", f"{kind} B{batch} {length} not reached", 0, "")
                break
            with mock.patch.object(sm90_decode, "variant_of", lambda _, v=variant: sm90_decode.Variant(*v)):
                name, keys = decode.kind_of(held[0].keys)[0], held[0].keys
                splits = sm90_decode.splits_of(
                    sm90_decode.problem_of(q, keys, name, None), batch * KV_HEADS, length
                )
                if cluster and not 1 < splits <= sm90_decode.MOST_CLUSTER:
                    continue
                sm90_decode._launch.cache_clear()
                rules = (WIDTH**-0.5 * decode.LOG2E, name, splits, cluster)
                us = graph_time([
                    lambda k=k, v=v, n=count, q=q, rules=rules: sm90_decode.attention(q, k, v, n, None, *rules)
                    for k, v, count in held
                ])  # fmt: skip
            where = f"tile {variant[0]} resident {variant[1]} splits {splits}{' in a cluster' * cluster}"
            what = f"{kind} B{batch} {length} {where}"
            say("variants", what, us, "us", TBps=round(size / us / 1e6, 3))
        sm90_decode._launch.cache_clear()
        del held
        torch.cuda.empty_cache()


def main() -> int:
    """The parts that were asked for; 1 where anything is beyond its bound."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", nargs="+", default=["bits", "writes", "sweep"])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--sizes", nargs="+", default=["64x8192", "1x32768"], help="sequences x tokens")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="of each part, after which nothing new starts"
    )
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    asked = parser.parse_args()
    sizes = [(int(one.split("x")[0]), int(one.split("x")[1])) for one in asked.sizes]
    parts = {"sweep": sweep, "variants": variants}
    for part in asked.part:
        try:
            if part in ("bits", "writes"):
                {"bits": bits, "writes": writes}[part](asked.kinds)
            else:
                parts[part](asked.kinds, time.monotonic() + asked.seconds, sizes)
        finally:
            write_rows("kv_cache.csv", asked.out)
    return int(differs())


if __name__ == "__main__":
    sys.exit(main())
