"""Scales that are chosen by the squared error of their block, rather than from its extremes."""
