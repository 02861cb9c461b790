"""Adds this folder to the path, so that tests can import the helper modules in it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
