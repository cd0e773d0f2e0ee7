"""The memory of states that layers keep instead of keys and values."""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from soothsay.core.state_shape import StateShape
from soothsay.core.strands import Marks
from soothsay.mapped_memory import mapped_zeros


class LayerStates(NamedTuple):
    """The states of one layer, by slot. Layers with a convolution alone have no matrices and gates."""

    matrices: Tensor  # [slots, H_v, d_k, d_v] float32
    inputs: Tensor  # [slots, taps - 1, channels], the convolution's last inputs, the latest last
    journal: Tensor  # [requests, nodes, channels], its inputs at the nodes of the last tree
    gates: Tensor  # [requests, nodes, 2 * H_v], what else these nodes were computed from


class StatePool:
    """States of requests, and copies of states at borders of blocks.

    Slots below `num_requests` are for requests: they have a journal of the last tree. Memory is taken only
    for the slots in use, on a CPU.

    Args:
        shapes: of the states, by layer.
        num_requests: slots for requests.
        num_snapshots: slots after these.
        nodes: of the largest tree, the root included.
        dtype: of what is not float32.
        device: of the memory.
    """

    def __init__(
        self,
        shapes: Mapping[int, StateShape],
        num_requests: int,
        num_snapshots: int,
        nodes: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.num_requests, self.num_snapshots, self.nodes = num_requests, num_snapshots, nodes
        zeros = mapped_zeros if device.type == "cpu" else partial(torch.zeros, device=device)
        slots = num_requests + num_snapshots
        self._copied = list[Tensor]()  # [layers, slots, ...], of layers of one shape
        self.layers = dict[int, LayerStates]()
        """By the number of the layer."""
        for shape in dict.fromkeys(shapes.values()):
            own = [layer for layer, other in shapes.items() if other == shape]
            matrices = zeros((len(own), slots, *shape.matrices), dtype=torch.float32)
            inputs = zeros((len(own), slots, shape.taps - 1, shape.channels), dtype=dtype)
            journal = zeros((len(own), num_requests, nodes, shape.channels), dtype=dtype)
            gates = zeros((len(own), num_requests, nodes, shape.gates), dtype=dtype)
            parts = zip(matrices, inputs, journal, gates, strict=True)
            self.layers |= {layer: LayerStates(*part) for layer, part in zip(own, parts, strict=True)}
            self._copied += [matrices, inputs]

    def check(self, slot: int | None, nodes: int, marks: Marks) -> None:
        """Raise `ValueError` if a request's state, tree or marks do not fit: kernels do not check bounds."""
        if slot is None or not 0 <= slot < self.num_requests or nodes > self.nodes:
            raise ValueError(f"no room for a request's state in slot {slot}, or for {nodes} nodes")
        last = self.num_requests + self.num_snapshots
        if beyond := [mark for _, mark in marks if not 0 <= mark < last]:
            raise ValueError(f"no room for copies of a state in the slots {beyond}")

    def copy(self, source: int, target: int) -> None:
        """Copy a state from slot to slot, in all layers."""
        for part in self._copied:
            part[:, target] = part[:, source]
