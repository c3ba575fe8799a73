"""Experiment `ptq`: post-training quantization of a trained language model."""
