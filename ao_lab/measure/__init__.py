"""What a model loses and gains by low precision: `evaluate`, `compare`, `benchmark`, and what they share."""
