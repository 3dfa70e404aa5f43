# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Files of other people: loaded without running what is in them."""
