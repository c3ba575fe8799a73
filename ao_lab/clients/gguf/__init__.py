"""GGUF, the files of llama.cpp: block types, names of tensors, tokenizers, reading and writing."""
