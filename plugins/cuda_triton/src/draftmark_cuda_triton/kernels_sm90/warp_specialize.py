"""Warp specialization: starts the consumer warp groups, the producer warps, and the warps that upcast or gather.

A partition is the warps that run one device function, with its arguments, its index or task, and the constants.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .config import GATHER, LOAD_K, LOAD_V, UPCAST
from .producer_gather import GATHER_WARPS

PRODUCER_REGISTERS_1WG, PRODUCER_REGISTERS, PRODUCER_REGISTERS_3WG = (
    gl.constexpr(24),
    gl.constexpr(40),
    gl.constexpr(32),
)
"""Registers of a TMA producer thread: with one consumer warp group; with two, or with upcast warps; with three."""
UPCAST_REGISTERS, UPCAST_REGISTERS_128 = gl.constexpr(96), gl.constexpr(88)
"""Registers of an upcast thread; the second value next to two consumer warp groups with tiles of 128 keys."""
TRANSPOSE_REGISTERS = gl.constexpr(56)
"""Registers of a thread that transposes V."""
GATHER_REGISTERS, GATHER_REGISTERS_2WG = gl.constexpr(64), gl.constexpr(56)
"""Registers of a gathering thread, with one consumer warp group and with two."""


@gluon.jit
def run_partition(PARTITION: gl.constexpr, args, INDEX: gl.constexpr, CFG: gl.constexpr):
    """Run one partition. `gl.warp_specialize` accepts this function, but not a function passed as a constexpr."""
    PARTITION(args, INDEX, CFG)


@gluon.jit
def start_tma(
    CONSUMER: gl.constexpr,
    consumer_args,
    PRODUCER: gl.constexpr,
    producer_args,
    CFG: gl.constexpr,
    UPCAST_FP8: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
):
    """Start the partitions of a CTA that loads keys by TMA; the call returns when all partitions have ended."""
    # For a head_dim of 256, more upcast warps would leave too few registers to the consumers.
    UPCAST_WARPS: gl.constexpr = 8 if CFG.BLOCK_D < 256 else 4
    if CFG.NUM_CONSUMER_WGS == 1 and not UPCAST_FP8:
        gl.warp_specialize(
            [
                (run_partition, (CONSUMER, consumer_args, 0, CFG)),
                (run_partition, (PRODUCER, producer_args, LOAD_K, CFG)),
                (run_partition, (PRODUCER, producer_args, LOAD_V, CFG)),
            ],
            [1, 1], [PRODUCER_REGISTERS_1WG, PRODUCER_REGISTERS_1WG],
        )  # fmt: skip
    elif CFG.NUM_CONSUMER_WGS == 1:
        gl.warp_specialize(
            [
                (run_partition, (CONSUMER, consumer_args, 0, CFG)),
                (run_partition, (PRODUCER, producer_args, LOAD_K, CFG)),
                (run_partition, (PRODUCER, producer_args, LOAD_V, CFG)),
                (run_partition, (PRODUCER, producer_args, UPCAST, CFG)),
            ],
            [1, 1, UPCAST_WARPS], [PRODUCER_REGISTERS, PRODUCER_REGISTERS, UPCAST_REGISTERS],
        )  # fmt: skip
    elif CFG.NUM_CONSUMER_WGS == 3:
        gl.warp_specialize(
            [
                (run_partition, (CONSUMER, consumer_args, 0, CFG)),
                (run_partition, (CONSUMER, consumer_args, 1, CFG)),
                (run_partition, (CONSUMER, consumer_args, 2, CFG)),
                (run_partition, (PRODUCER, producer_args, LOAD_K, CFG)),
                (run_partition, (PRODUCER, producer_args, LOAD_V, CFG)),
            ],
            [4, 4, 1, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS_3WG, PRODUCER_REGISTERS_3WG],
        )  # fmt: skip
    elif not UPCAST_FP8:
        gl.warp_specialize(
            [
                (run_partition, (CONSUMER, consumer_args, 0, CFG)),
                (run_partition, (CONSUMER, consumer_args, 1, CFG)),
                (run_partition, (PRODUCER, producer_args, LOAD_K, CFG)),
                (run_partition, (PRODUCER, producer_args, LOAD_V, CFG)),
            ],
            [4, 1, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        # The scores of 128 keys need more registers in the consumers, so the producers get fewer.
        TMA_REGISTERS: gl.constexpr = PRODUCER_REGISTERS_1WG if CFG.BLOCK_N == 128 else PRODUCER_REGISTERS
        OWN_REGISTERS: gl.constexpr = (
            TRANSPOSE_REGISTERS if CFG.ROUNDS else UPCAST_REGISTERS_128 if CFG.BLOCK_N == 128 else UPCAST_REGISTERS
        )
        gl.warp_specialize(
            [
                (run_partition, (CONSUMER, consumer_args, 0, CFG)),
                (run_partition, (CONSUMER, consumer_args, 1, CFG)),
                (run_partition, (PRODUCER, producer_args, LOAD_K, CFG)),
                (run_partition, (PRODUCER, producer_args, LOAD_V, CFG)),
                (run_partition, (PRODUCER, producer_args, UPCAST, CFG)),
            ],
            [4, 1, 1, 4], [CONSUMER_REGISTERS, TMA_REGISTERS, TMA_REGISTERS, OWN_REGISTERS],
        )  # fmt: skip


@gluon.jit
def start_gather(
    CONSUMER: gl.constexpr, consumer_args, PRODUCER: gl.constexpr, producer_args, CFG: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr
):  # fmt: skip
    """Start the partitions of a CTA that gathers keys by cp.async; the call returns when all have ended."""
    if CFG.NUM_CONSUMER_WGS == 1:
        gl.warp_specialize(
            [
                (run_partition, (CONSUMER, consumer_args, 0, CFG)),
                (run_partition, (PRODUCER, producer_args, GATHER, CFG)),
            ],
            [GATHER_WARPS], [GATHER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (run_partition, (CONSUMER, consumer_args, 0, CFG)),
                (run_partition, (CONSUMER, consumer_args, 1, CFG)),
                (run_partition, (PRODUCER, producer_args, GATHER, CFG)),
            ],
            [4, GATHER_WARPS], [CONSUMER_REGISTERS, GATHER_REGISTERS_2WG],
        )  # fmt: skip
