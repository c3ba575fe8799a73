"""Rows as figures and pages."""
