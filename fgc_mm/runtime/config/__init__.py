# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Configs: read, and looked at before anything is built from them."""
