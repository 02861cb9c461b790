"""Entry point that vLLM calls in each of its processes. It registers CUSTOM and the model class of draft heads."""

from __future__ import annotations

from draftmark_engines import EngineError

from .heads import model_name

PATH = "draftmark_vllm.backend.DraftmarkBackend"


class Claim:
    """This process's claim to vLLM's backend CUSTOM.

    Attributes:
        other: path of the backend that another plugin registered as CUSTOM before; None if there is none.
    """

    other: str | None = None

    def make(self) -> None:
        """Register draftmark's backend as CUSTOM, and keep the path of another plugin's backend."""
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        custom = AttentionBackendEnum.CUSTOM
        if custom.is_overridden() and custom.get_path() != PATH:
            self.other = custom.get_path()
        register_backend(custom, PATH)

    def check(self) -> None:
        """Raise EngineError if another plugin registered the backend CUSTOM before draftmark did."""
        if self.other is not None:
            raise EngineError(
                f"two plugins register vLLM's backend CUSTOM, {self.other} and {PATH}; set VLLM_PLUGINS to the plugin "
                "to load, VLLM_PLUGINS=draftmark for this one"
            )


CLAIM = Claim()


def register() -> None:
    """Register draftmark as vLLM's CUSTOM, its one slot for external backends. Repeated calls are allowed.

    Nothing is checked here, because vLLM calls this for users of other backends too. `Claim.check` and the backend
    raise errors once CUSTOM is chosen.
    """
    from vllm.model_executor.models.registry import ModelRegistry

    CLAIM.make()
    if model_name.ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(model_name.ARCHITECTURE, model_name.PATH)
