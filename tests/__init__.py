"""The tests of hf_dspark, one file for each module; `reference.py`, `tiny.py` and `drafters.py` serve them."""

import os

# Tiny models gain nothing from a second thread, and lose much to it where cores are shared.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
# Rounds that tests look at must not depend on the clock: whole blocks, unless a test names a policy or a profile.
os.environ.setdefault("HF_DSPARK_NO_PROFILE", "1")
