"""The batcher: who shares a batch, who runs first, who is refused, and that nobody's trouble is a neighbor's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nextscale.batching import Batcher, BatchRecord, GeneratedImage, Handle, Job, Partial
from nextscale.batching.jobs import Task
from nextscale.batching.queue import PROBATION, JobQueue, Throughput
from nextscale.batching.worker import read_alone
from nextscale.errors import DeadlinePassed, JobCancelled, OutOfMemory, Overloaded, PromptError, SettingError, ShuttingDown, UnknownModel
from nextscale.output import Preview
from nextscale.pipeline import Pipeline
from nextscale.report import Report
from nextscale.text import TextFeatures
from tests.helpers.tiny import shared_pipeline

SECONDS = 60  # after which a test that hangs fails
STAGES = 4


@dataclass(eq=False)
class Toy:
    """Generates nothing, stage by stage, and notes what it was asked for. `gate` holds it before its first stage."""

    gate: Event = field(default_factory=Event)
    fails: Callable[[Sequence[Any]], Exception | None] = lambda prompts: None
    between: Callable[[int], None] = lambda stage: None
    calls: list[list[Any]] = field(default_factory=list)
    stages_run: int = 0
    reader: Any = field(default_factory=lambda: SimpleNamespace(read=len))

    def __call__(self, prompt: Any, *, seed: Any, negative: Any, on_stage: Callable[[Any], None], **settings: Any) -> Any:
        self.calls.append(list(prompt))
        assert self.gate.wait(SECONDS)
        if (error := self.fails(prompt)) is not None:
            raise error
        for stage in range(STAGES):
            self.stages_run += 1
            self.between(stage)
            latent = torch.tensor([float(one) for one in seed]).view(-1, 1, 1, 1).expand(-1, 3, 2, 2)
            decoder: Any = SimpleNamespace(decode=lambda x: x / 255 * 2 - 1)
            done: Any = SimpleNamespace(stage=SimpleNamespace(index=stage))
            on_stage(Preview(done, latent, decoder))
        report = Report("toy", "eager", None, "dense", None, "cpu", "float32", (2, 2), tuple(seed), (), 1.0, 0.0, 0.0, 0, 0)
        return SimpleNamespace(images=[f"image {one}" for one in seed], report=report, compute_mask=None)


def opened(**fields: Any) -> Toy:
    toy = Toy(**fields)
    toy.gate.set()
    return toy


def job(prompt: Any, *seeds: int, model: str = "toy", **fields: Any) -> Job:
    return Job(model, prompt, seeds or (0,), **fields)


def running(batcher: Batcher, toy: Toy) -> Handle:
    """A job that the worker holds, so that all others wait."""
    handle = batcher.submit(job("first"))
    while not toy.calls:
        Event().wait(0.001)
    return handle


def finish(handles: Sequence[Handle]) -> None:
    assert not wait([handle.future for handle in handles], SECONDS).not_done


# --- joining


def test_what_waits_is_joined_up_to_max_batch_and_comes_back_in_order() -> None:
    toy = Toy()
    with Batcher([{"toy": toy}], max_batch=4, batch_delay=0) as batcher:
        first = running(batcher, toy)
        handles = [batcher.submit(job(f"p{number}", number, 10 + number)) for number in range(3)]
        assert (batcher.waiting, batcher.running) == (6, 1)
        toy.gate.set()
        finish([first, *handles])
        assert toy.calls == [["first"], ["p0", "p0", "p1", "p1"], ["p2", "p2"]]
        for number, handle in enumerate(handles):
            assert [image.seed for image in handle.result()] == [number, 10 + number]
            assert [image.image for image in handle.result()] == [f"image {number}", f"image {10 + number}"]
        assert handles[0].result()[0].batch == 4 and handles[2].result()[0].batch == 2
        assert handles[0].result()[0].prompt_tokens == 1
        assert (batcher.waiting, batcher.running) == (0, 0)


def test_only_equal_settings_share_a_batch_and_the_oldest_goes_first() -> None:
    toy = Toy()
    with Batcher([{"toy": toy}], max_batch=4, batch_delay=0) as batcher:
        first = running(batcher, toy)
        many = [batcher.submit(job(f"a{number}", settings={"guidance": 3})) for number in range(6)]
        others = [
            batcher.submit(job("b", settings={"guidance": 4})),
            batcher.submit(job("c", settings={"guidance": 3}, negative="fog")),
            batcher.submit(job("d", settings={"guidance": [3]})),  # has no hash: alone
        ]
        late = batcher.submit(job("late", settings={"guidance": 3}))
        toy.gate.set()
        finish([first, *many, *others, late])
        assert toy.calls[1:] == [["a0", "a1", "a2", "a3"], ["a4", "a5", "late"], ["b"], ["c"], ["d"]]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def tasks_of(key: str, clock: Clock, images: int = 1) -> list[Task]:
    handle = Handle(Job("toy", "p", tuple(range(images)), settings={"key": key}))
    return [Task(handle, position, clock()) for position in range(images)]


def waiting_room(clock: Clock, max_batch: int = 4, delay: float = 1.0, max_queue: int = 100) -> JobQueue:
    return JobQueue(max_batch, delay, max_queue, Throughput(1), clock)


def test_a_batch_waits_for_company_until_the_delay_is_over_or_it_is_full() -> None:
    clock = Clock()
    room = waiting_room(clock)
    room.put(tasks_of("a", clock))
    clock.now = 0.4
    room.put(tasks_of("b", clock, images=4))
    assert room._ready({"toy"})[0] == tasks_of("b", clock)[0].job.key  # full, though younger
    assert [task.job.settings["key"] for task in room.take({"toy"}) or []] == ["b"] * 4
    key, seconds = room._ready({"toy"})
    assert key is None and seconds == pytest.approx(0.6)
    clock.now = 1.0
    assert [task.job.settings["key"] for task in room.take({"toy"}) or []] == ["a"]
    assert room._ready({"other model"})[0] is None


def test_a_key_that_keeps_coming_does_not_starve_another() -> None:
    clock = Clock()
    room = waiting_room(clock, max_batch=2, delay=0.0)
    room.put(tasks_of("flood", clock, images=2))
    room.put(tasks_of("rare", clock))
    order = []
    for _ in range(4):
        clock.now += 1
        room.put(tasks_of("flood", clock, images=2))
        taken = room.take({"toy"}) or []
        order.append(taken[0].job.settings["key"])
    assert order == ["flood", "rare", "flood", "flood"]


def test_a_limit_after_running_out_of_memory_is_lifted_again() -> None:
    clock = Clock()
    room = waiting_room(clock)
    tasks = tasks_of("a", clock, images=4)
    key = tasks[0].job.key
    room.lower_limit(key, 2)
    for _ in range(PROBATION):
        room.put(tasks_of("a", clock, images=4))
        for _ in range(2):
            taken = room.take({"toy"}) or []
            assert len(taken) == 2 or room.limit(key) == 4
            room.finished(taken)
        if room.limit(key) == 4:
            break
    assert room.limit(key) == 4


# --- images


def difference(ours: GeneratedImage, theirs: GeneratedImage) -> int:
    """Returns the largest difference, in levels of 255."""
    return int(np.abs(np.asarray(ours.image).astype(int) - np.asarray(theirs.image).astype(int)).max())


@pytest.mark.parametrize(("family", "prompts"), [("infinity", ["a fox", "a red boat at sea", "owl"]), ("var", [3, 7, 1])])
def test_an_image_is_the_same_alone_and_in_company(family: str, prompts: list[Any]) -> None:
    pipe = shared_pipeline(family)
    gate = Event()

    def held(*args: Any, **settings: Any) -> Any:
        assert gate.wait(SECONDS)
        return pipe(*args, **settings)

    held.reader = pipe.reader  # type: ignore[attr-defined]
    records: list[BatchRecord] = []
    with Batcher([{"m": held}], batch_delay=0, on_batch=records.append) as batcher:  # type: ignore[dict-item]
        jobs = [job(prompt, number, 100 + number, model="m") for number, prompt in enumerate(prompts)]
        handles = [batcher.submit(job(prompts[0], 55, model="m")), *map(batcher.submit, jobs)]
        gate.set()
        finish(handles)
        alone = [batcher.submit(one) for one in jobs]
        for together, single in zip(handles[1:], alone, strict=True):
            for ours, theirs in zip(together.result(SECONDS), single.result(SECONDS), strict=True):
                assert ours.seed == theirs.seed and difference(ours, theirs) <= 1  # rounding, at the edge of a level
        assert difference(handles[1].result()[0], handles[2].result()[0]) > 20  # which it would not be between different images
    assert max(record.images for record in records) >= 6
    assert all(record.report is not None and len(record.report.stages) == STAGES for record in records)


def test_partial_images_are_decodes_of_the_canvas_for_those_who_asked() -> None:
    pipe = shared_pipeline("infinity")
    previews: dict[int, Any] = {}
    alone = pipe("a fox", seed=7, on_stage=lambda preview: previews.setdefault(preview.done.stage.index, preview.images()[0]))
    seen: list[Any] = []
    with Batcher([{"m": pipe}], max_batch=2, batch_delay=30) as batcher:
        plain = batcher.submit(job("an owl", 3, model="m"))
        watched = batcher.submit(job("a fox", 7, model="m", partial_stages=frozenset({1, 2}), watch=seen.append))
        finish([plain, watched])
    assert watched.result()[0].batch == 2
    partials, done = seen[:-1], seen[-1]
    assert [(partial.position, partial.stage) for partial in partials] == [(0, 1), (0, 2)]
    for partial in partials:
        assert np.abs(np.asarray(partial.image).astype(int) - np.asarray(previews[partial.stage]).astype(int)).max() <= 1
    assert done[0] == 0 and np.abs(np.asarray(done[1].image).astype(int) - np.asarray(alone.images[0]).astype(int)).max() <= 1


def test_masks_belong_to_their_image() -> None:
    with Batcher([{"m": shared_pipeline("infinity")}], batch_delay=0) as batcher:
        image = batcher.submit(job("a fox", 1, model="m", settings={"compute_mask": True, "method": "skip:last=1"})).result(SECONDS)[0]
    assert image.masks is not None and [tuple(mask.shape) for mask in image.masks] == [(1, 1), (2, 2), (3, 2), (4, 3)]
    assert [float(mask.mean()) for mask in image.masks] == [1, 1, 1, 0]


# --- same images


class Rounding(Toy):
    """Its images depend on how many are generated together, as on a GPU."""

    def __call__(self, prompt: Any, *, seed: Any, negative: Any, on_stage: Callable[[Any], None], **settings: Any) -> Any:
        output = super().__call__(prompt, seed=seed, negative=negative, on_stage=on_stage, **settings)
        against = negative or [None] * len(seed)
        output.images = [f"{of} not {no}, {one} of {len(seed)}" for of, no, one in zip(prompt, against, seed, strict=True)]
        return output


@pytest.mark.parametrize("same", [True, False])
def test_batches_that_are_filled_up_give_the_same_images_alone_and_in_company(same: bool) -> None:
    toy, records, seen = Rounding(), list[BatchRecord](), list[Any]()
    jobs = [
        job("a", 10, negative="fog", partial_stages=frozenset({2}), watch=seen.append),
        job("b", 20, 30, negative="rain", partial_stages=frozenset({2}), watch=seen.append),
    ]
    with Batcher([{"toy": toy}], max_batch=4, batch_delay=0, on_batch=records.append, same_images=same) as batcher:
        first = running(batcher, toy)
        together = [batcher.submit(one) for one in jobs]
        toy.gate.set()
        finish([first, *together])
        partials = [(event.position, round(np.asarray(event.image).mean(), -1)) for event in seen if isinstance(event, Partial)]
        assert partials == [(0, 10), (0, 20), (1, 30)]  # one each, of their own seeds
        alone = [batcher.submit(one).result(SECONDS) for one in jobs]
    pairs = zip([image for handle in together for image in handle.result()], [image for images in alone for image in images], strict=True)
    assert [ours.image == theirs.image for ours, theirs in pairs] == [same] * 3
    assert [image.batch for image in (*together[0].result(), *alone[0], *alone[1])] == [3, 1, 2, 2]
    assert [record.images for record in records] == [1, 3, 1, 2]
    assert [record.report and record.report.seeds for record in records] == [(0,), (10, 20, 30), (10,), (20, 30)]
    if same:
        assert toy.calls == [["first"] * 4, ["a", "b", "b", "b"], ["a"] * 4, ["b"] * 4]
        assert alone[1][1].image == "b not rain, 30 of 4"


def test_a_filled_batch_that_runs_out_of_memory_is_filled_up_to_less() -> None:
    toy = Toy(fails=lambda prompts: OutOfMemory("too much") if len(prompts) > 2 else None)
    with Batcher([{"toy": toy}], max_batch=8, batch_delay=0, same_images=True) as batcher:
        first = running(batcher, toy)
        others = [batcher.submit(job(name)) for name in "abc"]
        toy.gate.set()
        finish([first, *others])
        assert [handle.result()[0].batch for handle in (first, *others)] == [1, 2, 2, 1]
        assert toy.calls[3:] == [["a", "b"], ["c", "c"]]
        toy.fails = lambda prompts: OutOfMemory("0.10 GiB are free")
        with pytest.raises(OutOfMemory, match="0.10 GiB"):
            batcher.submit(job("huge")).result(SECONDS)
    assert [len(call) for call in toy.calls] == [8, 4, 2, 2, 2, 2, 1]


def test_who_made_a_filled_batch_fail_is_found_and_who_left_it_is_not_waited_for() -> None:
    toy = Rounding(fails=lambda prompts: PromptError("prompt is empty") if "bad" in prompts else None)
    with Batcher([{"toy": toy}], max_batch=4, batch_delay=0, same_images=True) as batcher:
        first = running(batcher, toy)
        good, bad = batcher.submit(job("good", 5)), batcher.submit(job("bad"))
        toy.gate.set()
        finish([first, good, bad])
        assert good.result()[0].image == "good not None, 5 of 4" and isinstance(bad.future.exception(), PromptError)
        handles: list[Handle] = []
        before, toy.between = toy.stages_run, lambda stage: handles[0].cancel() if stage == 1 else None
        toy.gate.clear()
        handles.append(batcher.submit(job("leaves")))
        toy.gate.set()
        assert batcher.drain(SECONDS) and toy.stages_run == before + 2


def test_texts_of_filled_batches_are_encoded_one_by_one() -> None:
    def read(prompts: list[Any]) -> TextFeatures:
        return TextFeatures(tuple(torch.full((len(prompt), 1), float(len(prompts))) for prompt in prompts))

    features = read_alone(SimpleNamespace(read=read), ["fox", "owl at sea", "fox"])  # type: ignore[arg-type]
    assert features.lengths == (3, 10, 3) and all(bool((row == 1).all()) for row in features.rows)
    assert read_alone(shared_pipeline("var").reader, [3, 1, 3]) == [3, 1, 3]


@pytest.mark.parametrize(("family", "prompts"), [("infinity", ["a fox", "an owl"]), ("var", [3, 7])])
def test_models_give_the_same_images_in_filled_batches(family: str, prompts: list[Any]) -> None:
    pipe, records = shared_pipeline(family), list[BatchRecord]()
    with Batcher([{"m": pipe}], max_batch=3, batch_delay=0.2, on_batch=records.append, same_images=True) as batcher:
        together = [batcher.submit(job(prompt, seed, model="m")) for seed, prompt in enumerate(prompts)]
        finish(together)
        again = batcher.submit(job(prompts[1], 1, model="m")).result(SECONDS)[0]
        ours = together[1].result()[0]
    assert difference(ours, again) == 0 and difference(ours, together[0].result()[0]) > 20
    assert ours.prompt_tokens == again.prompt_tokens
    report = records[-1].report
    assert report is not None and report.seeds == (1,) and {stage.rows for stage in report.stages} == {2}


# --- leaving


def test_work_stops_within_a_stage_when_all_have_left() -> None:
    toy = opened()
    with Batcher([{"toy": toy}], batch_delay=0) as batcher:
        handles: list[Handle] = []
        toy.between = lambda stage: handles[0].cancel() if stage == 1 else None
        toy.gate.clear()
        handles.append(batcher.submit(job("a", 1, 2)))
        toy.gate.set()
        with pytest.raises(JobCancelled):
            handles[0].result(SECONDS)
        assert batcher.drain(SECONDS)
    assert toy.stages_run == 2


def test_who_stays_gets_the_image_when_another_leaves() -> None:
    toy = Toy()
    with Batcher([{"toy": toy}], batch_delay=0) as batcher:
        first = running(batcher, toy)
        leaves, stays, gone = (batcher.submit(job(name)) for name in ("leaves", "stays", "gone"))
        gone.cancel()
        assert batcher.waiting == 2
        toy.between = lambda stage: leaves.cancel() if stage == 1 and len(toy.calls) == 2 else None
        toy.gate.set()
        finish([first, leaves, stays])
        assert stays.result()[0].image == "image 0"
        with pytest.raises(JobCancelled):
            leaves.result()
    assert toy.calls == [["first"], ["leaves", "stays"]] and toy.stages_run == 2 * STAGES


def test_a_deadline_ends_a_job_that_waits_and_one_that_runs() -> None:
    toy = opened()
    with Batcher([{"toy": toy}], batch_delay=0) as batcher:
        late = batcher.submit(job("late", deadline=0.0))
        with pytest.raises(DeadlinePassed, match="not ready"):
            late.result(SECONDS)
        assert toy.calls == []
        held = SimpleNamespace(handle=None)
        toy.between = lambda stage: object.__setattr__(held.handle.job, "deadline", 0.0) if stage == 0 else None
        toy.gate.clear()
        held.handle = batcher.submit(job("runs"))
        toy.gate.set()
        with pytest.raises(DeadlinePassed):
            held.handle.result(SECONDS)
        assert batcher.drain(SECONDS)
    assert toy.stages_run == 1


def test_a_pipeline_that_was_left_in_the_middle_generates_the_same_afterwards() -> None:
    pipe = shared_pipeline("infinity")
    before = pipe("a fox", seed=4)
    with Batcher([{"m": pipe}], batch_delay=0) as batcher:
        handles: list[Handle] = []
        ready = Event()

        def leave(event: Any) -> None:
            assert ready.wait(SECONDS)
            handles[0].cancel()

        handles.append(batcher.submit(job("an owl", 9, model="m", partial_stages=frozenset({1}), watch=leave)))
        ready.set()
        with pytest.raises(JobCancelled):
            handles[0].result(SECONDS)
        again = batcher.submit(job("a fox", 4, model="m")).result(SECONDS)[0]
    assert np.array_equal(np.asarray(again.image), np.asarray(before.images[0]))


# --- limits


def test_a_full_queue_says_when_to_come_back_by_measured_throughput() -> None:
    toy = Toy()
    with Batcher([{"toy": toy}], max_queue=3, batch_delay=0) as batcher:
        first = running(batcher, toy)
        large = batcher.submit(job("larger than the queue", 1, 2, 3, 4))  # an empty queue takes it
        with pytest.raises(Overloaded, match="4 of 3 images") as refused:
            batcher.submit(job("refused"))
        assert refused.value.retry_after == 1.0  # nothing measured yet
        toy.gate.set()
        finish([first, large])
        assert batcher.submit(job("welcome again")).result(SECONDS)
        assert batcher.images_per_second is not None and batcher.images_per_second > 0


def test_throughput_is_that_of_recent_batches_and_all_workers() -> None:
    rate = Throughput(workers=2)
    assert rate.images_per_second is None and rate.seconds_for(10) == 1.0
    rate.add(8, 2.0)
    assert rate.images_per_second == 8.0 and rate.seconds_for(4) == 0.5
    for _ in range(30):
        rate.add(8, 1.0)
    assert rate.images_per_second == pytest.approx(16.0, rel=0.01)


def test_draining_finishes_what_was_accepted_and_refuses_the_rest() -> None:
    toy = Toy()
    with Batcher([{"toy": toy}], batch_delay=30) as batcher:
        accepted = [batcher.submit(job(f"p{number}")) for number in range(3)]
        assert not batcher.drain(0)
        with pytest.raises(ShuttingDown):
            batcher.submit(job("late"))
        toy.gate.set()
        assert batcher.drain(SECONDS)
        assert all(handle.result() for handle in accepted)


def test_closing_gives_up_what_waits_and_what_runs() -> None:
    toy = Toy()
    batcher = Batcher([{"toy": toy}], batch_delay=0)
    first = running(batcher, toy)
    second = batcher.submit(job("waits"))
    toy.gate.set()
    assert batcher.close()
    for handle in (first, second):
        if not (handle is first and handle.future.exception() is None):  # it may have been quicker
            with pytest.raises(ShuttingDown):
                handle.result()


# --- trouble


def test_a_batch_that_runs_out_of_memory_is_halved_and_remembered() -> None:
    toy = Toy(fails=lambda prompts: OutOfMemory("too much") if len(prompts) > 2 else None)
    with Batcher([{"toy": toy}], max_batch=8, batch_delay=0) as batcher:
        first = running(batcher, toy)
        handles = [batcher.submit(job(f"p{number}")) for number in range(8)]
        toy.gate.set()
        finish([first, *handles])
        assert all(handle.result()[0].image == "image 0" for handle in handles)
        assert [len(call) for call in toy.calls] == [1, 8, 4, 2, 2, 4, 2, 2]
        toy.gate.clear()
        again = [batcher.submit(job(f"q{number}")) for number in range(4)]
        toy.gate.set()
        finish(again)
        assert max(len(call) for call in toy.calls[8:]) <= 2


def test_an_image_that_does_not_fit_alone_is_refused_clearly() -> None:
    toy = opened(fails=lambda prompts: OutOfMemory("0.10 GiB are free"))
    with Batcher([{"toy": toy}], batch_delay=0) as batcher:
        with pytest.raises(OutOfMemory, match="0.10 GiB"):
            batcher.submit(job("huge")).result(SECONDS)
        toy.fails = lambda prompts: None
        assert batcher.submit(job("small")).result(SECONDS)


@pytest.mark.parametrize("error", [PromptError("prompt is empty"), ZeroDivisionError("a bug")])
def test_only_the_culprit_of_a_failing_batch_fails(error: Exception) -> None:
    toy = Toy(fails=lambda prompts: error if "bad" in prompts else None)
    records: list[BatchRecord] = []
    with Batcher([{"toy": toy}], batch_delay=0, on_batch=records.append) as batcher:
        first = running(batcher, toy)
        good = [batcher.submit(job(f"p{number}")) for number in range(3)]
        bad = batcher.submit(job("bad", 1, 2))
        more = batcher.submit(job("p3"))
        toy.gate.set()
        finish([first, *good, bad, more])
        assert bad.future.exception() is error and error.__traceback__ is None
        assert all(handle.result()[0].image == "image 0" for handle in [*good, more])
        assert not batcher.broken
    assert sum(record.error is error for record in records) >= 2


def test_callbacks_that_raise_end_their_own_job_at_most() -> None:
    def broken(event: Any) -> None:
        raise ZeroDivisionError("in a callback")

    toy = Toy()
    with Batcher([{"toy": toy}], batch_delay=0, on_batch=broken) as batcher:
        first = running(batcher, toy)
        watched = batcher.submit(job("watched", watch=broken))
        plain = batcher.submit(job("plain"))
        toy.gate.set()
        finish([first, watched, plain])
        assert plain.result() and isinstance(watched.future.exception(), ZeroDivisionError)
        assert batcher.submit(job("again")).result(SECONDS)
    assert toy.calls[1] == ["watched", "plain"]


def test_a_device_that_is_lost_is_reported() -> None:
    toy = opened(fails=lambda prompts: RuntimeError("CUDA error: an illegal memory access was encountered"))
    with Batcher([{"toy": toy}], batch_delay=0) as batcher:
        with pytest.raises(RuntimeError, match="illegal"):
            batcher.submit(job("a")).result(SECONDS)
        assert batcher.broken


def test_prompts_that_cannot_be_read_harm_nobody_in_a_real_batch() -> None:
    with Batcher([{"m": shared_pipeline("var")}], max_batch=2, batch_delay=30) as batcher:
        good, bad = batcher.submit(job(3, 1, model="m")), batcher.submit(job(99, 2, model="m"))
        finish([good, bad])
        assert isinstance(bad.future.exception(), PromptError) and good.result()[0].seed == 1


def test_devices_share_the_queue_and_get_only_models_that_they_have() -> None:
    here, there = Toy(), opened()
    with Batcher([{"a": here}, {"b": there}], batch_delay=0) as batcher:
        held = batcher.submit(job("p", model="a"))
        assert batcher.submit(job("q", model="b")).result(SECONDS)
        here.gate.set()
        assert held.result(SECONDS)
        with pytest.raises(UnknownModel, match="a, b"):
            batcher.submit(job("r", model="c"))


@pytest.mark.parametrize("wrong", [{"max_batch": 0}, {"max_queue": 1.5}, {"batch_delay": -1}, {"batch_delay": "soon"}])
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=next(iter(wrong))):
        Batcher([{"toy": Toy()}], **wrong)


def test_jobs_and_batchers_without_content_are_refused() -> None:
    with pytest.raises(SettingError, match="seeds"):
        Job("toy", "p", ())
    with pytest.raises(SettingError, match="devices"):
        Batcher([{}])


def test_it_needs_no_packages_of_the_server() -> None:
    code = (
        "import sys\nfor name in ('fastapi', 'starlette', 'uvicorn', 'pydantic', 'prometheus_client'): sys.modules[name] = None\n"
        "import nextscale.batching"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_captured_graphs_can_be_left_between_stages() -> None:
    import nextscale

    pipe: Pipeline = nextscale.load("nano", device="cuda")
    settings = {"size": (128, 128)}
    pipe.warmup(["a fox"] * 2, **settings)
    before = pipe(["a fox", "an owl"], seed=[1, 2], **settings)
    with Batcher([{"m": pipe}], max_batch=2, batch_delay=30) as batcher:
        handles: list[Handle] = []
        ready = Event()

        def leave(event: Any) -> None:
            assert isinstance(event, Partial) and ready.wait(SECONDS)
            handles[0].cancel()

        handles.append(batcher.submit(job("a cat", 5, 6, model="m", settings=settings, partial_stages=frozenset({2}), watch=leave)))
        ready.set()
        with pytest.raises(JobCancelled):
            handles[0].result(SECONDS)
        fox, owl = (batcher.submit(job(prompt, seed, model="m", settings=settings)) for prompt, seed in (("a fox", 1), ("an owl", 2)))
        finish([fox, owl])
        assert fox.result()[0].report.engine == "graphs" and fox.result()[0].batch == 2
        for handle, image in zip((fox, owl), before.images, strict=True):
            assert np.array_equal(np.asarray(handle.result()[0].image), np.asarray(image))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("method", ["dense", "fastvar"])
def test_filled_batches_on_a_gpu_give_the_same_images_bit_for_bit(method: str) -> None:
    import nextscale

    pipe: Pipeline = nextscale.load("nano", device="cuda", dtype=torch.bfloat16)
    prompts = ["a fox", "a photo of a blue t-shirt on a chair", "owl", "a 3D icon of a red apple", "a rocket"]
    jobs = [job(prompt, seed, model="m", settings={"size": 256, "method": method}) for seed, prompt in enumerate(prompts)]
    with Batcher([{"m": pipe}], max_batch=8, batch_delay=0, same_images=True) as batcher:
        alone = [batcher.submit(one).result(SECONDS)[0] for one in jobs]
        for order in (jobs, jobs[::-1], jobs[1:4]):
            held = batcher.submit(job("a boat", *range(10, 18), model="m", settings=jobs[0].settings))  # behind which the others are joined
            together = [batcher.submit(one).result for one in order]
            images = [result(SECONDS)[0] for result in together]
            assert held.result()[0].report.engine == "graphs" and max(image.batch for image in images) > 1
            for image in images:
                assert np.array_equal(np.asarray(image.image), np.asarray(alone[image.seed].image))
