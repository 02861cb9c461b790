"""Range of SGLang releases that this adapter supports. The drift tests report interfaces that changed."""

from draftmark_engines import SupportedVersions

SUPPORTED = SupportedVersions("SGLang", ("sglang",), oldest="0.5.17", below="0.5.24")
