"""A small sentence encoder and a small Whisper with random weights, as folders of transformers have them."""

import torch

from tests.support.models.small_llama import tokenizer

#: Of the multilingual Whisper: tokens in all, and the ids of its special ones that are asked for.
VOCABULARY = 51865
SPECIAL = {
    "<|endoftext|>": 50257, "<|startoftranscript|>": 50258, "<|en|>": 50259, "<|transcribe|>": 50359, "<|notimestamps|>": 50363,
}  # fmt: skip


def save_mpnet(path, *, seed=0):
    """The folder of a random encoder of one layer in float32."""
    import transformers

    config = transformers.MPNetConfig(
        vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=400,
    )  # fmt: skip
    torch.manual_seed(seed)
    transformers.utils.logging.disable_progress_bar()
    model = transformers.MPNetModel(config).eval()
    model.save_pretrained(path)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer(), pad_token="!")
    fast.save_pretrained(path)
    return model


def save_whisper(path, *, seed=0, special=SPECIAL):
    """The folder of a random Whisper of one layer a side in float16, and a tokenizer of a few words with Whisper's ids."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY, d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=128, decoder_ffn_dim=128, max_target_positions=80, pad_token_id=50257,
        bos_token_id=50257, eos_token_id=50257, decoder_start_token_id=50258,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = transformers.WhisperForConditionalGeneration(config).half()
    model.save_pretrained(path)
    words = {word: number for number, word in enumerate(["[UNK]", "one", "two", "three", "of", "clubs"])}
    made = Tokenizer(models.WordLevel({**words, **special}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(path / "tokenizer.json"))
    return model
