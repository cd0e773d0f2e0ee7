"""Memory mappings: large pages, and when they are freed."""

import gc
import weakref

import pytest
import torch

from soothsay import mapped_memory
from soothsay.mapped_memory import LargePages


def test_large_pages_are_shared_by_tensors_that_follow_each_other() -> None:
    memory = LargePages()
    first, second = memory.zeros((3, 100), torch.float32), memory.copy(torch.arange(7, dtype=torch.uint8))
    assert first.data_ptr() % LargePages.PAGE == 0
    assert second.data_ptr() == first.data_ptr() + 1216  # 1,200 bytes are 19 cache lines
    assert not first.any()
    first.fill_(1.0)
    assert second.tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_a_tensor_that_does_not_fit_begins_another_mapping() -> None:
    memory = LargePages()
    small, large = memory.zeros((64,), torch.uint8), memory.zeros((LargePages.SHARED + 1,), torch.uint8)
    after = memory.zeros((64,), torch.uint8)
    large[-1] = 1
    assert small.data_ptr() % LargePages.PAGE == large.data_ptr() % LargePages.PAGE == 0
    assert not after.any()


def test_a_mapping_is_freed_with_the_last_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    mappings: list[weakref.ref[object]] = []
    made = mapped_memory._mapping

    def counted(size: int) -> object:
        mapping = made(size)
        mappings.append(weakref.ref(mapping))
        return mapping

    monkeypatch.setattr(mapped_memory, "_mapping", counted)
    memory = LargePages()
    first, second = (memory.zeros((LargePages.SHARED // 2,), torch.uint8) for _ in range(2))
    memory.zeros((64,), torch.uint8)  # begins another mapping
    assert len(mappings) == 2
    del first
    gc.collect()
    assert mappings[0]() is not None
    del second
    gc.collect()
    assert mappings[0]() is None
