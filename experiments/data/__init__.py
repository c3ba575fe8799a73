"""Corpora, multiple-choice questions and measures of error."""
