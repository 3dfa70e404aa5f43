# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Lets the tests of this folder import its helper ``gated_resnets``."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
