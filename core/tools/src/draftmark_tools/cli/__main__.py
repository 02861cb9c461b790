"""Entry point of ``python -m draftmark_tools.cli``, equal to the console script ``draftmark``."""

import sys

from . import main

sys.exit(main())
