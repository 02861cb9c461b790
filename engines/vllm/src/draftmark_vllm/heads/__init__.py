"""Converter and model class that let vLLM load draftmark's draft heads as EAGLE-3 drafters."""
