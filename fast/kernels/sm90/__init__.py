"""Instruction sequences for Hopper that give the bits of `fast.kernels.rules` in fewer instructions; they import no rules."""
