"""Text corpora, multiple-choice questions, error measures and stored sizes."""
