# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""A dense network teaches the gated one what to compute."""
