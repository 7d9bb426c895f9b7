"""Outputs of earlier stages."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from ..stage import Rows, Tokens, resize_area


class StageMemory:
    """Outputs of earlier stages, kept on their full grid under a name of the method's choice."""

    def __init__(self) -> None:
        self._maps: dict[Hashable, tuple[Tensor, tuple[int, int]]] = {}

    def store(self, key: Hashable, y: Tensor, tokens: Tokens) -> None:
        if tokens.index is not None:
            raise ValueError(f"memory {key!r} needs the whole grid of stage {tokens.stage.index}, not {tokens.num_tokens} of its tokens")
        self._maps[key] = (tokens.on_grid(y)[0], tokens.stage.size)

    def stored(self, key: Hashable) -> tuple[Tensor, tuple[int, int]]:
        """What is stored under `key`, [R, h * w, C], and the size of its grid."""
        return self._maps[key]

    def fill(self, key: Hashable, tokens: Tokens) -> Tensor:
        """What is stored under `key`, area-resized to the stage of `tokens` and gathered there: [R, N, C]."""
        y, (height, width) = self._maps[key]
        grid = y.transpose(1, 2).unflatten(2, (height, width))
        resized = resize_area(grid, tokens.stage.size)
        return tokens.gather(resized.flatten(2).transpose(1, 2))

    def copy(self) -> StageMemory:
        """Another memory with the same tensors."""
        memory = StageMemory()
        memory._maps = dict(self._maps)
        return memory

    def keep_rows(self, rows: Rows) -> None:
        """Keeps copies of these rows: views would keep the others alive."""
        self._maps = {key: (y[rows].clone(), size) for key, (y, size) in self._maps.items()}
