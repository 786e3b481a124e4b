"""Claims of braid.launch.chaos: seeded plans, and figures from a log of events."""

from __future__ import annotations

import errno
import itertools
import math
import signal
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import tyro
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from braid.cli import main
from braid.elasticity.bit_flips import flip_bits_on_signal
from braid.elasticity.parts import TensorBox
from braid.elasticity.weight_digest import WeightBox, weight_digest
from braid.errors import ConfigError
from braid.launch.chaos.account import Strike, account_of
from braid.launch.chaos.comparison import WeightComparison, compared, digests_of
from braid.launch.chaos.driver import ChaosOptions, ChaosRun, run_chaos
from braid.launch.chaos.page import chaos_figures, members_picture
from braid.launch.chaos.plan import KINDS, Fault, choose_ranks, plan_faults, signals_of
from braid.parallel.gradients import ParamTable
from braid.runtime.diagnose.run_events import RunEvent

KILLED = "was killed by signal 9 (SIGKILL)"


def test_a_plan_depends_on_its_seed_only_and_deals_every_kind():
    plan = plan_faults(3, KINDS, 10.0, 300.0)
    assert plan == plan_faults(3, KINDS, 10.0, 300.0) != plan_faults(4, KINDS, 10.0, 300.0)
    assert {fault.kind for fault in plan[: len(KINDS)]} == set(KINDS)
    times = [fault.at_s for fault in plan]
    assert times == sorted(times)
    assert len(times) in {29, 30}
    assert times[-1] < 300.0


@pytest.mark.parametrize(
    ("kind", "members", "newcomers", "ranks"),
    [
        ("kill", (0, 1, 2), (3,), (1,)),
        ("kill", (2,), (3, 4), ()),
        ("two", (0, 1, 2), (), (1, 2)),
        ("two", (0, 1), (), ()),
        ("newcomer", (0, 1), (4,), (4,)),
        ("newcomer", (0, 1), (), ()),
        ("stop", (5,), (), (5,)),
        ("bitflip", (0, 1), (), ()),
    ],
)
def test_a_fault_strikes_ranks_without_which_the_state_remains(kind, members, newcomers, ranks):
    assert choose_ranks(Fault(0.0, kind, 0.5, 0.0), members, newcomers) == ranks


def test_every_stop_is_followed_by_a_signal_to_go_on():
    for kind in ("stop", "slow"):
        signums = [sent.signum for sent in signals_of(Fault(0.0, kind, 0.0, 3.2), (1,))]
        assert signums == [SIGSTOP, SIGCONT] * (8 if kind == "slow" else 1)
    assert signals_of(Fault(0.0, "newcomer", 0.0, 1.5), (4,)) == ((1.5, 4, SIGKILL),)


def test_a_bit_of_a_gradient_flips_between_two_signals():
    model = nn.Linear(4, 1, bias=False)
    handler = signal.getsignal(signal.SIGUSR2)
    try:
        flip = flip_bits_on_signal()
        records = ParamTable.of(model).records
        grads = []
        for _ in range(3):
            model.weight.grad = None
            model(torch.ones(1, 4)).sum().backward()
            flip(records)
            grads.append(model.weight.grad[0].tolist())
            signal.raise_signal(signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, handler)
    assert grads == [[1.0] * 4, [1.125, 1.0, 1.0, 1.0], [1.0] * 4]


def _events(*more: RunEvent) -> list[RunEvent]:
    started = [RunEvent(0.0, "started", rank, pid=10 + rank) for rank in range(3)]
    first = RunEvent(9.0, "epoch", epoch=0, members=(0, 1, 2), num_steps=0)
    return [*started, first, *more]


def _steps(ranks: tuple[int, ...], first: int, *times: float) -> list[tuple[int, int, float]]:
    return [(rank, first + n, t) for n, t in enumerate(times) for rank in ranks]


def test_a_kill_is_named_and_its_recovery_ends_with_a_step_of_the_survivors():
    events = _events(
        RunEvent(13.6, "lost", 1, text=KILLED),
        RunEvent(13.6, "started", 3, pid=20),
        RunEvent(13.7, "epoch", epoch=1, members=(0, 2), num_steps=4),
        RunEvent(18.0, "epoch", epoch=2, members=(0, 2, 3), num_steps=7),
    )
    steps = _steps((0, 1, 2), 1, 10.0, 11.0, 12.0, 13.0)
    steps += _steps((0, 2), 5, 15.0, 16.5, 18.0) + _steps((0, 2, 3), 8, 19.0, 20.0)
    account = account_of([Strike(13.5, "kill", (1,))], events, steps, 20.0)
    (fault,) = account.faults
    assert (fault.cause, fault.judgement, fault.recovery_s) == (f"rank 1 {KILLED}", "right", 1.5)
    assert account.num_steps == 8
    assert account.num_lost_steps == 0
    assert account.rates == {2: pytest.approx(1 / 1.5), 3: pytest.approx(1.0)}
    # 3.5 s with three ranks, 4.5 s with the survivors, 2 s with three ranks
    assert account.num_possible == pytest.approx(3.5 + 4.5 / 1.5 + 2.0)
    assert account.goodput == pytest.approx(8 / 8.5)
    assert account.num_possible_by_all == pytest.approx(10.0)


def test_a_stop_lowers_the_goodput_also_if_a_process_always_starts():
    steps = [*_steps((0, 1, 2), 1, 10.0, 11.0), (0, 3, 12.0), (1, 3, 12.501)]
    steps += _steps((0, 1, 2), 4, 17.0, 18.0)
    events = _events(
        RunEvent(9.5, "started", 3),
        RunEvent(12.5, "stopped", 1, text="SIGSTOP"),
        RunEvent(16.5, "continued", 1),
    )
    account = account_of([Strike(12.5, "stop", (1,), 4.0)], events, steps, 18.0)
    assert account.faults[0].recovery_s == 4.5  # rank 1 had just finished its step when it stopped
    assert account.rates == {3: 1.0}
    assert account.goodput == pytest.approx(4 / 8)


def test_a_run_without_faults_has_a_goodput_of_one():
    steps = _steps((0, 1, 2), 1, 10.0, 10.1, 11.5, 11.5, 12.0)
    assert account_of([], _events(), steps, 12.0).goodput == pytest.approx(1.0)


def test_a_step_from_which_the_run_does_not_go_on_is_lost():
    events = _events(
        RunEvent(12.1, "lost", 1, text=KILLED),
        RunEvent(12.2, "epoch", epoch=1, members=(0, 2), num_steps=2),
    )
    steps = [*_steps((0, 1, 2), 1, 10.0, 11.0), (1, 3, 12.0), *_steps((0, 2), 3, 13.0)]
    account = account_of([Strike(12.05, "kill", (1,))], events, steps, 13.0)
    assert (account.num_lost_steps, account.num_steps) == (1, 2)


@pytest.mark.parametrize(
    ("strike", "event", "judgement"),
    [
        (Strike(11.0, "kill", (1,)), None, "unknown"),
        (Strike(11.0, "kill", (1,)), RunEvent(11.1, "lost", 1, text="exited with code 1"), "wrong"),
        (Strike(11.0, "leave", (1,)), RunEvent(12.0, "left", 1, text="was asked to end"), "right"),
        (Strike(11.0, "stop", (1,), 2.0), RunEvent(11.1, "stopped", 1, text="SIGSTOP"), "right"),
        (Strike(11.0, "stop", (1,), 2.0), RunEvent(15.0, "stopped", 1, text="SIGSTOP"), "unknown"),
        (Strike(11.0, "disk", (), 2.0), RunEvent(11.1, "notice", text="cannot write to x"), "right"),
    ],
)  # fmt: skip
def test_causes_are_judged_by_the_log_of_the_launcher(strike, event, judgement):
    events = _events(*[event] * (event is not None))
    account = account_of([strike], events, _steps((0, 1, 2), 1, 10.0, 16.0), 20.0)
    assert [fault.judgement for fault in account.faults] == [judgement]
    assert account.num_right == (judgement == "right")


@pytest.mark.parametrize(("missing", "judgement"), [(False, "right"), (True, "unknown")])
def test_a_full_disk_that_refuses_lines_must_be_named(missing, judgement):
    steps = _steps((0, 1), 1, 10.0, 11.0) + _steps((0, 1), 4 if missing else 3, 13.0)
    account = account_of([Strike(11.5, "disk", (), 1.0)], _events(), steps, 20.0)
    assert [fault.judgement for fault in account.faults] == [judgement]


def test_a_full_disk_that_ends_a_rank_is_wrong():
    notice = RunEvent(11.1, "notice", text="cannot write to x: No space left on device")
    died = RunEvent(11.2, "failed", 0, text="raised OSError: No space left on device")
    strikes = [Strike(10.5, "kill", (1,)), Strike(11.0, "disk", (), 2.0)]
    killed = RunEvent(10.6, "lost", 1, text=KILLED)
    events = _events(killed, notice, died)
    account = account_of(strikes, events, _steps((0, 1, 2), 1, 10.0), 20.0)
    assert [(f.strike.kind, f.cause, f.judgement) for f in account.faults] == [
        ("kill", f"rank 1 {KILLED}", "right"),
        ("disk", "rank 0 raised OSError: No space left on device", "wrong"),
    ]


def test_only_the_last_full_disk_before_a_death_is_wrong():
    died = RunEvent(12.1, "failed", 0, text="raised OSError: No space left on device")
    strikes = [Strike(at_s, "disk", (), 0.1) for at_s in (10.5, 12.0, 13.5)]
    steps = _steps((0, 1), 1, *[10.0 + second for second in range(6)])
    account = account_of(strikes, _events(died), steps, 20.0)
    assert [fault.judgement for fault in account.faults] == ["right", "wrong", "right"]


def test_a_full_disk_without_a_step_after_it_may_have_refused_lines():
    account = account_of([Strike(11.0, "disk", (), 1.0)], _events(), _steps((0,), 1, 10.0), 20.0)
    assert [fault.judgement for fault in account.faults] == ["unknown"]


@pytest.mark.parametrize(
    ("strikes", "exit_code", "goodput", "problem"),
    [
        ([], 0, "100 %", "no fault has struck the run, so nothing was tested"),
        ([Strike(10.5, "disk", (), 0.1)], 1, "none", "the run has failed with exit code 1"),
        ([Strike(10.5, "disk", (), 0.1)], 0, "100 %", ""),
    ],
)
def test_only_a_run_that_was_struck_and_ended_well_passes(strikes, exit_code, goodput, problem):
    account = account_of(strikes, _events(), _steps((0, 1, 2), 1, 10.0, 11.0, 12.0), 12.0)
    run: Any = None
    chaos = ChaosRun(run, ChaosOptions(), account, exit_code, False, (), WeightComparison())
    problems = "; ".join(chaos.problems)
    assert (problems.startswith(problem), bool(problems)) == (True, bool(problem))
    figures = dict(chaos_figures(chaos))
    assert figures["goodput"].startswith(goodput)
    assert figures["causes"] == ("1 of 1 right" if strikes else "none, as no fault has struck")


def test_a_page_that_cannot_be_written_costs_no_figure(tmp_path, monkeypatch, capsys):
    account = account_of([], _events(), _steps((0, 1, 2), 1, 10.0, 11.0), 11.0)
    run: Any = SimpleNamespace(path=tmp_path)
    chaos = ChaosRun(run, ChaosOptions(), account, 0, False, (), WeightComparison())

    def refuse(_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("braid.launch.chaos.driver.run_chaos", lambda *_: chaos)
    monkeypatch.setattr("braid.launch.chaos.page.write_chaos_page", refuse)
    assert main(["chaos", "run", "-n", "3", "--min-ranks", "1", "x.py"]) == 1
    text = capsys.readouterr().out
    assert "goodput           100 %" in text
    assert f"cannot be written to {tmp_path}: No space left on device; free some space" in text


def test_a_rank_that_is_named_without_a_fault_is_wrong():
    events = _events(RunEvent(11.0, "lost", 2, text=KILLED))
    account = account_of([Strike(10.5, "stop", (1,), 1.0)], events, [], 20.0)
    assert [(f.strike.kind, f.judgement) for f in account.faults] == [
        ("stop", "unknown"),
        ("none", "wrong"),
    ]
    assert math.isnan(account.goodput)


def _pieces(weight: torch.Tensor, bounds: list[int]) -> list[WeightBox]:
    """Return the rows of a weight in pieces, as ranks have them."""
    pieces = []
    for first, end in itertools.pairwise([0, *bounds, len(weight)]):
        rows = weight[first:end]
        box = TensorBox.all_of(rows)._replace(whole=tuple(weight.shape), offset=(first, 0))
        pieces.append(WeightBox("w", box, rows))
    return pieces


def _row(weight: torch.Tensor | WeightBox, step: int = 10, order: int = 0, epoch: int = 0) -> Any:
    boxes = [weight] if isinstance(weight, WeightBox) else _pieces(weight, [])
    digest = weight_digest(boxes, step, order=order)
    return {"step": step, "weights_training": 1, "weights_epoch": epoch, **digest}


@given(
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.complex64]),
    bounds=st.lists(st.integers(0, 6), max_size=3).map(sorted),
    bit=st.integers(0, 6 * 4 * 16 - 1),
    seed=st.integers(0, 99),
)
def test_digests_of_pieces_add_up_and_show_one_flipped_bit(dtype, bounds, bit, seed):
    weight = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)).to(dtype)
    before = weight.clone()
    expected = digests_of({0: [_row(weight)]})
    rows = {rank: [_row(piece)] for rank, piece in enumerate(_pieces(weight, bounds))}
    comparison = compared(digests_of(rows), expected)
    assert (comparison.num_steps, comparison.first_unequal) == (1, 0)
    assert torch.equal(weight, before)

    flat = weight.view(torch.uint8).view(-1)
    flat[bit // 8 % len(flat)] ^= 1 << bit % 8
    comparison = compared(digests_of({0: [_row(weight)]}), expected)
    assert comparison.first_unequal == 10
    assert "after step 10 the weights are not as" in comparison.problem


@given(st.tuples(*[st.integers(1, 5)] * 3), st.permutations(range(3)))
def test_digests_depend_on_indices_and_not_on_strides(shape, order):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    other = weight.permute(order).contiguous().permute([order.index(dim) for dim in range(3)])
    first = weight.flatten()[:1].view(())
    for pair in ((weight, other), (first, first.clone())):
        rows = [_row(WeightBox("w", TensorBox.all_of(x), x)) for x in pair]
        assert rows[0] == pytest.approx(rows[1], rel=1e-12)
        assert rows[0]["weights_digest"] == rows[1]["weights_digest"]
    if weight.numel() > 1:
        flat = weight.view(1, -1)
        assert _row(flat.roll(1))["weights_digest"] != _row(flat)["weights_digest"]


def test_blocks_of_a_large_weight_add_up():
    large = torch.arange(600_000.0).view(6, 100_000)
    for weight in (large, large.T.contiguous()):
        rows = {rank: [_row(piece)] for rank, piece in enumerate(_pieces(weight, [1, 3]))}
        digests = (digests_of(rows), digests_of({0: [_row(weight)]}))
        assert digests[0][1, 10][:2] == digests[1][1, 10][:2]


def test_a_step_that_was_done_again_counts_with_its_last_members():
    weight = torch.ones(6, 4)
    halves = _pieces(weight, [3])
    rows = {
        0: [_row(halves[0], 10), _row(halves[0], 20)],  # dies before its peer ends step 20
        1: [_row(halves[1], 10), _row(weight, 20, epoch=1)],
        2: [_row(weight, 30, epoch=2)],
    }
    undisturbed = {0: [_row(weight, step) for step in (10, 20, 30)]}
    comparison = compared(digests_of(rows), digests_of(undisturbed))
    assert (comparison.num_steps, comparison.first_unequal) == (3, 0)


def test_steps_that_a_member_has_not_logged_are_not_compared():
    halves = _pieces(torch.ones(6, 4), [3])
    rows = {
        0: [_row(halves[0], 10), _row(halves[0], 20)],
        1: [_row(halves[1], 10), {"step": 11, "members": 2}],
    }
    assert list(digests_of(rows)) == [(1, 10)]
    comparison = compared(digests_of(rows), {})
    assert comparison.text == "not compared: the two runs have no step in common"
    assert comparison.problem


CHANGES = {
    "scale": lambda w, size: w * (1 + size),
    "shift": lambda w, size: w + size,
    "some columns": lambda w, size: torch.cat([w[:, :50] + 1.4 * size, w[:, 50:]], 1),
    "noise": lambda w, size: w + size * torch.randn(w.shape, generator=torch.Generator()),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    ("size", "orders", "is_wrong"),
    [(1e-3, (0, 0), True), (1e-3, (-1, -1), False), (1e-3, (1, 2), False), (1.0, (1, 2), True)],
)
def test_only_sums_in_another_order_may_change_last_bits(change, size, orders, is_wrong):
    weights = torch.randn(1000, 100, generator=torch.Generator().manual_seed(0))
    steps = range(10, 170, 10)
    changed = CHANGES[change](weights, size)
    pair = [
        digests_of({0: [_row(w, step, order) for step in steps]})
        for w, order in zip((weights, changed), orders, strict=True)
    ]
    comparison = compared(*pair)
    assert 0.5 * size < comparison.distance < 2 * size
    assert bool(comparison.problem) == is_wrong
    assert ("up to rounding" in comparison.text) != is_wrong


def test_the_picture_has_the_states_of_each_rank():
    events = _events(
        RunEvent(12.0, "stopped", 1, text="SIGSTOP"),
        RunEvent(13.0, "stopped", 1, text="SIGSTOP"),
        RunEvent(14.0, "continued", 1),
        RunEvent(16.0, "lost", 1, text=KILLED),
        RunEvent(16.0, "started", 3, pid=20),
    )
    strikes = [Strike(12.0, "stop", (1,), 2.0), Strike(16.0, "kill", (1,))]
    account = account_of(strikes, events, _steps((0, 1, 2), 1, 10.0), 20.0)
    lanes = {lane.rank: lane for lane in members_picture(account, events).lanes}
    states = [(box.role, box.x, box.width) for box in lanes[1].phases]
    assert states == [("phase", 0.0, 20.0), ("wait", 20.0, 20.0), ("phase", 40.0, 20.0)]
    assert [box.x for box in lanes[1].states] == [20.0, 60.0]
    assert [box.role for box in lanes[3].phases] == ["neutral"]


def test_a_partition_that_costs_no_rank_is_right_and_one_that_is_taken_for_a_death_is_not():
    events = _events(
        RunEvent(8.0, "epoch", members=(0, 1, 2), epoch=0),
        RunEvent(16.0, "lost", 2, text="was killed by signal 9 (SIGKILL)"),
    )
    strikes = [Strike(11.0, "partition", (1,), 2.0), Strike(15.5, "partition", (2,), 2.0)]
    rows = [*_steps((0, 1, 2), 1, 10.0), *_steps((0, 1, 2), 2, 14.0)]
    faults = account_of(strikes, events, rows, 20.0).faults
    assert [fault.judgement for fault in faults] == ["right", "wrong"]
    assert faults[0].cause == "no rank was lost"
    assert faults[0].recovery_s == 3.0
    long = [Strike(11.0, "partition", (1,), 60.0)]
    assert account_of(long, events[:-1], rows, 90.0).faults[0].judgement == "unknown"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "-n", "3", "train.py"], "add --min-ranks"),
        (["train", "-n", "2"], "add --min-ranks"),
        (["trace", "run"], "tests the commands run and train, got trace"),
        (["--kinds", "partition", "run", "--min-ranks", "1", "x.py"], "add `-H a:2,b:2`"),
        (
            ["--kinds", "partition", "run", "-H", "a:2", "--min-ranks", "1", "x.py"],
            "add `-H a:2,b:2`",
        ),
        (["--kinds", "rain", "run", "--min-ranks", "1", "x.py"], "rain is unknown: choose from"),
        (["--every", "0", "run", "--min-ranks", "1", "x.py"], "--every must be more than 0"),
    ],
)
def test_runs_that_faults_cannot_strike_are_refused(arguments, words, capsys):
    assert main(["chaos", *arguments]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 30.0), ("30s", 30.0), ("0.5", 0.5), (".5s", 0.5), ("2m", 120.0), ("1.5h", 5400.0)],
)
def test_an_interval_has_a_unit_or_is_in_seconds(text, seconds):
    assert tyro.cli(ChaosOptions, args=["--every", text]).every_s == seconds


@pytest.mark.parametrize("text", ["30x", "-3s", "s", "1e3", "nan", ""])
def test_an_interval_that_is_not_a_duration_is_refused(text, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["chaos", "--every", text, "run", "x.py"])
    assert "is not a duration" in capsys.readouterr().err


def test_a_large_disk_is_not_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("braid.launch.chaos.driver.MOST_TO_FILL_BYTES", 0)
    options = ChaosOptions(kinds="disk")
    with pytest.raises(ConfigError, match="a file system of at most 1 GiB"):
        run_chaos(options, ["--min-ranks=1", "--log-dir", str(tmp_path), "--", "x.py"])
