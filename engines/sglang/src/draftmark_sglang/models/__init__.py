"""Model classes of draftmark's draft heads. SGLang loads them by name (SGLANG_EXTERNAL_MODEL_PACKAGE)."""
