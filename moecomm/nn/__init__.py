"""Modules for models: the router, the experts of a rank, the layer that joins them over a communicator."""

from moecomm.nn.experts import GroupedExperts
from moecomm.nn.gradients import clip_grad_norm, dense_parameters, expert_parameters, synchronize_gradients
from moecomm.nn.grouped_swiglu import grouped_swiglu
from moecomm.nn.layer import MoELayer, set_mode, take_aux_loss
from moecomm.nn.losses import load_balance_loss, router_z_loss
from moecomm.nn.recompute import keep_exchanges
from moecomm.nn.router import TopKRouter
from moecomm.nn.router_output import RouterOutput

__all__ = [
    "GroupedExperts",
    "MoELayer",
    "RouterOutput",
    "TopKRouter",
    "clip_grad_norm",
    "dense_parameters",
    "expert_parameters",
    "grouped_swiglu",
    "keep_exchanges",
    "load_balance_loss",
    "router_z_loss",
    "set_mode",
    "synchronize_gradients",
    "take_aux_loss",
]
