"""Predicts the cost of a request without any weights: MACs and memory of a large model, dense and with methods."""

import torch

from nextscale.loading.presets import build_model, build_tokenizer, model_spec
from nextscale.methods import resolve_method
from nextscale.planning.cost import Workload, request_cost
from nextscale.planning.memory import request_memory

spec = model_spec("infinity-2b")
with torch.device("meta"):  # shapes only
    model, tokenizer = build_model(spec.model).bfloat16(), build_tokenizer(spec.tokenizer).bfloat16()
schedule = spec.settings.schedules.choose("1M", "16:9")
workload = Workload(schedule, images=4, text_tokens=64)
dense = request_cost(model, workload)

print(f"{spec.name}, 4 images of {schedule.grid[0]}x{schedule.grid[1]} tokens")
for name in ("dense", "skip:last=2", "fastvar", "stagevar"):
    plans = resolve_method(name).forecast(model, schedule)
    cost, memory = request_cost(model, workload, plans), request_memory(model, tokenizer, workload, plans)
    print(f"{name:12} {cost.total / 1e12:6.2f} T MACs ({cost.share(dense):4.0%})   peak {memory.peak / 2**30:5.1f} GiB")
