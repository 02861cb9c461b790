"""Stand-in for tests on a CPU: SGLang and transformers import it for images alone."""

from absent import stand_in_for

__version__ = "0.0"
__getattr__ = stand_in_for(__name__)
