"""A rank that dies, a rank that is slow, a checkpoint that was cut: the run ends with an error in time, and what was saved goes
on.

    python -m experiments.distributed.failures FOLDER [WHAT]    (one process a rank, under torchrun's variables)

trains from the last complete checkpoint of FOLDER to the end and saves after every step; what happens in between is `WHAT`:
the last rank kills itself in the backward pass (`dies`) or once it has written its part of a checkpoint (`dies saving`),
comes late (`slow`), or does not come at all (`hangs`). The first rank's case starts such runs beside its own group, whose
other ranks wait for a file.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from experiments.distributed.cases import BITS, FAILURES, REFUSED, Case, Rank, Tally
from experiments.distributed.training import batch, blocks, content, loss_of, share

STEPS, AT = 4, 2
NOTHING, DIES, DIES_SAVING, SLOW, HANGS = "nothing", "dies", "dies saving", "slow", "hangs"
#: Words of the errors of a folder whose file was cut, or is gone.
CUT, GONE = "it is cut off or was added to, fetch it again", "give a folder that save_pretrained wrote"
RUNS = (NOTHING, DIES, DIES_SAVING, SLOW, HANGS)
#: By which ranks end.
ENDING = (DIES, DIES_SAVING, HANGS)
#: Seconds that a rank comes late, after which the group gives up on one, and in which a run of such has ended.
LATE, TIMEOUT, ENDED = 4.0, 20.0, 110.0
#: Seconds after the others' end in which one that never comes is killed.
FOLLOW = 5.0


class Run:
    """A model that trains by float8 codes under FSDP2, its optimizer, and how many steps they have made."""

    def __init__(self, rank: Rank) -> None:
        from ao_lab import convert_for_training_

        self.rank, self.net, self.step = rank, blocks(rank), 0
        convert_for_training_(self.net, "tensorwise", fsdp_float8_all_gather=True)
        share(self.net)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), 1e-2, foreach=False)

    def train(self, what: str) -> None:
        """One step, in which something happens where it is the one."""
        from ao_lab import precompute_float8_dynamic_scale_for_fsdp

        if self.step == AT and self.rank.rank == self.rank.size - 1:
            self.happen(what)
        loss_of(self.net, batch(self.rank, self.rank.rank, self.step)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        precompute_float8_dynamic_scale_for_fsdp(self.net)
        self.step += 1

    def happen(self, what: str) -> None:
        """To this rank."""
        if what == DIES:
            self.net[1].register_full_backward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        if what == SLOW:
            time.sleep(LATE)
        if what == HANGS:
            time.sleep(10 * ENDED)

    def state(self) -> dict[str, Any]:
        """What is saved."""
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.net, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": torch.tensor(self.step)}

    def save(self, folder: Path, what: str) -> None:
        """A folder of this step, whose metadata is written last."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.filesystem import FileSystemWriter

        writer = FileSystemWriter(folder / f"step_{self.step}")
        if what == DIES_SAVING and self.step == AT + 1 and self.rank.rank == self.rank.size - 1:
            write = writer.write_data

            def and_die(plan: Any, planner: Any) -> Any:
                write(plan, planner).wait()
                os.kill(os.getpid(), signal.SIGKILL)

            writer.write_data = and_die  # type: ignore[method-assign]
        dcp.save(self.state(), storage_writer=writer)

    def load(self, path: Path) -> None:
        """A checkpoint's weights, states and step."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self.state()
        dcp.load(state, checkpoint_id=path)
        set_state_dict(
            self.net, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        self.step = int(state["step"])


def complete(folder: Path) -> list[Path]:
    """Checkpoints that are whole, oldest first: torch writes their metadata last."""
    return sorted(path.parent for path in folder.glob("step_*/.metadata"))


def weights_of(net: nn.Module) -> dict[str, torch.Tensor]:
    """Whole weights on the host."""
    return {name: content(parameter).cpu() for name, parameter in net.named_parameters()}


def train(folder: Path, what: str) -> None:
    """Be a rank of a run: see the module's text."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cuda = os.environ["RANKS_DEVICE"] == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=TIMEOUT))
    run = Run(Rank(rank, size, device, folder))
    if found := complete(folder):
        run.load(found[-1])
    while run.step < STEPS:
        run.train(what)
        run.save(folder, what)
    found_weights = weights_of(run.net)
    if rank == 0:
        torch.save(found_weights, folder / "weights.pt")
    dist.barrier()
    time.sleep(0.5)  # gloo aborts where a rank is gone before another has left the barrier
    dist.destroy_process_group()


def ends(rank: Rank, folder: Path, what: str = NOTHING) -> tuple[list[int], float]:
    """Exit codes of a run in processes of its own, and the seconds it took; they are ended after `ENDED`."""
    from experiments.distributed.launch import processes, watch

    folder.mkdir(parents=True, exist_ok=True)
    module = f"{__package__}.failures"
    # Behind a timeout torch waits for dumps of its collectives, four times as long as this says (15 s), before a rank ends.
    variables = {"RANKS_DEVICE": rank.device.type, "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "500"}
    started = time.monotonic()
    with (folder / "stderr.txt").open("ab") as errors:
        group = processes(rank.size, [sys.executable, "-m", module, str(folder), what], variables, errors)
        codes = watch(group, limit=longest(rank), grace=FOLLOW if what == HANGS else 2 * TIMEOUT)
    return codes, time.monotonic() - started


def by_first(work: Any) -> Any:
    """A case that the first rank runs; the others wait for its file, not in a collective."""

    def case(rank: Rank, tally: Tally, **options: Any) -> None:
        done = rank.folder / "done"
        if rank.first:
            try:
                work(rank, tally, **options)
            finally:
                done.touch()
            return
        while not done.exists():
            time.sleep(0.1)

    return case


@dataclass(frozen=True)
class Outcome:
    """A run in which something happened: its exit codes, its seconds, the complete checkpoints that it left; exit codes of the
    run that went on behind ranks that ended (empty: it was not to)."""

    codes: list[int]
    seconds: float
    complete: list[str]
    again: list[int]


def outcome(rank: Rank, folder: Path, what: str) -> Outcome:
    """Let it happen, and go on where ranks end by it."""
    codes, seconds = ends(rank, folder, what)
    names = [path.name for path in complete(folder)]
    return Outcome(codes, seconds, names, ends(rank, folder)[0] if what in ENDING else [])


def happened(rank: Rank, what: str) -> tuple[Path, Outcome]:
    """The folder and the outcome of a run in which something happened; on GPUs all such runs go at once, made once."""
    base = rank.folder.parent / "runs"
    base.mkdir(exist_ok=True)
    wanted = RUNS if rank.device.type == "cuda" else (what,)
    missing = [one for one in wanted if not (base / f"{one}.json").exists()]

    def run(one: str) -> None:
        (base / f"{one}.json").write_text(json.dumps(asdict(outcome(rank, base / one, one))))

    with ThreadPoolExecutor(len(RUNS)) as pool:
        list(pool.map(run, missing))
    return base / what, Outcome(**json.loads((base / f"{what}.json").read_text()))


def expected_weights(rank: Rank, tally: Tally) -> dict[str, torch.Tensor]:
    """Weights of a run to which nothing happens."""
    folder, found = happened(rank, NOTHING)
    tally.true(
        f"a run to which nothing happens ends with {found.codes}: {last(folder)}", not any(found.codes)
    )
    return weights_in(folder)


def last(folder: Path) -> str:
    """The last words of a run's ranks."""
    lines = (folder / "stderr.txt").read_text(errors="replace").strip().splitlines()
    return " / ".join(lines[-3:])[-300:]


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    """What a run left behind."""
    found: dict[str, torch.Tensor] = torch.load(folder / "weights.pt", weights_only=True)
    return found


def dies(rank: Rank, tally: Tally, what: str) -> None:
    """All ranks end with an error in time; checkpoints from before are whole, and the run goes on to the same weights."""
    expected = expected_weights(rank, tally)
    folder, found = happened(rank, what)
    tally.values["seconds to the end of all ranks"] = (found.seconds, "s")
    tally.true(f"ranks ended with {found.codes}", by_themselves(found.codes))
    tally.true(f"they took {found.seconds:.0f} s", found.seconds < longest(rank) - 1)
    whole = [f"step_{step + 1}" for step in range(AT)]
    tally.true(f"complete checkpoints: {found.complete}", found.complete == whole)
    tally.true(f"the run that goes on ends with {found.again}: {last(folder)}", not any(found.again))
    alike(tally, weights_in(folder), expected)


def by_themselves(codes: list[int]) -> bool:
    """Whether all ranks failed, those beside the last (to which it happened) by an error of their own: killed ones hung."""
    return all(codes) and -signal.SIGKILL not in codes[:-1]


def longest(rank: Rank) -> float:
    """Seconds after which processes are ended; CPU ranks share cores."""
    return ENDED * (1 if rank.device.type == "cuda" else 2)


def alike(tally: Tally, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Whole weights."""
    for name, value in expected.items():
        tally.bits(name, found[name], value)


def slow(rank: Rank, tally: Tally) -> None:
    """A rank that comes late, but in time: nothing changes."""
    expected = expected_weights(rank, tally)
    folder, found = happened(rank, SLOW)
    tally.true(f"ranks ended with {found.codes}: {last(folder)}", not any(found.codes))
    alike(tally, weights_in(folder), expected)


def cut(rank: Rank, tally: Tally) -> None:
    """A file of a checkpoint that is shorter than it was: an error on every rank; the one before goes on."""
    run = Run(rank)
    for _ in range(2):
        run.train(NOTHING)
        run.save(rank.folder, NOTHING)
    expected = weights_of(run.net)
    first, last = complete(rank.folder)
    rank.wait()
    if rank.first:
        for path in last.glob("*.distcp"):
            os.truncate(path, path.stat().st_size // 2)
    rank.wait()
    other = Run(rank)
    tally.true(f"the error says {(said := error_of(other, last))!r}", bool(said))
    other = Run(rank)
    other.load(first)
    other.train(NOTHING)
    for name, value in weights_of(other.net).items():
        tally.bits(name, value, expected[name])


def error_of(run: Run, path: Path) -> str:
    """What loading says."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        run.load(path)
    except (CheckpointException, ValueError, RuntimeError, OSError, EOFError) as error:
        return f"{type(error).__name__}: {str(error)[:60]}"
    return ""


def cut_folder(rank: Rank, tally: Tally, whole_file: bool) -> None:
    """A folder of ours of which a file was cut or is gone: every rank says which, and no model is left half read."""
    import ao_lab
    from experiments.distributed.transformers_models import read, sharding, written

    kind = "LlamaForCausalLM"
    one = read(rank, kind, written(rank, kind), quantization_config=ao_lab.HfConfig("int8_rowwise"))
    folder = rank.folder / "quantized"
    if rank.first:
        one.save_pretrained(folder)
        path = next(folder.glob("*.safetensors"))
        path.unlink() if whole_file else os.truncate(path, path.stat().st_size // 2)
    rank.wait()
    try:
        read(rank, kind, folder, distributed_config=sharding(rank, tp_size=rank.size, tp_plan="auto"))
        said = "nothing"
    except (ValueError, OSError) as error:
        said = f"{type(error).__name__}: {error}"
    tally.true(f"the error says {said}", (GONE if whole_file else CUT) in said)


CASES = (
    Case("a rank dies in the backward pass", partial(by_first(dies), what=DIES), BITS, FAILURES, limit=240),
    Case("a rank dies while it saves", partial(by_first(dies), what=DIES_SAVING), BITS, FAILURES, limit=240),
    Case("a rank never comes", partial(by_first(dies), what=HANGS), BITS, FAILURES, limit=240),
    Case("a rank comes late", by_first(slow), BITS, FAILURES, limit=120),
    Case("a checkpoint that was cut", cut, BITS, FAILURES),
    Case("a quantized folder that was cut", partial(cut_folder, whole_file=False), REFUSED, FAILURES),
    Case("a quantized folder without its weights", partial(cut_folder, whole_file=True), REFUSED, FAILURES),
)


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else NOTHING)
