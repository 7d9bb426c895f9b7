"""Which products of a model run with weights of eight bits, in which form, and the scales of their inputs, from the weights alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .base import NextScaleModel
from .blocks import Block
from .feed_forward import GatedFeedForward
from .quantized import Fp8Linear, Int8Linear, Quantize, QuantizedLinear

INPUT_SIZE = 1.0
"""What inputs of the expected size, root mean square, become in e4m3: there is room for what is 448 times as large, and numbers down to a
64th keep three bits of mantissa. On nano inputs have 0.02 to 1.7 times the expected size and nothing is 9 times as large; a 16th of these
scales changes no product's error by more than a fiftieth, 16 times them only that of text_attention.proj, from 0.035 to 0.13."""

MULTIPLE = 16  # sizes of products in e4m3


class Product(NamedTuple):
    """One product of a block, and how it runs where the model is loaded in fp8; int8 is weights alone, and the same for all."""

    name: str  # of the linear layer in the block
    fp8: type[QuantizedLinear]
    input_size: Callable[[Block], float]  # the root mean square that its input is expected to have
    why: str


# --- sizes of inputs, expected of the weights


def row_size(weight: Tensor, bias: Tensor | None) -> float:
    """Root mean square of the outputs of these rows, for inputs of size 1 whose channels are independent."""
    squares = weight.float().square().sum(dim=1).mean()
    return float((squares if bias is None else squares + bias.float().square().mean()).sqrt())


def norm_size(norm: nn.Module) -> float:
    """Of what a norm returns: 1, times a learned weight. What a condition adds to that scale is not known, and small beside the range."""
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    return 1.0 if weight is None else row_size(weight[:, None], bias)


def attended_size(block: Block) -> float:
    """Of the values that attention averages."""
    qkv, third = block.attention.qkv, block.attention.qkv.out_features // 3
    return norm_size(block.norm) * row_size(qkv.weight[-third:], qkv.bias[-third:])


def attended_text_size(block: Block) -> float:
    kv, half = block.text_attention.kv, block.text_attention.kv.out_features // 2
    return row_size(kv.weight[-half:], kv.bias[-half:])


def hidden_size(block: Block) -> float:
    """Of the hidden states of a feed-forward: an activation halves the squares, a gate multiplies two."""
    ffn, entering = block.feed_forward, norm_size(block.norm)
    if isinstance(ffn, GatedFeedForward):
        gate, up = ffn.gate_up.weight.chunk(2)
        return entering**2 * row_size(gate, None) * row_size(up, None) / math.sqrt(2)
    return entering * row_size(ffn.fc1.weight, ffn.fc1.bias) / math.sqrt(2)


PRODUCTS = (
    Product("attention.qkv", Fp8Linear, lambda block: norm_size(block.norm), "the kernel that norms its input writes e4m3"),
    Product("attention.proj", Fp8Linear, attended_size, "so does the attention kernel for few queries; for many, a pass that pays"),
    Product("text_attention.q", Fp8Linear, lambda block: norm_size(block.text_norm), "as attention.qkv"),
    Product("text_attention.proj", Fp8Linear, attended_text_size, "as attention.proj"),
    Product("feed_forward.fc1", Fp8Linear, lambda block: norm_size(block.norm), "as attention.qkv; half of a block's weights with fc2"),
    Product("feed_forward.fc2", Fp8Linear, hidden_size, "gelu writes e4m3; its outliers are within the range of floats, and are kept"),
    Product("feed_forward.gate_up", Fp8Linear, lambda block: norm_size(block.norm), "as feed_forward.fc1"),
    Product("feed_forward.down", Fp8Linear, hidden_size, "as feed_forward.fc2"),
    Product("text_attention.kv", Int8Linear, lambda _: 1.0, "runs once per request: weights are what counts, and text has outliers"),
    Product("modulation", Int8Linear, lambda _: 1.0, "runs once per request, and multiplies everything"),
)
"""All others stay as they are. Embeddings and the head are a hundredth of the weights, and the head's errors are those of the logits;
convolutions of the tokenizer are no products of tokens."""


# --- the model


def quantize_blocks(model: NextScaleModel, format: Quantize, device: torch.device | None = None, keep: Collection[str] = ()) -> None:
    """Replaces the products of all blocks, block by block: the device needs room for the bytes, and for the weights of one product.

    device: where they go; None leaves them where they are. Everything else stays where it is, and so do products that `keep` names. A model
    on the meta device gets layers of the right size without weights.
    """
    for block in [module for module in model.modules() if isinstance(module, Block)]:
        found = [(product, find(block, product)) for product in PRODUCTS if product.name not in keep]
        made = {product.name: quantized(block, product, linear, format, device) for product, linear in found if linear is not None}
        for name, layer in made.items():  # not before: sizes of inputs are those of weights of other layers
            owner, _, leaf = name.rpartition(".")
            setattr(block.get_submodule(owner), leaf, layer)
    model.quantize = format


def find(block: Block, product: Product) -> nn.Linear | None:
    """The layer that makes this product, where the block has one."""
    found: nn.Module | None = block
    for part in product.name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, nn.Linear) else None


def quantized(block: Block, product: Product, linear: nn.Linear, format: Quantize, device: torch.device | None) -> QuantizedLinear:
    whole = linear.in_features % MULTIPLE == 0 and linear.out_features % MULTIPLE == 0
    form = product.fp8 if format == "fp8" and whole else Int8Linear
    size = 1.0 if linear.weight.is_meta or form is Int8Linear else product.input_size(block)
    layer = form.of(linear.weight.to(device or linear.weight.device), linear.bias, max(size, torch.finfo(torch.float32).tiny) / INPUT_SIZE)
    return layer if device is None else layer.to(device)
