# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Files that leave a marker behind if anybody runs what is in them."""

import io
import os
import pickle
import tarfile

import torch
from mmengine.logging import HistoryBuffer


class Bomb:
    """Unpickled, it makes a folder."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.makedirs, (self.marker, 0o777, True)


class Do:
    """Unpickled, it calls something."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def code(marker):
    """A config that is Python, and makes a folder."""
    return f"a = 1\nb = __import__('os').makedirs({str(marker)!r})\n"


def by_pickle(content, marker):
    return {**content, 'extra': Bomb(marker)}


def by_attributes(content, marker):
    """With nothing but types on mmengine's own list, which has ``getattr``: from a function to
    its module, to ``open``."""

    def call(function, kind, *args):  # torch allows this, which calls what it is given
        return Do(torch._tensor._rebuild_from_type_v2, function, kind, args, {})

    scope = Do(getattr, HistoryBuffer.__init__, '__globals__')
    known = call(Do(getattr, scope, 'get'), Do(getattr, {}, '__class__'), '__builtins__')
    look = Do(getattr, known, 'get')
    opener = call(look, Do(getattr, look, '__class__'), 'open')
    return {**content, 'extra': call(opener, torch.Tensor, str(marker), 'w')}


def by_config(content, marker):
    return {**content, 'meta': {**content.get('meta', {}), 'config': code(marker)}}


def by_cfg(content, marker):
    return {**content, 'meta': {**content.get('meta', {}), 'cfg': code(marker)}}


WAYS = dict(pickle=by_pickle, config=by_config)


def write_tar(path, marker):
    """The format of PyTorch 0.1, whose parts are pickles."""
    with tarfile.open(path, 'w') as archive:
        for name in ('storages', 'tensors', 'pickle'):
            content = pickle.dumps(Bomb(marker))
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
