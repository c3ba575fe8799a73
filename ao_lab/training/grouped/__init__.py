"""Mixture of experts in low precision: tokens sorted by expert, linear layers of several experts, modules of models."""
