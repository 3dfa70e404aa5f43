# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Running a command: errors become messages, the process ends cleanly."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn, Optional

import torch.distributed as torch_dist

from ..errors import DataError, FgcError, RunError
from ..runtime.messages import explained, sentence
from ..runtime.untrusted.loading import guarded_loading


def run(main: Callable[[], Any], subject: Optional[str] = None, trust: bool = False) -> None:
    """Call a command's function; usage errors become one message, exit code 2.

    Args:
        main (Callable): The function.
        subject (str, optional): What to say of all other errors, such as 'the
            test failed'. Defaults to None, for what runs for days: they end with
            a traceback and a sentence, exit code 1.
        trust (bool): Whether checkpoints are loaded that could run code. Defaults to False.
    """
    code = 0
    try:
        with guarded_loading(trust), explained(subject) if subject else contextlib.nullcontext():
            main()
    except FgcError as error:
        code = error.exit_code
        # All ranks make the same mistake, but data and a failing run are met by one.
        if int(os.environ.get('RANK', 0)) == 0 or isinstance(error, (DataError, RunError)):
            # Out of a data worker it comes with a traceback before it.
            text = str(error).rpartition(f'{type(error).__name__}: ')[2].strip()
            print(f'error: {text}', file=sys.stderr)
    except Exception as error:
        if _lost_another(error) and not os.environ.get('FGC_MM_TRACEBACK'):
            print(
                'error: another process of this training has ended or does not answer any more '
                f'({error}). If it has said why, mend that; then go on with --resume',
                file=sys.stderr,
            )
            _leave(1)  # nothing is left to agree upon with the others
        code = 1  # in the middle of a run: where matters, too
        traceback.print_exc()
        print(f'error: the run was stopped by {sentence(error)}', file=sys.stderr)
    finally:
        distributed = torch_dist.is_available() and torch_dist.is_initialized()
        if distributed:
            torch_dist.destroy_process_group()
    if distributed:
        _leave(code)
    sys.exit(code)


def _lost_another(error: Exception) -> bool:
    """Whether the process group has broken down, as gloo and NCCL put it."""
    if not (torch_dist.is_available() and torch_dist.is_initialized()):
        return False
    signs = ('closed by peer', 'reset by peer', 'Broken pipe', 'imed out', 'imeout', 'NCCL error')
    return any(sign in str(error) for sign in signs)


def _leave(code: int) -> NoReturn:
    """End the process without tearing the interpreter down.

    Threads of the process group may still hold tensors when the interpreter
    goes away under them, and abort the process after its work is done.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
