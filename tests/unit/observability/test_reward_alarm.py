from __future__ import annotations

from rlhf_mcore.observability.alarms import RewardAlarm


def find_alarms(alarm: RewardAlarm, *means: float, name: str = "reward/mean", span: float = 1.0) -> list[int]:
    """Return the numbers of the steps with an alarm."""
    made = ({name: mean, "reward/min": 0.0, "reward/max": span} for mean in means)
    return [number for number, metrics in enumerate(made) if list(alarm.lines(metrics))]


def test_a_jump_is_told_once_and_noise_and_learning_are_not() -> None:
    noise = [0.50, 0.53, 0.47, 0.51, 0.49, 0.52, 0.48, 0.50]  # a deviation of 0.0187
    assert find_alarms(RewardAlarm(5.0, 8), *noise, 0.58, 0.42) == []  # 4.3 deviations
    assert find_alarms(RewardAlarm(5.0, 8), *noise, 0.60) == [8]  # 5.3
    assert find_alarms(RewardAlarm(5.0, 8), *noise, 1.0, 1.0, 1.0) == [8]
    assert find_alarms(RewardAlarm(5.0, 8), *noise, 0.0) == [8]
    assert find_alarms(RewardAlarm(0.0, 8), *noise, 1.0) == []
    assert find_alarms(RewardAlarm(5.0, 8), *(n / 40 for n in range(41))) == []  # from 0 to 1 in forty steps


def test_steady_scores_have_no_deviation_to_compare_with() -> None:
    assert find_alarms(RewardAlarm(5.0, 4), *[0.0] * 6, 0.04, 0.0) == []  # the first success of a hard task
    assert find_alarms(RewardAlarm(5.0, 4), *[0.0] * 6, 0.06) == [6]
    assert find_alarms(RewardAlarm(5.0, 4), 1.0, 0.0) == []  # too few steps before


def test_sources_have_histories_of_their_own() -> None:
    alarm = RewardAlarm(5.0, 4)
    for _ in range(4):
        assert not list(alarm.lines({"reward/mean/a": 0.0, "reward/mean/b": 1.0, "reward/mean": 0.5}))
    (line,) = alarm.lines({"reward/mean/a": 0.0, "reward/mean/b": 0.25, "reward/mean": 0.1, "reward/max": 1.0})
    assert "of data source 'b' is 0.25, a jump from the mean 1 of the previous 4 steps" in line


def test_a_mean_of_few_scores_varies() -> None:
    """4 of 64 responses with 0.15, after 17 steps without: 2 deviations of the mean. 32 responses are 8 deviations."""
    for successes, is_told in ((4, False), (32, True)):
        alarm, share = RewardAlarm(5.0, 20), successes / 64
        for step in range(1, 18):
            assert not list(alarm.lines({"reward/mean": 0.0, "reward/std": 0.0, "progress/samples": 64.0 * step}))
        deviation = 0.15 * (share * (1 - share)) ** 0.5
        last = {"reward/mean": 0.15 * share, "reward/max": 0.15, "reward/std": deviation, "progress/samples": 64.0 * 18}
        assert bool(list(alarm.lines(last))) is is_told
