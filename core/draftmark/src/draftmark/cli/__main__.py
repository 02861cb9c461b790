"""``python -m draftmark.cli``: the console script without its script."""

import sys

from . import main

sys.exit(main())
