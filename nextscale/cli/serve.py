"""`nextscale serve`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from ..errors import MissingExtra, SettingError
from .options import DEFAULT_DEVICE, DEFAULT_MODEL, MACHINE, MODEL_HELP, FileOptions, Methods, Ray, option
from .parse import parse_methods, parse_pairs, parse_ray, resolved_method, size_text

BATCHING, NETWORK = "Batching", "Network and security"  # panels of the help
KEY_VARIABLE = "NEXTSCALE_API_KEY"
TIMEOUTS = ("request_timeout", "shutdown_timeout")  # names of --limit
SIZES = ("images", "pixels", "prompt_chars", "edit_bytes", "upload_pixels")

Texts = list[str] | None


@dataclass(frozen=True)
class ServedOptions(FileOptions):
    """The models, their files, and where they run."""

    models: Annotated[Texts, option("--model -m", "NAME", f"{MODEL_HELP} Can be repeated.", None, DEFAULT_MODEL)] = None
    devices: Annotated[Texts, option("--device", "DEVICE", "cpu, cuda, cuda:N or mps; can be repeated.", MACHINE, DEFAULT_DEVICE)] = None
    alias: Annotated[Texts, option("--alias", "NAME=MODEL", "Another name of a model, for clients that use it; can be repeated.")] = None
    lora_dir: Annotated[Path | None, option("--lora-dir", "FOLDER", "LoRA adapters that requests may name.", MACHINE)] = None


@dataclass(frozen=True)
class BatchingOptions:
    """Batching of requests."""

    max_batch: Annotated[int, option("--max-batch", "N", "Images per batch.", BATCHING, min=1)] = 8
    batch_delay_ms: Annotated[float, option("--batch-delay-ms", "MS", "Maximum batching delay.", BATCHING, min=0)] = 5.0
    max_queue: Annotated[int, option("--max-queue", "N", "Images that may wait; further requests get 429.", BATCHING, min=1)] = 64
    same_images: Annotated[
        bool,
        option("--same-images", None, "Fill up every batch: images do not depend on other requests; single ones take longer.", BATCHING),
    ] = False
    warmup: Annotated[
        Texts,
        option("--warmup", "WxH:B,B", "Sizes and batches to run before the server is ready, such as 1024x1024:1,4.", BATCHING),
    ] = None


@dataclass(frozen=True)
class NetworkOptions:
    """Address, access and limits of the server."""

    host: Annotated[str, option("--host", "HOST", "Address; 0.0.0.0 opens it to other machines.", NETWORK)] = "127.0.0.1"
    port: Annotated[int, option("--port", "PORT", "Port; 0 picks a free one.", NETWORK, min=0, max=65535)] = 8000
    root_path: Annotated[str, option("--root-path", "PATH", "Path prefix added by a reverse proxy, such as /images.", NETWORK)] = ""
    api_key_file: Annotated[
        Path | None, option("--api-key-file", "FILE", f"API keys, one per line; or set {KEY_VARIABLE} to a key.", NETWORK)
    ] = None
    cors_origins: Annotated[Texts, option("--cors-origin", "ORIGIN", "Allow pages of this origin; can be repeated.", NETWORK)] = None
    allowed_hosts: Annotated[Texts, option("--allow-host", "NAME", "Another host name of this server; can be repeated.", NETWORK)] = None
    log_format: Annotated[Literal["text", "json"], option("--log-format", "FORMAT", "Log lines as text or json.", NETWORK)] = "text"
    log_prompts: Annotated[bool, option("--log-prompts", None, "Write prompts into the log.", NETWORK)] = False
    limit: Annotated[
        Texts,
        option(
            "--limit",
            "NAME=VALUE",
            "request_timeout (seconds, 300), shutdown_timeout (30), images per request (10), pixels per request (10485760) or prompt_chars"
            " (2000); can be repeated.",
            NETWORK,
        ),
    ] = None


def serve(
    *,
    model: ServedOptions,
    method: Methods = None,
    batching: BatchingOptions,
    network: NetworkOptions,
    on_ray: Ray = None,
) -> None:
    """Serve images over HTTP with OpenAI's API and a studio at /."""
    from ..device import choose_device
    from ..loading.presets import model_spec

    ray, named, chosen = parse_ray(on_ray), " + ".join(method or ["dense"]), parse_methods(method)
    limits: dict[str, Any] = parse_pairs("--limit", network.limit or (), (*TIMEOUTS, *SIZES))
    devices: tuple[str | None, ...] = tuple(model.devices or (None,))
    names = tuple(dict.fromkeys(model.models or [DEFAULT_MODEL]))
    specs = list(map(model_spec, names))
    if len(specs) > 1 and (model.weights or model.tokenizer or model.text_encoder):
        raise SettingError("--weights, --tokenizer and --text-encoder need a single model. Serve one, or set NEXTSCALE_HOME.")
    for spec, device in product(specs, map(choose_device, devices)):
        resolved_method(chosen, spec, spec.settings.schedules.choose(None, None), 1, device, model.weights)
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        try:
            import_module(package)
        except ImportError as error:
            raise MissingExtra(f"`nextscale serve` needs the package {package}: pip install 'nextscale[serve]'") from error
    from ..serve.log import configure_log
    from ..serve.run import serve as run
    from ..serve.service import Content, Warmup
    from ..serve.settings import Limits, ServeSettings, parse_aliases, read_api_keys

    warmups = tuple(map(Warmup.parse, batching.warmup or ()))
    offers = {size for spec in specs for size in spec.settings.schedules.offers()}
    if bad := [size_text(warmup.size) for warmup in warmups if warmup.size not in offers]:
        raise SettingError(f"--warmup must be a size of the models: no model has {bad[0]}.")
    given = vars(batching) | vars(network)
    same = {name: value for name, value in given.items() if name in ServeSettings.model_fields}
    settings = ServeSettings(
        **same | {name: tuple(given[name] or ()) for name in ("cors_origins", "allowed_hosts")},
        batch_delay=batching.batch_delay_ms / 1000,
        api_keys=tuple(os.environ.get(KEY_VARIABLE, "").split()) if network.api_key_file is None else read_api_keys(network.api_key_file),
        limits=Limits(**{name: int(value) for name, value in limits.items() if name in SIZES}),
        **{name: value for name, value in limits.items() if name in TIMEOUTS},
    )
    aliases = parse_aliases(model.alias or [], names)
    configure_log(network.log_format == "json")
    if model.lora_dir is not None and not model.lora_dir.is_dir():
        raise SettingError(f"--lora-dir must be a folder of adapters; got {model.lora_dir}.")
    content = Content(names, devices, model.open, aliases, named, warmups, model.lora_dir)
    if ray is None:
        run(content, settings)
        return
    from ..serve.ray import RayServer, serve_on_ray

    serve_on_ray(RayServer(content, settings, ray))
