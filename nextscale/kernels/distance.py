"""Mean of the tokens and the distance of each token from it: the score by which FastVAR selects tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .shapes import dense_channels, per_row, power_of_two, warps_for

# bfloat16 [2, 1600, 2048] has 13 MB of input and almost no output: 3.0 us each at 4.3 TB/s, or less, since x is in the L2 cache (60 MB on
# an H200). Measured there: distance 4.9 us; torch, which also writes and reads the difference in float32, 47 us. FastVAR needs both before
# every sublayer, 150 times per request with its preset for infinity-2b. The mean takes two launches, over chunks of tokens and over the
# sums of chunks, to have enough programs: one launch took 13 us for 4096 tokens of 320 channels.
TOKENS, CHANNELS_AT_A_TIME = 64, 32
CHUNK = 256  # tokens per program; fixed, so that an image's sum is the same in every batch


@triton.jit(do_not_specialize=["tokens", "divisor"])
def sum_chunks_kernel(
    x_ptr, out_ptr, tokens, divisor, x_row, x_token,
    CHANNELS: tl.constexpr, CHUNK: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums one chunk of tokens of one row and block of channels per program, in an order that does not depend on the batch."""
    row, chunk = tl.program_id(2).to(tl.int64), tl.program_id(1)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    total = tl.zeros([TOKENS, BLOCK], dtype=tl.float32)
    for start in range(0, CHUNK, TOKENS):
        token = chunk * CHUNK + start + tl.arange(0, TOKENS)
        place = row * x_row + token[:, None].to(tl.int64) * x_token + channel[None, :]
        total += tl.load(x_ptr + place, mask=(token < tokens)[:, None] & inside[None, :], other=0.0).to(tl.float32)
    chunks = tl.num_programs(1)
    tl.store(out_ptr + (row * chunks + chunk) * CHANNELS + channel, tl.sum(total, axis=0) / divisor, mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def distance_from_mean_kernel(x_ptr, mean_ptr, out_ptr, tokens, x_row, x_token, mean_row, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    x = tl.load(x_ptr + row * x_row + token * x_token + channel, mask=inside, other=0.0).to(tl.float32)
    apart = x - tl.load(mean_ptr + row * mean_row + channel, mask=inside, other=0.0)
    tl.store(out_ptr + row * tokens + token, tl.sqrt(tl.sum(apart * apart, axis=0)))


def mean_over_tokens(x: Tensor) -> Tensor:
    """Returns the mean of the tokens of x [R, N, C]: [R, 1, C], float32."""
    tokens, sums = x.shape[1], dense_channels(x)
    while sums.shape[1] > CHUNK:
        sums = sum_chunks(sums, 1)
    return sum_chunks(sums, tokens)


def sum_chunks(x: Tensor, divisor: int) -> Tensor:
    """Returns sums over chunks of the tokens of x [R, N, C], divided by `divisor`: [R, chunks, C], float32."""
    rows, tokens, channels = x.shape
    chunks = triton.cdiv(tokens, CHUNK)
    out = torch.empty(rows, chunks, channels, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        sum_chunks_kernel[triton.cdiv(channels, CHANNELS_AT_A_TIME), chunks, rows](
            x, out, tokens, float(divisor), x.stride(0), x.stride(1),
            CHANNELS=channels, CHUNK=CHUNK, TOKENS=TOKENS, BLOCK=CHANNELS_AT_A_TIME, num_warps=4,
        )  # fmt: skip
    return out


def mean_over_tokens_reference(x: Tensor) -> Tensor:
    return x.mean(dim=1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))


def distance_from_mean(x: Tensor, mean: Tensor) -> Tensor:
    """Returns the distance of every token of x [R, N, C] from mean [R, 1, C]: [R, N], float32."""
    rows, tokens, channels = x.shape
    x, mean = dense_channels(x), per_row(mean.float(), rows, channels)
    out = torch.empty(rows, tokens, dtype=torch.float32, device=x.device)
    block = power_of_two(channels)
    with torch.cuda.device_of(x):
        distance_from_mean_kernel[tokens, rows](
            x, mean, out, tokens, x.stride(0), x.stride(1), mean.stride(0),
            CHANNELS=channels, BLOCK=block, num_warps=warps_for(block),
        )  # fmt: skip
    return out


def distance_from_mean_reference(x: Tensor, mean: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x - mean, dim=-1)
