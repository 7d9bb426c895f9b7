"""Linear layers with weights of eight bits, the products of a model that run with them, and the scales of their inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from functools import cache
from typing import Any, Literal, NamedTuple, Self, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import kernels
from ..errors import SettingError
from ..kernels.reference import E4M3, E4M3_MAX, INT8_MAX, MIN_SCALE, from_e4m3, to_e4m3
from ..kernels.shapes import power_of_two

Quantize = Literal["fp8", "int8"]
FORMATS: tuple[Quantize, ...] = get_args(Quantize)

MAX_FEW_TOKENS = 128  # over all rows: up to here the kernel that multiplies by bytes is faster than weights made whole and torch's product
MIN_ROWWISE_TOKENS = 6144  # from here on a product with scales per row is faster than one with scales per tensor; at 3200 they are equal
KEPT_ONES = 2**18  # scales of tokens, one MB of them: 32 guided images of a stage of 64 x 64


class QuantizedLinear(nn.Module):
    """A linear layer with weights [N, K] of one byte each. It cannot be trained."""

    codes: Tensor  # [N, K], as they are stored
    bias: nn.Parameter | None

    def __init__(self, codes: Tensor, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.out_features, self.in_features = codes.shape
        self.register_buffer("codes", codes)
        self.register_parameter("bias", bias)

    @classmethod
    def of(cls, weight: Tensor, bias: nn.Parameter | None, input_scale: float = 1.0) -> Self:
        """Quantizes weights; on the meta device the result has the same size. input_scale: see `Fp8Linear`."""
        raise NotImplementedError

    def restored_weight(self, dtype: torch.dtype) -> Tensor:
        """Returns the weights [N, K] that the bytes stand for."""
        raise NotImplementedError

    def restored_input(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns an input as it was before it was rounded to eight bits; others unchanged."""
        return x

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class Int8Linear(QuantizedLinear):
    """Weights are integers from -127 to 127 with a scale per output; inputs and arithmetic do not change."""

    scale: Tensor  # [N]

    def __init__(self, codes: Tensor, scale: Tensor, bias: nn.Parameter | None) -> None:
        super().__init__(codes, bias)
        self.register_buffer("scale", scale)

    @classmethod
    def of(cls, weight: Tensor, bias: nn.Parameter | None, input_scale: float = 1.0) -> Self:
        exact = weight.to(torch.float32, copy=True)
        scale = (exact.abs().amax(dim=1) / INT8_MAX).clamp(min=MIN_SCALE)
        return cls(exact.div_(scale[:, None]).round_().to(torch.int8), scale, bias)

    def restored_weight(self, dtype: torch.dtype) -> Tensor:
        if kernels.available(self.scale):
            return kernels.restore_int8(self.codes, self.scale, dtype)
        return torch.mul(self.codes, self.scale[:, None], out=torch.empty_like(self.codes, dtype=dtype))  # in one pass

    def reads_codes(self, x: Tensor) -> bool:
        """Returns whether the kernel multiplies such an input by the bytes themselves."""
        return x.dtype in (torch.float16, torch.bfloat16) and x.numel() // x.shape[-1] <= MAX_FEW_TOKENS and kernels.available(x)

    def forward(self, x: Tensor) -> Tensor:
        require_no_training(x)
        if self.reads_codes(x):
            return kernels.int8_linear(x, self.codes, self.scale, self.bias)
        return F.linear(x, self.restored_weight(x.dtype), self.bias)


class Fp8Linear(QuantizedLinear):
    """Weights and inputs are e4m3, with one scale each that is known before anything runs, so that no image changes another one's.

    An input that is e4m3 already was divided by `input_scale`, as kernels do that write it; any other is rounded here. Since e4m3 are
    floats, a scale only has to keep numbers within their range, 2**-9 to 448: see `INPUT_SIZE`.
    """

    scale_a: Tensor  # [], of the input, as the product takes it
    scale_b: Tensor  # [], of the weights
    scales: Tensor  # [1, N], both times each other, for every output

    def __init__(self, codes: Tensor, scale: Tensor, input_scale: float, dtype: torch.dtype, bias: nn.Parameter | None) -> None:
        super().__init__(codes, bias)
        self.input_scale, self.dtype = input_scale, dtype
        self.register_buffer("scale_a", torch.full_like(scale, input_scale))
        self.register_buffer("scale_b", scale)
        self.register_buffer("scales", (self.scale_a * scale).expand(1, self.out_features).contiguous())

    @classmethod
    def of(cls, weight: Tensor, bias: nn.Parameter | None, input_scale: float = 1.0) -> Self:
        exact = weight.to(torch.float32, copy=True)
        scale = (exact.abs().amax() / E4M3_MAX).clamp(min=MIN_SCALE)
        return cls(exact.div_(scale).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3), scale, input_scale, weight.dtype, bias)

    def restored_weight(self, dtype: torch.dtype) -> Tensor:
        return from_e4m3(self.codes, self.scale_b, dtype)

    def restored_input(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return from_e4m3(x, self.input_scale, dtype) if x.dtype == E4M3 else x

    def forward(self, x: Tensor) -> Tensor:
        require_no_training(x)
        if x.dtype != E4M3:
            x = kernels.round_to_e4m3(x, self.input_scale) if kernels.available(x) else to_e4m3(x, self.input_scale)
        product = scaled_product if x.is_cuda else scaled_product_reference
        return product(x.reshape(-1, self.in_features), self).view(*x.shape[:-1], self.out_features)


def scaled_product(x: Tensor, linear: Fp8Linear) -> Tensor:
    """Multiplies e4m3 tokens [M, K] by the weights: [M, N].

    On an H200, Infinity-2B's four products of 288 tokens take 39 us with a scale per tensor, 70 with scales per row and 60 in bfloat16;
    of 1152 tokens 106, 119 and 176; of 8192 tokens 654, 591 and 1102 (measured at 032f424).
    """
    scales = (linear.scale_a, linear.scale_b)
    if x.shape[0] >= MIN_ROWWISE_TOKENS:
        scales = (ones(max(KEPT_ONES, power_of_two(x.shape[0])), x.device)[: x.shape[0]], linear.scales)
    return torch._scaled_mm(x, linear.codes.t(), *scales, bias=linear.bias, out_dtype=linear.dtype, use_fast_accum=True)


@cache
def ones(rows: int, device: torch.device) -> Tensor:
    """Returns [rows, 1]. Kept for good: captured graphs read it where it lies, so that it is never made inside one."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"scales of {rows} rows must be made before the capture")
    return torch.ones(rows, 1, device=device)


def scaled_product_reference(x: Tensor, linear: Fp8Linear) -> Tensor:
    """Computes the same in float32, on any device."""
    product = F.linear(x.float(), linear.codes.float()) * (linear.scale_a * linear.scale_b)
    return (product if linear.bias is None else product + linear.bias.float()).to(linear.dtype)


def require_no_training(x: Tensor) -> None:
    if torch.is_grad_enabled() and x.requires_grad:
        raise SettingError("quantized weights have no gradients; load the model without quantize")


AnyLinear = nn.Linear | QuantizedLinear


def input_scale_of(linear: AnyLinear) -> float | None:
    """Returns the scale of e4m3 inputs of a layer; None if they are in the model's dtype."""
    return linear.input_scale if isinstance(linear, Fp8Linear) else None


# --- products of a block

INPUT_SIZE = 1.0
"""What inputs of the expected size, root mean square, become in e4m3: there is room for what is 448 times as large, and numbers down to a
64th keep three bits of mantissa. On nano inputs have 0.02 to 1.7 times the expected size and nothing is 9 times as large; a 16th of these
scales changes no product's error by more than a fiftieth, 16 times them only that of text_attention.proj, from 0.035 to 0.13."""

MULTIPLE = 16  # sizes of products in e4m3


class Product(NamedTuple):
    """A product of a block, and its layer where the model is loaded in fp8; with int8 all are `Int8Linear`."""

    name: str  # of the linear layer in the block
    fp8: type[QuantizedLinear]
    input_size: Callable[[Any], float]  # expected root mean square of its input, from the block


# --- sizes of inputs, expected of the weights


def row_size(weight: Tensor, bias: Tensor | None) -> float:
    """Returns the root mean square of the outputs of these rows, for inputs of size 1 whose channels are independent."""
    squares = weight.float().square().sum(dim=1).mean()
    return float((squares if bias is None else squares + bias.float().square().mean()).sqrt())


def norm_size(norm: nn.Module) -> float:
    """Returns the size of the output of a norm: 1, times a learned weight. What a condition adds is not known, and small."""
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    return 1.0 if weight is None else row_size(weight[:, None], bias)


def attended_size(block: Any) -> float:
    """Returns the size of the values that attention averages."""
    qkv, third = block.attention.qkv, block.attention.qkv.out_features // 3
    return norm_size(block.norm) * row_size(qkv.weight[-third:], qkv.bias[-third:])


def attended_text_size(block: Any) -> float:
    kv, half = block.text_attention.kv, block.text_attention.kv.out_features // 2
    return row_size(kv.weight[-half:], kv.bias[-half:])


def hidden_size(block: Any) -> float:
    """Returns the size of hidden states of a feed-forward: an activation halves the squares, a gate multiplies two."""
    ffn, entering = block.feed_forward, norm_size(block.norm)
    if hasattr(ffn, "gate_up"):
        gate, up = ffn.gate_up.weight.chunk(2)
        return entering**2 * row_size(gate, None) * row_size(up, None) / math.sqrt(2)
    return entering * row_size(ffn.fc1.weight, ffn.fc1.bias) / math.sqrt(2)


PRODUCTS = (
    Product("attention.qkv", Fp8Linear, lambda block: norm_size(block.norm)),  # the kernel that norms its input writes e4m3
    Product("attention.proj", Fp8Linear, attended_size),  # so does the attention kernel for few queries; for many, a pass that pays
    Product("text_attention.q", Fp8Linear, lambda block: norm_size(block.text_norm)),  # as attention.qkv
    Product("text_attention.proj", Fp8Linear, attended_text_size),  # as attention.proj
    Product("feed_forward.fc1", Fp8Linear, lambda block: norm_size(block.norm)),  # as attention.qkv; half of a block's weights with fc2
    Product("feed_forward.fc2", Fp8Linear, hidden_size),  # gelu writes e4m3; its outliers are within the range of floats, and are kept
    Product("feed_forward.gate_up", Fp8Linear, lambda block: norm_size(block.norm)),  # as feed_forward.fc1
    Product("feed_forward.down", Fp8Linear, hidden_size),  # as feed_forward.fc2
    Product("text_attention.kv", Int8Linear, lambda _: 1.0),  # runs once per request: weights are what counts, and text has outliers
    Product("modulation", Int8Linear, lambda _: 1.0),  # runs once per request, and multiplies everything
)
"""All others stay as they are. Embeddings and the head are a hundredth of the weights, and the head's errors are those of the logits;
convolutions of the tokenizer are no products of tokens."""


# --- the model


def quantize_blocks(model: Any, format: Quantize, device: torch.device | None = None, keep: Collection[str] = ()) -> None:
    """Replaces the products of all blocks, except those that `keep` names; all else stays where it is.

    The device needs room for the bytes and for the weights of one product. A model on the meta device gets layers without weights.
    """
    for block in [module for module in model.modules() if hasattr(module, "feed_forward")]:
        found = [(product, find(block, product)) for product in PRODUCTS if product.name not in keep]
        made = {product.name: quantized(block, product, linear, format, device) for product, linear in found if linear is not None}
        for name, layer in made.items():  # not before: sizes of inputs are those of weights of other layers
            owner, _, leaf = name.rpartition(".")
            setattr(block.get_submodule(owner), leaf, layer)
    model.quantize = format


def find(block: nn.Module, product: Product) -> nn.Linear | None:
    """Returns the linear layer of a product; None if the block has none."""
    found: nn.Module | None = block
    for part in product.name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, nn.Linear) else None


def quantized(block: nn.Module, product: Product, linear: nn.Linear, format: Quantize, device: torch.device | None) -> QuantizedLinear:
    whole = linear.in_features % MULTIPLE == 0 and linear.out_features % MULTIPLE == 0
    form = product.fp8 if format == "fp8" and whole else Int8Linear
    size = 1.0 if linear.weight.is_meta or form is Int8Linear else product.input_size(block)
    layer = form.of(linear.weight.to(device or linear.weight.device), linear.bias, max(size, torch.finfo(torch.float32).tiny) / INPUT_SIZE)
    return layer if device is None else layer.to(device)
