"""How the head was trained and measured. Not part of its wheel."""
