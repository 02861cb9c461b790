"""Training and measurement of the head. Not part of its wheel."""
