"""What every command shares: output, progress, interruption, requirements."""
