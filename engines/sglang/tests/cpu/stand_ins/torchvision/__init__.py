"""Stand-in for tests on a CPU: SGLang and transformers use torchvision for images only."""

from draftmark_sglang_judge.absent import names_of, stand_in

__version__ = "0.0"
stand_in((__name__,))
__getattr__ = names_of(__name__)
