"""Pictures of the pages on data parallel training, each drawn by the code that its page is about."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from braid.comm import Group
from braid.compat.horovod.fusion.autotune import Autotuner, Settings, TuneOptions, grid_around
from braid.compat.horovod.fusion.fusion_state import FusionState
from braid.compat.horovod.fusion.request import Request
from braid.parallel.data_parallel import (
    DataParallel,
    DiLoCo,
    DistributedDataParallel,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
)
from braid.parallel.gradients.bucket_layout import BucketLayout, Caps, plan_buckets, waiting_cost
from braid.parallel.gradients.bucket_layout_cache import REBUILD_GAIN
from braid.parallel.gradients.status import StatusLayout
from braid.programs.schedule import simulate
from braid.programs.schedule.bars import (
    BACKWARD,
    COLOURS,
    FORWARD,
    RECEIVE,
    RECOMPUTE,
    REDUCE,
    SEND,
    STEP,
    WAIT,
    Bar,
    draw,
)
from braid.programs.schedule.collective import algorithm, collective_costs, program
from braid.programs.topology import flat
from braid.runtime.clock import VirtualClock
from braid.runtime.events import Recorder
from braid.types import TensorSpec
from handbook_servers import LOST, _svg, _text
from support.worlds import run_threads

# Replicas: a device touches memory at 100 GB/s; between devices go 20 GB/s.
MEMORY_BYTES_PER_S, LINK_BYTES_PER_S = 100e9, 20e9
NUM_DEVICES, SAMPLES, HIDDEN, CLASSES = 3, 768, 256, 4096


def nbytes_of(tensors: Sequence[torch.Tensor]) -> int:
    return sum(x.nbytes for x in tensors)


class _Touched(TorchDispatchMode):
    """Advances the clock of the device that computes by the bytes that each operation touches."""

    def __init__(self, clocks: Sequence[VirtualClock]) -> None:
        super().__init__()
        self.clocks = clocks
        self.device = 0
        self.summed_ns = 0  # by sums of gradients, which wait for those of all devices

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [x for x in [*args, *(kwargs or {}).values()] if isinstance(x, torch.Tensor)]
        made = [x for x in (result if isinstance(result, tuple) else [result]) if x is not None]
        made = [x for x in made if isinstance(x, torch.Tensor)]
        if not func.is_view:
            spent_ns = round(nbytes_of([*given, *made]) / MEMORY_BYTES_PER_S * 1e9)
            if func is torch.ops.aten.add.out:
                self.summed_ns += spent_ns
            else:
                self.clocks[self.device].advance(spent_ns)
        return result


class _Recorded(DataParallel):
    """DataParallel whose "devices" are clocks: what its steps move and compute takes time there."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, ["cpu"] * NUM_DEVICES, **options)
        self.clocks = [VirtualClock(0) for _ in self.device_ids]
        self.touched = _Touched(self.clocks)
        self.bars: list[tuple[int, int, int, str]] = []

    @contextmanager
    def spending(self, device: int, kind: str) -> Iterator[None]:
        self.touched.device = device
        begin_ns = self.clocks[device].now_ns()
        with self.touched:
            yield
        self.bars.append((device, begin_ns, self.clocks[device].now_ns(), kind))

    def send(self, nbytes: int, kind: str, *, to: int = 0, source: int = 0) -> None:
        """Let bytes go over the link of the first device, whose other messages wait."""
        first, other = self.clocks[0], self.clocks[to or source]
        begin_ns = max(first.now_ns(), other.now_ns())
        first.advance(begin_ns - first.now_ns() + round(nbytes / LINK_BYTES_PER_S * 1e9))
        self.bars.append((0, begin_ns, first.now_ns(), kind))
        other.advance(first.now_ns() - other.now_ns())

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        shares, options = super().scatter(inputs, kwargs, device_ids)
        for device, share in enumerate(shares[1:], 1):
            self.send(nbytes_of(share), "scatter", to=device)
        return shares, options

    def replicate(self, module: nn.Module, device_ids: Any) -> list[nn.Module]:
        for device in range(1, len(device_ids)):
            self.send(nbytes_of(list(module.parameters())), "replicate", to=device)
        return super().replicate(module, device_ids)

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> list[Any]:
        outputs = []
        for device, (replica, *given) in enumerate(zip(replicas, inputs, kwargs, strict=True)):
            with self.spending(device, "forward"):
                outputs.append(replica(*given[0], **given[1]))
            own = outputs[-1] if isinstance(outputs[-1], torch.Tensor) else outputs[-1].total
            own.register_hook(self._backward_reaches(device))
        return outputs

    def gather(self, outputs: Sequence[torch.Tensor], output_device: Any) -> torch.Tensor:
        for device, output in enumerate(outputs[1:], 1):
            self.send(output.nbytes, "gather", source=device)
        with self.spending(0, "gather"):
            return super().gather(outputs, output_device)

    def _backward_reaches(self, device: int) -> Any:
        """Return a hook of a replica's output: backward goes on where that is."""

        def go_on(grad: torch.Tensor) -> None:
            self.end_backward()
            if device:
                self.send(grad.nbytes, "gather", to=device)
            self.touched.device = device
            self.began_ns = self.clocks[device].now_ns()

        return go_on

    def end_backward(self) -> None:
        device = self.touched.device
        now_ns = self.clocks[device].now_ns()
        self.bars.append((device, self.began_ns, now_ns, "backward"))

    def backward(self, loss: torch.Tensor) -> None:
        self.touched.device, self.began_ns = 0, self.clocks[0].now_ns()
        with self.touched:
            loss.backward()
        self.end_backward()
        for device in range(1, NUM_DEVICES):
            self.send(nbytes_of(list(self.module.parameters())), "add gradients", source=device)
        begin_ns = self.clocks[0].now_ns()
        self.clocks[0].advance(self.touched.summed_ns)
        self.bars.append((0, begin_ns, self.clocks[0].now_ns(), "add gradients"))


def replicas() -> str:
    """One step on three devices: the loss on the first device, and the loss where outputs are."""
    kinds = ("scatter", "replicate", "forward", "gather", "loss", "backward", "add gradients")
    order = (SEND, RECEIVE, FORWARD, REDUCE, RECOMPUTE, BACKWARD, STEP)
    colours = dict(zip(kinds, order, strict=True))
    x, y = torch.ones(SAMPLES, HIDDEN), torch.zeros(SAMPLES, dtype=torch.long)
    ways = []
    for criterion in (None, functional.cross_entropy):
        layers = nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES)
        model = _Recorded(nn.Sequential(*layers), criterion=criterion)
        if criterion is None:
            outputs = model(x)
            with model.spending(0, "loss"):
                loss = functional.cross_entropy(outputs, y)
        else:
            loss = model(x, target=y)
        model.backward(loss)
        ways.append(model)
    bars = [
        Bar(way * NUM_DEVICES + lane, begin * 1e-9, end * 1e-9, colours[kind], kind)
        for way, model in enumerate(ways)
        for lane, begin, end, kind in model.bars
        if end > begin
    ]
    lanes = [f"{name} {device}" for name in ("gathered", "criterion") for device in range(3)]
    return draw(lanes, bars, max(bar.end_s for bar in bars), legend=colours)


# Buckets: a rank computes gradients of so many numbers in a second; two ranks on one network.
NUMBERS_PER_S, NETWORK_S, NETWORK_BYTES_PER_S, ADDED_S = (1e9, 0.8e9), 10e-6, 4e9, 1e-11
CAPS = Caps((256 << 10, 512 << 10))
STATUS = WAIT


class _Levels(nn.Module):
    """Levels of a layer down and a layer up; all layers down are used before those up."""

    def __init__(self) -> None:
        super().__init__()
        pairs = ({"down": nn.Linear(256, 256), "up": nn.Linear(256, 256)} for _ in range(3))
        self.levels = nn.ModuleList(nn.ModuleDict(pair) for pair in pairs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for level in self.levels:
            x = level["down"](x)
        for level in reversed(self.levels):
            x = level["up"](x)
        return x


def all_reduce_s(nbytes: int, size: int = 2) -> float:
    """Seconds of a ring all-reduce."""
    ring = program(algorithm("ring", "all_reduce", size))
    network = flat(size, NETWORK_S, NETWORK_BYTES_PER_S)
    return simulate(ring, collective_costs(ring, nbytes, ADDED_S), network).seconds


def backward_times(rank: int) -> tuple[list[int], list[float]]:
    """Return the order of gradients of a real backward, and when each was there."""
    model, clock = _Levels(), VirtualClock(0)
    order, at_s = [], []
    for position, param in enumerate(model.parameters()):

        def arrived(param: torch.Tensor, position: int = position) -> None:
            clock.advance(round(param.numel() / NUMBERS_PER_S[rank] * 1e9))
            order.append(position)
            at_s.append(clock.now_ns() * 1e-9)

        param.register_post_accumulate_grad_hook(arrived)
    model(torch.ones(1, 256)).sum().backward()
    return order, at_s


def _one_backward(layouts: tuple[BucketLayout, ...], first_lane: int) -> list[Bar]:
    """Bars of both ranks' gradients, and of the averaging of buckets in the order of readiness."""
    of = {p: index for index, layout in enumerate(layouts) for p in layout.members}
    bars, ready_s, ends_s = [], [0.0] * len(layouts), []
    for rank in range(2):
        before = 0.0
        order, at_s = backward_times(rank)
        for position, end in zip(order, at_s, strict=True):
            bucket = of[position]
            title = f"gradient of parameter {position}, in bucket {bucket}"
            colour, label = COLOURS[bucket], str(bucket)
            bars.append(Bar(first_lane + rank, before, end, colour, title, label))
            ready_s[bucket] = max(ready_s[bucket], end)  # on both ranks
            before = end
        ends_s.append(before)
    specs = [TensorSpec(tuple(p.shape), "float32") for p in _Levels().parameters()]
    free, lane = 0.0, first_lane + 2
    for bucket in sorted(range(len(layouts)), key=ready_s.__getitem__):
        nbytes = sum(4 * prod(specs[p].shape) for p in layouts[bucket].members)
        begin = max(free, ready_s[bucket])
        free = begin + all_reduce_s(nbytes)
        title = f"average of bucket {bucket}: {nbytes} bytes"
        bars.append(Bar(lane, begin, free, COLOURS[bucket], title, str(bucket)))
    status_s = all_reduce_s(8 * StatusLayout(len(specs), 2).length)
    end = max(ends_s)
    bars.append(Bar(lane, end, end + status_s, STATUS, "status", part="lower"))
    return bars


def buckets() -> str:
    """Gradients of two ranks and their averages: buckets before and after they are filled anew."""
    specs = {
        position: TensorSpec(tuple(param.shape), "float32")
        for position, param in enumerate(_Levels().parameters())
    }
    planned = plan_buckets(specs, CAPS)
    order, _ = backward_times(0)
    anew = plan_buckets(specs, CAPS, order=order)
    assert waiting_cost(anew, specs, order) < REBUILD_GAIN * waiting_cost(planned, specs, order)
    bars = [*_one_backward(planned, 0), *_one_backward(anew, 3)]
    lanes = ["rank 0", "rank 1", "network"] * 2
    legend = {f"bucket {index}": COLOURS[index] for index in range(len(planned))}
    legend["status"] = STATUS
    return draw(lanes, bars, max(bar.end_s for bar in bars), legend=legend)


# Negotiation: two ranks whose gradients come in orders and at speeds of their own.
GRADIENTS = {"a": 64 << 10, "b": 256 << 10, "c": 512 << 10, "d": 128 << 10}  # name -> bytes
ORDERS, GRADIENT_S = ("dcba", "cdab"), (60e-6, 80e-6)
COLLECT_S = 70e-6  # for which requests are collected while nobody waits


class _Engine:
    """The thread of one rank: braid's machine of the agreement, and a clock."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.state = FusionState(rank, range(len(ORDERS)))
        self.coming: list[tuple[float, str]] = []

    def backward(self, start_s: float) -> None:
        """Let the gradients of a step come one after the other."""
        each = GRADIENT_S[self.rank]
        times = [start_s + each * (i + 1) for i in range(len(GRADIENTS))]
        self.coming = list(zip(times, ORDERS[self.rank], strict=True))

    def open(self, now_s: float) -> tuple[float, bytes]:
        """Enter an exchange as soon as there is something new; return when, and the bitmask."""
        self.submit(now_s)
        if not self.state.has_new and self.coming:
            first, last = self.coming[0][0], self.coming[-1][0]
            now_s = max(now_s, min(first + COLLECT_S, last))  # after the last, its caller waits
            self.submit(now_s)
        return now_s, self.state.open(now_s)

    def submit(self, now_s: float) -> None:
        while self.coming and self.coming[0][0] <= now_s:
            at_s, name = self.coming.pop(0)
            numbers = GRADIENTS[name] // 4
            request = Request(name, "all_reduce", "float32", (numbers,), 4, "avg")
            self.state.submit(request, at_s)


def negotiation() -> str:
    """Two steps of two ranks: what their threads agree on with lists, and then with bits."""
    engines = [_Engine(rank) for rank in range(len(ORDERS))]
    kinds = ("gradient", "waits", "exchange", "lists", "sum")
    colours = dict(zip(kinds, (BACKWARD, WAIT, RECEIVE, SEND, REDUCE), strict=True))
    bars: list[Bar] = []

    def add(lane: int, begin: float, end: float, kind: str, label: str = "") -> None:
        part = "lower" if kind == "waits" else "whole"
        bars.append(Bar(lane, begin, end, colours[kind], f"{kind} {label}", label, part))

    now_s = 0.0
    for _ in range(2):
        for engine in engines:
            engine.backward(now_s)
            for at_s, name in engine.coming:
                begin = at_s - GRADIENT_S[engine.rank]
                add(2 * engine.rank, begin, at_s, "gradient", name)
        while any(engine.coming or engine.state.num_pending for engine in engines):
            opened = [engine.open(now_s) for engine in engines]
            begin = max(at_s for at_s, _ in opened)
            for engine, (at_s, _) in zip(engines, opened, strict=True):
                if at_s < begin:
                    add(2 * engine.rank + 1, at_s, begin, "waits")
            now_s = _one_cycle(engines, [bits for _, bits in opened], begin, add)
    lanes = [name for rank in range(2) for name in (f"rank {rank}", f"thread {rank}")]
    return draw(lanes, bars, now_s, legend=colours)


def _one_cycle(
    engines: Sequence[_Engine], bitmasks: Sequence[bytes], now_s: float, add: Callable[..., None]
) -> float:
    """Let all ranks agree and carry out what they have agreed on; return when that is done."""

    def all_spend(seconds: float, kind: str, label: str = "") -> None:
        nonlocal now_s
        for engine in engines:
            add(2 * engine.rank + 1, now_s, now_s + seconds, kind, label)
        now_s += seconds

    all_spend(all_reduce_s(len(bitmasks[0])), "exchange")
    together = int.from_bytes(bitmasks[0], "little") & int.from_bytes(bitmasks[1], "little")
    combined = together.to_bytes(len(bitmasks[0]), "little")
    answer = None
    has_news = {engine.state.combined(combined) for engine in engines}
    if has_news == {True}:
        lists = [engine.state.own_list(now_s) for engine in engines]
        answer = engines[0].state.answer(lists, now_s)
        nbytes = max(map(len, lists)) + len(answer)
        all_spend(2 * NETWORK_S + nbytes / NETWORK_BYTES_PER_S, "lists")  # there and back
    outcomes = [engine.state.conclude(answer) for engine in engines]
    assert outcomes[0] == outcomes[1]
    for batch in outcomes[0].batches:
        names = "".join(response.name for response in batch.responses)
        all_spend(all_reduce_s(batch.nbytes), "sum", names)
    return now_s


# Optimizers: four ranks, eight steps; a backward takes as long as a step, whatever the way.
BACKWARD_S, STEP_S, STEPS, PERIOD, RING_SIZE = 300e-6, 40e-6, 8, 4, 4
WAYS = ("DDP", "DDP, 4", "local SGD", "DiLoCo")


class _NotedSGD(torch.optim.SGD):
    """SGD that records its steps among the rank's collectives."""

    recorder: Recorder

    def step(self, closure: Any = None) -> Any:
        self.recorder.instant("step")
        return super().step(closure)


def _train(group: Group, way: str) -> list[list[tuple[str, int]]]:
    """Train in one of the ways; return kind and bytes of what this rank did, by step."""
    recorder = group.context.events
    module: nn.Module = nn.utils.skip_init(nn.Linear, 256, 512)
    nn.init.constant_(module.weight, 0.01), nn.init.constant_(module.bias, 0.0)
    optimizer: Any = _NotedSGD(module.parameters(), lr=0.01)
    optimizer.recorder = recorder
    each = PERIOD if way == "DDP, 4" else 1
    if way.startswith("DDP"):
        module = DistributedDataParallel(
            module, process_group=group, gradient_accumulation_steps=each
        )
    elif way == "local SGD":
        averager = PeriodicModelAverager(PERIOD, warmup_steps=PERIOD - 1, process_group=group)
        optimizer = PostLocalSGDOptimizer(optimizer, averager)
    else:
        optimizer = DiLoCo(optimizer, period=PERIOD, process_group=group)
    steps = []
    for number in range(STEPS):
        written = recorder.ring.written
        module(torch.ones(2, 256) * (group.rank + 1)).sum().backward()
        if (number + 1) % each == 0:
            optimizer.step()
            optimizer.zero_grad()
        events = sorted(recorder.tail(recorder.ring.written - written))
        steps.append([(recorder.ring.name(event.kind), event.nbytes) for event in events])
    return steps


def where_steps_are_taken() -> str:
    """Rank 0 of four in four ways: backward, steps, and what it averages when."""
    kinds = ("backward", "step", "averaging")
    colours = dict(zip(kinds, (BACKWARD, STEP, REDUCE), strict=True))
    bars = []
    for lane, way in enumerate(WAYS):
        now_s = 0.0
        for steps in run_threads(RING_SIZE, _train, way)[0]:
            spans = [("backward", BACKWARD_S)]
            for name, nbytes in steps:
                if name == "step":
                    spans.append(("step", STEP_S))
                elif name.startswith(("all_reduce", "all_gather", "broadcast")):
                    spans.append(("averaging", all_reduce_s(nbytes, RING_SIZE)))
            for kind, seconds in spans:
                bars.append(Bar(lane, now_s, now_s + seconds, colours[kind], kind))
                now_s += seconds
    return draw(WAYS, bars, max(bar.end_s for bar in bars), legend=colours)


TUNED_GRADIENTS, TUNED_BYTES, TUNED_BACKWARD_S, EXCHANGE_S = 64, 512 << 10, 10e-3, 60e-6
MESSAGE_S = 200e-6  # of each sum, besides the ring
SEARCH_START = Settings(128 << 20, 0.025)


def _step_s(settings: Settings) -> float:
    """Seconds of a backward, and of the sums of its gradients on four ranks."""
    ready_s = [TUNED_BACKWARD_S * (n + 1) / TUNED_GRADIENTS for n in range(TUNED_GRADIENTS)]
    now_s, num_sent = 0.0, 0
    per_batch = max(1, settings.threshold_bytes // TUNED_BYTES)
    while num_sent < TUNED_GRADIENTS:
        now_s = max(now_s, ready_s[num_sent])
        if now_s < TUNED_BACKWARD_S:  # until the optimizer waits
            now_s = min(now_s + settings.cycle_time_s, max(now_s, TUNED_BACKWARD_S))
        num_ready = sum(at_s <= now_s for at_s in ready_s) - num_sent
        now_s += EXCHANGE_S
        for first in range(0, num_ready, per_batch):
            count = min(per_batch, num_ready - first)
            now_s += MESSAGE_S + all_reduce_s(count * TUNED_BYTES, 4)
        num_sent += num_ready
    return now_s


def search_of_settings() -> str:
    """Which settings the search tries, in which order, and the speed of all settings."""
    nbytes = TUNED_GRADIENTS * TUNED_BYTES
    grid = grid_around(SEARCH_START)
    seconds = {settings: _step_s(settings) for settings in grid}
    options = TuneOptions(warmup_samples=0, steps_per_sample=1, max_samples=12, noise=0.1)
    tuner, settings, now_s = Autotuner(SEARCH_START, options), SEARCH_START, 0.0
    while not tuner.done:
        settings = tuner.note(["x"], nbytes, now_s) or settings
        now_s += seconds[settings]
    tries: dict[Settings, list[str]] = {}
    for number, (tried, _) in enumerate(tuner.samples, 1):
        tries.setdefault(tried, []).append(str(number))
    thresholds = sorted({each.threshold_bytes for each in grid})
    times = sorted({each.cycle_time_s for each in grid})
    wide, high, left, top = 76, 34, 96, 44
    least, most = nbytes / max(seconds.values()), nbytes / min(seconds.values())
    parts = [_text(left, 16, "limit of a batch, MiB", "start")]
    for column, threshold in enumerate(thresholds):
        parts.append(
            _text(left + wide * (column + 0.5), 36, f"{threshold / (1 << 20):g}", "middle")
        )
    for row, time_s in enumerate(times):
        y = top + high * row
        parts.append(_text(left - 8, y + 21, f"{time_s * 1e3:g} ms", "end"))
        for column, threshold in enumerate(thresholds):
            x, each = left + wide * column, Settings(threshold, time_s)
            speed = nbytes / seconds[each]
            share = (speed - least) / (most - least)
            title = f"<title>{speed / 1e9:.2f} GB/s</title>"
            border = LOST if each == tuner.best else "white"
            parts.append(
                f'<rect x="{x + 1.5}" y="{y + 1.5}" width="{wide - 3}" height="{high - 3}" '
                f'fill="{COLOURS[0]}" fill-opacity="{0.05 + 0.55 * share:.2f}" stroke="{border}" '
                f'stroke-width="3">{title}</rect>'
            )
            order = ", ".join(tries.get(each, []))
            parts.append(_text(x + wide / 2, y + 21, order, "middle"))
    bottom = top + high * len(times)
    scale = f"light {least / 1e9:.1f} GB/s, dark {most / 1e9:.1f} GB/s; numbers: order of trials"
    parts.append(_text(left, bottom + 22, scale))
    return _svg(left + wide * len(thresholds) + 8, bottom + 32, parts)


DATA_PARALLEL = (replicas, buckets, negotiation, where_steps_are_taken, search_of_settings)
