"""Judges backends that were written for an engine, not for draftmark: `draftmark judge ENGINE:TARGET`.

What an engine brings is in `target`. `driver` is a way to run one step, and `questions` makes of it what is asked.
"""
