"""Command `draftmark generate`: prompts → settings → decoding (with progress) → check → report."""
