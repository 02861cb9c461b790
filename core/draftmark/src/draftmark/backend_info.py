"""Name, device and capabilities of a backend. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from .geometry import CORE_MODES, PLAIN_ROWS, Form, Mode, Recurrence


@dataclass(frozen=True)
class BackendInfo:
    """Name, device and capabilities of a backend.

    Attributes:
        name: name of the entry point.
        device: torch device type that the backend runs on (``"cuda"``, ``"npu"``), or ``"any"``.
        contract_minor: newest contract minor that the plugin supports. The conformance suite reports the checks of
            later minors as upcoming.
        host_kernels: the kernels also run on CPU tensors, natively or in an interpreter.
        runtime: import names of the vendor packages that a device needs, e.g. ``("flashinfer",)``.
        install: pip command that installs the vendor packages.
        summary: one-line description that `draftmark list` prints.
        runs_code_of: names of other backends that this backend runs code of, e.g. ``("cuda_triton",)``. A verdict on
            this backend also depends on the code of those backends.
        modes: modes that the backend serves. A geometry with any other mode is refused.
        forms: engine-specific batch and cache forms that the backend accepts. A geometry with any other form is
            refused.
        sinks: `attend` includes `KVCache.sinks` in the softmax. When False, a geometry with sinks is refused.
        latent: the backend serves latent layers (`AttentionShape.latent`). Its `write_kv` takes v = None. When False, a
            latent geometry is refused.
        narrow_values: the backend serves values that are narrower than keys (`AttentionShape.value_dim`) in a layer
            that is not latent. When False, such a geometry is refused.
        lse: `attend` accepts `lse`, in every geometry that the backend serves. When False, the engine never passes it.
        chosen_keys: the backend serves layers with lists of keys (`AttentionShape.chosen_width`). When False, such a
            geometry is refused.
        row_formats: formats of latent rows that the backend reads (`AttentionShape.row_format`). A geometry with any
            other format is refused.
        batch_invariant: with `Limits.batch_invariant` the bits of a request's outputs do not depend on its batch. When
            False, a geometry with that limit is refused.
        recurrences: recurrences of the layers with state that the backend serves, through the hooks `state_supports`,
            `state_buffers` and `open_state`. A `StateGeometry` with any other recurrence is refused.
    """

    name: str
    device: str
    contract_minor: int
    host_kernels: bool
    runtime: tuple[str, ...] = ()
    install: str = ""
    summary: str = ""
    runs_code_of: tuple[str, ...] = ()
    modes: tuple[Mode, ...] = CORE_MODES
    forms: tuple[Form, ...] = ()
    sinks: bool = False
    batch_invariant: bool = False
    latent: bool = False
    narrow_values: bool = False
    lse: bool = False
    recurrences: tuple[Recurrence, ...] = ()
    chosen_keys: bool = False
    row_formats: tuple[str, ...] = (PLAIN_ROWS,)
