"""Distances of sets of images, and the networks behind them."""
