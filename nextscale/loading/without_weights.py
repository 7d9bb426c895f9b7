"""Models of a known layout that have sizes and no weights: what is planned of a request needs no more."""

from __future__ import annotations

import torch

from ..device import check_quantized_dtype, place
from ..models.base import KvDtype, NextScaleModel
from ..models.quantization import Quantize, quantize_blocks
from ..tokenizers.base import Tokenizer
from .presets import ModelSpec, build_model, build_tokenizer


def without_weights(
    spec: ModelSpec, dtype: torch.dtype, quantize: Quantize | None = None, kv_dtype: KvDtype | None = None
) -> tuple[NextScaleModel, Tokenizer]:
    """The model and its tokenizer on the meta device, as `load` with these options would make them."""
    check_quantized_dtype(quantize, dtype)
    meta = torch.device("meta")
    with meta:
        model, tokenizer = build_model(spec.model), build_tokenizer(spec.tokenizer)
    place(model, meta, dtype, model.float32)
    place(tokenizer, meta, dtype, tokenizer.float32)
    if quantize is not None:
        quantize_blocks(model, quantize)
    model.kv_dtype = kv_dtype
    return model, tokenizer
