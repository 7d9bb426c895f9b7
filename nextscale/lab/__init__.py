"""Measuring, judging, observing and training models. The runtime never imports it."""
