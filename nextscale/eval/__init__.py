"""Measurements of models and methods, and the rows that they are written to."""
