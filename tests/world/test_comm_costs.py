"""Each algorithm takes the steps and moves the bytes that its docstring says, on a virtual clock."""

from __future__ import annotations

import pytest
import torch

from braid.comm.algorithms import broadcast_gather as move
from braid.comm.algorithms.all_reduce import all_reduce, direct, two_phase
from braid.comm.algorithms.programs import Programs, program_steps
from braid.comm.channel.control_pages import ControlPages
from braid.comm.channel.staging import CHUNK_BYTES
from braid.programs.cost.forms import FORMS
from braid.programs.schedule.collective import algorithm, program
from support.explorer import Acquire, Publish, record
from support.virtual_time import run_on_virtual_clock

A_NS = 1000
CHUNK = CHUNK_BYTES // 4  # in floats


def _record(size: int, make):
    def steps(port: ControlPages):
        channel = port.channel(0)
        channel.digest = 1
        return make(port, channel)

    return record(size, steps)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("chunks", [1, 4])
def test_direct_all_reduce_takes_one_step_a_chunk_and_every_byte_once_a_peer(size, chunks):
    numel = chunks * CHUNK
    run = run_on_virtual_clock(
        _record(size, lambda _, ch: direct(ch, torch.ones(numel), "sum", None)), a_ns=A_NS
    )
    own_slot = 4 * numel if size > 2 else 0  # rank 2 and up read back what they staged
    assert run.num_steps == (chunks,) * size
    assert run.finished_ns == (chunks * A_NS,) * size
    assert run.bytes_written == (4 * numel,) * size
    assert run.bytes_read == tuple(
        4 * numel * (size - 1) + (own_slot if rank > 1 else 0) for rank in range(size)
    )


@pytest.mark.parametrize("size", [2, 3])
def test_two_phase_all_reduce_takes_two_steps_a_chunk(size):
    numel = 3 * CHUNK * size // 2
    run = run_on_virtual_clock(
        _record(size, lambda _, ch: two_phase(ch, torch.ones(numel), "sum", None)), a_ns=A_NS
    )
    assert run.num_steps == (6,) * size
    assert run.finished_ns == (6 * A_NS,) * size


@pytest.mark.parametrize("size", [2, 3, 4])
def test_registered_all_reduce_takes_two_steps_and_sums_one_slice_of_everybody(size):
    numel = 12 * CHUNK

    def make(port: ControlPages, ch):
        x = port.transport.arena.empty((numel,)).fill_(1.0)
        return all_reduce(ch, x, "sum")

    run = run_on_virtual_clock(_record(size, make), a_ns=A_NS)
    assert run.num_steps == (2,) * size
    assert run.finished_ns == (2 * A_NS,) * size
    # one slice of each of the `size` tensors: as many bytes as one tensor has
    assert (run.bytes_read, run.bytes_written) == ((4 * numel,) * size, (4 * numel,) * size)


@pytest.mark.parametrize("size", [2, 3])
def test_broadcast_of_many_chunks_is_a_pipeline(size):
    chunks = 5
    run = run_on_virtual_clock(
        _record(size, lambda _, ch: move.broadcast(ch, torch.ones(chunks * CHUNK), 0)), a_ns=A_NS
    )
    assert run.num_steps == (chunks + 1,) * size
    assert run.bytes_written == (4 * chunks * CHUNK,) + (0,) * (size - 1)
    assert run.bytes_read == (0,) + (4 * chunks * CHUNK,) * (size - 1)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_barrier_is_one_synchronisation(size):
    run = run_on_virtual_clock(_record(size, lambda _, ch: move.barrier(ch)), a_ns=A_NS)
    assert run.finished_ns == ((A_NS if size > 1 else 0),) * size


@pytest.mark.parametrize("size", [4, 5])
@pytest.mark.parametrize(("name", "operation"), sorted(FORMS))
def test_a_program_on_tensors_sends_the_bytes_of_its_rounds(name, operation, size):
    rounds = algorithm(name, operation, size)
    numel = 60 * size * (2 if operation == "all_to_all" else 1)
    written = program(rounds).ranks
    slots = 2 * size if operation == "all_to_all" else rounds.num_blocks
    sent = tuple(
        sum(action.kind == "send" for action in rank) * numel * 4 // slots for rank in written
    )

    def make(port: ControlPages, ch):
        return program_steps(ch, Programs(port.rank, size), name, operation, torch.ones(numel))

    assert run_on_virtual_clock(_record(size, make), a_ns=A_NS).bytes_written == sent


def test_bytes_take_their_time():
    run = run_on_virtual_clock(
        _record(2, lambda _, ch: direct(ch, torch.ones(1000), "sum", None)), a_ns=A_NS, b_ns=2
    )
    assert run.finished_ns == (4000 * 2 + A_NS + 4000 * 2,) * 2


def test_ranks_that_wait_for_each_other_are_refused():
    with pytest.raises(AssertionError, match="wait for each other"):
        run_on_virtual_clock(
            [[Acquire(1, 0, 1), Publish(0, 1)], [Acquire(0, 0, 1), Publish(0, 1)]], a_ns=1
        )
