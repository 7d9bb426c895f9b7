"""`nextscale serve` in a separate process, called over HTTP from threads."""

from __future__ import annotations

import argparse
import base64
import http.client
import io
import json
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor

from PIL import Image

from nextscale.cli.parse import parse_size

from .load import GONE, Answer, is_kept, prompt_of

CONNECTIONS = 512  # concurrent


class HttpDoor:
    def __init__(self, arguments: argparse.Namespace, max_batch: int, max_queue: int) -> None:
        size = parse_size(arguments.size)
        self._size = size if isinstance(size, str) else "{1}x{0}".format(*(size if isinstance(size, tuple) else (size, size)))
        options = {
            "--model": arguments.model,
            "--port": "0",
            "--max-batch": str(max_batch),
            "--max-queue": str(max_queue),
            "--batch-delay-ms": str(arguments.delay_ms),
            "--device": arguments.device,
            "--dtype": arguments.dtype,
            "--method": arguments.method,
            "--warmup": None if isinstance(size, str) else f"{self._size}:{','.join(map(str, range(1, max_batch + 1)))}",
        }
        given = [word for name, value in options.items() if value is not None for word in (name, value)]
        given += ["--same-images"] if arguments.same_images else []
        self._process = subprocess.Popen([sys.executable, "-m", "nextscale", "serve", *given], stderr=subprocess.PIPE, text=True)
        self._port = self._started()
        self._pool = ThreadPoolExecutor(CONNECTIONS)
        self._batch_sizes: list[int] = []  # for every image
        self._draining = False

    @property
    def batches(self) -> list[int]:
        return [size for size, images in Counter(self._batch_sizes).items() for _ in range(round(images / size))]

    @property
    def batch_ms(self) -> dict[str, float]:
        return {}

    def _started(self) -> int:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if found := re.search(r"API: http://\S+:(\d+)/", line):
                ThreadPoolExecutor(1).submit(self._process.stderr.read)  # keeps the log pipe from filling up
                return int(found[1])
        raise RuntimeError(f"the server exited with code {self._process.wait()}")

    def ask(self, seed: int) -> Future[Answer]:
        return self._pool.submit(self._ask, seed, time.monotonic())

    def _ask(self, seed: int, arrived: float) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=600)
        body = {"prompt": prompt_of(seed), "seed": seed, "size": self._size}
        try:
            connection.request("POST", "/v1/images/generations", json.dumps(body), {"content-type": "application/json"})
        except ConnectionRefusedError:
            if not self._draining:
                raise
            return Answer(GONE, time.monotonic() - arrived, seed)
        response = connection.getresponse()
        content = json.loads(response.read())
        seconds = time.monotonic() - arrived
        connection.close()
        if response.status != 200:
            return Answer(response.status, seconds, seed)
        image = content["data"][0]
        self._batch_sizes.append(image["report"]["batch"])
        picture = Image.open(io.BytesIO(base64.b64decode(image["b64_json"]))) if is_kept(seed) else None
        return Answer(200, seconds, seed, picture)

    def drain(self) -> None:
        self._draining = True
        self._process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        if not self._draining:
            self.drain()
        self._process.wait(60)
        self._pool.shutdown()
