"""What `draftmark generate` does, in order: prompts → settings → decoding (with progress) → check → report."""
