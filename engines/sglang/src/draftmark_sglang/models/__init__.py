"""Model classes that SGLang loads by name, for SGLANG_EXTERNAL_MODEL_PACKAGE: draftmark's draft heads."""
