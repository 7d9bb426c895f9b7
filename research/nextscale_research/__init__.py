"""Analyses, figures and comparison methods of the papers behind nextscale."""
