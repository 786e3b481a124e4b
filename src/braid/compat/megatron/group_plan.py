"""The groups of `initialize_model_parallel` as lists of ranks, computed identically on all ranks.

    kind           ranks that differ along            kind            of experts
    tp pp dp cp    one of them                        ep ep_tp        ep, tp
    mp             tp, pp: a copy of the model        tp_ep           tp, ep
    dp_cp          dp, cp: the same weights           tp_ep_pp        tp, ep, pp
    tp_dp tp_cp    two of them                        ep_dp           dp
    tp_dp_cp       all but pp                         intra_ep_dp     neighbours in ep_dp
    embd pos_embd  stages with embeddings             inter_ep_dp     one of each intra_ep_dp
    intra_dp_cp    neighbours in dp_cp                intra_dist_opt  one copy of the optimizer
    hcp0 hcp1 ...  levels of cp                       hybrid2 ...     neighbours in dp_cp

Source: Megatron-LM 0.16, `parallel_state.initialize_model_parallel`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from braid.compat.megatron.failure import UsageError
from braid.compat.megatron.rank_generator import RankGenerator, hierarchical_ranks
from braid.errors import raise_all

__all__ = ["Parallelism", "default_embedding_ranks", "default_position_embedding_ranks"]

Groups = list[list[int]]
EmbeddingRanks = Callable[[list[int]], Sequence[int]]


def default_embedding_ranks(pp_ranks: Sequence[int]) -> list[int]:
    """Return the first and last rank of a pipeline, which share the embedding."""
    return list(dict.fromkeys((pp_ranks[0], pp_ranks[-1])))


def default_position_embedding_ranks(pp_ranks: Sequence[int]) -> list[int]:
    """Return the first rank of a pipeline, which has the position embedding."""
    return [pp_ranks[0]]


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """Sizes of all kinds of parallelism, and options for the groups.

    Raises:
        UsageError: The sizes do not fit together or the world size; the message has all problems.
    """

    world_size: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    expert_tp: int | None = None
    virtual_pp: int | None = None
    instances: int = 1
    order: str = "tp-cp-ep-dp-pp"
    hierarchical_cp: Sequence[int] = ()
    hybrid_cp: bool = False
    all_gather_group: bool = False
    embedding_ranks: EmbeddingRanks = default_embedding_ranks
    position_embedding_ranks: EmbeddingRanks = default_position_embedding_ranks
    dense: RankGenerator = field(init=False)
    expert: RankGenerator = field(init=False)

    def __post_init__(self) -> None:
        expert_tp = self.tp if self.expert_tp is None else self.expert_tp
        sizes = {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "context_parallel_size": self.cp,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": expert_tp,
            "num_distributed_optimizer_instances": self.instances,
        }
        problems = [
            f"{name} must be a whole number of at least 1, got {size!r}"
            for name, size in sizes.items()
            if type(size) is not int or size < 1
        ]
        if not problems:
            problems = [*self._misfits(expert_tp)]
        raise_all(problems, UsageError)
        dp = self.world_size // (self.tp * self.pp * self.cp)
        expert_dp = self.world_size // (expert_tp * self.ep * self.pp)
        dense = RankGenerator(self.tp, 1, dp, self.pp, self.cp, self.order)
        expert = RankGenerator(expert_tp, self.ep, expert_dp, self.pp, 1, self.order)
        object.__setattr__(self, "dense", dense)
        object.__setattr__(self, "expert", expert)
        if problems := [*self._uneven(dp, expert_dp)]:
            raise UsageError("; ".join(problems))

    def _misfits(self, expert_tp: int) -> list[str]:
        problems = []
        dense, expert = (self.tp, self.pp, self.cp), (expert_tp, self.ep, self.pp)
        for names, sizes in (
            ("tensor x pipeline x context", dense),
            ("expert tensor x expert x pipeline", expert),
        ):
            is_new = sizes is dense or math.prod(sizes) != math.prod(dense)
            if is_new and self.world_size % math.prod(sizes):
                problems.append(
                    f"world_size {self.world_size} is not divisible by {names} parallel sizes "
                    f"{' x '.join(map(str, sizes))} = {math.prod(sizes)}: start a multiple of it, "
                    "or choose smaller sizes"
                )
        if self.virtual_pp is not None and self.pp < 2:
            problems.append(
                f"virtual_pipeline_model_parallel_size={self.virtual_pp} needs a "
                f"pipeline_model_parallel_size of at least 2, got {self.pp}"
            )
        if self.hierarchical_cp and math.prod(self.hierarchical_cp) != self.cp:
            problems.append(
                f"hierarchical_context_parallel_sizes {list(self.hierarchical_cp)} must have the "
                f"product context_parallel_size {self.cp}"
            )
        return problems

    def _uneven(self, dp: int, expert_dp: int) -> list[str]:
        problems = []
        for name, size in (("data", dp * self.cp), ("expert data", expert_dp)):
            if size % self.instances:
                problems.append(
                    f"num_distributed_optimizer_instances={self.instances} does not divide the "
                    f"{size} ranks of {name} parallelism: choose a divisor"
                )
        if self.dense.get_ranks("pp") != self.expert.get_ranks("pp"):
            problems.append(
                f"order {self.order!r} gives dense layers the pipelines "
                f"{self.dense.get_ranks('pp')}, but experts {self.expert.get_ranks('pp')}: put "
                "pp last, or make the data parallel sizes equal"
            )
        if self.hybrid_cp and dp * self.cp % 2:
            problems.append(
                "hybrid_context_parallel needs an even number of data x context parallel ranks, "
                f"got {dp * self.cp}: choose other parallel sizes"
            )
        return problems

    def groups(self) -> dict[str, Groups]:
        """Return all groups of each kind, in the order of their creation."""
        dense, expert = self.dense.get_ranks, self.expert.get_ranks
        both = dense("dp-cp")
        plan = {"dp_cp": both, "dp": dense("dp"), "cp": dense("cp"), "mp": dense("tp-pp")}
        if self.all_gather_group:
            plan["dp_cp_ag"] = both
        plan |= {"tp": dense("tp"), "pp": dense("pp")}
        plan["embd"] = _chosen("get_embedding_ranks", self.embedding_ranks, plan["pp"])
        plan["pos_embd"] = _chosen(
            "get_position_embedding_ranks", self.position_embedding_ranks, plan["pp"]
        )
        plan |= {kind: dense(kind.replace("_", "-")) for kind in ("tp_dp_cp", "tp_dp", "tp_cp")}
        plan |= {"ep": expert("ep"), "ep_tp": expert("tp"), "tp_ep": expert("tp-ep")}
        plan |= {"tp_ep_pp": expert("tp-ep-pp"), "ep_dp": expert("dp")}
        if self.hierarchical_cp:
            for level in range(len(self.hierarchical_cp)):
                plan[f"hcp{level}"] = _level(plan["cp"], self.hierarchical_cp, level)
        if self.hybrid_cp:
            plan |= {
                f"hybrid{size}": _level(both, (size, len(both[0]) // size), 0)
                for size in (2**power for power in range(1, len(both[0]).bit_length() - 1))
                if len(both[0]) % size == 0
            }
        if self.instances > 1:
            intra = len(both[0]) // self.instances
            plan["intra_dp_cp"] = _level(both, (intra, self.instances), 0)
            intra = self.expert.dp // self.instances
            plan["intra_ep_dp"] = _level(plan["ep_dp"], (intra, self.instances), 0)
            plan["inter_ep_dp"] = _level(plan["ep_dp"], (intra, self.instances), 1)
        intra = self.expert.dp // self.instances
        models = plan["tp_ep_pp"]
        plan["intra_dist_opt"] = [
            [rank for model in models[first : first + intra] for rank in model]
            for first in range(0, len(models), intra)
        ]
        return plan


def _level(groups: Groups, sizes: Sequence[int], level: int) -> Groups:
    """Divide each group hierarchically; return the groups of one level."""
    return [part for group in groups for part in hierarchical_ranks(group, sizes)[level]]


def _chosen(name: str, choose: EmbeddingRanks, pipelines: Groups) -> Groups:
    """Return the ranks that a function selects from each pipeline."""
    chosen = [list(choose(list(stages))) for stages in pipelines]
    for ranks, stages in zip(chosen, pipelines, strict=True):
        if not ranks or len(set(ranks)) != len(ranks) or not set(ranks) <= set(stages):
            msg = (
                f"{name} must return different ranks out of the pipeline's ranks {stages}, but "
                f"returned {ranks}"
            )
            raise UsageError(msg)
    return chosen
