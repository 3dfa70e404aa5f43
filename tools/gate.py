# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
from fgc_mm.cli.main import run_tool

run_tool('gate')
