# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
from command_line import demo_checkpoint, run_tool, short_options, trained  # noqa: F401
