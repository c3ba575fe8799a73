"""What every experiment shares: settings, rows, workers, timing."""
