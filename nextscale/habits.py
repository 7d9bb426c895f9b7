"""What users of other pipelines expect of one: to, from_pretrained, save_pretrained, a progress bar, offloading."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, cast

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from .device import check_quantize, choose_device, choose_dtype, place
from .errors import SettingError
from .models.base import NextScaleModel
from .output import Preview
from .stage import Schedule
from .text.prompts import PromptReader, TextReader
from .tokenizers.autoencoder import module_to_channels_last
from .tokenizers.base import Tokenizer

OnStage = Callable[[Preview], None]


class Persistence(Protocol):
    """Reads and writes pipelines. It lives in a higher layer, `loading`, which sets it."""

    def load(self, source: str | Path, **options: Any) -> Habits: ...

    def save(self, pipeline: Any, folder: str | Path) -> Path: ...


class Habits:
    """The part of a pipeline that says where it lies and comes from, not how it generates."""

    persistence: ClassVar[Persistence]
    model: NextScaleModel
    tokenizer: Tokenizer
    reader: PromptReader
    progress: bool = False
    """Whether calls show a bar of their tokens, stage by stage, on stderr. On a GPU the host then waits for every stage."""
    weights_folder: Path | None = None
    """Where the weights were read from."""

    @classmethod
    def from_pretrained(cls, source: str | Path, **options: Any) -> Self:
        """A pipeline by a model's name, or from a folder that `save_pretrained` wrote; `options` are those of `nextscale.load`.

        A folder is read in the precision that it was saved in, unless `dtype` says otherwise.
        """
        return cast(Self, cls.persistence.load(source, **options))

    def save_pretrained(self, folder: str | Path) -> Path:
        """Writes one folder that `from_pretrained` reads back bit for bit: settings, safetensors, tokenizer, tuning profiles.

        A small encoder of words is part of it; of a published text encoder the folder says where it is.
        """
        return self.persistence.save(self, folder)

    def to(self, *where: str | torch.device | torch.dtype) -> Self:
        """Moves everything to a device, casts the weights to a dtype, or both: pipe.to("cuda", torch.bfloat16).

        What generates in float32 stays in float32. Graphs that were captured before are captured anew.
        """
        dtypes = [one for one in where if isinstance(one, torch.dtype)]
        devices = [one for one in where if not isinstance(one, torch.dtype)]
        if not where or len(dtypes) > 1 or len(devices) > 1:
            raise SettingError(f"to{where}: give a device, a dtype, or one of each")
        device = choose_device(devices[0]) if devices else self.model.device
        dtype = choose_dtype(dtypes[0] if dtypes else self.model.dtype, device)
        if check_quantize(self.model.quantize, device, dtype) is not None and dtype != self.model.dtype:
            raise SettingError(f"to({dtype}): quantised weights were made for {self.model.dtype}; load the model again with this dtype")
        with self._turn():
            place(self.model, device, dtype, self.model.float32)
            place(self.tokenizer, device, dtype, self.tokenizer.float32)
            module_to_channels_last(self.tokenizer)
            self.reader.to(device)
        return self

    def enable_model_cpu_offload(self) -> None:
        """Keeps a large text encoder in the host's memory; the GPU has it only while a new prompt is encoded.

        Transformer and tokenizer stay on the GPU: captured graphs read them where they lie.
        """
        if not isinstance(self.reader, TextReader) or not self.reader.can_offload:
            raise SettingError("this model has no text encoder that is worth moving: generation needs all of it at once")
        self.reader.offload()

    @contextmanager
    def _watched(self, schedule: Schedule, on_stage: OnStage | None, latents: list[Tensor] | None) -> Iterator[OnStage | None]:
        """What is to be called after each stage: whatever keeps its latent, moves the bar, and the caller's own function."""
        keep: list[OnStage] = [] if latents is None else [lambda preview: latents.append(preview.latent)]
        own = [] if on_stage is None else [on_stage]
        shown: AbstractContextManager[list[OnStage]] = self._bar(schedule) if self.progress else nullcontext([])
        with shown as bar:
            watchers, shown_stages = [*keep, *bar, *own], 0

            def all_of_them(preview: Preview) -> None:
                nonlocal shown_stages
                if preview.done.stage.index < shown_stages:  # of a request that had to start anew
                    return
                shown_stages += 1
                for watcher in watchers:
                    watcher(preview)

            yield all_of_them if watchers else None

    @contextmanager
    def _bar(self, schedule: Schedule) -> Iterator[list[OnStage]]:
        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=sum(stage.cells for stage in schedule))

            def advance(preview: Preview) -> None:
                if self.model.device.type == "cuda":
                    torch.cuda.current_stream(self.model.device).synchronize()
                stage = preview.done.stage
                bar.update(task, advance=stage.cells, description=f"stage {stage.index + 1}/{len(schedule)}")

            yield [advance]

    def _turn(self) -> AbstractContextManager[bool]:
        raise NotImplementedError
