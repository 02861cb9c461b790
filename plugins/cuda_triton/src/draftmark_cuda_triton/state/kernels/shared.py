"""Helpers of the plugin's package `kernels`, compiled or interpreted as this package is."""

import importlib
import os

_VARIANT = "interpreted_kernels" if os.environ.get("TRITON_INTERPRET") == "1" else "kernels"
_PACKAGE = f"{__name__.rsplit('.', 3)[0]}.{_VARIANT}"

INTERPRETED = importlib.import_module(f"{_PACKAGE}.inline").INTERPRETED
bound = importlib.import_module(f"{_PACKAGE}.inline").bound
convert = importlib.import_module(f"{_PACKAGE}.convert").convert
dot = importlib.import_module(f"{_PACKAGE}.tile").dot
inline = importlib.import_module(f"{_PACKAGE}.inline").inline
largest = importlib.import_module(f"{_PACKAGE}.reduce").largest
smallest = importlib.import_module(f"{_PACKAGE}.reduce").smallest
running_total = importlib.import_module(f"{_PACKAGE}.reduce").running_total
total = importlib.import_module(f"{_PACKAGE}.reduce").total
