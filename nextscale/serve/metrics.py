"""Prometheus metrics."""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..batching import Batcher, BatchRecord
from ..errors import OutOfMemory
from ..pipeline import Pipeline
from ..report import Report

GENERATIONS, EDITS = "/v1/images/generations", "/v1/images/edits"
IMAGE_PATHS = (GENERATIONS, EDITS)  # requests that are counted
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
STAGE_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
IMAGES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)


class ServeMetrics:
    """Counters and histograms of requests and batches, and gauges that are computed when read."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self.requests = counter("nextscale_requests", "Answered requests for images.", ["status"])
        self.request_seconds = histogram("nextscale_request_seconds", "Time from request to answer.", buckets=SECONDS)
        self.queue_seconds = histogram("nextscale_queue_seconds", "Waiting time of an image.", buckets=SECONDS)
        self.batch_images = histogram("nextscale_batch_images", "Images per batch.", ["model"], buckets=IMAGES)
        self.stage_seconds = histogram("nextscale_stage_seconds", "Time of a stage.", ["model", "stage"], buckets=STAGE_SECONDS)
        self.images = counter("nextscale_images", "Generated images.", ["model", "engine"])
        self.tokens_run = counter("nextscale_tokens_run", "Tokens that ran in all cfg branches.", ["model"])
        self.tokens_saved = counter("nextscale_tokens_saved", "Tokens that methods saved.", ["model"])
        self.batches_failed = counter("nextscale_batches_failed", "Failed batches.", ["model", "reason"])
        self.batches_left = counter("nextscale_batches_abandoned", "Abandoned batches.", ["model"])
        self.open_requests = gauge("nextscale_requests_open", "Open requests for images.")
        self.waiting = gauge("nextscale_images_waiting", "Queued images.")
        self.running = gauge("nextscale_images_running", "Images that are generated.")
        self.rate = gauge("nextscale_images_per_second", "Rate of recent batches while busy.")
        self.captures = gauge("nextscale_captures", "Captured CUDA graphs.", ["model", "device"])
        self.captures_bytes = gauge("nextscale_captures_bytes", "Memory of captured graphs.", ["model", "device"])
        self.lora_switches = gauge("nextscale_lora_switches", "Changes of adapters so far.", ["model", "device"])
        self.lora_seconds = gauge("nextscale_lora_switch_seconds", "Time of all changes of adapters.", ["model", "device"])
        self.gpu_memory = gauge("nextscale_gpu_memory_bytes", "Memory of the GPUs.", ["device", "kind"])

    def watch(self, batcher: Batcher, pipelines: Iterable[tuple[str, Pipeline]]) -> None:
        """Connects the gauges."""
        self.waiting.set_function(lambda: batcher.waiting)
        self.running.set_function(lambda: batcher.running)
        self.rate.set_function(lambda: batcher.images_per_second or 0.0)
        for name, pipeline in pipelines:
            device = pipeline.model.device
            self.captures.labels(name, str(device)).set_function(lambda pipe=pipeline: len(pipe.captures))  # type: ignore[misc]
            self.captures_bytes.labels(name, str(device)).set_function(lambda pipe=pipeline: pipe.captures.bytes)  # type: ignore[misc]
            self.lora_switches.labels(name, str(device)).set_function(lambda pipe=pipeline: pipe.loras.switches)  # type: ignore[misc]
            self.lora_seconds.labels(name, str(device)).set_function(lambda pipe=pipeline: pipe.loras.switch_seconds)  # type: ignore[misc]
            if device.type == "cuda":
                for kind, read in GPU_MEMORY.items():
                    self.gpu_memory.labels(str(device), kind).set_function(partial(read, device))

    def request_began(self, path: str) -> None:
        if path in IMAGE_PATHS:
            self.open_requests.inc()

    def request_ended(self, path: str, status: int, seconds: float) -> None:
        if path in IMAGE_PATHS:
            self.open_requests.dec()
            self.requests.labels(str(status)).inc()
            self.request_seconds.observe(seconds)

    def batch_done(self, record: BatchRecord) -> None:
        model, report = record.model, record.report
        if record.error is not None:
            reason = "out_of_memory" if isinstance(record.error, OutOfMemory) else type(record.error).__name__
            self.batches_failed.labels(model, reason).inc()
        elif report is None:
            self.batches_left.labels(model).inc()
        else:
            self.batch_images.labels(model).observe(record.images)
            self.images.labels(model, report.engine).inc(record.images)
            for seconds in record.queue_seconds:
                self.queue_seconds.observe(seconds)
            for stage in report.stages:
                if not stage.skipped:
                    self.stage_seconds.labels(model, str(stage.index)).observe(stage.seconds)
            run, dense = tokens(report)
            self.tokens_run.labels(model).inc(run * record.images)
            self.tokens_saved.labels(model).inc(max(dense - run, 0) * record.images)

    def text(self) -> bytes:
        return generate_latest(self.registry)


GPU_MEMORY: dict[str, Callable[[torch.device], float]] = {
    "allocated": torch.cuda.memory_allocated,
    "reserved": torch.cuda.memory_reserved,
    "free": lambda device: torch.cuda.mem_get_info(device)[0],
    "total": lambda device: torch.cuda.mem_get_info(device)[1],
}


def tokens(report: Report) -> tuple[float, float]:
    """Returns the tokens per image that ran and the tokens of dense generation, in all cfg branches."""
    branches = max((stage.cfg_branches for stage in report.stages), default=1)
    run = sum(stage.computed * stage.cfg_branches for stage in report.stages)
    return run, sum(stage.height * stage.width * branches for stage in report.stages)
