"""Converts settings of a case from names of the reference implementations to ours."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import Any

TRUNK = {"depth": "depth", "embed_dim": "dim", "num_heads": "heads"}  # of every transformer
QUANTIZER = {"vocab_size": "codes", "z_channels": "latent_channels"}
RESIDUAL_QUANTIZER = {**QUANTIZER, "share_quant_resi": "blends", "quant_resi": "blend_share"}
AUTOENCODER = {"ch": "channels", "ch_mult": "multipliers"}


def translated(settings: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Returns the settings in `names` under our names; lists become tuples."""
    return {ours: tuple(value) if isinstance(value := settings[theirs], list) else value for theirs, ours in names.items()}


def understood(settings: Mapping[str, Any], read: Collection[str], fixed: Mapping[str, Any]) -> None:
    """Fails if a value differs from those of all published models; warns about settings that the reader ignores.

    A setting that matters changes the tensors, so an unknown setting alone is not an error.
    """
    unknown = set(settings) - set(read) - set(fixed)
    if unknown:
        warnings.warn(f"settings that no reader knows: {sorted(unknown)}", stacklevel=2)
    other = {name: settings[name] for name, value in fixed.items() if name in settings and settings[name] != value}
    assert not other, f"no published model has {other}"
