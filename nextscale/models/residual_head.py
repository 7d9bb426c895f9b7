"""HART's residual diffusion: a small network that generates, token by token, the residual between latent and codes of the last stage."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import SettingError
from ..guidance import mix
from ..sampling import Rng, cell_noise
from ..stage import Tokens
from .blocks import plain_norm
from .macs import macs_per_token

TRAINED_STEPS = 1000
MAX_BETA = 0.999
SINUSOIDS = 256  # channels of a timestep embedding
MAX_PERIOD = 10000.0
RESIDUAL_SCALE = 0.6  # from the network's output to the latent


@dataclass(frozen=True)
class DiffusionStep:
    """Constants of one step of the respaced diffusion process."""

    timestep: int  # in the trained process
    clean_from_state: float
    clean_from_noise: float
    mean_from_clean: float
    mean_from_state: float
    min_log_variance: float
    max_log_variance: float
    first: bool  # first of the process, hence the last of sampling: no noise is added


@cache
def diffusion_steps(count: int) -> tuple[DiffusionStep, ...]:
    """Returns `count` evenly spaced steps of the trained process in sampling order, from noise to data."""

    def signal(fraction: float) -> float:
        return math.cos((fraction + 0.008) / 1.008 * math.pi / 2) ** 2

    trained = [min(1 - signal((i + 1) / TRAINED_STEPS) / signal(i / TRAINED_STEPS), MAX_BETA) for i in range(TRAINED_STEPS)]
    spacing = (TRAINED_STEPS - 1) / (count - 1)
    timesteps = [round(i * spacing) for i in range(count)]  # half to even
    kept = np.cumprod(1 - np.array(trained, dtype=np.float64))[timesteps]
    betas = 1 - kept / np.append(1.0, kept[:-1])
    remaining = np.cumprod(1 - betas)
    before = np.append(1.0, remaining[:-1])
    variance = betas * (1 - before) / (1 - remaining)
    log_variance = np.log(np.append(variance[1], variance[1:]))  # the first variance is zero, so the second is used
    steps = [
        DiffusionStep(
            timestep=timesteps[i],
            clean_from_state=math.sqrt(1 / remaining[i]),
            clean_from_noise=math.sqrt(1 / remaining[i] - 1),
            mean_from_clean=float(betas[i] * math.sqrt(before[i]) / (1 - remaining[i])),
            mean_from_state=float((1 - before[i]) * math.sqrt(1 - betas[i]) / (1 - remaining[i])),
            min_log_variance=float(log_variance[i]),
            max_log_variance=math.log(betas[i]),
            first=i == 0,
        )
        for i in range(count)
    ]
    return tuple(reversed(steps))


def sinusoids(numbers: Tensor) -> Tensor:
    """Returns sinusoidal embeddings [N, 256], float32, of numbers [N]: cosines, then sines."""
    half = SINUSOIDS // 2
    inv_freq = torch.exp(-math.log(MAX_PERIOD) * torch.arange(half, device=numbers.device).float() / half)
    angles = numbers.float()[:, None] * inv_freq
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class SinusoidEmbedding(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(SINUSOIDS, dim)
        self.fc2 = nn.Linear(dim, dim)

    def forward(self, numbers: Tensor) -> Tensor:
        """Embeds numbers [N] as [N, dim]."""
        return self.fc2(F.silu(self.fc1(sinusoids(numbers).to(self.fc1.weight.dtype))))


class ResidualBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = plain_norm(dim, learned=True)
        self.modulation = nn.Linear(dim, 3 * dim)
        self.fc1 = nn.Linear(dim, dim)
        self.fc2 = nn.Linear(dim, dim)

    def forward(self, h: Tensor, activated: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(activated).chunk(3, dim=-1)
        y = torch.addcmul(shift, self.norm(h), 1 + scale)
        return torch.addcmul(h, gate, self.fc2(F.silu(self.fc1(y))))


class ResidualHead(nn.Module):
    def __init__(self, channels: int, condition_dim: int, dim: int, depth: int, steps: int) -> None:
        super().__init__()
        if not 2 <= steps <= TRAINED_STEPS:
            raise SettingError(f"residual_steps must be from 2 to {TRAINED_STEPS}; got {steps}.")
        self.channels, self.steps = channels, steps
        self.time_embed = SinusoidEmbedding(dim)
        self.condition_embed = nn.Linear(condition_dim, dim)
        self.input_proj = nn.Linear(channels, dim)
        self.blocks = nn.ModuleList(ResidualBlock(dim) for _ in range(depth))
        self.final_norm = plain_norm(dim)
        self.final_modulation = nn.Linear(dim, 2 * dim)
        self.final = nn.Linear(dim, 2 * channels)

    def forward(self, state: Tensor, condition: Tensor, timestep: Tensor) -> Tensor:
        """Predicts noise and variance [R, N, 2Z], float32, from `state` [R, N, Z], embedded `condition` [R, N, dim] and `timestep` [1]."""
        activated = F.silu(condition + self.time_embed(timestep))
        h = self.input_proj(state.to(condition.dtype))
        for block in self.blocks:
            h = block(h, activated)
        shift, scale = self.final_modulation(activated).chunk(2, dim=-1)
        return self.final(torch.addcmul(shift, self.final_norm(h), 1 + scale)).float()

    def sample(self, condition: Tensor, tokens: Tokens, scale: float, rng: Rng, batch: int) -> Tensor:
        """Samples residuals [B, N, Z]; `condition` of `tokens` is [R, N, C] or packed, and `scale` is the CFG scale."""
        branch = tokens.branch_size(batch)
        if scale == 1:
            condition = condition[:branch]
        embedded = self.condition_embed(condition.to(self.condition_embed.weight.dtype))
        noise = self._noise(rng, tokens, batch, embedded.device)
        state = next(noise)
        for step in diffusion_steps(self.steps):
            timestep = torch.full((1,), step.timestep, device=state.device)
            both = state.repeat(embedded.shape[0] // branch, 1, 1)  # CFG branches share the state
            predicted, variance = self(both, embedded, timestep).chunk(2, dim=-1)
            predicted, variance = mix(predicted, scale, branch), variance[:branch]
            clean = (step.clean_from_state * state - step.clean_from_noise * predicted).clamp(-1, 1)
            clean = clean + 0 * predicted  # keeps NaN and infinity, which clamping would hide
            state_mean = step.mean_from_clean * clean + step.mean_from_state * state
            if step.first:
                return tokens.unpack(RESIDUAL_SCALE * state_mean)
            fraction = (variance + 1) / 2
            log_variance = fraction * step.max_log_variance + (1 - fraction) * step.min_log_variance
            state = state_mean + (0.5 * log_variance).exp() * next(noise)
        raise AssertionError("the steps end with the first")

    def macs(self, rows: int, num_tokens: int) -> int:
        """Returns the MACs of `sample`. Timesteps are embedded once for all tokens."""
        per_token = macs_per_token(self.input_proj, self.blocks, self.final_modulation, self.final)
        embedding = macs_per_token(self.condition_embed)
        return rows * num_tokens * (embedding + self.steps * per_token) + self.steps * macs_per_token(self.time_embed)

    def _noise(self, rng: Rng, tokens: Tokens, batch: int, device: torch.device) -> Iterator[Tensor]:
        """Yields standard normal noise [B, N, Z], or packed: the initial state, then one tensor per step but the last."""
        while True:
            yield tokens.pack(cell_noise(rng.normal, tokens, (batch, tokens.num_tokens, self.channels), device))
