"""Entry point of ``python -m draftmark.cli``, equal to the console script ``draftmark``."""

import sys

from . import main

sys.exit(main())
