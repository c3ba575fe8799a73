"""On a GPU: which configurations, with their defaults and each documented option, are slower than a bfloat16 layer.

    PYTHONPATH=. python tests/gpu/linear/validate_default_speeds.py [--rows 1 16] [--only Int4WeightOnlyConfig ...]

A layer (14336, 4096) as `quantize_` makes it of `nn.Linear`, in a CUDA graph, beside dense bfloat16 in turn, over more weights
than the L2 holds. What takes longer by more than twice `TOLERANCE` has to be in `SLOWER`, and what is there has to be slower:
the guide names those options, so both a new trap and a sentence that is true no more end with exit code 1. Prints a line for
each, writes $OUT/default_speeds.json.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import ao_lab
from ao_lab import PerBlock, PerRow, PerTensor
from ao_lab.measure.turns import AGAIN, CudaWatch, Plan, interleaved, prepare, summary

#: Rows of the weight and of its inputs.
SHAPE, ROWS = (14336, 4096), (1, 16, 32, 64, 256, 2048)
#: Part of bfloat16's time that a layer may take longer: two measurements of bfloat16 itself differ by so much.
TOLERANCE = 0.05
#: Weights in turn, more than twice an L2 cache of 60 MB even where they are stored in 4 bits.
SETS = 6
PLAN = Plan(rounds=10, warmup=1, seconds=0.3, fewest=3, span=300e-6)
STATIC = {"act_quant_scale": torch.tensor(0.02)}


class Case(NamedTuple):
    """A configuration's class with the arguments that a user writes; sparse: the weight is pruned to 2:4 first."""

    name: str
    arguments: dict[str, Any]
    sparse: bool = False

    @property
    def label(self) -> str:
        """As a user writes it."""
        words = [f"{key}={value!r}" for key, value in self.arguments.items() if key != "act_quant_scale"]
        return f"{self.name}({', '.join(words)})"

    def layer(self, dense: nn.Linear) -> nn.Module:
        """A quantized copy; ValueError where the options do not go together."""
        holder = nn.Sequential(copy.deepcopy(dense))
        if self.sparse:
            ao_lab.sparsify_(holder, ao_lab.SparsityConfig())
        ao_lab.quantize_(holder, getattr(ao_lab, self.name)(**self.arguments))
        return holder[0]


#: Classes with their options beside none. 2:4 storage is asked of each.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "Float8WeightOnlyConfig": [{"granularity": PerTensor()}, {"granularity": PerBlock((128, 128))}],
    "Float8DynamicActivationFloat8WeightConfig": [
        {"granularity": PerRow()}, {"granularity": (PerBlock((1, 128)), PerBlock((128, 128)))},
    ],
    "Float8DynamicActivationInt4WeightConfig": [],
    "Float8StaticActivationFloat8WeightConfig": [],
    "Int4WeightOnlyConfig": [
        {"group_size": 32}, {"group_size": 64}, {"group_size": 256}, {"scheme": "int4_g128"}, {"scheme": "int4_g64"},
    ],
    "Int8WeightOnlyConfig": [{"group_size": 128}, {"granularity": PerTensor()}],
    "Int8DynamicActivationInt8WeightConfig": [{"act_mapping_type": "ASYMMETRIC"}, {"granularity": PerTensor()}],
    "Int8StaticActivationInt8WeightConfig": [],
    "Int8DynamicActivationIntxWeightConfig": [{"weight_dtype": torch.int4}],
    "IntxWeightOnlyConfig": [{"weight_dtype": dtype} for dtype in (torch.int1, torch.int2, torch.int3, torch.int4, torch.int6)],
    "LowBitWeightOnlyConfig": [],
    "MXDynamicActivationMXWeightConfig": [],
    "MXWeightOnlyConfig": [{"scheme": name} for name in ("mxfp6_e2m3", "mxfp4")],
    "NF4WeightOnlyConfig": [],
    "NVFP4DynamicActivationNVFP4WeightConfig": [],
    "NVFP4WeightOnlyConfig": [],
}  # fmt: skip
#: What is slower on an H200 by more than TOLERANCE, by label: the rows of inputs at which it is. Many rows of weights alone are
#: decoded on the way to products that bfloat16 has at once; 2:4 storage without a kernel of its own is dequantized each time
#: (`quantize_` warns).
ALL = ROWS
SLOWER: dict[str, tuple[int, ...]] = {
    "Float8WeightOnlyConfig(sparsity='2:4')": ALL,
    "Float8WeightOnlyConfig(granularity=PerTensor(), sparsity='2:4')": ALL,
    "Float8WeightOnlyConfig(granularity=PerBlock(block_size=(128, 128)))": (64, 256, 2048),
    "Float8WeightOnlyConfig(granularity=PerBlock(block_size=(128, 128)), sparsity='2:4')": ALL,
    "Float8DynamicActivationFloat8WeightConfig(granularity=(PerBlock(block_size=(1, 128)), PerBlock(block_size=(128, 128))), sparsity='2:4')": ALL,  # noqa: E501
    "Float8DynamicActivationInt4WeightConfig()": (256, 2048),
    "Float8DynamicActivationInt4WeightConfig(sparsity='2:4')": ALL,
    "Int4WeightOnlyConfig()": (2048,),
    "Int4WeightOnlyConfig(sparsity='2:4')": (64, 256, 2048),
    "Int4WeightOnlyConfig(group_size=32)": (256, 2048),
    "Int4WeightOnlyConfig(group_size=32, sparsity='2:4')": (64, 256, 2048),
    "Int4WeightOnlyConfig(group_size=64)": (256, 2048),
    "Int4WeightOnlyConfig(group_size=64, sparsity='2:4')": (64, 256, 2048),
    "Int4WeightOnlyConfig(group_size=256)": (2048,),
    "Int4WeightOnlyConfig(group_size=256, sparsity='2:4')": (64, 256, 2048),
    "Int4WeightOnlyConfig(scheme='int4_g128', sparsity='2:4')": (64, 256, 2048),
    "Int4WeightOnlyConfig(scheme='int4_g64', sparsity='2:4')": (64, 256, 2048),
    "Int8WeightOnlyConfig()": (256,),
    "Int8WeightOnlyConfig(sparsity='2:4')": ALL,
    "Int8WeightOnlyConfig(group_size=128)": (256,),
    "Int8WeightOnlyConfig(group_size=128, sparsity='2:4')": ALL,
    "Int8WeightOnlyConfig(granularity=PerTensor())": (256,),
    "Int8WeightOnlyConfig(granularity=PerTensor(), sparsity='2:4')": ALL,
    "Int8DynamicActivationInt8WeightConfig(act_mapping_type='ASYMMETRIC', sparsity='2:4')": ALL,
    "Int8DynamicActivationIntxWeightConfig()": (32, 256, 2048),
    "Int8DynamicActivationIntxWeightConfig(sparsity='2:4')": ALL,
    "Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4)": (256, 2048),
    "Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, sparsity='2:4')": ALL,
    "IntxWeightOnlyConfig()": (256,),
    "IntxWeightOnlyConfig(sparsity='2:4')": ALL,
    "IntxWeightOnlyConfig(weight_dtype=torch.int1)": ALL,
    "IntxWeightOnlyConfig(weight_dtype=torch.int2)": (64, 256, 2048),
    "IntxWeightOnlyConfig(weight_dtype=torch.int2, sparsity='2:4')": ALL,
    "IntxWeightOnlyConfig(weight_dtype=torch.int3)": (64, 256, 2048),
    "IntxWeightOnlyConfig(weight_dtype=torch.int3, sparsity='2:4')": ALL,
    "IntxWeightOnlyConfig(weight_dtype=torch.int4, sparsity='2:4')": (64, 256, 2048),
    "IntxWeightOnlyConfig(weight_dtype=torch.int6)": (32, 64, 256, 2048),
    "IntxWeightOnlyConfig(weight_dtype=torch.int6, sparsity='2:4')": ALL,
    "LowBitWeightOnlyConfig()": (16, 32, 64, 256, 2048),
    "MXDynamicActivationMXWeightConfig()": (256, 2048),
    "MXDynamicActivationMXWeightConfig(sparsity='2:4')": ALL,
    "MXWeightOnlyConfig(sparsity='2:4')": ALL,
    "MXWeightOnlyConfig(scheme='mxfp6_e2m3')": (16, 32, 64, 256, 2048),
    "MXWeightOnlyConfig(scheme='mxfp6_e2m3', sparsity='2:4')": ALL,
    "MXWeightOnlyConfig(scheme='mxfp4', sparsity='2:4')": ALL,
    "NF4WeightOnlyConfig()": (32, 256, 2048),
    "NVFP4DynamicActivationNVFP4WeightConfig()": (256, 2048),
    "NVFP4DynamicActivationNVFP4WeightConfig(sparsity='2:4')": ALL,
    "NVFP4WeightOnlyConfig()": (256, 2048),
    "NVFP4WeightOnlyConfig(sparsity='2:4')": ALL,
}


def cases() -> Iterator[Case]:
    """All of them; those that no layer can have are left out by `measured`."""
    for name, options in OPTIONS.items():
        fixed = STATIC if "Static" in name else {}
        for option in ({}, *options):
            yield Case(name, {**fixed, **option})
            yield Case(name, {**fixed, **option, "sparsity": "2:4"}, sparse=True)


@torch.no_grad()
def ratios(case: Case, dense: list[nn.Linear], rows: tuple[int, ...], watch: CudaWatch) -> dict[int, float]:
    """Time over bfloat16's, by rows of inputs."""
    layers, found = [case.layer(one) for one in dense], {}
    for count in rows:
        x = torch.randn(count, SHAPE[1], device="cuda", dtype=torch.bfloat16)
        calls = {
            "bfloat16": [partial(layer, x) for layer in dense],
            "quantized": [partial(layer, x) for layer in layers],
        }
        spans = {name: prepare(watch, made, PLAN) for name, made in calls.items()}
        times = interleaved(watch, spans, PLAN)
        base = min(summary(times[name]).median for name in ("bfloat16", AGAIN))
        found[count] = summary(times["quantized"]).median / base
    return found


def measured(rows: tuple[int, ...], only: list[str]) -> dict[str, dict[int, float]]:
    """Ratios of all cases by label, printed as they come."""
    torch.manual_seed(0)
    watch, found = CudaWatch(), {}
    dense = [
        nn.Linear(SHAPE[1], SHAPE[0], bias=False, device="cuda", dtype=torch.bfloat16) for _ in range(SETS)
    ]
    for case in cases():
        if only and case.name not in only:
            continue
        try:
            found[case.label] = ratios(case, dense, rows, watch)
        except ValueError as error:  # options that exclude each other are refused by name
            print(f"{case.label}: refused: {str(error)[:150]}", flush=True)
            continue
        print(
            case.label, {count: round(1 / ratio, 2) for count, ratio in found[case.label].items()}, flush=True
        )
    return found


def differences(found: dict[str, dict[int, float]]) -> list[str]:
    """What is slower and not in SLOWER, and what is there and not slower."""
    lines = []
    for label, by_rows in found.items():
        known = set(SLOWER.get(label, ())) & set(by_rows)
        # What is at the limit may be on either side of it another time.
        slow = {count for count, ratio in by_rows.items() if ratio > 1 + 2 * TOLERANCE}
        lines += [
            f"{label}: slower than bfloat16 at {count} rows, not listed" for count in sorted(slow - known)
        ]
        lines += [
            f"{label}: listed at {count} rows, takes {by_rows[count]:.2f} of bfloat16's time"
            for count in sorted(known - slow)
            if by_rows[count] < 1
        ]
    return lines


def main() -> int:
    """Measure, print, write; 1 where the list is not what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--only", nargs="+", default=[])
    given = parser.parse_args()
    found = measured(tuple(given.rows), given.only)
    if out := os.environ.get("OUT"):
        Path(out, "default_speeds.json").write_text(json.dumps(found, indent=1))
    wrong = differences(found)
    print("\n".join(wrong) or f"{len(found)} configurations: as listed")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
