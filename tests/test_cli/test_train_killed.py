# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Trainings that are killed again and again end like one that was left alone, bit for bit."""

import random
import shutil

import pytest
from trainings import TASKS, Trainings, check, differences, outcome


def kill_and_compare(name, kills, options, folder, seed=0):
    """Kill a training, at random moments and while a checkpoint is written by turns.

    Returns:
        int: How many kills have left something half-written.
    """
    rng = random.Random(seed)
    with Trainings(name, options, folder) as trainings:
        _, seconds = trainings.run(folder / 'alone')
        expected = outcome(folder / 'alone')
        done = writing = lives = 0
        while done < kills:
            lives += 1
            work_dir, ended, there = folder / f'life{lives}', False, 0
            while not ended and done < kills:
                anywhere = (rng.uniform(0, 0.9 * seconds), None)
                moment = (rng.uniform(0, 0.02), rng.choice([0, 0, 1])) if done % 2 else anywhere
                ended, _ = trainings.run(work_dir, moment)
                done += not ended
                writing += not ended and any(work_dir.glob('*.partial'))
                before, there = there, check(work_dir)
                assert there >= min(before, 1)
            if not ended:
                assert trainings.run(work_dir)[0]
            assert differences(outcome(work_dir), expected) == []
            shutil.rmtree(work_dir)
    print(f'{name}: {done} kills, {writing} in the middle of writing, {lives} trainings')
    return writing


def test_killed_classification(short_options, tmp_path):
    # Whether a kill of so few meets a checkpoint half-written is up to the disk.
    kill_and_compare('resnet18_digits_fgc', 3, short_options, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize('name', TASKS)
def test_killed_often(name, short_options, tmp_path):
    """Eight kills each: 24 over the three tasks."""
    assert kill_and_compare(name, 8, short_options, tmp_path, seed=1) > 0
