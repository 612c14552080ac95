"""A mixture of experts with its router and weight table, as DeepSeek-V3 has it (arXiv 2412.19437, section 2.1.2), or
with less: without groups, bias or shared block, or with softmax for scores (Mixtral, arXiv 2401.04088). Called by the
layer, engine and worker processes.

A token's result does not depend on the other tokens of the step: the router works row by row in exact or compiled
operations, and a token's experts are added up in ascending order, whichever tokens they compute beside it. Ranks that
share layers have parts of all experts, or some of them wholly (expert parallelism); each adds up what it has of the
experts and of the shared block, and the sum over ranks is one. Ranks that share sequences have all experts, or some of
them wholly; then rows travel (`expert_exchange.py`).

Legend: T tokens, C hidden size, N experts in G groups of M, K experts chosen for a token from J groups, P pairs of a
token and an expert.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from model_runtime.architecture import Experts, ModelConfig
from model_runtime.blocks.expert_exchange import ExpertExchange
from model_runtime.blocks.mlp import MLP, mlp_table
from model_runtime.blocks.narrow import Narrow, narrow_table
from model_runtime.ops.registry import Ops
from model_runtime.parallel import Collectives
from model_runtime.weights.table import Parameter, Parameters, Slot, linear_table

SUM_EPS = 1e-20
"""Added to the sum of a token's weights before they are divided by it."""
SMALLEST = 1e-20
"""sigmoid is 0.5 for anything nearer to zero."""


def moe_table(config: ModelConfig, name: str, key: str, *, only_first: bool = False) -> list[Parameter]:
    """The parameters under `name` and the checkpoint keys under `key` that fill them; with `only_first` those of the
    first expert alone, which the others are like."""
    experts = _experts(config)
    width = experts.hidden_size or config.hidden_size
    single = replace(config, hidden_size=width, intermediate_size=experts.intermediate_size, mlp_bias=experts.bias)
    shared = replace(config, intermediate_size=experts.shared_size)
    router = (Slot(f"{key}.gate", experts.num_experts),)
    router_table = linear_table(f"{name}.router", router, config.hidden_size, experts.bias)
    table = [replace(parameter, fewest_bits=32) for parameter in router_table]
    if experts.choice_bias:
        bias = Slot(f"{key}.gate.e_score_correction_bias", experts.num_experts)
        table.append(Parameter(name=f"{name}.choice_bias", slots=(bias,)))
    for expert in range(1 if only_first else experts.num_experts):
        parameters = mlp_table(single, f"{name}.experts.{expert}", f"{key}.experts.{expert}", "expert")
        table += [replace(parameter, expert=expert) for parameter in parameters]
    table += narrow_table(config, experts, name, key)
    if experts.shared_gate:
        gate = (Slot(f"{key}.shared_expert_gate", 1),)
        gate_table = linear_table(f"{name}.shared_gate", gate, config.hidden_size, bias=False)
        table += [replace(parameter, fewest_bits=32) for parameter in gate_table]
    if experts.shared_size:
        table += mlp_table(shared, f"{name}.shared", f"{key}.shared_experts", "shared")
    return table


@dataclass(frozen=True, slots=True)
class Route:
    """Which experts compute which token, and how much each counts."""

    expert_TK: Tensor
    """int64, ascending in each row."""
    weight_TK: Tensor

    def pairs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Experts [P], ascending, with the rows [P] that each computes, and their weights [P, 1]."""
        sorted_P, pair_P = self.expert_TK.flatten().sort(stable=True)
        return sorted_P, pair_P // self.expert_TK.shape[1], self.weight_TK.flatten()[pair_P, None]


def _by_expert(expert_P: Tensor) -> Iterator[tuple[int, slice]]:
    """(expert, its places) of experts in ascending order."""
    start = 0
    experts, counts = (found.tolist() for found in torch.unique_consecutive(expert_P, return_counts=True))
    for expert, count in zip(experts, counts, strict=True):
        yield expert, slice(start, start + count)
        start += count


def route(ops: Ops, logits_TN: Tensor, choice_bias_N: Tensor | None, experts: Experts) -> Route:
    """The best experts by score with bias; their weights are the scores without bias."""
    score_TN = _sigmoid(ops, logits_TN) if experts.router == "sigmoid" else logits_TN.softmax(dim=-1)
    # a sigmoid is 1 of all large numbers alike
    plain_TN = logits_TN if experts.router == "sigmoid" and experts.num_groups == 1 else score_TN
    choice_TN = plain_TN if choice_bias_N is None else score_TN + choice_bias_N
    if experts.num_groups > 1:
        choice_TN = _in_best_groups(choice_TN, experts)
    expert_TK = choice_TN.topk(experts.num_chosen, dim=-1).indices.sort(dim=-1).values
    weight_TK = score_TN.gather(1, expert_TK)
    if experts.renormalise:
        weight_TK = weight_TK / (_row_sum(weight_TK) + SUM_EPS)
    return Route(expert_TK, weight_TK * experts.scale)


def _in_best_groups(choice_TN: Tensor, experts: Experts) -> Tensor:
    """[T, N]: -inf for experts outside of the best groups, a group being as good as its best experts together."""
    choice_TGM = choice_TN.view(-1, experts.num_groups, experts.num_experts // experts.num_groups)
    group_TG = _row_sum(choice_TGM.topk(experts.best_of_group, dim=-1).values.flatten(0, 1)).view(choice_TGM.shape[:2])
    chosen_TJ = group_TG.topk(experts.num_chosen_groups, dim=-1).indices
    out_of_choice_TG = torch.ones_like(group_TG, dtype=torch.bool).scatter_(1, chosen_TJ, False)
    return choice_TGM.masked_fill(out_of_choice_TG[..., None], -torch.inf).flatten(1)


class MixtureOfExperts:
    """The shared block's output, if there is one, and, weighted, those of the experts that the router chooses."""

    def __init__(
        self,
        config: ModelConfig,
        name: str,
        parameters: Parameters,
        collectives: Collectives,
        exchange: ExpertExchange | None = None,
    ) -> None:
        """`exchange`: experts that this rank has not are asked of the others, which have other rows."""
        self.config, self._exchange = _experts(config), exchange
        self.router = parameters.linear(f"{name}.router")
        self.choice_bias_N = parameters.vectors.get(f"{name}.choice_bias")
        names = {index: f"{name}.experts.{index}" for index in range(self.config.num_experts)}
        own = {index: key for index, key in names.items() if f"{key}.down.weight" in parameters.matrices}
        self.experts = {index: MLP(config, key, parameters, self.config.clamp) for index, key in own.items()}
        """Those of this rank."""
        self.shared = MLP(config, f"{name}.shared", parameters) if self.config.shared_size else None
        self.shared_gate = parameters.linear(f"{name}.shared_gate") if self.config.shared_gate else None
        self.narrow = Narrow(config, name, parameters, collectives) if self.config.hidden_size else None
        self.tokens = 0
        """That these experts have computed, each token counted once for each of its experts."""

    def forward(self, ops: Ops, x_TC: Tensor) -> Tensor:
        """[T, C] -> [T, C]."""
        # which experts are chosen hangs on small differences, so narrower activations are widened
        wide_TC = x_TC.to(torch.promote_types(x_TC.dtype, torch.float32))
        logits_TN = ops.linear(wide_TC, self.router.weight, self.router.bias)
        out_TC = self._shared(ops, x_TC, wide_TC)
        pairs = route(ops, logits_TN, self.choice_bias_N, self.config).pairs()
        if self.narrow is None:
            self._add_experts(ops, x_TC, pairs, out_TC)
        else:
            narrow_TL = self.narrow.enter(ops, x_TC)
            sum_TL = torch.zeros_like(narrow_TL)
            self._add_experts(ops, narrow_TL, pairs, sum_TL)
            self.narrow.leave(ops, sum_TL, out_TC)
        return out_TC

    def _add_experts(self, ops: Ops, x_TC: Tensor, pairs: tuple[Tensor, Tensor, Tensor], out_TC: Tensor) -> None:
        """What this rank's experts give, weighted; `pairs` are as `Route` has them."""
        expert_P, row_P, weight_P1 = pairs
        if self.config.weigh_input:
            taken, from_P = (x_TC[row_P] * weight_P1).to(x_TC.dtype), torch.arange(len(row_P), device=x_TC.device)
        else:
            taken, from_P = x_TC, row_P
        for some, result_C in self._results(ops, taken, expert_P, from_P):
            # of an expert's pairs no row comes twice, so each gets one addition here
            share_C = result_C if self.config.weigh_input else result_C * weight_P1[some]
            out_TC.index_add_(0, row_P[some], share_C.to(out_TC.dtype))
            del result_C, share_C  # or they would be there beside what the next expert makes

    def _results(self, ops: Ops, x_TC: Tensor, expert_P: Tensor, row_P: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """(places of pairs, the outputs of the expert that they have in common), experts in ascending order."""
        if self._exchange is None:
            for expert, some in _by_expert(expert_P):
                if expert in self.experts:
                    yield some, self._expert(ops, expert, x_TC[row_P[some]])
            return

        def compute(rows_QC: Tensor, expert_Q: Tensor) -> Tensor:
            sorted_Q, place_Q = expert_Q.sort(stable=True)
            out_QC = torch.empty_like(rows_QC)
            for expert, some in _by_expert(sorted_Q):
                out_QC[place_Q[some]] = self._expert(ops, expert, rows_QC[place_Q[some]])
            return out_QC

        for round_, result_C in self._exchange.rounds(x_TC, expert_P, row_P, compute):
            for _, some in _by_expert(expert_P[round_]):
                yield slice(round_.start + some.start, round_.start + some.stop), result_C[some]

    def _expert(self, ops: Ops, expert: int, rows_C: Tensor) -> Tensor:
        self.tokens += len(rows_C)
        return self.experts[expert].forward(ops, rows_C)

    def _shared(self, ops: Ops, x_TC: Tensor, wide_TC: Tensor) -> Tensor:
        """[T, C]: what every token gets; zeros without a shared block."""
        if self.shared is None:
            return torch.zeros_like(x_TC)
        out_TC = self.shared.forward(ops, x_TC)
        if self.shared_gate is not None:
            out_TC *= _sigmoid(ops, ops.linear(wide_TC, self.shared_gate.weight, None)).to(out_TC.dtype)
        return out_TC


def _experts(config: ModelConfig) -> Experts:
    assert config.experts is not None, "the architecture has no experts"
    return config.experts


def _sigmoid(ops: Ops, x_TN: Tensor) -> Tensor:
    """As silu(x) / x. torch's sigmoid rounds the last numbers of a tensor in another way than the rest, and so a row by
    its place."""
    x_TN = x_TN.where(x_TN.abs() > SMALLEST, SMALLEST)
    return ops.silu_mul(torch.cat((x_TN, torch.ones_like(x_TN)), dim=1)) / x_TN


def _row_sum(x_TK: Tensor) -> Tensor:
    """[T, 1], from left to right."""
    total_T1 = x_TK[:, :1]
    for column in range(1, x_TK.shape[1]):
        total_T1 = total_T1 + x_TK[:, column : column + 1]
    return total_T1
