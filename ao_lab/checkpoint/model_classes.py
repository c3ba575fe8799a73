"""How a model is loaded and served by others: the class that transformers loads it by, the Hub's name of its task, vLLM.

`AutoModelForX.from_pretrained` takes the class that X's table has for the configuration's model_type. It is right for a folder
where that is the class that config.json names under "architectures"; where no table has it, the class itself is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

#: Auto classes of transformers and the tasks of the Hub, those first that say most. None: the Hub has no name for all of them.
TASKS: dict[str, str | None] = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSeq2SeqLM": None,
    "AutoModelForSpeechSeq2Seq": "automatic-speech-recognition",
    "AutoModelForCTC": "automatic-speech-recognition",
    "AutoModelForImageTextToText": "image-text-to-text",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForMultipleChoice": None,
    "AutoModelForNextSentencePrediction": None,
    "AutoModelForImageClassification": "image-classification",
    "AutoModelForZeroShotImageClassification": "zero-shot-image-classification",
    "AutoModelForObjectDetection": "object-detection",
    "AutoModelForZeroShotObjectDetection": "zero-shot-object-detection",
    "AutoModelForSemanticSegmentation": "image-segmentation",
    "AutoModelForUniversalSegmentation": "image-segmentation",
    "AutoModelForDepthEstimation": "depth-estimation",
    "AutoModelForMaskGeneration": "mask-generation",
    "AutoModelForVideoClassification": "video-classification",
    "AutoModelForAudioClassification": "audio-classification",
    "AutoModelForTextToWaveform": "text-to-audio",
    "AutoModelForTextToSpectrogram": "text-to-speech",
    "AutoModelForVisualQuestionAnswering": "visual-question-answering",
    "AutoModelForDocumentQuestionAnswering": "document-question-answering",
    "AutoModelForMaskedImageModeling": None,
    "AutoModelForPreTraining": None,
    "AutoModel": "feature-extraction",
}
#: Classes of transformers that vLLM's registry has for text generation with layers that its quantization covers
#: (_TEXT_GENERATION_MODELS of vllm/model_executor/models/registry.py, commit 0002bff0). It may serve others too.
SERVED_ARCHITECTURES = frozenset(
    f"{name}ForCausalLM"
    for name in (
        "Apertus", "Arcee", "Bamba", "Bloom", "Cohere", "Cohere2", "Dbrx", "DeepseekV2", "DeepseekV3", "Dots1", "Ernie4_5",
        "Ernie4_5_Moe", "Exaone4", "Falcon", "FalconH1", "FlexOlmo", "GPTBigCode", "GPTJ", "GPTNeoX", "Gemma", "Gemma2",
        "Gemma3", "Gemma3n", "Glm", "Glm4", "Glm4Moe", "Granite", "GraniteMoe", "GraniteMoeHybrid", "GraniteMoeShared",
        "HunYuanDenseV1", "HunYuanMoEV1", "Jamba", "Lfm2", "Lfm2Moe", "Llama", "Llama4", "LongcatFlash", "MiniMax",
        "Mistral", "Mixtral", "Mpt", "Nemotron", "OPT", "Olmo", "Olmo2", "Olmo3", "Olmoe", "Persimmon", "Phi", "Phi3",
        "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "Qwen3Next", "SeedOss", "StableLm", "Starcoder2", "Zamba2",
    )
)  # fmt: skip


@dataclass(frozen=True)
class Loader:
    """A class of transformers, and the Hub's name of what its models do."""

    name: str
    task: str | None


def loader_of(config: Mapping[str, Any]) -> Loader | None:
    """What loads the model of a configuration; None for one that describes no model of transformers.

    Where transformers is not installed nobody can say which of its tables has a class: then it is the class itself.
    """
    name = architecture_of(config)
    kind = config.get("model_type")
    if not isinstance(kind, str):
        return None
    if find_spec("transformers") is None:
        return Loader(name, None) if name is not None else None
    import transformers

    for auto, task in TASKS.items():
        tables: Any = getattr(transformers, auto, None)
        found = None if tables is None else tables._model_mapping._model_mapping.get(kind)
        first = found[0] if isinstance(found, (tuple, list)) else found
        if found is not None and first == name:
            return Loader(auto, task)
    known = name is not None and name in dir(transformers)
    # A class of somebody's own: what a plain language model is loaded by, as `ao_lab.load_pretrained` does.
    return Loader(str(name), None) if known else Loader("AutoModelForCausalLM", "text-generation")


def architecture_of(config: Mapping[str, Any]) -> str | None:
    """The class that a configuration names first; None where it names none, or what can be none."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    return name if isinstance(name, str) and name.isidentifier() else None


def is_served(config: Mapping[str, Any]) -> bool:
    """Whether vLLM lists the architecture that a configuration names."""
    return architecture_of(config) in SERVED_ARCHITECTURES


__all__ = ["SERVED_ARCHITECTURES", "TASKS", "Loader", "architecture_of", "is_served", "loader_of"]
