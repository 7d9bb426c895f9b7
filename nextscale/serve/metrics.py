"""Prometheus metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..batching import Batcher, BatchRecord
from ..errors import OutOfMemory
from ..pipeline import Pipeline
from ..report import Report

GENERATIONS = "/v1/images/generations"  # the requests that are counted
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
STAGE_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
IMAGES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)


class ServeMetrics:
    """Counters, and gauges that are read when metrics are."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("nextscale_requests", "Answered requests for images.", ["status"], registry=registry)
        self.request_seconds = Histogram("nextscale_request_seconds", "Time from request to answer.", buckets=SECONDS, registry=registry)
        self.queue_seconds = Histogram("nextscale_queue_seconds", "Waiting time of an image.", buckets=SECONDS, registry=registry)
        self.batch_images = Histogram("nextscale_batch_images", "Images per batch.", ["model"], buckets=IMAGES, registry=registry)
        self.stage_seconds = Histogram(
            "nextscale_stage_seconds", "Time of a stage of a batch.", ["model", "stage"], buckets=STAGE_SECONDS, registry=registry
        )
        self.images = Counter("nextscale_images", "Generated images.", ["model", "engine"], registry=registry)
        self.tokens_run = Counter("nextscale_tokens_run", "Tokens that ran in all cfg branches.", ["model"], registry=registry)
        self.tokens_saved = Counter("nextscale_tokens_saved", "Tokens that methods saved.", ["model"], registry=registry)
        self.batches_failed = Counter("nextscale_batches_failed", "Failed batches.", ["model", "reason"], registry=registry)
        self.batches_left = Counter("nextscale_batches_abandoned", "Abandoned batches.", ["model"], registry=registry)
        self.open_requests = Gauge("nextscale_requests_open", "Open requests for images.", registry=registry)

    def watch(self, batcher: Batcher, pipelines: Callable[[], Iterable[tuple[str, Pipeline]]]) -> None:
        self.registry.register(Present(batcher, pipelines))

    def request_began(self, path: str) -> None:
        if path == GENERATIONS:
            self.open_requests.inc()

    def request_ended(self, path: str, status: int, seconds: float) -> None:
        if path == GENERATIONS:
            self.open_requests.dec()
            self.requests.labels(str(status)).inc()
            self.request_seconds.observe(seconds)

    def batch_done(self, record: BatchRecord) -> None:
        if record.error is not None:
            reason = "out_of_memory" if isinstance(record.error, OutOfMemory) else type(record.error).__name__
            self.batches_failed.labels(record.model, reason).inc()
        elif record.report is None:
            self.batches_left.labels(record.model).inc()
        else:
            self._generated(record, record.report)

    def _generated(self, record: BatchRecord, report: Report) -> None:
        self.batch_images.labels(record.model).observe(record.images)
        self.images.labels(record.model, report.engine).inc(record.images)
        for seconds in record.queue_seconds:
            self.queue_seconds.observe(seconds)
        for stage in report.stages:
            if not stage.skipped:
                self.stage_seconds.labels(record.model, str(stage.index)).observe(stage.seconds)
        run, dense = tokens(report)
        self.tokens_run.labels(record.model).inc(run * record.images)
        self.tokens_saved.labels(record.model).inc(max(dense - run, 0) * record.images)

    def text(self) -> bytes:
        return generate_latest(self.registry)


def tokens(report: Report) -> tuple[float, float]:
    """Returns the tokens of one image that ran, and those of dense generation, in all cfg branches."""
    branches = max((stage.cfg_branches for stage in report.stages), default=1)
    run = sum(stage.computed * stage.cfg_branches for stage in report.stages)
    return run, sum(stage.height * stage.width * branches for stage in report.stages)


class Present(Collector):
    """Present values."""

    def __init__(self, batcher: Batcher, pipelines: Callable[[], Iterable[tuple[str, Pipeline]]]) -> None:
        self._batcher, self._pipelines = batcher, pipelines

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("nextscale_images_waiting", "Queued images.", value=self._batcher.waiting)
        yield GaugeMetricFamily("nextscale_images_running", "Images that are generated.", value=self._batcher.running)
        rate = self._batcher.images_per_second
        yield GaugeMetricFamily("nextscale_images_per_second", "Rate of recent batches while busy.", value=0.0 if rate is None else rate)
        pipelines = list(self._pipelines())
        captures = GaugeMetricFamily("nextscale_captures", "Captured CUDA graphs.", labels=["model", "device"])
        kept = GaugeMetricFamily("nextscale_captures_bytes", "Memory of captured graphs.", labels=["model", "device"])
        for name, pipeline in pipelines:
            where = [name, str(pipeline.model.device)]
            captures.add_metric(where, len(pipeline.captures))
            kept.add_metric(where, pipeline.captures.bytes)
        yield captures
        yield kept
        yield gpu_memory([pipeline.model.device for _, pipeline in pipelines])


def gpu_memory(devices: Sequence[torch.device]) -> Metric:
    family = GaugeMetricFamily("nextscale_gpu_memory_bytes", "Memory of the GPUs.", labels=["device", "kind"])
    for device in dict.fromkeys(device for device in devices if device.type == "cuda"):
        free, total = torch.cuda.mem_get_info(device)
        used = {"allocated": torch.cuda.memory_allocated(device), "reserved": torch.cuda.memory_reserved(device)}
        for kind, amount in {**used, "free": free, "total": total}.items():
            family.add_metric([str(device), kind], amount)
    return family
