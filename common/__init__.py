"""What the recipes share: plain functions and small dataclasses, one question a module, no recipe imported.

A recipe imports it before torch: what the libraries make when they are imported is no garbage, and to look through all
of it again and again takes half a second. `parallel.shutdown.user_mistakes_end_here` sets it back.
"""

import gc

from common import launcher as launcher  # first: the launcher may end while the rest is imported
from common.versions import exit_if_broken

GC_THRESHOLD = gc.get_threshold()  # Python's own
gc.set_threshold(100_000, *GC_THRESHOLD[1:])
exit_if_broken()
