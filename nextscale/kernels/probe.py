"""Whether Triton can compile a kernel here and launch it: that takes a C compiler and a driver that fits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def require_launches_kernel(out_ptr):
    tl.store(out_ptr, 1.0)


def require_launches(device: torch.device) -> None:
    """Raises what Triton raises."""
    out = torch.zeros(1, device=device)
    with torch.cuda.device_of(out):
        require_launches_kernel[1,](out)
    if out.item() != 1:
        raise RuntimeError(f"a kernel was launched on {device} and did not write")
