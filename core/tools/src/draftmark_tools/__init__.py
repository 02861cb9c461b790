"""Tools around the core of draftmark: the command line, the checks of guard mode, and shapes of models.

* `draftmark_tools.cli`: the command ``draftmark``.
* `draftmark_tools.guard`: checks that read the device, with ``DRAFTMARK_GUARD=1``.
* `draftmark_tools.models`: shapes of layers from Hugging Face configurations. This part is public API.
"""
