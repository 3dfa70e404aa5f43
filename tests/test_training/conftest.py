# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
from toy_task import build, clean_up, digits_cfg, make_runner, toy  # noqa: F401
