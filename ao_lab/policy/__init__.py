"""Policies of training: a recipe for each layer and product, by measured time under a budget of error."""
