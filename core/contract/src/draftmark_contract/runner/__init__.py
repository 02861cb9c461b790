"""Runs items, keeps what they said, and draws the verdict."""
