"""`LowBitOptimizer`: a torch optimizer whose states are stored as `reference.optim.states` says.

A step looks at every gradient before it changes anything, then updates parameters of one device and pair of dtypes together
(`fast.optim.update`). Nothing is compiled by torch, and nothing waits for a GPU.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable
from inspect import signature
from typing import Any, Self

import torch
from torch.optim import Optimizer

from ao_lab.optim.slots import (
    NAMES,
    begin_state,
    is_sharded,
    local,
    moment_of,
    on_any_rank,
    place_of,
    put_moment,
    slot_of,
    states_for,
)
from fast.optim.update import Rule, Slot, Updates
from reference.arrays.namespace import check_keywords
from reference.optim.states import States, states_of
from reference.optim.update import MASTERS, check_numbers

NONFINITE = ("raise", "propagate")
#: The index of a group, the number of a parameter among all, and the parameter.
Numbered = tuple[int, int, torch.Tensor]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Options of torch's optimizers that change steps, and that these do not have.
UNSUPPORTED = ("amsgrad", "maximize")
#: What copies and pickles have beside torch's groups and states.
OWN = ("states", "kind", "master", "nonfinite", "bf16_stochastic_round", "seed", "_left_out")


class LowBitOptimizer(Optimizer):
    """Adam, AdamW or Lion with stored states.

    params: as torch's optimizers take them. kind: "adam", "adamw" or "lion". states: a name of `STATES` or a record.
    block_size: elements of a block of states, a power of two. lr: a number or a tensor of no axis, which may be changed in
    place (a captured CUDA graph reads it). bf16_stochastic_round: bfloat16 parameters are rounded stochastically. master:
    "none", "24bit" or "32bit", the float32 that a bfloat16 parameter and its error are together. nonfinite: "raise", a gradient
    with NaN or infinity is a ValueError before anything has changed (a GPU leaves the step out, and the error comes with a
    later step, so that nothing waits; `left_out` counts), or "propagate", it makes its block NaN, as in torch. Each rank and
    each device looks at its own part alone: `clip_grad_norm_(..., error_if_nonfinite=True)` tells all of them. seed: of random
    bits, beside step, number of the parameter and place in it: replicas draw the same. A captured graph keeps the one it had.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """TypeError for arguments that an optimizer lacks, with the nearest."""
        check_keywords(cls.__name__, kwargs, list(signature(cls.__init__).parameters)[1:])
        return super().__new__(cls)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        *,
        kind: str,
        states: str | States,
        block_size: int | None = None,
        bf16_stochastic_round: bool = False,
        master: str = "none",
        nonfinite: str = "raise",
        seed: int = 0,
    ) -> None:
        record = states_of(states)
        self.states = record if block_size is None else record.with_block(block_size)
        self.kind, self.master, self.nonfinite = kind, master, nonfinite
        # A kernel takes no NumPy integer.
        self.bf16_stochastic_round, self.seed = bf16_stochastic_round, operator.index(seed)
        if nonfinite not in NONFINITE:
            raise ValueError(f"nonfinite is one of {NONFINITE}, got {nonfinite!r}")
        if master not in MASTERS:
            raise ValueError(f"master is one of {tuple(MASTERS)}, got {master!r}")
        if not 0 <= seed < 1 << 64:
            raise ValueError(f"seed is an integer from 0 to 2**64 - 1, got {seed!r}")
        self._updates = Updates()
        self._left_out: dict[torch.device, torch.Tensor] = {}
        self._pending: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        check_numbers(kind, float(lr), betas, eps, weight_decay)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def __repr__(self) -> str:
        """torch's, and how states and parameters are stored."""
        first, _, rest = super().__repr__().partition("\n")
        stored = f"states: {self.states.name}, block_size: {self.block_size}, master: {self.master}"
        return f"{first}\n    {stored}\n{rest}"

    def __getstate__(self) -> dict[str, Any]:
        """torch's, and what a subclass has beside it; neither tables of addresses nor events."""
        return {**super().__getstate__(), **{name: getattr(self, name) for name in OWN}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._updates, self._pending = Updates(), []

    @property
    def block_size(self) -> int:
        """Elements of a block of states."""
        return self.states.first.block

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; ValueError for numbers out of range, TypeError for parameters of another dtype."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_group(self.kind, group)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every parameter that has a gradient; the closure's loss, or None.

        Raises ValueError for gradients that are sparse, on another device or, with nonfinite="raise", not finite, before
        anything has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._raise_for_skipped()
        steps = self._checked()
        skips = self._skips(steps)
        for (index, states, device), slots in self._work(steps).items():
            self._updates(slots, self._rule(index, states), group=index, skip=skips.get(device))
        return loss

    def _checked(self) -> list[Numbered]:
        """What steps: every gradient was looked at, those on a CPU for NaN and infinity too."""
        for group in self.param_groups:
            _check_group(self.kind, group)
        steps = [(index, number, p) for index, number, p in self._numbered() if p.grad is not None]
        for _, number, p in steps:
            _check_gradient(p, number)
        if self.nonfinite == "raise":
            self._raise_for_hosts(steps)
        return steps

    def _raise_for_hosts(self, steps: list[Numbered]) -> None:
        """ValueError where a gradient on a CPU is not finite, on this rank or another: all ranks leave the step out."""
        hosts = [(number, p) for _, number, p in steps if local(p).is_cpu]
        bad = [(number, p) for number, p in hosts if not _is_finite(_gradient(p))]
        flag = torch.full((1,), float(bool(bad)))
        if not on_any_rank(flag, [p for _, p in hosts]):
            return
        which = [f"parameter {number} of shape {tuple(p.shape)}" for number, p in bad] or [
            "a parameter, on another rank,"
        ]
        raise ValueError(
            f"the gradient of {which[0]} is not finite: nothing was changed; skip the step, or give nonfinite='propagate' to "
            f"have torch's behaviour"
        )

    def _skips(self, steps: list[Numbered]) -> dict[torch.device, torch.Tensor]:
        """Of each GPU 1 where a gradient there is not finite, else 0: the device leaves the step out, and nothing waits."""
        if self.nonfinite != "raise":
            return {}
        parameters: dict[torch.device, list[torch.Tensor]] = {}
        for _, _, p in steps:
            if not local(p).is_cpu:
                parameters.setdefault(local(p).device, []).append(p)
        return {device: self._skip(device, part) for device, part in parameters.items()}

    def _skip(self, device: torch.device, parameters: list[torch.Tensor]) -> torch.Tensor:
        gradients = [grad for p in parameters if (grad := local(_gradient(p))).numel()]
        skip = torch.zeros(1, device=device)
        if gradients:
            largest = torch.stack(torch._foreach_norm(gradients, float("inf"))).float()
            skip = (~torch.isfinite(largest).all()).float().reshape(1)
        skip = on_any_rank(skip, parameters)
        if device not in self._left_out:
            self._left_out[device] = torch.zeros(1, device=device)
        self._left_out[device].add_(skip)
        if not torch.cuda.is_current_stream_capturing():
            host = torch.empty(1, pin_memory=True)
            host.copy_(skip, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._pending.append((host, event))
        return skip

    def _raise_for_skipped(self) -> None:
        """ValueError where an earlier step was left out on a GPU, as soon as that is known here.

        With sharded parameters in the step after it on every rank, for which the host waits: a rank that raised later than the
        others would take a step without them.
        """
        together = bool(self._pending) and any(is_sharded(p) for _, _, p in self._numbered())
        waits = together and not torch.cuda.is_current_stream_capturing()
        while self._pending and (waits or self._pending[0][1].query()):  # type: ignore[no-untyped-call]
            found, event = self._pending.pop(0)
            event.synchronize()
            if found.item():
                raise ValueError(
                    "a gradient of an earlier step was not finite: that step was left out and changed nothing; go on, or give "
                    "nonfinite='propagate' to have torch's behaviour"
                )

    @property
    def left_out(self) -> int:
        """How many steps GPUs have left out for gradients that were not finite; waits for them."""
        return int(sum(float(count) for count in self._left_out.values()))

    def _work(self, steps: list[Numbered]) -> dict[tuple[int, States, torch.device], list[Slot]]:
        """What steps read and write, by group, states and device."""
        work: dict[tuple[int, States, torch.device], list[Slot]] = {}
        for index, number, p in steps:
            state = self.state[p]
            if not state:
                state.update(begin_state(p, self.states, self.kind, self.master))
            states = states_for(p, self.states)
            slot = slot_of(p, _gradient(p), state, number, *place_of(p, states.first.block))
            work.setdefault((index, states, slot.p.device), []).append(slot)
        return work

    def _numbered(self) -> list[Numbered]:
        """(index of the group, number, parameter) in order."""
        pairs = [(index, p) for index, group in enumerate(self.param_groups) for p in group["params"]]
        return [(index, number, p) for number, (index, p) in enumerate(pairs)]

    def _rule(self, index: int, states: States) -> Rule:
        group = self.param_groups[index]
        return Rule(
            self.kind, states, group["lr"], tuple(group["betas"]), group["eps"], group["weight_decay"],
            self.bf16_stochastic_round, self.seed,
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """torch's, with codes and scales as they are; `low_bit` in each group says how they are stored."""
        result = super().state_dict()
        for group in result["param_groups"]:
            group["low_bit"] = self.description
        return result

    @property
    def description(self) -> dict[str, Any]:
        """What two optimizers have in common that can read each other's states; the class is not part of it."""
        return {
            "kind": self.kind,
            "states": self.states.name,
            "block_size": self.block_size,
            "master": self.master,
        }

    def float32_state_dict(self) -> dict[str, Any]:
        """A state dict whose moments are float32: torch's Adam or AdamW loads it, and so does any class of this module."""
        result = super().state_dict()
        states: dict[int, dict[str, Any]] = {}
        for _, number, p in self._numbered():
            state = self.state.get(p)
            if not state:
                continue
            mine = states_for(p, self.states)
            names = {name: field for name, field in NAMES.items() if self.kind != "lion" or field == "first"}
            states[number] = {
                "step": state["step"].clone(),
                **{name: moment_of(p, state, name, getattr(mine, field)) for name, field in names.items()},
            }
        return {**result, "state": states}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """States of an optimizer of the same kind and states, bit for bit, or float32 moments of torch's Adam, AdamW or of
        `float32_state_dict`, which are stored to nearest.

        Raises ValueError where the states are stored otherwise, or do not fit the parameters, before anything has changed.
        """
        state_dict = self._before_loading(state_dict)
        groups, states = state_dict["param_groups"], state_dict["state"]
        self._check_groups(groups)
        numbers = [number for group in groups for number in group["params"]]
        mine = [p for group in self.param_groups for p in group["params"]]
        pairs = dict(zip(numbers, mine, strict=True))
        result = {
            pairs[number]: self._loaded(pairs[number], number, state)
            for number, state in states.items()
            if state
        }
        for group, saved in zip(self.param_groups, groups, strict=True):
            for name, value in saved.items():
                if name in ("params", "low_bit"):
                    continue
                own = group.get(name)
                if isinstance(own, torch.Tensor) and name == "lr":
                    own.fill_(float(value))
                else:
                    group[name] = copy.deepcopy(
                        value
                    )  # a rate that is a tensor stays the other optimizer's own
        for p in [p for p in self.state if p not in result]:
            del self.state[p]
        for p, state in result.items():
            self._put(p, state)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _put(self, p: torch.Tensor, state: dict[str, Any]) -> None:
        """Take states in, where they are if they are there: captured graphs have their addresses."""
        held = self.state[p]
        if held.keys() != state.keys():
            held.clear()
            held.update(state)
            return
        for name, value in state.items():
            local(held[name]).copy_(local(value))

    def _before_loading(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        return state_dict

    def _check_groups(self, groups: list[dict[str, Any]]) -> None:
        counts = [len(group["params"]) for group in groups]
        wanted = [len(group["params"]) for group in self.param_groups]
        if counts != wanted:
            raise ValueError(f"the state dict has groups of {counts} parameters, this optimizer of {wanted}")
        for group in groups:
            for name in UNSUPPORTED:
                if group.get(name):
                    raise ValueError(
                        f"the state dict is of an optimizer with {name}=True, whose steps these optimizers do not take: "
                        f"load one with {name}=False"
                    )
            saved = group.get("low_bit")
            if saved is not None and saved != self.description:
                names = [name for name in self.description if saved.get(name) != self.description[name]]
                said = ", ".join(f"{name} {saved.get(name)!r}" for name in names)
                own = ", ".join(f"{name} {self.description[name]!r}" for name in names)
                raise ValueError(
                    f"the state dict is of {said}, this optimizer of {own}: make it with the same, or save "
                    f"float32_state_dict(), which any of them loads"
                )

    def _loaded(self, p: torch.Tensor, number: int, state: dict[str, Any]) -> dict[str, Any]:
        """The states of a parameter from those of a dict, on its device."""
        mine = states_for(p, self.states)
        result = begin_state(p, self.states, self.kind, self.master)
        result["step"].fill_(float(state["step"]))
        done = {"step"} if "error" in state else {"step", "error"}
        for name, field in NAMES.items():
            if name in state and f"{name}_codes" in result:
                _same_shape(p, number, name, state[name], p)
                put_moment(result, name, p, getattr(mine, field), local(state[name]))
                done |= {f"{name}_codes", f"{name}_scale"}
        for name in [name for name in result if name not in done]:
            if name not in state:
                raise ValueError(
                    f"the states of parameter {number} of shape {tuple(p.shape)} have no {name!r} but {sorted(state)}: they "
                    f"are those of another optimizer; load its float32 moments instead"
                )
            _same_shape(p, number, name, state[name], result[name])
            local(result[name]).copy_(local(state[name]))
        return result


def _is_finite(grad: torch.Tensor) -> bool:
    return bool(torch.isfinite(local(grad)).all())


def _same_shape(p: torch.Tensor, number: int, name: str, value: torch.Tensor, wanted: torch.Tensor) -> None:
    if tuple(value.shape) != tuple(wanted.shape):
        raise ValueError(
            f"{name} of parameter {number} of shape {tuple(p.shape)} has shape {tuple(value.shape)} in the state dict, and "
            f"{tuple(wanted.shape)} here: the dict is of another model or another block size"
        )


def _check_group(kind: str, group: dict[str, Any]) -> None:
    check_numbers(kind, 0.0 if isinstance(group["lr"], torch.Tensor) else group["lr"], group["betas"], group["eps"],
                  group["weight_decay"])  # fmt: skip
    for p in group["params"]:
        if p.dtype not in DTYPES:
            raise TypeError(
                f"parameters are float32, bfloat16 or float16, got {p.dtype} of shape {tuple(p.shape)}; leave it out"
            )
        if not local(p).is_contiguous():
            raise ValueError(
                f"parameters lie contiguously in memory, got one of shape {tuple(p.shape)} with strides {local(p).stride()}; "
                f"make it contiguous first"
            )


def _gradient(p: torch.Tensor) -> torch.Tensor:
    grad = p.grad
    assert grad is not None
    return grad


def _check_gradient(p: torch.Tensor, number: int) -> None:
    grad = _gradient(p)
    if grad.is_sparse:
        raise ValueError(
            f"the gradient of parameter {number} of shape {tuple(p.shape)} is sparse, which these optimizers do not take: use "
            f"Embedding(sparse=False), or torch.optim.SparseAdam for it"
        )
    if grad.dtype not in DTYPES:
        raise TypeError(
            f"gradients are float32, bfloat16 or float16, got {grad.dtype} for parameter {number}"
        )


__all__ = ["LowBitOptimizer"]
