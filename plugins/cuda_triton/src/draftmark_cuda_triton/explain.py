"""Explanation of the kernels of a batch: each choice of `heuristics` with its candidates and reason, for a person.

It calls the functions that choose, and assumes a KV cache that is contiguous and has adjacent heads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from draftmark import AttentionShape, BatchSize, DeviceProfile, Geometry, KernelChoice, Mode

from . import sizing
from .heuristics import chosen, common, select, split_kv, upcast
from .heuristics.sm90 import SM90, merged_block_ms, prefill_configs, reasons_against_sm90, rounds
from .support import TMA_PAGE_MULTIPLE, gathers_kv

HOPPER, GENERIC = "kernels_sm90 (Hopper, Gluon)", "kernels (any GPU, Triton)"


def explain(geometry: Geometry, batch: BatchSize) -> list[KernelChoice]:
    """Return the choices that lead to the kernels of a batch, in their order."""
    device = replace(geometry.device, kind="cuda")
    geometry = replace(geometry, device=device)
    if geometry.attention.chosen_width:
        choices = _chosen(geometry, batch)
    else:
        choices = _prefill(geometry, batch) if batch.mode is Mode.EXTEND else _decode_verify(geometry, batch)
    return [*choices, *_compiled(geometry, batch)]


def _chosen(geometry: Geometry, batch: BatchSize) -> Iterator[KernelChoice]:
    a, rows = geometry.attention, batch.q_len * batch.num_reqs
    config, splits = chosen.chosen_config(a, geometry.device), chosen.num_splits(geometry, batch.mode, rows)
    yield KernelChoice("kernels", GENERIC, "each row has its own list of keys")
    yield KernelChoice("tile", _describe(config), f"{a.group_size} heads of one row attend to the row's list")
    yield KernelChoice(
        "splits of the keys", str(splits),
        f"{rows} rows need {rows * chosen.ctas_per_row(geometry)} CTAs, and a split has at least "
        f"{chosen.MIN_SPLIT_KEYS} keys",
    )  # fmt: skip


def _decode_verify(geometry: Geometry, batch: BatchSize) -> Iterator[KernelChoice]:
    a, device = geometry.attention, geometry.device
    config = select.select_config(a, device, batch.q_len, num_reqs=batch.num_reqs)
    yield _family(a, device, config)
    yield from _products(a, config)
    yield _tile(a, config, batch, [one for one in select.config_candidates(a, device) if _same_family(one, config)])
    if config.kernel.is_sm90:
        yield _merged_heads(a, device, config, batch)
    yield _loads(a, device, config)
    most = split_kv.choose_num_splits(a, device, config, batch.q_len, batch.num_reqs, geometry.max_kv_len)
    splits = split_kv.even_splits(most, batch.num_reqs)
    size, resident = split_kv.ctas_per_split(a, config, batch.q_len), device.num_sms * config.ctas_per_sm
    waves = (waves * resident // size for waves in range(1, split_kv.MAX_WAVES + 1))
    even = f"; {splits} instead of {most} splits cut fewer equal requests" if splits != most else ""
    yield KernelChoice(
        "splits of the keys", str(splits),
        f"a split of all requests needs {size} CTAs, and {resident} are resident{even}",
        tuple(map(str, dict.fromkeys((splits, *waves)))),
    )  # fmt: skip
    yield KernelChoice(
        "combine", "second launch" if splits > 1 else "none",
        "partial results of cut requests are merged" if splits > 1 else "one split holds every key",
    )  # fmt: skip


def _prefill(geometry: Geometry, batch: BatchSize) -> Iterator[KernelChoice]:
    a, device = geometry.attention, geometry.device
    rows = (batch.q_len,) * batch.num_reqs
    lens = None if batch.prefix_len < 0 else (batch.prefix_len,) * batch.num_reqs
    if upcast.upcasts(a, device):
        pays = lens is not None and upcast.upcast_pays(a, rows, lens)
        reason = f"enough rows see each key: the limit is {upcast.UPCAST_MIN_ROWS} packed rows a key and one launch"
        reason = (
            reason if pays else "too few rows see each key" if lens else "the host does not bound the prefix lengths"
        )
        yield KernelChoice("e4m3 keys", "upcast once" if pays else "upcast in each tile", reason, UPCASTS)
        a = upcast.upcast_shape(a) if pays else a
    usual = sizing.prefill_config(replace(geometry, attention=a))
    planned = [split_kv.ExtendTiles(a, device, one) for one in prefill_configs(a, usual)]
    unsplit = split_kv.fastest_tiles(planned, rows, lens)
    split = unsplit.split(rows, lens)
    pays = split is not None and split.splitting_pays(rows, lens)
    used = (split if split is not None and pays else unsplit).config
    yield _family(a, device, used)
    yield from _products(a, used)
    candidates = (used, *(one.config for one in (*planned, *unsplit.when_split())))
    yield _tile(a, used, batch, list(dict.fromkeys(candidates)))
    yield _loads(a, device, used)
    if split is None:
        reason = f"the batch has more than {split_kv.MAX_SPLIT_ROW_TILES} row tiles or requests, or too few SMs"
    elif lens is None:
        reason = "the host does not know the lengths, so the device decides" if pays else "row tiles fill every CTA"
    else:
        reason = f"by estimate, splitting row tiles is {'faster' if pays else 'not faster'} for these lengths"
    most = 1 if split is None else split.num_splits
    yield KernelChoice("splits of the keys", str(most if pays else 1), reason, ("1", str(most)) if most > 1 else ())


UPCASTS = ("upcast once", "upcast in each tile")
PRODUCTS = ("16 bit, exact", "e4m3, q and weights rounded")


def _products(a: AttentionShape, config: common.KernelConfig) -> Iterator[KernelChoice]:
    """Yield the operands of a Hopper kernel's products over e4m3."""
    if a.kv_dtype != "float8_e4m3fn" or not config.kernel.is_sm90:
        return
    rounded = config.kernel is common.Kernel.SM90_ROUNDED
    reason = "AttentionShape.round_to_e4m3 allows it" if rounded else "the batch has up to 64 packed rows"
    if not rounded and not rounds(a):
        reason = f"{a.head_dim} elements a head" if a.round_to_e4m3 else "AttentionShape.round_to_e4m3 is False"
    yield KernelChoice("products", PRODUCTS[rounded], reason, PRODUCTS)


def _family(a: AttentionShape, device: DeviceProfile, config: common.KernelConfig) -> KernelChoice:
    if config.kernel.is_sm90:
        return KernelChoice("kernels", HOPPER, f"the device is sm_{SM90}, and the shape is served", (HOPPER, GENERIC))
    against = reasons_against_sm90(a, device)
    if not against:
        served = a.page_size % TMA_PAGE_MULTIPLE == 0 or gathers_kv(a)
        assert not served, "select_config takes the Hopper kernels for every shape that they serve"
        against = [f"e4m3 needs pages of a multiple of {TMA_PAGE_MULTIPLE} tokens, not {a.page_size}"]
    return KernelChoice("kernels", GENERIC, f"the Hopper kernels do not serve this: {against[0]}", (HOPPER, GENERIC))


def _tile(
    a: AttentionShape, config: common.KernelConfig, batch: BatchSize, candidates: list[common.KernelConfig]
) -> KernelChoice:
    rows = batch.q_len * a.group_size
    return KernelChoice(
        "tile", _describe(config),
        f"{batch.num_reqs} requests of {rows} packed rows: {batch.q_len} x {a.group_size} query heads of a KV head",
        tuple(dict.fromkeys(map(_describe, [config, *candidates]))),
    )  # fmt: skip


def _describe(config: common.KernelConfig) -> str:
    groups = f", {config.num_consumer_wgs} consumer groups" if config.num_consumer_wgs > 1 else ""
    ctas = f", {config.ctas_per_sm} CTAs an SM" if config.ctas_per_sm > 1 else ""
    return f"{config.block_m} rows x {config.block_n} keys, {config.num_stages} stages{groups}{ctas}"


def _same_family(one: common.KernelConfig, other: common.KernelConfig) -> bool:
    return one.kernel.is_sm90 == other.kernel.is_sm90


def _merged_heads(
    a: AttentionShape, device: DeviceProfile, config: common.KernelConfig, batch: BatchSize
) -> KernelChoice:
    block_ms, rows = merged_block_ms(a), batch.q_len * a.group_size
    if not block_ms:
        return KernelChoice("KV heads of a tile", "1", f"heads of {a.head_dim} fill cache lines, or cannot be paired")
    pairs = f"the batch has {batch.num_reqs * a.num_kv_heads} (request, KV head) pairs for {device.num_sms} SMs"
    reason = f"{2 * rows} rows of two heads exceed the largest tile of {block_ms[-1]}"
    reason = reason if 2 * rows > block_ms[-1] else pairs
    return KernelChoice("KV heads of a tile", str(config.kv_heads_per_tile), reason, ("1", "2"))


def _loads(a: AttentionShape, device: DeviceProfile, config: common.KernelConfig) -> KernelChoice:
    config = select.adapt_to_cache(a, device, config, True, config.kernel.is_sm90)
    if not config.kernel.is_sm90:
        in_boxes = config.kernel is common.Kernel.BOXES
        chosen = "TMA" if in_boxes else "pointers"
        reason = f"a tile of {config.block_n} keys {'fits' if in_boxes else 'does not fit'} one box of a page"
        return KernelChoice("loads", chosen, reason, ("TMA", "pointers"))
    gathers = config.kernel is common.Kernel.SM90_GATHER
    chosen = "gather (cp.async)" if gathers else "TMA, whole heads" if config.box_full_head else "TMA"
    reason = f"pages of {a.page_size} tokens, {a.head_dim} elements of {a.kv_dtype} a head"
    return KernelChoice("loads", chosen, reason, ("TMA", "TMA, whole heads", "gather (cp.async)"))


def _compiled(geometry: Geometry, batch: BatchSize) -> Iterator[KernelChoice]:
    """Yield, for each kernel that batches of this mode launch, the place of its compiled code."""
    from .compiled.folder import kernel_store
    from .compiled.source import KernelSource
    from .kernel_list import kernels_of

    store, places = kernel_store(), dict[str, Counter[str]]()
    for spec in kernels_of(replace(geometry, modes=(batch.mode,))):
        entry = store.find(KernelSource.of(spec.source(), spec.target, dict(spec.options)))
        place = "not compiled yet" if entry is None else "installed wheel" if entry.shipped else str(store.root)
        places.setdefault(spec.name.removeprefix(f"{__package__}."), Counter())[place] += 1
    for name, found in places.items():
        chosen = ", ".join(
            f"{count} in {place}" if place[0] == "/" else f"{count} {place}" for place, count in found.items()
        )
        yield KernelChoice(name, chosen, f"compiled forms that {batch.mode} batches of this geometry launch")
