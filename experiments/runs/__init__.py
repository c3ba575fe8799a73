"""A run of the experiments: what it is given, what it ran on, and the one function that runs them all."""
