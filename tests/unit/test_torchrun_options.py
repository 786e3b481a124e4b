"""`braid run` takes torchrun's options, or says which option to use instead."""

from __future__ import annotations

import pytest

from braid.cli import main
from braid.cli.commands.torchrun_options import translated
from braid.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ("--nproc-per-node 2 t.py", "--num-ranks 2 t.py"),
        ("--nproc_per_node=2 t.py --nproc_per_node=3", "--num-ranks 2 t.py --nproc_per_node=3"),
        ("--standalone --nnodes=1 --nproc-per-node=4 t.py", "--num-ranks 4 t.py"),
        ("--nnodes 1:1 --node_rank 0 --rdzv-backend c10d -np 2 t.py", "--num-ranks 2 t.py"),
        ("-np 2 --master-port 29501 -m pkg.train", "-m --num-ranks 2 --port 29501 pkg.train"),
        ("--master_addr 127.0.0.1 --master_port=1 t.py", "--port 1 t.py"),
        (
            "--nnodes 2 --node-rank 1 --rdzv-endpoint a:29400 --rdzv-id 7 -n 2 t.py",
            "--nnodes 2 --node-rank 1 -n 2 --rdzv tcp://a:29400 t.py",
        ),
        (
            "--nnodes=2:2 --master-addr a --master-port 5 t.py",
            "--nnodes 2 --rdzv tcp://a:5 t.py",
        ),
        ("--nnodes 2 --rdzv-endpoint a t.py", "--nnodes 2 --rdzv tcp://a:29400 t.py"),
        ("--max-restarts 0 -r 3 -t 3 --log_dir x t.py", "--log-dir x t.py"),
        ("-n 2 --no-python -- ./a -n 3", "--no-python -n 2 -- ./a -n 3"),
    ],
)
def test_options_of_torchrun_are_those_of_braid(given, options):
    assert translated(given.split()) == options.split()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("--nnodes 1:4 t.py", "--nnodes 1:4 lets the number of hosts change"),
        ("--max-restarts=3 t.py", "--max-restarts 3: braid run does not restart ranks"),
        ("--nproc-per-node auto t.py", "give the number of ranks, -n 2"),
        ("--local-ranks-filter 0 t.py", "all ranks are shown"),
        ("--num-rank 2 t.py", "no option --num-rank: did you mean --num-ranks?"),
        ("--nproc-per-node", "--nproc-per-node needs a value"),
    ],
)
def test_what_braid_cannot_do_is_refused_by_name(given, words):
    with pytest.raises(ConfigError) as caught:
        translated(given.split())
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["runn", "t.py"], "there is no command runn: did you mean run?"),
        (["run", "--nproc", "2", "t.py"], "no option --nproc: did you mean --nproc-per-node?"),
        (["quantize"], "there is no command quantize: choose one of run, "),
    ],
)
def test_a_mistyped_command_or_option_is_answered_with_the_likely_one(given, words, capsys):
    assert main(given) == 2
    assert words in capsys.readouterr().err
