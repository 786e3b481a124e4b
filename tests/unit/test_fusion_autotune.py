"""The search tries what may be good, contains what one starts with, and keeps the best."""

from __future__ import annotations

import random

import pytest

from braid.compat.horovod.fusion.autotune import Autotuner, Settings, TuneOptions, grid_around
from braid.errors import ConfigError

MIB = 1 << 20
DEFAULT = Settings(128 * MIB, 0.001)


def search(start: Settings, speed: object, seed: int = 0, **options: float) -> Autotuner:
    """Let a tuner work on a machine of which `speed(settings)` is known, with 5 % of noise."""
    tuner = Autotuner(start, TuneOptions(noise=0.1, **options))  # type: ignore[arg-type]
    random_, now_s, settings = random.Random(seed), 0.0, start
    while not tuner.done:
        settings = tuner.note(["x"], MIB, now_s) or settings
        now_s += MIB / (speed(settings) * random_.uniform(0.95, 1.05))  # type: ignore[operator]
    return tuner


@pytest.mark.parametrize("start", [DEFAULT, Settings(0, 0.0), Settings(12345, 0.2)])
def test_the_grid_contains_the_defaults_and_what_one_starts_with(start):
    assert {DEFAULT, start} <= set(grid_around(start))


def _speed(best: Settings) -> object:
    grid = grid_around(DEFAULT)
    thresholds = sorted({s.threshold_bytes for s in grid})
    times = sorted({s.cycle_time_s for s in grid})

    def speed(settings: Settings) -> float:
        along = thresholds.index(settings.threshold_bytes) - thresholds.index(best.threshold_bytes)
        across = times.index(settings.cycle_time_s) - times.index(best.cycle_time_s)
        return 1e9 / (1 + 0.1 * along**2 + 0.1 * across**2)

    return speed


@pytest.mark.parametrize("best", [DEFAULT, Settings(4 * MIB, 0.0), Settings(32 * MIB, 0.01)])
def test_the_search_comes_near_the_best_in_twenty_samples(best):
    speed = _speed(best)
    for seed in range(5):
        found = search(DEFAULT, speed, seed).best
        assert speed(found) > 0.75 * speed(best), (found, best)


@pytest.mark.parametrize("fixed", ["threshold", "cycle_time"])
def test_what_is_not_searched_stays(fixed):
    tuner = search(DEFAULT, _speed(Settings(4 * MIB, 0.0)), **{fixed: False})
    place = 0 if fixed == "threshold" else 1
    assert {settings[place] for settings, _ in tuner.samples} == {DEFAULT[place]}
    assert tuner.best[1 - place] != DEFAULT[1 - place]


def test_the_default_stays_where_nothing_is_better():
    assert search(DEFAULT, lambda s: 1e9 if s == DEFAULT else 1e8).best == DEFAULT


def test_warming_up_is_thrown_away():
    tuner = Autotuner(DEFAULT, TuneOptions(warmup_samples=1, steps_per_sample=2, max_samples=1))
    changes = [tuner.note(["x"], 10, float(now)) for now in range(7)]
    assert changes == [None] * 7
    assert tuner.done
    assert tuner.samples == [(DEFAULT, 10.0)]


def _exchanges(settings: Settings) -> int:
    """Of 40 tensors in the ten milliseconds of a backward."""
    return max(1, min(40, int(0.01 / (settings.cycle_time_s + 1e-4))))


@pytest.mark.parametrize("seed", range(3))
def test_settings_are_judged_by_whole_steps_however_many_exchanges_they_have(seed):
    random_, now_s, settings = random.Random(seed), 0.0, DEFAULT
    tuner = Autotuner(settings, TuneOptions(noise=0.1))
    while not tuner.done:
        count = _exchanges(settings)
        now_s += 0.1  # forward, in which nothing is sent
        for number in range(count):
            now_s += (0.01 / count + 0.0005) * random_.uniform(0.98, 1.02)
            names = [f"x{n}" for n in range(40) if n * count // 40 == number]
            settings = tuner.note(names, MIB * len(names), now_s) or settings
    assert _exchanges(tuner.best) <= 2


def test_names_that_never_come_again_do_not_keep_the_search_from_its_end():
    tuner = Autotuner(DEFAULT, TuneOptions(warmup_samples=0, steps_per_sample=1, max_samples=1))
    for number in range(100_000):
        tuner.note([f"noname.{number}"], 10, float(number))
    assert tuner.samples == [(DEFAULT, 10.0)]


@pytest.mark.parametrize(
    "wrong", [{"warmup_samples": -1}, {"steps_per_sample": 0}, {"max_samples": 0}, {"noise": 0.0}]
)
def test_searches_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ConfigError):
        TuneOptions(**wrong)
