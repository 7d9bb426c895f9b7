"""Benchmarks, evaluation, metrics, analysis and training. The runtime never imports it."""
