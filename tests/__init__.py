"""The tests of hf_dspark, one file for each module; `reference.py`, `tiny.py` and `drafters.py` serve them."""

import os

os.environ.setdefault("TQDM_DISABLE", "1")
