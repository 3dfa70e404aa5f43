# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""NaN and Inf: kept out of a training."""
