"""8-bit linear layers, the layers of a block that use them, and the scales of their inputs."""

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

MAX_KERNEL_TOKENS = 128  # over all rows; with more tokens, dequantizing the weights and torch's product are faster than the kernel
MIN_ROWWISE_TOKENS = 6144  # from here on, scales per row are faster than scales per tensor; at 3200 tokens they are equal
CACHED_SCALES = 2**18  # scales of tokens (1 MiB): enough for 32 images with CFG at a stage of 64 x 64 cells


class QuantizedLinear(nn.Module):
    """Base class of linear layers with 8-bit weights [N, K]. They cannot be trained."""

    codes: Tensor  # [N, K], stored weights
    bias: nn.Parameter | None

    def __init__(self, codes: Tensor, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.out_features, self.in_features = codes.shape
        self.register_buffer("codes", codes)
        self.register_parameter("bias", bias)

    @classmethod
    def of(cls, weight: Tensor, bias: nn.Parameter | None, input_scale: float = 1.0) -> Self:
        """Quantizes weights; on the meta device only the shapes. See `Fp8Linear` for `input_scale`."""
        raise NotImplementedError

    def restored_weight(self, dtype: torch.dtype) -> Tensor:
        """Returns the dequantized weights [N, K]."""
        raise NotImplementedError

    def restored_input(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns a dequantized input; inputs that are not quantized are returned unchanged."""
        return x

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class Int8Linear(QuantizedLinear):
    """Linear layer with int8 weights in [-127, 127] and one scale per output channel. Inputs and arithmetic are not quantized."""

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
        """Returns True if the kernel multiplies this input by the int8 codes directly."""
        return x.dtype in (torch.float16, torch.bfloat16) and x.numel() // x.shape[-1] <= MAX_KERNEL_TOKENS and kernels.available(x)

    def forward(self, x: Tensor) -> Tensor:
        check_no_grad(x)
        if self.reads_codes(x):
            return kernels.int8_linear(x, self.codes, self.scale, self.bias)
        return F.linear(x, self.restored_weight(x.dtype), self.bias)


class Fp8Linear(QuantizedLinear):
    """Linear layer with e4m3 weights and inputs. Both scales are fixed at load time, so images of a batch do not affect each other.

    Inputs that are already e4m3, as written by fused kernels, have been divided by `input_scale`; other inputs are quantized here. e4m3 is
    a floating-point format, so the scale only needs to keep values within its range of 2**-9 to 448 (see `E4M3_RMS`).
    """

    scale_a: Tensor  # [], of the input
    scale_b: Tensor  # [], of the weights
    scales: Tensor  # [1, N], scale_a * scale_b repeated for every output channel

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
        check_no_grad(x)
        if x.dtype != E4M3:
            x = kernels.round_to_e4m3(x, self.input_scale) if kernels.available(x) else to_e4m3(x, self.input_scale)
        product = fp8_matmul if x.is_cuda else fp8_matmul_reference
        return product(x.reshape(-1, self.in_features), self).view(*x.shape[:-1], self.out_features)


def fp8_matmul(x: Tensor, linear: Fp8Linear) -> Tensor:
    """Multiplies e4m3 tokens [M, K] by the weights; returns [M, N].

    Time of Infinity-2B's four products on an H200 with scales per tensor, with scales per row and in bfloat16: 39, 70 and 60 us for 288
    tokens; 106, 119 and 176 us for 1152 tokens; 654, 591 and 1102 us for 8192 tokens (measured at 032f424).
    """
    scales = (linear.scale_a, linear.scale_b)
    if x.shape[0] >= MIN_ROWWISE_TOKENS:
        scales = (ones(max(CACHED_SCALES, power_of_two(x.shape[0])), x.device)[: x.shape[0]], linear.scales)
    return torch._scaled_mm(x, linear.codes.t(), *scales, bias=linear.bias, out_dtype=linear.dtype, use_fast_accum=True)


@cache
def ones(rows: int, device: torch.device) -> Tensor:
    """Returns a cached tensor of ones, [rows, 1]. CUDA graphs read it at a fixed address, so it is never created during capture."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"scales of {rows} rows must be created before CUDA graph capture.")
    return torch.ones(rows, 1, device=device)


def fp8_matmul_reference(x: Tensor, linear: Fp8Linear) -> Tensor:
    """Computes `fp8_matmul` in float32 on any device."""
    product = F.linear(x.float(), linear.codes.float()) * (linear.scale_a * linear.scale_b)
    return (product if linear.bias is None else product + linear.bias.float()).to(linear.dtype)


def check_no_grad(x: Tensor) -> None:
    if torch.is_grad_enabled() and x.requires_grad:
        raise SettingError("quantize must be None for training: quantized weights have no gradients.")


AnyLinear = nn.Linear | QuantizedLinear


def input_scale_of(linear: AnyLinear) -> float | None:
    """Returns the scale of a layer's e4m3 inputs; None if inputs have the model's dtype."""
    return linear.input_scale if isinstance(linear, Fp8Linear) else None


# --- quantized layers of a block

E4M3_RMS = 1.0
"""Root mean square of a typical input after scaling to e4m3. Values up to 448 times as large fit, and values down to 1/64 keep three bits
of mantissa. On nano the measured RMS is 0.02 to 1.7 times the expected one, and no value is more than 9 times as large. Scales 16 times
smaller change no layer's error by more than 2 %; scales 16 times larger change only text_attention.proj's, from 0.035 to 0.13."""

MULTIPLE = 16  # e4m3 matrix multiplication needs sizes that are multiples of this


class BlockLinear(NamedTuple):
    """A linear layer of a block that is quantized. `fp8` is its class if the model is loaded in fp8; with int8 it is `Int8Linear`."""

    name: str  # in the block
    fp8: type[QuantizedLinear]
    input_rms: Callable[[Any], float]  # expected root mean square of the input, computed from the block


# --- root mean squares, estimated from the weights


def output_rms(weight: Tensor, bias: Tensor | None) -> float:
    """Returns the root mean square of the outputs of these rows, for inputs with independent channels of RMS 1."""
    squares = weight.float().square().sum(dim=1).mean()
    return float((squares if bias is None else squares + bias.float().square().mean()).sqrt())


def norm_rms(norm: nn.Module) -> float:
    """Returns the RMS of a norm's output: 1, times a learned weight. The modulation is unknown and small, and is ignored."""
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    return 1.0 if weight is None else output_rms(weight[:, None], bias)


def values_rms(block: Any) -> float:
    """Returns the RMS of the values of self-attention."""
    qkv, third = block.attention.qkv, block.attention.qkv.out_features // 3
    return norm_rms(block.norm) * output_rms(qkv.weight[-third:], qkv.bias[-third:])


def text_values_rms(block: Any) -> float:
    kv, half = block.text_attention.kv, block.text_attention.kv.out_features // 2
    return output_rms(kv.weight[-half:], kv.bias[-half:])


def hidden_rms(block: Any) -> float:
    """Returns the RMS of the feed-forward's hidden states: an activation halves the mean square, a gate multiplies two of them."""
    ffn, entering = block.feed_forward, norm_rms(block.norm)
    if hasattr(ffn, "gate_up"):
        gate, up = ffn.gate_up.weight.chunk(2)
        return entering**2 * output_rms(gate, None) * output_rms(up, None) / math.sqrt(2)
    return entering * output_rms(ffn.fc1.weight, ffn.fc1.bias) / math.sqrt(2)


BLOCK_LINEARS = (
    BlockLinear("attention.qkv", Fp8Linear, lambda block: norm_rms(block.norm)),  # the norm kernel writes its input as e4m3
    BlockLinear("attention.proj", Fp8Linear, values_rms),  # the kernel for few queries writes e4m3; for many, an extra pass that pays off
    BlockLinear("text_attention.q", Fp8Linear, lambda block: norm_rms(block.text_norm)),  # as attention.qkv
    BlockLinear("text_attention.proj", Fp8Linear, text_values_rms),  # as attention.proj
    BlockLinear("feed_forward.fc1", Fp8Linear, lambda block: norm_rms(block.norm)),  # as attention.qkv; with fc2 half of a block's weights
    BlockLinear("feed_forward.fc2", Fp8Linear, hidden_rms),  # the GELU kernel writes e4m3; outliers are within its range
    BlockLinear("feed_forward.gate_up", Fp8Linear, lambda block: norm_rms(block.norm)),  # as feed_forward.fc1
    BlockLinear("feed_forward.down", Fp8Linear, hidden_rms),  # as feed_forward.fc2
    BlockLinear("text_attention.kv", Int8Linear, lambda _: 1.0),  # runs once per request on text features, which have outliers
    BlockLinear("modulation", Int8Linear, lambda _: 1.0),  # runs once per request, and its errors affect every sublayer
)
"""Embeddings and the head are not quantized: they hold 1 % of the weights, and the head's errors go straight into the logits."""


# --- the model


def quantize_blocks(model: Any, format: Quantize, device: torch.device | None = None, keep: Collection[str] = ()) -> None:
    """Replaces the linear layers of all blocks by quantized ones, except the layers named in `keep`.

    If `device` is given, the quantized layers are created there. It needs memory for them and for one original layer. On the meta device
    the layers have no weights.
    """
    for block in [module for module in model.modules() if hasattr(module, "feed_forward")]:
        found = [(spec, find_linear(block, spec.name)) for spec in BLOCK_LINEARS if spec.name not in keep]
        made = {spec.name: quantized(block, spec, linear, format, device) for spec, linear in found if linear is not None}
        for name, layer in made.items():  # after all are made: the RMS of an input depends on the weights of other layers
            owner, _, leaf = name.rpartition(".")
            setattr(block.get_submodule(owner), leaf, layer)
    model.quantize = format


def find_linear(block: nn.Module, name: str) -> nn.Linear | None:
    """Returns the linear layer of this name; None if the block has none."""
    found: nn.Module | None = block
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, nn.Linear) else None


def quantized(block: nn.Module, spec: BlockLinear, linear: nn.Linear, format: Quantize, device: torch.device | None) -> QuantizedLinear:
    aligned = linear.in_features % MULTIPLE == 0 and linear.out_features % MULTIPLE == 0
    layer_class = spec.fp8 if format == "fp8" and aligned else Int8Linear
    rms = 1.0 if linear.weight.is_meta or layer_class is Int8Linear else spec.input_rms(block)
    scale = max(rms, torch.finfo(torch.float32).tiny) / E4M3_RMS
    layer = layer_class.of(linear.weight.to(device or linear.weight.device), linear.bias, scale)
    return layer if device is None else layer.to(device)
