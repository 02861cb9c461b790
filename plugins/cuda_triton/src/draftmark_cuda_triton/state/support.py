"""Layers with recurrent state that the plugin rejects, with reasons. No torch."""

from __future__ import annotations

from draftmark import StateGeometry

MAX_KEY_DIM = 256
"""Most key elements of a head: a program holds whole rows of the state in registers."""
MAX_NODES = 256
"""Most rows of a verify."""
MAX_KERNEL = 16
"""Most taps of the convolution: one program of a prompt reads the whole window before it writes the new one."""
MAX_GRID = 65535
"""CUDA's limit on a grid's y and z extents."""
DTYPES = ("float32", "bfloat16", "float16")


def state_reasons_against(geometry: StateGeometry) -> list[str]:
    """Return every reason why the kernels do not serve a layer; an empty list means they do."""
    s, device, reasons = geometry.state, geometry.device, []
    if device.kind not in ("cuda", "cpu"):
        reasons.append(f"device kind {device.kind} is not served: the kernels run on cuda, or interpreted on cpu")
    if device.kind == "cuda" and device.arch < 80:
        reasons.append(f"sm_{device.arch} is not served: the kernels need sm_80 or newer")
    for name in ("dtype", "state_dtype", "conv_dtype"):
        if getattr(s, name) not in DTYPES:
            reasons.append(
                f"{name} {getattr(s, name)} is not served: the kernels compute in float32, so use {', '.join(DTYPES)}"
            )
    if s.key_dim > MAX_KEY_DIM:
        reasons.append(f"key_dim {s.key_dim} is not served: a state row has at most {MAX_KEY_DIM} elements")
    if s.conv_kernel > MAX_KERNEL:
        reasons.append(f"conv_kernel {s.conv_kernel} is not served: the convolution has at most {MAX_KERNEL} taps")
    if geometry.draft.num_draft_tokens > MAX_NODES:
        nodes = geometry.draft.num_draft_tokens
        reasons.append(f"num_draft_tokens {nodes} is not served: a verify has at most {MAX_NODES} rows of a request")
    if max(s.num_heads, geometry.max_reqs) > MAX_GRID:
        reasons.append(
            f"{s.num_heads} heads and {geometry.max_reqs} requests are not served: a CUDA grid has at most {MAX_GRID} "
            "of each"
        )
    return reasons
