"""The entry point that vLLM calls in each of its processes: its backend CUSTOM, and the model of our draft heads."""

from __future__ import annotations

from draftmark_engines import EngineError

from .heads import model_name

PATH = "draftmark_vllm.backend.DraftmarkBackend"
_other: str | None = None


def register() -> None:
    """Claim vLLM's one slot for a backend from outside, CUSTOM. May be called again.

    Nothing is checked here, as vLLM calls this for users of other backends too: what is wrong is said by
    `check_claim` and by the backend when CUSTOM is chosen.
    """
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    global _other
    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != PATH:
        _other = custom.get_path()
    register_backend(custom, PATH)
    if model_name.ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(model_name.ARCHITECTURE, model_name.PATH)


def check_claim() -> None:
    """Raise EngineError if another plugin had claimed CUSTOM before."""
    if _other is not None:
        raise EngineError(
            f"two plugins claim vLLM's backend CUSTOM, {_other} and {PATH}; set VLLM_PLUGINS to the one to load, "
            "VLLM_PLUGINS=draftmark for this one"
        )
