"""Splits one model over several devices: the modules and the budget of each device, for each deal of the blocks.

A deal says which device computes which block. plan/multi_device.py makes the deals that are worth a try, and this file
corrects them for shared memory: blocks that share memory are on the device of the first of them, and blocks that share
memory with a module outside of the blocks are on the first device, like that module.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import nn

from weightstream.adapters.modules.partition import GRAINS, called, find_blocks, find_units
from weightstream.adapters.tracing.footprint import observe
from weightstream.errors import ConfigError
from weightstream.inputs.builder import rooted
from weightstream.inputs.gathering import LayerSubset, Observe
from weightstream.plan import multi_device
from weightstream.plan.planner import Machine
from weightstream.runtime.tensors.leaves import leaves, leaves_of
from weightstream.runtime.weights.alias_groups import Scope
from weightstream.settings.config import OffloadConfig

_FREE = 0.9  # share of the free memory for weights if no budget is set: activations and caches take the rest


class DeviceSplit(NamedTuple):
    """One model over several devices. Lists have an entry per device.

    Attributes:
        roots: a module that contains the modules of the device.
        nbytes: bytes of their weights.
        budgets: bytes of device memory for weights; None: not configured.
        lane_of: the index of the device that computes each block.
        around: modules that contain blocks, whose own tensors are on the first device.
        observe: returns the work of the model's step, once for all devices.
    """

    roots: list[nn.Module]
    nbytes: list[int]
    budgets: list[int | None]
    lane_of: dict[nn.Module, int]
    around: list[nn.Module]
    observe: Observe

    def settings(self, lane: int, config: OffloadConfig) -> OffloadConfig:
        """The settings of one device, with its share of the host budget."""
        return config.within(self.budgets[lane], self.nbytes[lane] / sum(self.nbytes))

    def subset(self, lane: int, model: nn.Module) -> LayerSubset:
        """The layers of the model that one device holds."""
        blocks = tuple(block for block, owner in self.lane_of.items() if owner == lane)
        share = len(blocks) / len(self.lane_of)
        elsewhere: dict[nn.Module | None, bool] = {block: owner != lane for block, owner in self.lane_of.items()}
        return LayerSubset(
            blocks=blocks,
            grains=GRAINS,
            model=model,
            cache_share=share,
            elsewhere=elsewhere | {None: lane != 0},
            observe=self.observe,
        )

    @property
    def used(self) -> list[int]:
        """The lanes of the devices that have any weights."""
        return [lane for lane, nbytes in enumerate(self.nbytes) if nbytes]


def split_over_devices(model: nn.Module, machines: Sequence[Machine], config: OffloadConfig) -> list[DeviceSplit]:
    """The split of a model for each deal of its blocks that is worth a try.

    Raises `ConfigError` for the classic settings, and for a model without repeated blocks.
    """
    if config.backend != "none":
        raise ConfigError(f"the {config.backend} settings are for one GPU: for several, give a device_budget for each")
    if not (blocks := called(find_blocks(model))):
        raise ConfigError(f"{type(model).__name__} has no repeated blocks to spread over {len(machines)} devices")
    settings = [config.within(budget) for budget in config.stripes.values()]
    configured = [each.device_nbytes(machine.total_nbytes) for each, machine in zip(settings, machines, strict=True)]
    budgets = [int(_FREE * m.free_nbytes) if n is None else n for n, m in zip(configured, machines, strict=True)]
    rates = [machine.profile.link_bytes_per_s for machine in machines]
    nbytes, leaders = [_nbytes(block) for block in blocks], blocks_sharing_memory(model, blocks)
    deals = multi_device.whose(nbytes, budgets, rates, max(0, _nbytes(model) - sum(nbytes)))
    units = find_units(model, "block", blocks)
    around = [unit.module for unit in units if unit.scope is not Scope.TREE]
    if configured[0] is not None:
        # the tensors of modules around blocks are no part of any device's plan, and stay on the first device
        around_nbytes = sum(leaf.tensor.nbytes for module in around for leaf in leaves(module))
        configured[0] = max(1, configured[0] - around_nbytes)
    observe_once, splits = cache(observe), []
    for deal in deals:
        lane_of = {block: 0 if leader is None else deal[leader] for block, leader in zip(blocks, leaders, strict=True)}
        layers: list[dict[str, nn.Module]] = [{} for _ in machines]
        for unit in (u for u in units if u.scope is Scope.TREE):
            layers[lane_of.get(unit.module, 0)][unit.name] = unit.module
        roots = [rooted(named) for named in layers]
        splits.append(DeviceSplit(roots, [_nbytes(root) for root in roots], configured, lane_of, around, observe_once))
    return splits


def _nbytes(module: nn.Module) -> int:
    return sum({id(leaf.tensor): leaf.tensor.nbytes for leaf in leaves_of(module)}.values())


def blocks_sharing_memory(model: nn.Module, blocks: Sequence[nn.Module]) -> list[int | None]:
    """For each block, the index of the first block of those that share memory with it, perhaps through other blocks.

    They are on one device. None: that is the first device, as one of them shares memory with a module outside of the
    blocks.
    """
    inside = {id(module) for block in blocks for module in block.modules()}
    outside = {_memory(leaf.tensor) for m in model.modules() if id(m) not in inside for leaf in leaves(m)}
    held = [{_memory(leaf.tensor) for leaf in leaves_of(block)} for block in blocks]
    groups: list[set[int]] = []  # the memories of blocks that share some
    for memories in held:
        joined = [group for group in groups if group & memories]
        groups = [memories.union(*joined), *(group for group in groups if not group & memories)]
    leaders: list[int | None] = []
    for index, memories in enumerate(held):
        group: set[int] = next((group for group in groups if group & memories), set())
        first = next((other for other in range(index) if held[other] & group), index)
        leaders.append(None if group & outside else first)
    return leaders


def _memory(tensor: torch.Tensor) -> int:
    """A number for the storage of a tensor: its address, or its identity where it has none."""
    storage = tensor.untyped_storage()
    return (storage.data_ptr() if not tensor.is_meta and tensor.numel() else 0) or storage._cdata
