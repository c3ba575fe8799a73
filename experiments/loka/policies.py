"""Part "policies" of `loka`: uniform recipes, LoKA's rule and the knapsack on the same errors and times.

Errors are those of a probe of a trained model. Times are measured on a GPU with 8-bit units; elsewhere they are a model of one
H200 (`ao_lab.probe.measure`) of MLPerf's batch, and tables say "modelled": they show how rules differ, not what a machine does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import nn

import ao_lab
from ao_lab.gemm.choices import DENSE, SUBSETS
from ao_lab.policy.api import Decision
from ao_lab.policy.options import Times, measured_times
from ao_lab.probe.measure import H200, product_seconds
from ao_lab.probe.report import ProbeReport
from ao_lab.training.products import has_fp8
from experiments.harness.measuring import Values
from experiments.loka.subjects import MODELS
from experiments.loka.trajectory import PLANS, impressions
from experiments.models.click_training import train
from reference.training.recipe import Recipe

POLICIES = "policies"
SECONDS, MOVED, BOUND, FITS = (
    "time of all layers",
    "change of a logit over the budget",
    "above the bound",
    "within the budget",
)
RECIPES = ("rowwise", "tensorwise", "mxfp8")
#: Rows of a GPU in MLPerf's training of DLRMv2, and lengths of the small model's layers in it.
BATCH, LONGER = 8192, 8
#: What logits may move by, in their standard deviations.
BUDGET = 0.03
OURS = "least time"


def modelled_times(
    model: nn.Module, sample: Any, recipes: Sequence[Recipe], names: Sequence[str], launches: str
) -> Mapping[str, Times]:
    """Seconds by a model of one H200: the longer one of multiply-adds and bytes for each product, and casts of its operands.

    Lengths count LONGER times, so that a small network's layers have the ratios of a large one's.
    """
    modules: dict[str, Any] = dict(model.named_modules())
    result = {}
    for name in names:
        n, k = (LONGER * length for length in modules[name].weight.shape)
        dense = product_seconds(BATCH, n, k, 2 * k, 2 * n * k, H200.bfloat16)
        # A cast reads 16 bits and writes 8 of both operands.
        low = product_seconds(BATCH, n, k, k, n * k, H200.eight_bits) + 3 * (BATCH * k + n * k) / H200.copy
        result[name] = {
            (one.name, subset): sum(low if part in subset.split("+") else dense for part in PARTS)
            for one in recipes
            for subset in SUBSETS
        }
    return result


PARTS = ("output", "input_grad", "weight_grad")


@lru_cache(maxsize=4)
def decisions(data: str, model: str, scale: str, seed: int, device: str, cache: Any) -> dict[str, Decision]:
    """Policies of a trained model by name."""
    plan, found = PLANS[scale], impressions(data, scale, cache)
    torch.manual_seed(seed)
    net = MODELS[model](found, plan.width).to(device)
    train(net, found, plan.training, seed, device)
    batches = [(one.dense, one.ids) for one in found.held_out(512, 2048, device)]
    wide = {name for name, m in net.named_modules() if isinstance(m, nn.Linear) and min(m.weight.shape) >= 16}
    report: ProbeReport = ao_lab.probe_(
        net, batches, list(RECIPES), filter_fn=lambda module, name: name in wide, measure=False, seed=seed
    )
    measure = measured_times if has_fp8(torch.device(device)) else modelled_times
    policy = ao_lab.dispatch_(net, batches[0], report, budget=BUDGET, apply=False, measure=measure)
    return {one.name: one for one in (policy.decision, *policy.others)}


def policy_values(
    data: str, model: str, method: str, scale: str, seed: int, device: str, cache: Any
) -> Values:
    """Of one policy."""
    one = decisions(data, model, scale, seed, device, cache)[method]
    values: Values = {
        SECONDS: (1e6 * one.seconds, "us"),
        MOVED: ((one.variance / one.room) ** 0.5, ""),
        FITS: (float(one.fits), ""),
    }
    if one.bound is not None:
        values[BOUND] = (100 * (one.seconds / one.bound - 1), "%")
    return values


def names() -> tuple[str, ...]:
    """Policies in the order of tables."""
    return (
        f"uniform {DENSE}", *(f"uniform {one}" for one in RECIPES), "LoKA (error < 0.2, speedup > 1.05)", OURS
    )  # fmt: skip


__all__ = ["POLICIES", "names", "policy_values"]
