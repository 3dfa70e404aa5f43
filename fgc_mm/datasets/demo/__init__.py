# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The demo data: handwritten digits in the layouts of real datasets."""
