"""draftmark as SGLang's attention backend, by SGLang's own plugin mechanism (`sglang.srt.plugins`).

`plugin` says what is registered and `hooks` what is hooked; `refusals` what is not served. Per forward, `phases`
reads what SGLang is about to run, `page_table`, `window_pool` and `trees` translate it into a `ForwardBatch` over the
buffers of `batches`, and `attention` runs it on the backends of the model's layer shapes. `backend` and `draft_steps`
are the two classes that SGLang calls. Importing this module imports neither SGLang nor torch.
"""

NAME = "draftmark"
"""What users write behind ``--attention-backend``."""


def register() -> None:
    """Register the backend, its name and its hooks with SGLang; the entry point, run once in each of its processes."""
    from .plugin import register_all

    register_all()


__all__ = ["NAME", "register"]
