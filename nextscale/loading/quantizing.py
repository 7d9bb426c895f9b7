"""Models whose weights become smaller when they are loaded."""

from __future__ import annotations

from collections.abc import Collection

import torch

from ..device import place
from ..models.base import NextScaleModel
from ..models.quantization import Quantize, quantize_blocks
from ..profiles import fingerprint


def quantize_model(model: NextScaleModel, quantize: Quantize, device: torch.device | None = None, keep: Collection[str] = ()) -> None:
    """Quantises the weights of the blocks, one product at a time, on the device that the model then lies on.

    device: None is where the model lies already. A model that lies in the host's memory never takes more of a GPU's than its bytes. keep:
    names of products that stay as they are (`models.quantization.PRODUCTS`).
    """
    device = device or model.device
    model.fingerprint = fingerprint(model)
    quantize_blocks(model, quantize, device, keep)
    place(model, device, model.dtype, model.float32)
