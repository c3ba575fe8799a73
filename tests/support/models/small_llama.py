"""A small Llama with a tokenizer made on the fly, as folders of transformers have them."""

import torch

WORDS = "the of and to in is it that for was on are with as at be this have from or by not but what all were when we there can"


def tokenizer():
    """Words of one text, and bytes for the rest."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([WORDS] * 4, trainer)
    return tokenizer


def save_llama(path, *, seed=0, vocabulary=320, with_tokenizer=True, tied=False):
    """The folder of a random model in bfloat16."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(seed)
    transformers.utils.logging.disable_progress_bar()
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
    model.save_pretrained(path)
    if with_tokenizer:
        tokenizer().save(str(path / "tokenizer.json"))
    return model
