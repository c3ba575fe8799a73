"""The page docs/CLIENTS.md, "where can I take it": what each program makes of each scheme, as it was seen.

``python docs/clients.py [CLIENT ...]`` runs the clients (all that this Python can import, or those named) and puts their rows
into ``docs/clients.csv``, each with the client's version and the date; rows of other clients stay. Then it writes the page.
Each client reads a small Llama that was written for it, by its own code on a CPU, and its log-probabilities are compared with
those of the quantized model here. ``python docs/clients.py --page`` writes the page alone.
"""

from __future__ import annotations

import csv
import datetime
import functools
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    HF_HUB_OFFLINE="1",
)

import torch  # noqa: E402

import ao_lab  # noqa: E402
from ao_lab.cli.export import Logits  # noqa: E402
from tests.support.models.hf_models import tokenizer  # noqa: E402

DATA, PAGE = ROOT / "docs" / "clients.csv", ROOT / "docs" / "CLIENTS.md"
FIELDS = ("client", "scheme", "outcome", "difference", "through", "said", "version", "date")
#: Largest difference of a log-probability (natural) by what it is called; beyond the last it is another model.
OUTCOMES = {"same bits": 0.0, "same, other order of sums": 2e-4, "same weights, rounds by itself": 0.1}
REFUSED, FAILED, WRONG = "refused here", "refused there", "another model"
MARKS = {"same bits": "=", "same, other order of sums": "✓", "same weights, rounds by itself": "≈",
         REFUSED: "–", FAILED: "✗", WRONG: "wrong"}  # fmt: skip
#: How a client says that it knows a scheme and this build of it has no kernel for it; how the page says so, and its mark.
NO_KERNEL = re.compile(r"Failed to find a kernel|kernel \w+ is not supported")
NOT_BUILT, EMPTY = "no kernel in this build", "○"
#: The layer that an error begins with.
LAYER = re.compile(r"^(?:model\.)*(?:layers\.[\w.]+|lm_head(?:\.weight)?): ")
FIELDS_OF_MODEL = {
    "vocab_size": 320, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip


def dynamic(weight: str, inputs: str) -> Callable[[], Any]:
    """A scheme of weights by one of inputs."""
    return lambda: ao_lab.SchemeConfig(scheme=weight, activation_scheme=inputs)


#: Rows of the page.
SCHEMES: dict[str, Callable[[], Any]] = {
    **{
        name: (lambda name=name: ao_lab.SchemeConfig(scheme=name))
        for name in ("int8_rowwise", "int8_g32", "int8_g32_f16", "int4_g32", "int4_g32_f16", "int4_g32_asymmetric",
                     "int4_g128_asymmetric", "int2_g32_asymmetric", "fp8_rowwise", "mxfp8_e4m3", "mxfp4", "nvfp4", "nf4")
    },
    # What `ao-lab quantize --config Int8WeightOnlyConfig` writes of a bfloat16 model.
    "int8_rowwise_cast in bfloat16": lambda: ao_lab.SchemeConfig(scheme="int8_rowwise_cast"),
    "int8_rowwise by int8_rowwise": dynamic("int8_rowwise", "int8_rowwise"),
    "int8_rowwise by static int8": lambda: ao_lab.Int8StaticActivationInt8WeightConfig(),
    "int8_rowwise by int8_rowwise_asymmetric": dynamic("int8_rowwise", "int8_rowwise_asymmetric"),
    "int4_g32 by int8_rowwise_asymmetric": dynamic("int4_g32", "int8_rowwise_asymmetric"),
    "fp8_rowwise by fp8_rowwise": dynamic("fp8_rowwise", "fp8_rowwise"),
    "mxfp8_e4m3 by mxfp8_e4m3": dynamic("mxfp8_e4m3", "mxfp8_e4m3"),
    "nvfp4 by nvfp4": dynamic("nvfp4", "nvfp4"),
}  # fmt: skip


#: The end of the name of a scheme whose scales are rounded to bfloat16, in a model of that dtype.
BFLOAT16 = " in bfloat16"


class Case(NamedTuple):
    """A quantized model, its configuration, where to write, and the token numbers (1, T)."""

    model: Any
    config: Any
    folder: Path
    ids: torch.Tensor


class Client(NamedTuple):
    """module: what has to be there. package: whose version is told. compressed: the configuration is `for_layout`'s."""

    run: Callable[[Case], tuple[str, Any]]
    module: str
    package: str
    through: str
    compressed: bool = False
    dtype: torch.dtype = torch.float32


def by_transformers(case: Case) -> tuple[str, Any]:
    """A folder in compressed-tensors' layout."""
    import transformers

    ao_lab.save_pretrained(case.model, case.folder, layout="compressed-tensors")
    read = transformers.AutoModelForCausalLM.from_pretrained(case.folder).eval()
    return "all", read(case.ids).logits


def by_peft(case: Case) -> tuple[str, Any]:
    """LoRA of PEFT on the quantized model, a step of training, and the adapter switched off."""
    import peft

    adapted = peft.get_peft_model(case.model, peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    with torch.enable_grad():
        adapted(case.ids, labels=case.ids).loss.backward()
        torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.1).step()
    with adapted.disable_adapter():
        return "all", adapted(case.ids).logits


def by_lm_eval(case: Case) -> tuple[str, Any]:
    """lm-evaluation-harness's own sum over a continuation."""
    import transformers
    from lm_eval.models.huggingface import HFLM

    words = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer(), eos_token="the")
    harness = HFLM(pretrained=case.model, tokenizer=words)
    ids = case.ids[0].tolist()
    ((total, _),) = harness._loglikelihood_tokens([(("", ""), ids[:1], ids[1:])], disable_tqdm=True)
    return "sum", torch.tensor(total)


def by_gguf_loader(case: Case) -> tuple[str, Any]:
    """transformers' GGUF loader."""
    import transformers

    path = ao_lab.save_gguf(case.model, case.folder / "model.gguf").path
    dense = transformers.GgufConfig(dequantize=True)
    read = transformers.AutoModelForCausalLM.from_pretrained(
        case.folder, gguf_file=path.name, dtype=torch.float32, quantization_config=dense
    )
    return "all", read(case.ids).logits


def by_llama_cpp(case: Case) -> tuple[str, Any]:
    """llama.cpp's server in a Python package, the next token's log-probabilities."""
    import transformers
    import xllamacpp

    words = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer())
    given = xllamacpp.CommonParams()
    given.model.path = str(ao_lab.save_gguf(case.model, case.folder / "model.gguf", words).path)
    given.n_ctx, given.n_parallel, given.warmup, given.verbosity, given.cpuparams.n_threads = (
        64,
        1,
        False,
        0,
        1,
    )
    asked = {
        "prompt": case.ids[0].tolist(),
        "n_predict": 1,
        "temperature": 0,
        "logprobs": 320,
        "cache_prompt": False,
    }
    answer = xllamacpp.Server(given).handle_completions(asked)
    found = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    return "last", torch.tensor([one["logprob"] for one in sorted(found, key=lambda one: one["id"])])


def exported(case: Case) -> Path:
    """An ONNX file of the model."""
    path = ao_lab.export_onnx(Logits(case.model), (case.ids,), case.folder / "model.onnx").path
    return Path(path)


def by_onnxruntime(case: Case) -> tuple[str, Any]:
    """onnxruntime's CPU provider."""
    import onnxruntime

    session = onnxruntime.InferenceSession(exported(case))
    return "all", torch.from_numpy(session.run(None, {"input_ids": case.ids.numpy()})[0])


def by_openvino(case: Case) -> tuple[str, Any]:
    """OpenVINO's CPU plugin on the ONNX file, without its own 8-bit inputs."""
    import openvino

    exact = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": "0", "INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(str(exported(case)), "CPU", exact)
    return "all", torch.from_numpy(compiled(case.ids.numpy())[0])


def by_executorch(case: Case) -> tuple[str, Any]:
    """ExecuTorch's runtime with XNNPACK."""
    from executorch.runtime import Runtime

    path = ao_lab.export_executorch(Logits(case.model), (case.ids,), case.folder / "model.pte")
    return "all", Runtime.get().load_program(path).load_method("forward").execute([case.ids])[0]


def by_mlx(case: Case) -> tuple[str, Any]:
    """mlx-lm on mlx's CPU backend."""
    import mlx.core as mx
    from mlx_lm.utils import load_model

    read, _ = load_model(ao_lab.save_mlx(case.model, case.folder).path)
    return "all", torch.tensor(read(mx.array(case.ids.numpy())).astype(mx.float32).tolist())


#: vLLM in a process of its own, a folder and token numbers a line: it looks through all modules that are loaded, and stumbles
#: over Numba's.
VLLM = """
import json, sys, vllm
for line in sys.stdin:
    folder, ids = json.loads(line)
    try:
        engine = vllm.LLM(folder, skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, max_num_seqs=1)
        sampling = vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        (answer,) = engine.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
        found = [next(iter(one.values())).logprob for one in answer.prompt_logprobs[1:]]
        del engine
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    print("ANSWER" + json.dumps(found), flush=True)
"""


@functools.cache
def vllm_process() -> Any:
    """The process, started once."""
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-W", "ignore", "-c", VLLM], stdin=pipe, stdout=pipe, text=True)


def by_vllm(case: Case) -> tuple[str, Any]:
    """vLLM's engine, log-probabilities of the prompt."""
    ao_lab.save_pretrained(case.model, case.folder, layout="compressed-tensors")
    process = vllm_process()
    process.stdin.write(json.dumps([str(case.folder), case.ids[0].tolist()]) + "\n")
    process.stdin.flush()
    answer = next((line for line in process.stdout if line.startswith("ANSWER")), None)
    found = json.loads(answer.removeprefix("ANSWER")) if answer else "the process ended"
    if isinstance(found, str):
        raise RuntimeError(found)
    return "next", torch.tensor(found)


CLIENTS = {
    "transformers": Client(
        by_transformers,
        "compressed_tensors",
        "transformers",
        "`save_pretrained`",
        compressed=True,
        dtype=torch.bfloat16,
    ),
    "vLLM (CPU)": Client(
        by_vllm, "vllm", "vllm-cpu", "`save_pretrained`", compressed=True, dtype=torch.bfloat16
    ),
    "PEFT": Client(by_peft, "peft", "peft", "the model itself"),
    "lm-eval": Client(by_lm_eval, "lm_eval", "lm_eval", "the model itself"),
    "llama.cpp": Client(by_llama_cpp, "xllamacpp", "xllamacpp", "`save_gguf`"),
    "transformers, GGUF": Client(by_gguf_loader, "gguf", "gguf", "`save_gguf`"),
    "onnxruntime": Client(by_onnxruntime, "onnxruntime", "onnxruntime", "`export_onnx`"),
    "OpenVINO": Client(by_openvino, "openvino", "openvino", "`export_onnx`"),
    "ExecuTorch": Client(by_executorch, "executorch", "executorch", "`export_executorch`"),
    "MLX": Client(by_mlx, "mlx_lm", "mlx-lm", "`save_mlx`"),
}


def row(client: str, scheme: str) -> dict[str, str]:
    """What a client makes of a scheme, now."""
    record = CLIENTS[client]
    fields = {"client": client, "scheme": scheme, "difference": "", "through": record.through, "said": ""}
    fields |= {
        "version": importlib.metadata.version(record.package),
        "date": datetime.date.today().isoformat(),
    }
    try:
        config = SCHEMES[scheme]()
        config = config.for_layout("compressed-tensors") if record.compressed else config
        model, ids = model_of(config, torch.bfloat16 if scheme.endswith(BFLOAT16) else record.dtype)
    except ValueError as error:
        return {**fields, "outcome": REFUSED, "said": first_sentence(error)}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        wanted = model(ids).logits.float().log_softmax(-1)[0]
        try:
            kind, found = record.run(Case(model, config, Path(folder), ids))
        except Exception as error:  # noqa: BLE001  # any failure of a client is a row
            outcome = REFUSED if raised_here(error) else FAILED
            return {**fields, "outcome": outcome, "said": first_sentence(error)}
        if kind == "sum":  # the last token is no input of the harness
            wanted = model(ids[:, :-1]).logits.float().log_softmax(-1)[0]
    difference = float((seen(kind, found) - seen_here(kind, wanted, ids)).abs().max())
    name = next((name for name, most in OUTCOMES.items() if difference <= most), WRONG)
    return {**fields, "outcome": name, "difference": f"{difference:.2g}"}


def raised_here(error: BaseException) -> bool:
    """Whether an error is a ValueError of this project: the innermost file lies in ao_lab."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    file = Path("" if trace is None else trace.tb_frame.f_code.co_filename)
    return isinstance(error, ValueError) and ROOT / "ao_lab" in file.parents


def seen(kind: str, found: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of what a client gave."""
    found = found.detach().float()
    return found[0].log_softmax(-1) if kind == "all" else found


def seen_here(kind: str, wanted: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The same of ours."""
    following = wanted[: ids.shape[1] - 1].gather(-1, ids[0, 1:, None])[:, 0]
    return {"all": wanted, "last": wanted[-1], "next": following, "sum": following.sum()}[kind]


def model_of(config: Any, dtype: torch.dtype) -> tuple[Any, torch.Tensor]:
    """The small Llama under a configuration, and inputs."""
    import transformers

    torch.manual_seed(0)
    fields = transformers.LlamaConfig(**FIELDS_OF_MODEL)
    model = transformers.LlamaForCausalLM._from_config(fields, dtype=dtype).eval().requires_grad_(False)
    ids = torch.randint(0, 320, (1, 24))
    ao_lab.quantize_(
        model, config, **({"forward_loop": lambda m: m(ids)} if "Static" in type(config).__name__ else {})
    )
    return model, ids


def first_sentence(error: BaseException) -> str:
    """One line of an error, without its layer."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = text[max(text.find("No conversion rule found"), 0) :]  # what OpenVINO says last
    return LAYER.sub("", text.removeprefix("ValueError: ")).split("; ")[0].split(" Reasons:")[0][:160]


def rows() -> list[dict[str, str]]:
    """The table as it is stored."""
    if not DATA.is_file():
        return []
    with DATA.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def put(found: list[dict[str, str]]) -> None:
    """New rows take the place of those of the same client and scheme; the order is the page's."""
    table = {(one["client"], one["scheme"]): one for one in [*rows(), *found]}
    order = [(client, scheme) for client in CLIENTS for scheme in SCHEMES]
    with DATA.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(table[key] for key in order if key in table)


def page(table: list[dict[str, str]]) -> str:
    """The page as Markdown."""
    cells = {(one["client"], one["scheme"]): one for one in table}
    head = ["scheme of weights (by that of activations)", *CLIENTS]
    lines = ["# Where can I take it", "", INTRODUCTION, "", line(head), line(["---"] * len(head))]
    for scheme in SCHEMES:
        found = [cells.get((client, scheme)) for client in CLIENTS]
        lines.append(line([f"`{scheme}`", *["" if one is None else mark(one) for one in found]]))
    lines += [
        "",
        LEGEND,
        "",
        "## Versions, and what is called",
        "",
        line(["client", "through", "version", "seen"]),
    ]
    lines.append(line(["---"] * 4))
    for client in CLIENTS:
        one = next(iter([cell for cell in table if cell["client"] == client]), None)
        if one is not None:
            lines.append(
                line([client, one["through"], f"{CLIENTS[client].package} {one['version']}", one["date"]])
            )
    lines += ["", "## What was said", "", line(["client", "scheme", "outcome", "difference", "message"])]
    lines.append(line(["---"] * 5))
    for one in table:
        said = one["said"].replace("|", "\\|")
        outcome = NOT_BUILT if mark(one) == EMPTY else one["outcome"]
        lines.append(line([one["client"], f"`{one['scheme']}`", outcome, one["difference"], said]))
    return "\n".join([*lines, "", ABSENT, ""])


def mark(one: dict[str, str]) -> str:
    """The mark of a row."""
    return EMPTY if one["outcome"] == FAILED and NO_KERNEL.search(one["said"]) else MARKS[one["outcome"]]


def line(cells: list[str]) -> str:
    """A line of a table."""
    return f"| {' | '.join(cells)} |"


INTRODUCTION = (
    "What each program makes of each scheme, written by `python docs/clients.py` from `docs/clients.csv`, a row for each run. "
    "Every client read a small Llama by its own code on a CPU; its log-probabilities were compared with those of the quantized "
    "model here. How to write the files: [Serve and export](guides/serve.md)."
)
LEGEND = (
    "`=` bitwise equal outputs; `✓` equal up to the order of float32 sums (2e-4 of a log-probability); `≈` the same weights, "
    "and the client's own rounding of activations, scales or sums (up to 0.1; transformers and vLLM ran in bfloat16); `–` "
    "refused by ao_lab, before anything is written, with what would work; `○` the client knows the scheme, this build of it "
    "has no kernel for it (vLLM ran in its CPU build; those for GPUs have more kernels and were not run); `✗` refused by the "
    "client; empty: not run. transformers and vLLM "
    'read what `for_layout("compressed-tensors")` makes of the configuration; other schemes load in transformers after '
    "`import ao_lab`."
)
ABSENT = (
    "## Not here\n\nTensorRT-LLM, SGLang, GPTQModel and ExLlama need a GPU or packages that no CPU has; vLLM was seen in its "
    "CPU build, whose kernels are fewer than those of its GPU build. Axolotl, torchtune and llm-compressor pin other versions "
    "of transformers and were not run. MLX was seen on its CPU backend, not on Apple's chips. K-quants of GGUF are read as "
    "dense weights: no scheme has 6-bit scales under a float16."
)


def main(arguments: list[str]) -> int:
    """Run clients, and write the table and the page."""
    if arguments != ["--page"]:
        for client in arguments or [
            name for name in CLIENTS if importlib.util.find_spec(CLIENTS[name].module)
        ]:
            for scheme in SCHEMES:
                found = row(client, scheme)
                sys.stdout.write(
                    f"{client} | {scheme} | {found['outcome']} {found['difference']} {found['said']}\n"
                )
                sys.stdout.flush()
                put([found])
    PAGE.write_text(page(rows()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
