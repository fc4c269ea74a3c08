"""Functions and small dataclasses that the recipes share. Each module has a single purpose; none imports a recipe.

A recipe imports this package before torch, because it raises the threshold of Python's garbage collector. The libraries
create many long-lived objects when they are imported; scanning them repeatedly takes half a second.
`parallel.shutdown.user_mistakes_end_here` restores the threshold.
"""

import gc

from common import launcher as launcher  # first, because the launcher's process may end before the other imports
from common.versions import exit_if_broken

GC_THRESHOLD = gc.get_threshold()  # Python's default
gc.set_threshold(100_000, *GC_THRESHOLD[1:])
exit_if_broken()
