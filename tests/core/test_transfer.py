"""Copies of many tensors at once, to a device and back."""

from __future__ import annotations

import torch
from counting_device import DEVICE, CountingDevice, OnDevice

from soothsay.core.transfer import download, upload

INTEGERS = torch.tensor([[3, -1], [2**52, 7]])
DOUBLES = torch.tensor([0.1, -torch.inf, 1e300], dtype=torch.float64)


def test_tensors_go_to_a_device_in_one_copy_with_all_bits() -> None:
    device, nothing = CountingDevice(), torch.empty(0, dtype=torch.int64)
    small = [torch.tensor([True, False, True]), torch.tensor([[0.1], [-torch.inf]])]
    with device:
        there = upload([INTEGERS.t(), nothing, small[0], DOUBLES, small[1]], DEVICE)
        assert (device.copies, device.waits) == (1, 0)
        assert all(isinstance(one, OnDevice) for one in there)
        here = [one.cpu() for one in there]
    assert [one.dtype for one in here] == [torch.int64, torch.int64, torch.bool, torch.float64, torch.float32]
    assert torch.equal(here[0], INTEGERS.t())
    assert here[1].shape == (0,)
    assert torch.equal(here[3], DOUBLES)
    assert [torch.equal(here[place], one) for place, one in zip((2, 4), small, strict=True)] == [True, True]


def test_a_repeated_number_goes_to_a_device() -> None:
    """Its stride is 0, so its bytes cannot be seen in place."""
    with CountingDevice():
        [there] = upload([torch.tensor([7]).as_strided((1,), (0,))], DEVICE)
        assert there.tolist() == [7]


def test_tensors_come_back_behind_one_wait() -> None:
    device, floats = CountingDevice(), torch.tensor([[0.1], [-torch.inf]])
    with device:
        there = upload([INTEGERS, floats, floats > 0], DEVICE)
        found = download(*there)
        assert device.waits == 1
    assert found[0].tolist() == INTEGERS.tolist()
    assert found[1].dtype == "float32"
    assert found[1].tolist() == floats.tolist()
    assert found[2].tolist() == [[True], [False]]


def test_on_a_cpu_nothing_is_copied() -> None:
    [there] = upload([INTEGERS], torch.device("cpu"))
    assert there is INTEGERS
    [here] = download(INTEGERS)
    here[0, 0] = 4
    assert INTEGERS[0, 0] == 4
    here[0, 0] = 3
