"""Placed and plain steps take turns by a clock of the test's own: which is kept, and what does not count."""

import gc

import pytest
import torch
from torch import nn

from baechi_ext import parallelize
from baechi_runtime.measure import turns
from baechi_runtime.measure.lead import Kind
from baechi_runtime.measure.samples import ENOUGH
from baechi_runtime.measure.turns import BLOCKS, GONE, LAST_BLOCK, MOST_BLOCKS, PER_BLOCK, PLACED, PLAIN, REST_SHARE, Turns
from baechi_runtime.torch.calls.module_call import call_of


class Clock:
    """The module's clock in the place of time.perf_counter: seconds."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(turns, "time", made)
    monkeypatch.setattr(turns, "_timed", [])
    return made


def run(own: Turns, clock: Clock, ms: dict[str, float], steps: int) -> list[str]:
    """The kinds of this many steps, each of which takes what its kind takes."""
    kinds = []
    for _ in range(steps):
        kinds.append(own.begin())
        clock.now += ms[kinds[-1]] / 1000
    return kinds


def test_calls_that_come_by_twos_fall_to_both_alike(clock: Clock) -> None:
    kinds = run(Turns(), clock, {PLACED: 2, PLAIN: 2.1}, 16)
    assert kinds[:8] == [PLACED, PLAIN, PLAIN, PLACED, PLAIN, PLACED, PLACED, PLAIN]
    for start in (0, 1):
        assert kinds[start::2].count(PLACED) == kinds[start::2].count(PLAIN) == 4


@pytest.mark.parametrize("period", [2, 4, 8, 16])
def test_what_comes_with_every_so_manieth_step_falls_to_both_alike(period: int) -> None:
    """As a validation does that ends each epoch."""
    own, kinds = Turns(), list[str]()
    for _ in range(32):
        kinds.append(own._mode())  # noqa: SLF001
        (own.placed_us if kinds[-1] == PLACED else own.plain_us).append(1.0)
    for position in range(period):
        assert kinds[position::period].count(PLACED) == kinds[position::period].count(PLAIN) == 16 // period


def test_steps_that_never_have_a_time_leave_the_timing_to_others(clock: Clock) -> None:
    vain, other = Turns(), Turns()
    for step in range(60):
        if vain.join():
            vain.begin()
            vain.disturbed()
        assert other.join() == (step >= 40)


def test_the_faster_is_kept(clock: Clock) -> None:
    own = Turns()
    run(own, clock, {PLACED: 2, PLAIN: 3}, 4 * BLOCKS)
    assert own.decided == ""  # the last step of a block ends when the next one begins
    assert own.begin() == PLACED == own.decided
    assert (len(own.placed_us), len(own.plain_us)) == (2 * BLOCKS, 2 * BLOCKS)
    assert own.placed_us == pytest.approx([2000] * 2 * BLOCKS)
    assert own.plain_us == pytest.approx([3000] * 2 * BLOCKS)
    assert own.saved_us == pytest.approx(1000)
    assert set(run(own, clock, {PLACED: 2, PLAIN: 3}, 30)) == {PLACED}
    assert len(own.placed_us) == 2 * BLOCKS


def test_plain_steps_that_are_a_little_faster_are_kept(clock: Clock) -> None:
    own = Turns()
    kinds = run(own, clock, {PLACED: 2.1, PLAIN: 2}, 4 * BLOCKS + 1)
    assert (own.decided, kinds[-1]) == (PLAIN, PLAIN)
    assert own.saved_us == pytest.approx(-100)


def test_the_means_that_decided_are_what_is_said() -> None:
    own = Turns([10_000.0, 11_000, 11_000, 11_000, 90_000, 16_000], [11_500.0, 11_500, 11_500, 11_500, 11_500, 11_500])
    assert own.why_plain.startswith("plain steps are faster: 11.5 ms against 11.8 ms placed")
    own = Turns([10_000.0, 90_000], [11_000.0, 12_000])  # the first block decides at once
    assert own.why_plain.startswith("plain steps are faster: 11.5 ms against 50.0 ms placed")


@pytest.mark.parametrize(("placed_ms", "blocks"), [(4, 1), (2.5, 2), (2.2, BLOCKS)])
def test_the_slower_plan_costs_the_fewer_steps_the_slower_it_is(clock: Clock, placed_ms: float, blocks: int) -> None:
    own = Turns()
    kinds = run(own, clock, {PLACED: placed_ms, PLAIN: 2}, 40)
    assert own.decided == PLAIN
    assert kinds.index(PLAIN) == 1
    assert kinds.count(PLACED) == 2 * blocks == len(own.placed_us)


def block_of(own: Turns) -> int:
    """The number of the block of the step that begins next."""
    return (len(own.placed_us) + len(own.plain_us) + (own._begun is not None)) // 4  # noqa: SLF001


def test_blocks_that_say_different_things_are_more_and_then_all_count(clock: Clock) -> None:
    own, block = Turns(), 0
    while not own.decided:
        block = block_of(own)
        run(own, clock, {PLACED: 2, PLAIN: 1.0 if block == 1 else 2.5}, 1)
        assert block <= MOST_BLOCKS
    assert len(own.placed_us) == 2 * MOST_BLOCKS
    assert own.decided == PLACED


def noisy(own: Turns, clock: Clock, quiet_from: int, last: int) -> list[str]:
    """The kinds of steps until it is decided, or of 2,000; the plain ones of every other block before the block of this number take twice
    the others' 3 ms, and placed ones 2 ms; `last` is the ms of a plain step after that."""
    kinds = []
    while not own.decided and len(kinds) < 2000:
        block = block_of(own)
        plain = last if block >= quiet_from else 6 if block % 2 else 3
        kinds += run(own, clock, {PLACED: 2, PLAIN: plain}, 1)
    return kinds


def test_placed_steps_that_are_faster_but_not_clearly_go_on_with_plain_ones_now_and_then(clock: Clock) -> None:
    own = Turns()
    kinds = noisy(own, clock, quiet_from=MOST_BLOCKS, last=3)
    assert own.decided == PLACED
    assert own.meanwhile == PLACED
    blocks, rest = len(own.plain_us) // PER_BLOCK, kinds[4 * MOST_BLOCKS : -1]
    assert MOST_BLOCKS < blocks < LAST_BLOCK
    assert kinds[: 4 * MOST_BLOCKS].count(PLAIN) == PER_BLOCK * MOST_BLOCKS
    assert rest.count(PLAIN) == PER_BLOCK * (blocks - MOST_BLOCKS)
    lost, took = rest.count(PLAIN) * 1.0, sum({PLACED: 2.0, PLAIN: 3.0}[kind] for kind in rest)
    assert 0.3 * REST_SHARE <= lost / took <= REST_SHARE


def test_what_stays_unclear_ends(clock: Clock) -> None:
    own = Turns()
    noisy(own, clock, quiet_from=2 * LAST_BLOCK, last=3)
    assert own.decided == PLACED
    assert len(own.plain_us) == len(own.placed_us) == PER_BLOCK * LAST_BLOCK


def test_a_later_block_can_show_that_plain_steps_are_faster(clock: Clock) -> None:
    own = Turns()
    noisy(own, clock, quiet_from=MOST_BLOCKS, last=0.1)
    assert own.decided == PLAIN
    assert len(own.plain_us) > PER_BLOCK * MOST_BLOCKS


def test_steps_of_one_are_timed_at_a_time_and_rests_are_for_others(clock: Clock) -> None:
    first, second = Turns(), Turns()
    assert first.join()
    assert not second.join()
    assert second.meanwhile == PLAIN
    first.leave()
    assert second.join()
    assert not first.join()
    clock.now += 60  # nobody calls the second any more
    assert first.join()


def test_what_is_left_to_others_is_not_timed(clock: Clock) -> None:
    own, other = Turns(), Turns()
    assert own.join()
    own.begin()
    clock.now += 60
    assert other.join()
    assert not own.join()
    other.leave()
    assert own.join()
    own.begin()
    assert own.placed_us == []


def test_one_long_step_of_either_kind_decides_nothing(clock: Clock) -> None:
    """As of the machine doing something else, or of a checkpoint that is written."""
    own = Turns()
    run(own, clock, {PLACED: 2, PLAIN: 3}, 3)
    run(own, clock, {PLACED: 500, PLAIN: 500}, 1)
    run(own, clock, {PLACED: 2, PLAIN: 3}, 4 * MOST_BLOCKS)
    assert max(own.placed_us) == pytest.approx(500_000)
    assert own.saved_us == pytest.approx(1000)


def test_turns_go_on_until_it_is_clear_how_much_is_gained(clock: Clock) -> None:
    """With eight steps of each kind the longest and the shortest bound the ratio's interval; with ten one odd step is left out."""
    own = Turns()
    run(own, clock, {PLACED: 2, PLAIN: 3}, 4)
    run(own, clock, {PLACED: 2, PLAIN: 3.6}, 1)
    run(own, clock, {PLACED: 2, PLAIN: 3}, 4 * MOST_BLOCKS)
    assert own.decided == PLACED
    assert len(own.placed_us) == len(own.plain_us) == PER_BLOCK * (BLOCKS + 1)


def test_a_machine_that_becomes_slower_takes_as_many_blocks_as_an_interval_of_blocks_needs(clock: Clock) -> None:
    own = Turns()
    for block in range(MOST_BLOCKS):
        run(own, clock, {PLACED: 2 + block, PLAIN: 3 + 1.5 * block}, 4)
    assert own.decided == PLACED
    assert len(own.placed_us) == len(own.plain_us) == PER_BLOCK * ENOUGH


def test_disturbed_steps_do_not_count(clock: Clock) -> None:
    own = Turns()
    seen = []
    for i in range(4 * 2 * BLOCKS):
        seen.append(own.begin())
        if i % 2:  # a verified step
            own.disturbed()
            clock.now += 1
        else:
            clock.now += {PLACED: 0.002, PLAIN: 0.003}[seen[-1]]
    own.begin()
    assert own.decided == PLACED
    assert max(own.placed_us + own.plain_us) == pytest.approx(3000)
    assert len(own.placed_us) == len(own.plain_us) == 2 * BLOCKS
    assert seen[1] == seen[2]  # the disturbed one is done again


def test_steps_that_stay_placed_are_timed_alone(clock: Clock) -> None:
    own = Turns(alone=True)
    assert set(run(own, clock, {PLACED: 4}, 60)) == {PLACED} == {own.decided}
    assert own.placed_us == pytest.approx([4000] * PER_BLOCK * MOST_BLOCKS)
    assert own.plain_us == []


def test_what_others_do_in_between_does_not_count_where_steps_stay_placed(clock: Clock) -> None:
    own = Turns(alone=True)
    own.begin()
    clock.now += 3.0
    turns.disturb_timed()
    run(own, clock, {PLACED: 4}, 60)
    assert own.placed_us == pytest.approx([4000] * PER_BLOCK * MOST_BLOCKS)


def test_saved_time_is_known_before_anything_is_decided(clock: Clock) -> None:
    own = Turns()
    run(own, clock, {PLACED: 2, PLAIN: 3}, 3)
    assert own.saved_us != 0
    assert Turns().saved_us == 0


def test_a_module_that_has_ended_leaves_the_turns_to_others(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_timed", [])
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 1))
    model = parallelize(model, devices=2, method="contiguous", verify_steps=1)
    for _ in range(5):
        model(torch.randn(4, 8)).sum().backward()
    assert len(turns._timed) == 1  # noqa: SLF001
    del model
    gc.collect()
    assert turns._timed == []  # noqa: SLF001


@pytest.mark.parametrize("last", [PLACED, PLAIN])
def test_where_the_first_kind_of_call_comes_no_more_another_takes_turns(
    one_thread: None, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    """As of layers that are frozen for an epoch, or of images that grow; otherwise all others would run as the last of the first kind."""
    monkeypatch.setattr(turns, "_timed", [])
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 1))
    model = parallelize(model, devices=2, method="contiguous", verify_steps=1, cache=False)
    session = call_of(model).session
    for _ in range(8):
        model(torch.randn(4, 8)).sum().backward()
        if session.groups and session.groups[0].mode == last and session.groups[0].turns.placed_us:
            break
    assert session.groups[0].turns.placed_us
    assert not session.groups[0].turns.decided
    for _ in range(GONE + 12):
        model(torch.randn(6, 8)).sum().backward()
    first, other = session.groups
    assert first.mode == last
    assert len(other.turns.placed_us + other.turns.plain_us) >= 2 * PER_BLOCK


def test_a_step_in_which_another_thread_had_the_devices_has_no_time(clock: Clock) -> None:
    own = Turns()
    assert own.join()
    run(own, clock, {PLACED: 3.0, PLAIN: 4.0}, 2)
    turns.disturb_timed()
    clock.now += 60
    run(own, clock, {PLACED: 3.0, PLAIN: 4.0}, 3)
    assert max(own.placed_us + own.plain_us) < 5000


class Loop(nn.Module):
    """Code that TorchDynamo does not trace runs a traced part several times in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.seen: list[float] = []

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            x = self.turn(x)
            self.seen.append(float(x.detach().numpy().sum()))
        return x


def test_a_call_is_one_step_however_often_a_part_of_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = parallelize(Loop(), devices=2, method="random", keep_placed=True, cache=False, verify_steps=0)
    held = call_of(model).session
    begun: list[int] = []
    begin = held.lead.begin_step

    def begin_step(kind: Kind) -> str:
        begun.append(held.calls)
        return begin(kind)

    monkeypatch.setattr(held.lead, "begin_step", begin_step)
    for _ in range(4):
        model(torch.ones(3, 6)).sum().backward()
    assert held.ran_placed > 2 * held.calls
    assert begun == [1, 2, 3, 4]
