"""Outputs of earlier stages."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from ..errors import SettingError
from ..stage import Rows, Tokens, resize_area
from ..validation import require


class StageMemory:
    """Stores full-grid outputs of earlier stages by key."""

    def __init__(self) -> None:
        self._maps: dict[Hashable, tuple[Tensor, tuple[int, int]]] = {}

    def store(self, key: Hashable, y: Tensor, tokens: Tokens) -> None:
        stage, count = tokens.stage, tokens.num_tokens
        require(tokens.index is None, f"stage {stage.index}", f"run on all of its {stage.cells} cells, which a later stage reads", count)
        self._maps[key] = (tokens.on_grid(y)[0], tokens.stage.size)

    def stored(self, key: Hashable) -> tuple[Tensor, tuple[int, int]]:
        """Returns the output stored under `key`, [R, h * w, C], and its grid size."""
        if key not in self._maps:
            raise SettingError(f"outputs {key!r} of an earlier stage are missing, because another method skips it. Skip other stages.")
        return self._maps[key]

    def fill(self, key: Hashable, tokens: Tokens) -> Tensor:
        """Returns the output stored under `key`, area-resized to the stage of `tokens` and gathered: [R, N, C]."""
        y, (height, width) = self.stored(key)
        grid = y.transpose(1, 2).unflatten(2, (height, width))
        resized = resize_area(grid, tokens.stage.size)
        return tokens.gather(resized.flatten(2).transpose(1, 2))

    def copy(self) -> StageMemory:
        """Returns a copy that shares the tensors."""
        memory = StageMemory()
        memory._maps = dict(self._maps)
        return memory

    def keep_rows(self, rows: Rows) -> None:
        """Keeps copies of these rows, because views would keep all rows in memory."""
        self._maps = {key: (y[rows].clone(), size) for key, (y, size) in self._maps.items()}
