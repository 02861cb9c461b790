"""A draft head for SmolLM2-135M-Instruct: files only; draftmark finds them by the entry point."""
