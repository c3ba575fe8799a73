"""Experiment `formats`: what each scheme loses on data and on trained tensors."""
