"""Attention to lists of keys in plain torch: the reference of `attend_lists`, and what runs without Triton."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nextscale.kernels.shapes import require_shape


def require_lists(q: Tensor, keys: Tensor, values: Tensor, lists: Tensor, counts: Tensor, group: int) -> None:
    rows, queries, heads, channels = q.shape
    for name, store in (("keys", keys), ("values", values)):
        require_shape(name, store, rows, keys.shape[1], heads, channels)
    groups = -(-queries // group)
    if lists.ndim != 4 or lists.shape[0] not in (1, rows) or lists.shape[1] not in (1, heads) or lists.shape[2] != groups:
        raise ValueError(f"expected lists [{rows} or 1, {heads} or 1, {groups}, keys]; got {list(lists.shape)}")
    require_shape("counts", counts, *lists.shape[:3])


def attend_lists_reference(q: Tensor, keys: Tensor, values: Tensor, lists: Tensor, counts: Tensor, group: int, scale: float) -> Tensor:
    """Every group's keys and values side by side, as one batch of ordinary attention."""
    require_lists(q, keys, values, lists, counts, group)
    rows, queries, heads, channels = q.shape
    groups, listed = lists.shape[2:]
    padded = F.pad(q, (0, 0, 0, 0, 0, groups * group - queries)).unflatten(1, (groups, group)).permute(0, 3, 1, 2, 4)  # [R, H, G, g, D]
    index = lists.long().expand(rows, heads, -1, -1).flatten(2)[..., None].expand(-1, -1, -1, channels)  # [R, H, G * M, D]
    chosen_keys, chosen_values = (store.transpose(1, 2).gather(2, index).unflatten(2, (groups, listed)) for store in (keys, values))
    there = torch.arange(listed, device=q.device) < counts[..., None]  # [R or 1, H or 1, G, M]
    mask = there[..., None, :].expand(rows, heads, -1, group, -1)
    out = F.scaled_dot_product_attention(padded, chosen_keys, chosen_values, attn_mask=mask, scale=scale)
    return out.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :queries].flatten(2)
