"""Shares: what each device is given of one model that is spread over several, by whose each block is.

Blocks that share memory are with the first of them, and with what is in no block where they share that. Which deals of
blocks are worth a try: plan/multi_device.py.
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

_FREE = 0.9  # of what is free, where no budget is given: activations and caches take the rest


class DeviceSplit(NamedTuple):
    """What each device is given: modules under one root, their bytes, a budget; whose each block is; what is around."""

    roots: list[nn.Module]
    nbytes: list[int]
    budgets: list[int | None]
    lane_of: dict[nn.Module, int]
    around: list[nn.Module]
    observe: Observe

    def settings(self, lane: int, config: OffloadConfig) -> OffloadConfig:
        """Those of one device, with a share of the host's budget."""
        return config.within(self.budgets[lane], self.nbytes[lane] / sum(self.nbytes))

    def subset(self, lane: int, model: nn.Module) -> LayerSubset:
        """The layers of the model that one device holds."""
        blocks = tuple(block for block, owner in self.lane_of.items() if owner == lane)
        share = len(blocks) / len(self.lane_of)
        return LayerSubset(blocks=blocks, grains=GRAINS, model=model, cache_share=share, observe=self.observe)

    @property
    def used(self) -> list[int]:
        """The devices that have any weights."""
        return [lane for lane, nbytes in enumerate(self.nbytes) if nbytes]


def split_over_devices(model: nn.Module, machines: Sequence[Machine], config: OffloadConfig) -> list[DeviceSplit]:
    """What each device is given of a model, in each deal of its blocks that is worth a try."""
    if config.backend != "none":
        raise ConfigError(f"the {config.backend} settings are for one GPU: several have a device_budget each")
    if not (blocks := called(find_blocks(model))):
        raise ConfigError(f"{type(model).__name__} has no repeated blocks to spread over {len(machines)} devices")
    settings = [config.within(budget) for budget in config.stripes.values()]
    known = [own.device_nbytes(machine.total_nbytes) for own, machine in zip(settings, machines, strict=True)]
    budgets = [int(_FREE * m.free_nbytes) if n is None else n for n, m in zip(known, machines, strict=True)]
    rates = [machine.profile.link_bytes_per_s for machine in machines]
    nbytes, first = [_nbytes(block) for block in blocks], blocks_sharing_memory(model, blocks)
    deals = multi_device.whose(nbytes, budgets, rates, max(0, _nbytes(model) - sum(nbytes)))
    units = find_units(model, "block", blocks)
    around = [unit.module for unit in units if unit.scope is not Scope.TREE]
    if known[0] is not None:
        known[0] = max(1, known[0] - sum(leaf.tensor.nbytes for module in around for leaf in leaves(module)))
    follow, found = cache(observe), []
    for whose in deals:
        lane_of = {block: 0 if root is None else whose[root] for block, root in zip(blocks, first, strict=True)}
        layers: list[dict[str, nn.Module]] = [{} for _ in machines]
        for unit in (u for u in units if u.scope is Scope.TREE):
            layers[lane_of.get(unit.module, 0)][unit.name] = unit.module
        roots = [rooted(named) for named in layers]
        found.append(DeviceSplit(roots, [_nbytes(root) for root in roots], known, lane_of, around, follow))
    return found


def _nbytes(module: nn.Module) -> int:
    return sum({id(leaf.tensor): leaf.tensor.nbytes for leaf in leaves_of(module)}.values())


def blocks_sharing_memory(model: nn.Module, blocks: Sequence[nn.Module]) -> list[int | None]:
    """For each block the first that shares memory with it, which it is to be with; None: with what is in no block."""
    inside = {id(module) for block in blocks for module in block.modules()}
    outside = {_memory(leaf.tensor) for m in model.modules() if id(m) not in inside for leaf in leaves(m)}
    held = [{_memory(leaf.tensor) for leaf in leaves_of(block)} for block in blocks]
    found: list[int | None] = []
    for index, own in enumerate(held):
        roots = [found[before] for before in range(index) if own & held[before]]
        found.append(
            None if own & outside or None in roots else min((r for r in roots if r is not None), default=index)
        )
    return found


def _memory(tensor: torch.Tensor) -> int:
    storage = tensor.untyped_storage()
    return (storage.data_ptr() if not tensor.is_meta and tensor.numel() else 0) or storage._cdata
