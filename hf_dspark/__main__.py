"""`python -m hf_dspark`."""

import sys

from .cli import main

sys.exit(main())
