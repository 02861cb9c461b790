"""Entry point that vLLM calls in each of its processes. It registers CUSTOM and the model class of draft heads."""

from __future__ import annotations

from draftmark_engines import EngineError

from .heads import model_name

PATH = "draftmark_vllm.backend.DraftmarkBackend"
_other: str | None = None


def register() -> None:
    """Register draftmark as vLLM's CUSTOM, its one slot for external backends. Repeated calls are allowed.

    Nothing is checked here, because vLLM calls this for users of other backends too. `check_claim` and the backend
    raise errors once CUSTOM is chosen.
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
    """Raise EngineError if another plugin registered the backend CUSTOM before draftmark did."""
    if _other is not None:
        raise EngineError(
            f"two plugins register vLLM's backend CUSTOM, {_other} and {PATH}; set VLLM_PLUGINS to the plugin to load, "
            "VLLM_PLUGINS=draftmark for this one"
        )
