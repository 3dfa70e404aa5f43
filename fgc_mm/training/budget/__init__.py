# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Training ends at a given share of the computation."""
