"""A model's own routers: how to find them, which scoring rule each follows, and how to answer in their place."""

from vmoer.gates.finding import FoundRouter, find
from vmoer.gates.gate import Gate, call_router, expert_count, probe_states, router_weight
from vmoer.gates.rules import Rule, Scoring

__all__ = [
    "FoundRouter",
    "Gate",
    "Rule",
    "Scoring",
    "call_router",
    "expert_count",
    "find",
    "probe_states",
    "router_weight",
]
