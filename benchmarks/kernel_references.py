"""What the Triton kernels compute, in plain torch: the truth of their tests, and what benchmarks compare them with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nextscale.kernels.reference import to_e4m3
from nextscale.kernels.shapes import MIN_SQUARE

NORM_EPS = 1e-6


def attend_lengths_reference(
    q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor | int, scale: float, *, unit: bool = False, cu_seqlens: Tensor | None = None
) -> Tensor:
    if unit:
        wide = q.to(torch.promote_types(q.dtype, torch.float32))
        q = F.rms_norm(wide, wide.shape[-1:], eps=MIN_SQUARE).to(q.dtype)
    if cu_seqlens is not None:
        return attend_packed_reference(q, keys, values, lengths, scale, cu_seqlens.tolist())
    if isinstance(lengths, int):
        lengths = torch.full((q.shape[0],), lengths, device=q.device)
    there = (torch.arange(keys.shape[1], device=lengths.device) < lengths[:, None])[:, None, None]
    # Zero times what is not finite is not zero.
    keys, values = (x.masked_fill(~there[:, 0, 0, :, None, None], 0) for x in (keys, values))
    out = F.scaled_dot_product_attention(q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), attn_mask=there, scale=scale)
    return out.transpose(1, 2).flatten(2)


def attend_packed_reference(q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor | int, scale: float, cu_seqlens: list[int]) -> Tensor:
    out = q.new_zeros(*q.shape[:2], q.shape[2] * q.shape[3])
    for row in range(keys.shape[0]):
        branch, image = divmod(row, len(cu_seqlens) - 1)
        asked, one = slice(cu_seqlens[image], cu_seqlens[image + 1]), slice(row, row + 1)
        length = lengths if isinstance(lengths, int) else lengths[one]
        out[branch, asked] = attend_lengths_reference(q[branch, asked][None], keys[one], values[one], length, scale)[0]
    return out


def add_bias_residual_reference(x: Tensor, bias: Tensor, residual: Tensor | None = None, residual_bias: Tensor | None = None) -> Tensor:
    """The same sum as torch computes it, in new memory."""
    y = x + bias[:, None, None]
    if residual is not None:
        y = (residual if residual_bias is None else residual + residual_bias[:, None, None]) + y
    return y


def sample_bits_reference(logits: Tensor, noise: Tensor, top_p: float = 0.0) -> Tensor:
    chances = logits.softmax(dim=-1)
    if top_p != 0:
        unlikely = chances.sort(dim=-1).values[..., :1] <= 1 - top_p
        chances = chances.masked_fill(unlikely & (chances < chances.amax(dim=-1, keepdim=True)), 0.0)
    return (chances / noise).argmax(dim=-1)


def mean_over_tokens_reference(x: Tensor) -> Tensor:
    return x.mean(dim=1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))


def distance_from_mean_reference(x: Tensor, mean: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x - mean, dim=-1)


def group_norm_silu_reference(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float, shift: Tensor | None = None) -> Tensor:
    x = x if shift is None else x + shift[:, None, None]
    return F.silu(torch.group_norm(x, groups, weight, bias, eps))


def int8_linear_reference(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, restore_int8_reference(weight, scale, x.dtype), bias)


def restore_int8_reference(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (codes * scale[:, None]).to(dtype)


def of_tokens(modulation: Tensor | None, rows: int, image: Tensor | None) -> Tensor | None:
    """[R * B, 1, C] for every token of packed rows, [R, N, C]; all else as it is."""
    if modulation is None or image is None or modulation.ndim == 1 or modulation.shape[0] == 1:
        return modulation
    return modulation.unflatten(0, (rows, -1))[:, image.long(), 0]


def norm_modulate_reference(
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    index: Tensor | None = None,
    *,
    centred: bool = True,
    image: Tensor | None = None,
    dtype: torch.dtype | None = None,
    e4m3_scale: float | None = None,
) -> Tensor:
    if index is not None:
        x = x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]).long())
    x = x if dtype is None else x.to(torch.promote_types(x.dtype, dtype))
    scale, shift = (of_tokens(modulation, x.shape[0], image) for modulation in (scale, shift))
    y = F.layer_norm(x, x.shape[-1:], eps=NORM_EPS) if centred else F.rms_norm(x, x.shape[-1:], eps=NORM_EPS)
    if scale is not None:
        y = y * scale if shift is None else torch.addcmul(shift, y, scale)
    elif shift is not None:
        y = y + shift
    return y if e4m3_scale is None else to_e4m3(y, e4m3_scale)


def residual_norm_modulate_reference(
    x: Tensor,
    gate: Tensor | None,
    update: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    *,
    centred: bool = True,
    image: Tensor | None = None,
    e4m3_scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    gate = of_tokens(gate, x.shape[0], image)
    total = x + update if gate is None else torch.addcmul(x, gate, update)
    return total, norm_modulate_reference(total, scale, shift, centred=centred, image=image, e4m3_scale=e4m3_scale)


def group_norm_silu_conv_reference(
    x: Tensor, groups: int, norm_weight: Tensor, norm_bias: Tensor, eps: float, weight: Tensor, bias: Tensor
) -> Tensor:
    """The same as torch computes it, in the dtype of x until the end."""
    y = F.conv2d(group_norm_silu_reference(x, groups, norm_weight, norm_bias, eps), weight, bias, padding=1)
    return y if x.dtype == torch.float64 else y.float()


def round_to_e4m3_reference(x: Tensor, scale: float) -> Tensor:
    return to_e4m3(x, scale)


def gelu_to_e4m3_reference(x: Tensor, scale: float) -> Tensor:
    return to_e4m3(F.gelu(x, approximate="tanh"), scale)


def silu_to_e4m3_reference(x: Tensor, scale: float) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return to_e4m3(F.silu(gate) * up, scale)


def restore_tokens_reference(
    memory: Tensor,
    size: tuple[int, int],
    grid: tuple[int, int],
    fresh: Tensor,
    index: Tensor,
    *,
    base: Tensor | None = None,
    gate: Tensor | None = None,
    cells: Tensor | None = None,
) -> Tensor:
    channels = memory.shape[-1]

    def at(x: Tensor, places: Tensor) -> Tensor:
        return x.gather(1, places[..., None].expand(-1, -1, channels).long())

    resized = F.interpolate(memory.transpose(1, 2).unflatten(2, size), size=grid, mode="area").flatten(2).transpose(1, 2)
    if cells is not None:
        resized = at(resized, cells)
    if gate is not None:
        resized, fresh = gate * resized, gate * fresh
    if base is not None:
        resized, fresh = base + resized, at(base, index) + fresh
    return resized.scatter(1, index[..., None].expand(-1, -1, channels).long(), fresh)


def rotate_into_cache_reference(
    qkv: Tensor,
    temperature: Tensor | None,
    rotation: Tensor | None,
    index: Tensor | None,
    keys: Tensor,
    values: Tensor,
    start: int | Tensor,
    *,
    packed: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    rows, tokens, _, heads, head_dim = qkv.shape
    qk = qkv[:, :, :2].to(torch.promote_types(qkv.dtype, torch.float32))
    if temperature is not None:
        qk = F.rms_norm(qk, (head_dim,), eps=MIN_SQUARE)
    if rotation is not None:
        at = rotation[None] if index is None else rotation[index.long()]  # [1 or R, N, D / 2]
        pairs = torch.view_as_complex(qk.unflatten(-1, (-1, 2)).contiguous())
        qk = torch.view_as_real(pairs * at[:, :, None, None]).flatten(-2)
    q, k = qk.unbind(2)
    if temperature is not None:
        q = q * temperature.view(heads, 1)
    for store, new in ((keys, k), (values, qkv[:, :, 2])):
        if packed is not None:
            image, place = (part[: int(packed[2][-1])] for part in packed[:2])
            row = torch.arange(rows, device=store.device)[:, None] * (store.shape[0] // rows) + image
            store[row, place + (start[row] if isinstance(start, Tensor) else start)] = new[:, : len(image)].to(store.dtype)
        elif isinstance(start, Tensor):
            row, slot = torch.arange(rows, device=start.device)[:, None], torch.arange(tokens, device=start.device)
            store[row, start[:, None] + slot] = new.to(store.dtype)
        else:
            store.narrow(1, start, tokens).copy_(new)
    return q.to(qkv.dtype)


def upsample_nearest_reference(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2, mode="nearest")
