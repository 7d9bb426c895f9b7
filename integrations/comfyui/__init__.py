"""ComfyUI nodes for nextscale. ComfyUI imports this folder and asks `comfy_entrypoint` for its nodes."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from .nodes import NODES


class NextScaleExtension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return list(NODES)


async def comfy_entrypoint() -> ComfyExtension:
    return NextScaleExtension()
