"""Convergence of recipes over paired seeds, and what planted faults do to it."""
