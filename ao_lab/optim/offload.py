"""`CPUOffloadOptimizer`: moments and steps of the large parameters of a GPU live on the CPU, behind backward.

As soon as autograd has a parameter's gradient, it is copied to pinned memory on a stream of its own, while backward goes on.
`step` copies again what has changed since (by `clip_grad_norm_`, say), waits for the copies, looks at all gradients, steps the
copies of the parameters on the CPU, and sends them back on the same stream. What bounds a step is the host: the pass over
states that its cores make, then the way back over the bus; the way there is behind backward.

The name, the arguments and the division of work are torchao's. Parameters on a CPU are stepped where they are, so a loop runs
unchanged without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from ao_lab.optim.classes import AdamW8bit

#: Parameters of fewer elements stay where they are.
LEAST = 4096


class CPUOffloadOptimizer(Optimizer):
    """An optimizer whose large parameters are stepped on the CPU.

    params: parameters or groups, as torch's optimizers take them. optimizer_class: of what steps them, by default `AdamW8bit`;
    kwargs are its arguments. offload_gradients: gradients on the GPU are freed once they are copied, which excludes their
    accumulation over several backward passes and all that looks at `.grad` before the step, as `clip_grad_norm_` (it sees the
    other gradients alone) and `GradScaler` do. minimal_size: elements below which a parameter is stepped where it is.

    `param_groups` are those of the one optimizer that has all of them, so schedulers and rates work as usual; state dicts are
    its own, and load into it without offload too. Raises ValueError as that does, before anything has changed.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: Callable[..., Optimizer] = AdamW8bit,
        *,
        offload_gradients: bool = False,
        minimal_size: int = LEAST,
        **kwargs: Any,
    ) -> None:
        groups = list(params)
        if not groups:
            raise ValueError("optimizer got an empty parameter list")
        groups = groups if isinstance(groups[0], dict) else [{"params": groups}]
        self.minimal_size, self.offload_gradients = minimal_size, offload_gradients
        #: Parameters on a GPU, and their copies on the CPU.
        self.copies: dict[torch.Tensor, torch.nn.Parameter] = {}
        #: Those whose gradients have come since the last step: the event after their copy, and what was copied.
        self.queue: dict[torch.Tensor, tuple[Any, torch.Tensor | None, int]] = {}
        self.stream: Any = None
        self.inner = optimizer_class([self._moved(group) for group in groups], **kwargs)
        self.defaults = self.inner.defaults

    def _moved(self, group: dict[str, Any]) -> dict[str, Any]:
        """A group with copies in the place of large parameters on a GPU."""
        parameters = group["params"]
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        wanted = [p for p in parameters if p.requires_grad]
        return {**group, "params": [self._copy_of(p) if self._goes(p) else p for p in wanted]}

    def _goes(self, p: torch.Tensor) -> bool:
        return p.is_cuda and p.numel() >= self.minimal_size

    def _copy_of(self, p: torch.Tensor) -> torch.nn.Parameter:
        if self.stream is None:
            self.stream = torch.cuda.Stream(p.device)  # type: ignore[no-untyped-call]
        copy = torch.nn.Parameter(torch.empty_like(p, device="cpu", pin_memory=True))
        copy.grad = torch.empty_like(copy, pin_memory=True)
        copy.data.copy_(p.detach())
        self.copies[p] = copy
        p.register_post_accumulate_grad_hook(self._gradient_came)  # type: ignore[no-untyped-call]
        return copy

    def _gradient_came(self, p: torch.Tensor) -> None:
        """Copy a gradient as soon as it is there; one that grows by another backward pass is copied again."""
        if p.grad is None:
            return
        self.stream.wait_stream(torch.cuda.current_stream(p.device))
        with torch.cuda.stream(self.stream):
            self.copies[p].grad.copy_(p.grad, non_blocking=True)  # type: ignore[union-attr]
        self.queue.pop(p, None)
        event, grad = self.stream.record_event(), p.grad
        if self.offload_gradients:
            grad.record_stream(self.stream)
            p.grad = None
        self.queue[p] = event, p.grad, grad._version

    def _look_again(self) -> None:
        """Copy gradients that were changed or set since backward; forget those that were dropped."""
        for p in self.copies:
            if p.grad is None:
                self.queue.pop(p, None)
                continue
            _, grad, version = self.queue.get(p, (None, None, 0))
            if grad is not p.grad or version != p.grad._version:
                self._gradient_came(p)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every parameter that has a gradient; the closure's loss, or None.

        Raises what the inner optimizer does, before anything has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.offload_gradients:
            self._look_again()
        for event, _, _ in self.queue.values():
            event.synchronize()
        held = {p: copy.grad for p, copy in self.copies.items()}
        for p, copy in self.copies.items():
            copy.grad = held[p] if p in self.queue else None
        try:
            self.inner.step()
        finally:
            for p, copy in self.copies.items():
                copy.grad = held[p]
        self._send_back()
        return loss

    def _send_back(self) -> None:
        """Parameters whose gradients came take the values of their copies, before later work of the current stream."""
        for p in self.queue:
            with torch.cuda.stream(self.stream):
                p.copy_(self.copies[p], non_blocking=True)
        if self.queue:
            torch.cuda.current_stream().wait_stream(self.stream)
        self.queue.clear()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Gradients of the parameters as the model has them are dropped (or set to 0); copies are written anew."""
        self.queue.clear()
        for p in self.copies:
            _zero(p, set_to_none)
        copies = set(self.copies.values())
        for group in self.inner.param_groups:
            for one in group["params"]:
                if one not in copies:
                    _zero(one, set_to_none)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of the inner optimizer, with copies in the place of offloaded parameters."""
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """That of the inner optimizer."""
        return self.inner.state

    def state_dict(self) -> dict[str, Any]:
        """That of the inner optimizer."""
        return self.inner.state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into the inner optimizer; copies take the values that the parameters have now."""
        self.inner.load_state_dict(state_dict)
        for p, copy in self.copies.items():
            copy.copy_(p)

    def __repr__(self) -> str:
        return f"CPUOffloadOptimizer({self.inner!r}, offloaded={len(self.copies)})"


def _zero(p: torch.Tensor, set_to_none: bool) -> None:
    if p.grad is None:
        return
    if set_to_none:
        p.grad = None
    else:
        p.grad.zero_()


__all__ = ["CPUOffloadOptimizer"]
