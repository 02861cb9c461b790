"""The releases of SGLang whose interfaces this adapter was run or read against; a drift test names what moved."""

from draftmark_engines import SupportedVersions

SUPPORTED = SupportedVersions("SGLang", ("sglang",), oldest="0.5.17", below="0.5.24")
