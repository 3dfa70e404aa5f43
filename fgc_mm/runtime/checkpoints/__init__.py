# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Checkpoints: written whole, found again, gone on from exactly, handed out."""
