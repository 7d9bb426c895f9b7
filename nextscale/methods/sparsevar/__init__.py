"""SparseVAR (arXiv 2507.20454): from a late stage on, tokens of smooth regions are left out, and a few anchors propagate to them."""

from .method import SparseVAR

__all__ = ["SparseVAR"]
