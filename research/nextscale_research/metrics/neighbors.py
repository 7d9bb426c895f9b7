"""Improved precision and recall (Kynkäänniemi et al., 2019): the images that are among the images of another set.

torch-fidelity has it too, and a test compares them; it cannot be imported without torchvision, and this runs with torch alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nextscale.errors import SettingError

NEIGHBORS = 3
ROWS_AT_A_TIME = 4096


def precision_recall(generated: Tensor, real: Tensor, neighbors: int = NEIGHBORS) -> tuple[Tensor, Tensor]:
    """Marks the generated images within the reach of a real one, [N], and the reverse for real ones, [M]; means of
    these are precision and recall. A point reaches as far as its k-th nearest neighbor in its own set. Features [N, D] and [M, D]."""
    if min(len(generated), len(real)) <= neighbors:
        raise SettingError(f"precision and recall need more than {neighbors} images in each set; got {len(generated)} and {len(real)}")
    return _within(generated, real, _reach(real, neighbors)), _within(real, generated, _reach(generated, neighbors))


def _reach(points: Tensor, neighbors: int) -> Tensor:
    """Distance of every point to its k-th nearest neighbor; the nearest of all is the point itself."""
    return torch.cat([torch.cdist(part, points).kthvalue(neighbors + 1, dim=1).values for part in points.split(ROWS_AT_A_TIME)])


def _within(points: Tensor, centers: Tensor, reach: Tensor) -> Tensor:
    return torch.cat([(torch.cdist(part, centers) <= reach).any(dim=1) for part in points.split(ROWS_AT_A_TIME)])
