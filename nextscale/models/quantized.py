"""Linear layers with weights of eight bits, in the place of `nn.Linear` in a model that generates. They cannot be trained."""

from __future__ import annotations

from functools import cache
from typing import Literal, Self, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import kernels
from ..errors import SettingError
from ..kernels.e4m3 import E4M3, LARGEST, from_e4m3, to_e4m3
from ..kernels.shapes import power_of_two

Quantize = Literal["fp8", "int8"]
FORMATS: tuple[Quantize, ...] = get_args(Quantize)

LARGEST_INT8 = 127
SMALLEST_SCALE = 1e-30  # only keeps weights that are all zero from dividing by zero
FEW_TOKENS = 128  # over all rows: up to here the kernel that multiplies by bytes is faster than weights made whole and torch's product
MANY_TOKENS = 6144  # from here on a product with scales per row is faster than one with scales per tensor; at 3200 they are equal
KEPT_ONES = 2**18  # scales of tokens, one MB of them: 32 guided images of a stage of 64 x 64


class QuantizedLinear(nn.Module):
    """Weights [N, K] of one byte each, with what multiplies them; the bias stays as it is."""

    codes: Tensor  # [N, K], as they are stored
    bias: nn.Parameter | None

    def __init__(self, codes: Tensor, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.out_features, self.in_features = codes.shape
        self.register_buffer("codes", codes)
        self.register_parameter("bias", bias)

    @classmethod
    def of(cls, weight: Tensor, bias: nn.Parameter | None, input_scale: float = 1.0) -> Self:
        """What stands for these weights; on the meta device something of the same size. input_scale: see `Fp8Linear`."""
        raise NotImplementedError

    def restored_weight(self, dtype: torch.dtype) -> Tensor:
        """The weights [N, K] that the bytes stand for."""
        raise NotImplementedError

    def restored_input(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """An input as it was before it was rounded to eight bits; others as they are."""
        return x

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class Int8Linear(QuantizedLinear):
    """Weights are whole numbers from -127 to 127 with a scale per output; inputs stay as they are, and so does the arithmetic."""

    scale: Tensor  # [N]

    def __init__(self, codes: Tensor, scale: Tensor, bias: nn.Parameter | None) -> None:
        super().__init__(codes, bias)
        self.register_buffer("scale", scale)

    @classmethod
    def of(cls, weight: Tensor, bias: nn.Parameter | None, input_scale: float = 1.0) -> Self:
        exact = weight.to(torch.float32, copy=True)
        scale = (exact.abs().amax(dim=1) / LARGEST_INT8).clamp(min=SMALLEST_SCALE)
        return cls(exact.div_(scale[:, None]).round_().to(torch.int8), scale, bias)

    def restored_weight(self, dtype: torch.dtype) -> Tensor:
        if kernels.available(self.scale):
            return kernels.restore_int8(self.codes, self.scale, dtype)
        return torch.mul(self.codes, self.scale[:, None], out=torch.empty_like(self.codes, dtype=dtype))  # in one pass

    def reads_codes(self, x: Tensor) -> bool:
        """Whether the kernel multiplies such an input by the bytes themselves."""
        return x.dtype in (torch.float16, torch.bfloat16) and x.numel() // x.shape[-1] <= FEW_TOKENS and kernels.available(x)

    def forward(self, x: Tensor) -> Tensor:
        require_no_training(x)
        if self.reads_codes(x):
            return kernels.int8_linear(x, self.codes, self.scale, self.bias)
        return F.linear(x, self.restored_weight(x.dtype), self.bias)


class Fp8Linear(QuantizedLinear):
    """Weights and inputs are e4m3, with one scale each that is known before anything runs, so that no image changes another one's.

    An input that is e4m3 already was divided by `input_scale`, as kernels do that write it; any other is rounded here. Since e4m3 are
    floats, a scale only has to keep numbers within their range, 2**-9 to 448: see `quantization.INPUT_SIZE`.
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
        scale = (exact.abs().amax() / LARGEST).clamp(min=SMALLEST_SCALE)
        return cls(exact.div_(scale).clamp_(-LARGEST, LARGEST).to(E4M3), scale, input_scale, weight.dtype, bias)

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
    """e4m3 tokens [M, K] through the layer: [M, N].

    On an H200, Infinity-2B's four products of 288 tokens take 39 us with a scale per tensor, 70 with scales per row and 60 in bfloat16;
    of 1152 tokens 106, 119 and 176; of 8192 tokens 654, 591 and 1102 (measured at 032f424).
    """
    scales = (linear.scale_a, linear.scale_b)
    if x.shape[0] >= MANY_TOKENS:
        scales = (ones(max(KEPT_ONES, power_of_two(x.shape[0])), x.device)[: x.shape[0]], linear.scales)
    return torch._scaled_mm(x, linear.codes.t(), *scales, bias=linear.bias, out_dtype=linear.dtype, use_fast_accum=True)


@cache
def ones(rows: int, device: torch.device) -> Tensor:
    """[rows, 1]. Kept for good: captured graphs read it where it lies, so that it is never made inside one."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"scales of {rows} rows are asked for in a capture and were not in the runs before it")
    return torch.ones(rows, 1, device=device)


def scaled_product_reference(x: Tensor, linear: Fp8Linear) -> Tensor:
    """The same in float32, on any device."""
    product = F.linear(x.float(), linear.codes.float()) * (linear.scale_a * linear.scale_b)
    return (product if linear.bias is None else product + linear.bias.float()).to(linear.dtype)


def require_no_training(x: Tensor) -> None:
    if torch.is_grad_enabled() and x.requires_grad:
        raise SettingError("quantised weights cannot be trained, nor passed through: load the model without quantize")


AnyLinear = nn.Linear | QuantizedLinear


def input_scale_of(linear: AnyLinear) -> float | None:
    """The scale at which a layer takes its input as e4m3; None where it takes it as it is."""
    return linear.input_scale if isinstance(linear, Fp8Linear) else None


def restored_weight(linear: AnyLinear, dtype: torch.dtype) -> Tensor:
    """The weights of a linear layer, quantised or not."""
    return linear.restored_weight(dtype) if isinstance(linear, QuantizedLinear) else linear.weight


def restored_input(linear: AnyLinear, x: Tensor, dtype: torch.dtype) -> Tensor:
    """The input of a linear layer before it was quantised, if it was."""
    return linear.restored_input(x, dtype) if isinstance(linear, QuantizedLinear) else x
