"""Functions and small dataclasses that the recipes share. Each module has a single purpose; none imports a recipe.

Recipes import this package before torch: it raises the threshold of Python's garbage collector, because repeated scans
of the many long-lived objects that the libraries create at import take half a second.
`parallel.shutdown.user_mistakes_end_here` restores the threshold.
"""

import gc

from common import launcher as launcher  # first, because the launcher may end during the other imports
from common.versions import exit_if_broken

GC_THRESHOLD = gc.get_threshold()  # Python's default
gc.set_threshold(100_000, *GC_THRESHOLD[1:])
exit_if_broken()
