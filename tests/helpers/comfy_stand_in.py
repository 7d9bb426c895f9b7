"""A stand-in for ComfyUI's node interface (V3 schema), as far as our nodes use it. ComfyUI cannot be installed from an index.

It checks the same as ComfyUI: ids are unique among inputs and outputs, values fit their widgets, links join equal types, and `execute` gets
the inputs by name and returns as many values as there are outputs.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from PIL import Image

CONTROL = ("fixed", "increment", "decrement", "randomize")  # the widget that follows a number with control_after_generate


@dataclass(kw_only=True)
class Input:
    type: str
    id: str
    optional: bool = False
    is_widget: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def check(self, value: Any) -> None:
        match self.type:
            case "COMBO":
                assert value in self.options["options"], f"{self.id}: {value!r} is none of {self.options['options']}"
            case "INT" | "FLOAT":
                assert isinstance(value, int | float) and self.options["min"] <= value <= self.options["max"], f"{self.id}: {value!r}"
            case "BOOLEAN":
                assert isinstance(value, bool)
            case "STRING":
                assert isinstance(value, str)


@dataclass(kw_only=True)
class Output:
    type: str
    id: str
    display_name: str


def comfy_type(name: str, is_widget: bool = False) -> Any:
    def make_input(id: str, optional: bool = False, **options: Any) -> Input:
        return Input(type=name, id=id, optional=optional, is_widget=is_widget, options=options)

    def make_output(id: str, display_name: str) -> Output:
        return Output(type=name, id=id, display_name=display_name)

    return SimpleNamespace(Input=make_input, Output=make_output)


@dataclass
class Schema:
    node_id: str
    display_name: str
    category: str
    description: str
    inputs: list[Input]
    outputs: list[Output]

    def __post_init__(self) -> None:
        ids = [one.id for one in (*self.inputs, *self.outputs)]
        assert len(set(ids)) == len(ids), f"{self.node_id}: ids have to be unique, {ids}"


class NodeOutput:
    def __init__(self, *values: Any) -> None:
        self.values = values


class ComfyNode:
    @classmethod
    def define_schema(cls) -> Schema:
        raise NotImplementedError


class InterruptProcessing(BaseException):
    """Not an Exception, as in ComfyUI, so that nodes do not catch it."""


@dataclass
class Comfy:
    """State and callbacks of the program that runs the nodes."""

    progress: list[tuple[int, int, Image.Image | None]] = field(default_factory=list)
    interrupt_after: int | None = None  # calls of set_progress

    def set_progress(self, value: int, max_value: int, preview_image: Image.Image | None = None) -> None:
        self.progress.append((value, max_value, preview_image))

    def throw_if_interrupted(self) -> None:
        if self.interrupt_after is not None and len(self.progress) >= self.interrupt_after:
            raise InterruptProcessing


def modules_of(comfy: Comfy) -> dict[str, ModuleType]:
    widgets = {name: comfy_type(name.upper(), is_widget=True) for name in ("Boolean", "Int", "Float", "String", "Combo")}
    io = SimpleNamespace(
        ComfyNode=ComfyNode,
        Schema=Schema,
        NodeOutput=NodeOutput,
        Custom=comfy_type,
        Image=comfy_type("IMAGE"),
        Mask=comfy_type("MASK"),
        **widgets,
    )
    latest, api, package, management = (ModuleType(name) for name in ("latest", "comfy_api", "comfy", "model_management"))
    latest.__dict__.update(io=io, ComfyExtension=type("ComfyExtension", (), {}), ComfyAPISync=lambda: SimpleNamespace(execution=comfy))
    management.__dict__.update(throw_exception_if_processing_interrupted=comfy.throw_if_interrupted)
    package.__dict__.update(model_management=management)
    return {"comfy_api": api, "comfy_api.latest": latest, "comfy": package, "comfy.model_management": management}


@contextmanager
def nodes_of(folder: Path, comfy: Comfy) -> Iterator[dict[str, type]]:
    """Imports the nodes of a folder in custom_nodes like ComfyUI."""
    name = "custom_nodes_under_test"
    before = dict(sys.modules)
    sys.modules.update(modules_of(comfy))
    try:
        spec = importlib.util.spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=[str(folder)])
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        extension = asyncio.run(module.comfy_entrypoint())
        yield {node.define_schema().node_id: node for node in asyncio.run(extension.get_node_list())}
    finally:
        for added in sys.modules.keys() - before.keys():
            if added.startswith((name, "comfy")):
                del sys.modules[added]


def run_workflow(workflow: dict[str, Any], nodes: dict[str, Any]) -> dict[int, tuple[Any, ...]]:
    """Runs a workflow; returns outputs by node number. Nodes of other packages return given values."""
    links = {link[0]: link for link in workflow["links"]}
    made: dict[int, tuple[Any, ...]] = {}
    for entry in sorted(workflow["nodes"], key=lambda one: one["order"]):
        linked = {}
        for socket in entry["inputs"]:
            if socket["link"] is not None:
                _, source, slot, target, _, kind = links[socket["link"]]
                assert (target, kind) == (entry["id"], socket["type"])
                linked[socket["name"]] = made[source][slot]
        if entry["type"] not in nodes:
            made[entry["id"]] = tuple(linked.values())
            continue
        made[entry["id"]] = run_node(nodes[entry["type"]], linked, entry["widgets_values"])
        assert [output["type"] for output in entry["outputs"]] == [output.type for output in nodes[entry["type"]].define_schema().outputs]
    return made


def run_node(node: Any, linked: dict[str, Any], widgets: list[Any]) -> tuple[Any, ...]:
    schema, values, rest = node.define_schema(), dict(linked), list(widgets)
    for one in schema.inputs:
        if one.is_widget:
            values[one.id] = rest.pop(0)
            one.check(values[one.id])
            if one.options.get("control_after_generate"):
                assert rest.pop(0) in CONTROL
        else:
            assert one.optional or one.id in values, f"{schema.node_id}: nothing is connected to {one.id}"
    assert not rest, f"{schema.node_id}: more values than widgets, {rest}"
    outputs = node.execute(**values).values
    assert len(outputs) == len(schema.outputs)
    return outputs
