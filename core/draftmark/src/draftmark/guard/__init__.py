"""Checks that cost time, for an engine under development: ``DRAFTMARK_GUARD=1``.

Checks of shapes, types and host numbers are free and always run. Checks of a tensor's contents read the device, so they
run in guard mode only. They run in eager steps; a captured region cannot read the device.
"""
