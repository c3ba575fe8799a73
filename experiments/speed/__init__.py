"""Experiment `speed`: the reference on CPUs beside other libraries."""
