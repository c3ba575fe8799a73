"""Experts and other weights that transformers renames, merges and splits: both ways between a checkpoint and a model."""
