"""On a GPU: `grouped_linear_small` exact on integers, the same bits twenty times, and its times beside torch's grouped product.

    PYTHONPATH=. python tests/gpu/linear/validate_grouped_linear_small.py [--seconds 60] [--tensor]

Eight experts of (14336, 4096) and (4096, 14336), 2 rows of each of some tokens among them at random; bfloat16's product is
`torch._grouped_mm`. Every tile of `TILES` is compared and timed, as CUDA graphs in turn; the weights of one call are more than
the second-level cache holds. --tensor: first modules of experts that `quantize_` made (`small/expert_tensors.py`), 20 seconds;
with --seconds 0 nothing else. Prints a line a row, writes $OUT/grouped_linear_small.json; exits with 1 on any difference.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from fast.kernels.linear_small import grouped, host
from tests.gpu.harness.graph_times import captured, in_turn
from tests.gpu.linear.small import expert_tensors, weights
from tests.gpu.linear.small.times import rate

EXPERTS, REPEATS, ROUNDS = 8, 20, 7
SHAPES = ((14336, 4096), (4096, 14336))
SCHEMES = ("int4_g128", "fp8_rowwise", "int8_rowwise", "int4_g32_asymmetric")
TOKENS = (1, 8, 64, 256)
#: Tiles of the weight (rows, columns, stages, warps) by rows of X at once; the rule's are among them.
TILES = {
    16: ((128, 128, 6, 4), (64, 128, 6, 4), (64, 256, 4, 4), (128, 128, 4, 8), (128, 128, 4, 4)),
    32: ((128, 128, 4, 4), (128, 128, 4, 8), (128, 128, 3, 8)),
    64: ((128, 128, 4, 8), (128, 128, 3, 8), (128, 64, 4, 8)),
}


def ends_of(tokens: int) -> torch.Tensor:
    """Two experts of each token, counted and added."""
    draw = torch.Generator("cuda").manual_seed(tokens)
    chosen = torch.rand(tokens, EXPERTS, device="cuda", generator=draw).topk(2, 1).indices.flatten()
    return torch.bincount(chosen, minlength=EXPERTS).cumsum(0).to(torch.int32)


def compared(name: str, shape: tuple[int, int], tokens: int) -> list[str]:
    """What differs of the rule's tile and of each other, on integers whose sums are exact; rows behind the last end are
    somebody else's."""
    made = [weights.drawn(name, shape, seed) for seed in range(EXPERTS)]
    experts = grouped.stacked([host.arrange(w) for w, _ in made])  # type: ignore[misc]
    ends = ends_of(tokens)
    x = torch.randint(-1, 2, (2 * tokens + 3, shape[1]), device="cuda").bfloat16()
    bounds = [0, *ends.tolist()]
    rows = [x[a:b].double() @ dense.t() for a, b, (_, dense) in zip(bounds, bounds[1:], made, strict=False)]
    wanted = torch.cat(rows).float().bfloat16()
    found = []
    for tile in (None, *TILES[grouped.rows_at_once(len(x), EXPERTS)]):
        wrong = 0
        for _ in range(REPEATS):
            poison = torch.full((len(x), shape[0]), float("nan"), device="cuda", dtype=torch.bfloat16)
            del poison
            got = grouped.grouped_linear_small(x, experts, ends, tile=tile)
            assert got is not None
            wrong += not torch.equal(got[: bounds[-1]], wanted)
        if wrong:
            found.append(f"{name} {shape} {tokens} tokens, tile {tile}: {wrong} of {REPEATS} differ")
    return found


def timed(
    name: str, shape: tuple[int, int], tokens: int, experts: Any, dense: torch.Tensor
) -> dict[str, float]:
    """Microseconds of bfloat16, of the rule's tiles and of others."""
    ends = ends_of(tokens)
    x = torch.randn(2 * tokens, shape[1], device="cuda", dtype=torch.bfloat16)
    calls = {"bf16": lambda: torch._grouped_mm(x, dense.transpose(1, 2), ends)}
    graphs = {"bf16": captured([calls["bf16"]])}
    graphs["rule"] = captured([lambda: grouped.grouped_linear_small(x, experts, ends)])
    rows = grouped.rows_at_once(len(x), EXPERTS)
    for tile in TILES[rows]:
        call = partial(grouped.grouped_linear_small, x, experts, ends, tile=tile)
        graphs[",".join(map(str, (rows, *tile)))] = captured([call])
    return in_turn(graphs, ROUNDS)


def look_at_tensors() -> list[str]:
    """What is wrong with modules of preshuffled experts."""
    wrong: list[str] = []
    for label, check in expert_tensors.checks():
        begin = time.monotonic()
        try:
            found = list(check)
        except Exception as error:  # noqa: BLE001  others go on
            found = [f"{label}: {type(error).__name__}: {str(error)[-600:]}"]
        told = f"tensor {label}: {len(found)} wrong, {time.monotonic() - begin:.1f} s"
        print("\n    ".join([told, *found[:6]]), flush=True)
        wrong += found
    return wrong


def main() -> int:
    """Compare, then time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--tensor", action="store_true")
    options = parser.parse_args()
    wrong = look_at_tensors() if options.tensor else []
    end = time.monotonic() + options.seconds
    wrong += [
        line
        for name in SCHEMES
        if options.seconds
        for tokens in (1, 8, 100)
        for line in compared(name, (1024, 2048 if "g32" not in name else 1024), tokens)
    ]
    print("\n".join([*wrong, f"{len(wrong)} wrong"]), flush=True)
    found: list[dict[str, Any]] = []
    for shape in SHAPES if options.seconds else ():
        dense = torch.randn(EXPERTS, *shape, device="cuda", dtype=torch.bfloat16)
        for name in SCHEMES[:3]:
            experts = grouped.stacked([weights.filled_weight(name, shape) for _ in range(EXPERTS)])
            for tokens in TOKENS:
                if time.monotonic() > end:
                    print(f"not timed: {name} {shape} {tokens} tokens", flush=True)
                    continue
                times = timed(name, shape, tokens, experts, dense)
                floor = experts.nbytes / rate()
                found.append(
                    {"scheme": name, "shape": shape, "tokens": tokens, "floor": floor, "times": times}
                )
                told = "  ".join(f"{key} {value:.1f}" for key, value in times.items())
                print(
                    f"{name} {shape} {tokens:3} tokens: floor {floor:.1f}  {told}  x{times['bf16'] / times['rule']:.2f}",
                    flush=True,
                )
    if "OUT" in os.environ:
        about = {"device": torch.cuda.get_device_name(), "wrong": wrong, "rows": found}
        Path(os.environ["OUT"], "grouped_linear_small.json").write_text(json.dumps(about, indent=1))
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
