"""Names of the arguments that behaviour checks receive. `harness.fixtures` opens them."""

from __future__ import annotations

from enum import StrEnum

from .check import Need


class Fixture(StrEnum):
    """Arguments that a behaviour check receives. Each member states the arguments and how the case value gives them."""

    FORWARD = "forward"
    """``(Harness, ForwardCase)`` from a ForwardCase. The pool fits the forward; padded requests use the null pages."""
    METADATA = "metadata"
    """Like FORWARD, but with a pool of one page, for rules that run no kernel."""
    FORWARDS = "forwards"
    """``(Harness, list of ForwardCase)`` from a list of forwards with one geometry."""
    GEOMETRY = "geometry"
    """``(Harness, Geometry)`` from a geometry. The pool fits any forward of that geometry."""
    PAIR = "pair"
    """``(Harness, Harness)`` from two geometries."""
    LARGE_POOL = "large_pool"
    """Like FORWARD, but on a sparse pool of billions of elements. The forward touches only a few pages."""
    GRAPHS = "graphs"
    """``(GraphHarness, Geometry)`` from a geometry."""
    PROGRAM = "program"
    """``(GraphHarness, Program)`` from a geometry and a program."""
    LATE_DEVICE = "late_device"
    """``(LateHarness, Geometry)`` from a geometry. The pool fits the rounds of `cases.late_rounds`."""
    LAYERS = "layers"
    """``(LayerHarness, list of ForwardCase)`` from one geometry per layer shape, and a list of forwards."""
    TREES = "trees"
    """``(TreeHarness, Geometry)`` from a geometry."""
    LARGE_POOL_TREES = "large_pool_trees"
    """Like TREES, but with a KV pool of billions of elements."""
    ROUNDS = "rounds"
    """``(StateHarness, list of Round)`` from rounds over recurrent state on one pool, with one geometry."""
    STATE = "state"
    """``(StateHarness, StateGeometry)`` from a `StateGeometry`. The pool has one request's slot, and a few more."""
    SUBJECT = "subject"
    """``(BackendUnderTest, case value)``. Nothing is opened."""

    @property
    def needs(self) -> tuple[Need, ...]:
        """Abilities of the subject that a check with these arguments uses."""
        if self is Fixture.SUBJECT:
            return (Need.HOOKS,)
        if self is Fixture.METADATA:
            return (Need.METADATA,)
        return (Need.FORWARD, Need.GRAPHS) if self in (Fixture.GRAPHS, Fixture.PROGRAM) else (Need.FORWARD,)
