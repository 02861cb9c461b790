"""Geometry of a layer with recurrent state: every byte formula of its slots. Integers only, no torch.

A slot stores what one request's layer remembers: a state ``[num_heads, value_dim, key_dim]`` and the window of a short
convolution ``[conv_channels, conv_kernel - 1]``. SGLang and vLLM use the same formulas.
"""

from __future__ import annotations

from dataclasses import dataclass

from .arithmetic import maximum
from .batch_geometry import BatchGeometry, sorted_sizes
from .shapes import DTYPE_BYTES, DeviceProfile, DraftShape, Limits, Mode
from .state_checks import check_state_geometry
from .state_shapes import STATE_MODES, Gate, Recurrence, StateShape


@dataclass(frozen=True)
class StateGeometry(BatchGeometry):
    """State shape of a layer, with the draft shape, limits and device that bound its batches.

    A hybrid model has one `Geometry` per attention shape and one `StateGeometry` per state shape. All have the same
    draft shape, limits and modes, and share one batch. Create an instance with `StateGeometry.create`, which validates
    all fields. The bare constructor does not validate, so that a proof can use symbolic integers.

    Attributes:
        state: heads, elements, convolution and dtypes of the layer.
        draft, limits, device, modes: see `BatchGeometry`.
        num_layers: layers of this shape on this rank. What a verify leaves of all of them is kept until the commit.
    """

    state: StateShape
    draft: DraftShape
    limits: Limits
    device: DeviceProfile
    modes: tuple[Mode, ...] = STATE_MODES
    num_layers: int = 1

    forms = ()

    @classmethod
    def create(
        cls,
        state: StateShape,
        limits: Limits,
        draft: DraftShape | None = None,
        device: DeviceProfile | None = None,
        modes: tuple[Mode, ...] = STATE_MODES,
        num_layers: int = 1,
    ) -> StateGeometry:
        """Validate the fields and return a geometry with sorted size tuples.

        Args:
            state, limits, draft, device, modes, num_layers: see the class. The default draft shape has no
                speculation; the default device is a CPU.

        Raises:
            GeometryError: the first field that is out of range, with its value, limit and remedy.
        """
        draft = DraftShape() if draft is None else draft
        device = DeviceProfile() if device is None else device
        check_state_geometry(cls(state, draft, limits, device, modes, num_layers), state, num_layers)
        return cls(state, draft, sorted_sizes(limits), device, tuple(modes), num_layers)

    # -- elements -----------------------------------------------------------------------------------------

    @property
    def window(self) -> int:
        """Columns of the stored window: earlier channels that the convolution of a row reads, ``max(0, K-1)``."""
        return maximum(0, self.state.conv_kernel - 1)

    @property
    def state_numel(self) -> int:
        """Elements of one slot's state in one layer: ``num_heads · value_dim · key_dim``."""
        return self.state.num_heads * self.state.value_dim * self.state.key_dim

    @property
    def conv_numel(self) -> int:
        """Elements of one slot's window in one layer: ``conv_channels · window``."""
        return self.state.conv_channels * self.window

    # -- bytes --------------------------------------------------------------------------------------------

    @property
    def state_bytes(self) -> int:
        """Bytes of one slot's state in one layer."""
        return self.state_numel * DTYPE_BYTES[self.state.state_dtype]

    @property
    def conv_bytes(self) -> int:
        """Bytes of one slot's window in one layer."""
        return self.conv_numel * DTYPE_BYTES[self.state.conv_dtype]

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot in one layer: state and window."""
        return self.state_bytes + self.conv_bytes

    @property
    def record_bytes(self) -> int:
        """Bytes that replay stores of one row in one layer to update the state again: k, v, decay and β.

        A constant decay and a write strength of 1 need no bytes. Channels of the convolution come in addition
        (`channel_bytes`).
        """
        s, gates = self.state, DTYPE_BYTES[self.state.compute_dtype]
        values = s.num_heads * s.value_dim + s.num_key_heads * s.key_dim
        decays = {Gate.HEAD: s.num_heads, Gate.KEY: s.num_heads * s.key_dim, Gate.CONSTANT: 0}[s.gate]
        strengths = s.num_heads * int(s.recurrence is Recurrence.DELTA)
        return values * DTYPE_BYTES[s.dtype] + (decays + strengths) * gates

    @property
    def channel_bytes(self) -> int:
        """Bytes of one row's convolution channels in one layer, as the window stores them."""
        return self.state.conv_channels * DTYPE_BYTES[self.state.conv_dtype]

    # -- slots --------------------------------------------------------------------------------------------

    def null_slots(self, unique: bool = False) -> int:
        """Return the number of null slots: slots at the start of the pool that no request owns. Padding uses them.

        The result is 1. With `unique` each padded request gets its own slot.
        """
        return self.max_reqs if unique else 1

    @property
    def max_pages_per_req(self) -> int:
        """Columns of the page table: 0, because a state layer has no pages."""
        return 0
