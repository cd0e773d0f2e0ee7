"""Operations between linear layers of a GPU in the interpreter: against stock operations, and rows alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import interpreter  # noqa: F401 (kernels run in it)
import numpy as np
import pytest
import torch
from tiny import TINY, adapted
from torch import Tensor

from soothsay.core.batch import Rows
from soothsay.core.functions import ACTIVATIONS, UNGATED
from soothsay.core.tree import DraftTree
from soothsay.model.decoder.norm import RMSNorm, UnitNorm
from soothsay.model.decoder.rope import Rope
from soothsay.model.gpu import gpu_layers
from soothsay.model.gpu.gpu_layers import GpuLayers
from soothsay.model.gpu.launching import launch
from soothsay.model.ops.kernels import StockKernels
from soothsay.model.ops.operands import HeadForm
from soothsay.model.specs.attention_spec import HeadRotation, RopeSpec
from soothsay.model.specs.feed_forward_spec import CLIPPED
from soothsay.model.specs.model_spec import PositionsSpec
from soothsay.model.transformer import Transformer

OURS, STOCK = GpuLayers(), StockKernels()


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """Fill new tensors with NaN."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def norm(size: int, eps: float = 1e-5, *, centred: bool = False, biased: bool = False) -> RMSNorm:
    made = RMSNorm(size, eps, centred=centred, biased=biased)
    for parameter in made.parameters():
        parameter.data.normal_()
    return made


def close(ours: Tensor, stock: Tensor, near: float = 0.2) -> None:
    """Near each other, and of the same type."""
    loose = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}[ours.dtype]
    torch.testing.assert_close(ours, stock, rtol=loose, atol=loose * near)


def assert_rows_alone(run: Callable[[Tensor], Tensor], rows: Tensor) -> None:
    """Each row has its bits in any company, and at an address that is no multiple of 16 bytes."""
    together = run(rows)
    for row in range(len(rows)):
        assert torch.equal(run(rows[row : row + 1].clone()), together[row : row + 1]), row
    moved = torch.cat([rows.new_zeros(3), rows.flatten()])[3:].view(rows.shape)
    assert torch.equal(run(moved), together)


@pytest.mark.parametrize("size", [1, 100, 576, 2049])
@pytest.mark.parametrize(("centred", "biased"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms(size: int, centred: bool, biased: bool, dtype: torch.dtype) -> None:
    own, x = norm(size, centred=centred, biased=biased), torch.randn(3, size) * 4 + 1
    close(OURS.norm(x, own, dtype), STOCK.norm(x, own, dtype))
    assert_rows_alone(lambda rows: OURS.norm(rows, own, dtype), x)


@pytest.mark.parametrize("post", ["none", "plain", "centred"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_and_their_norms(post: str, dtype: torch.dtype) -> None:
    x, delta = torch.randn(4, 96), torch.randn(4, 96).to(dtype)
    first = None if post == "none" else norm(96, 1e-3, centred=post == "centred")
    second, kept = norm(96), x.clone()
    for ours, stock in zip(
        OURS.add_norm(x, delta, first, second, dtype),
        STOCK.add_norm(x, delta, first, second, dtype),
        strict=True,
    ):
        close(ours, stock)
    close(OURS.add(x, delta, first), STOCK.add(x, delta, first))
    assert torch.equal(x, kept)
    assert_rows_alone(
        lambda rows: OURS.add_norm(x[: len(rows)] * 0 + 1, rows, first, second, dtype)[1], delta
    )


HEAD_NORMS = {
    "none": lambda size: (None, None),
    "heads": lambda size: ((norm(size, 1e-5), norm(size, 1e-2)), None),
    "values": lambda size: ((norm(size, 1e-5), norm(size, 1e-2)), UnitNorm(size, 1e-3)),
    "values alone": lambda size: (None, UnitNorm(size, 1e-3)),
}


@pytest.mark.parametrize("norms", HEAD_NORMS)
@pytest.mark.parametrize(
    ("gates", "keys", "size", "pool", "dtype"),
    [
        (0, 2, 64, torch.float32, torch.float32),
        (5, 2, 80, torch.bfloat16, torch.bfloat16),
        (0, 0, 32, torch.float16, torch.float32),
    ],
)
def test_rotated_and_stored_heads(
    norms: str, gates: int, keys: int, size: int, pool: torch.dtype, dtype: torch.dtype
) -> None:
    rope = Rope(HeadRotation(RopeSpec(), size, rotated=size // 2))
    positions, slots = torch.tensor([0, 7, 900, 31]), torch.tensor([9, 0, 3, 11])
    pair, values = HEAD_NORMS[norms](size)
    qkv = torch.randn(4, 5 + gates + 2 * keys, size).to(dtype) * 3
    kept = torch.randn(4, 12, size).to(pool)

    def run(ops: GpuLayers | StockKernels, some: list[int]) -> tuple[Tensor, Tensor]:
        kv, turns = kept.clone(), rope(positions[some])
        own = None if keys else 0
        q = ops.rotate_store(qkv[some], turns, kv, slots[some], HeadForm(0.3, pair, values, gates, own))
        return q, kv

    (q, kv), (stock_q, stock_kv) = run(OURS, [0, 1, 2, 3]), run(STOCK, [0, 1, 2, 3])
    close(q, stock_q.to(pool))
    close(kv, stock_kv)
    untouched = [slot for slot in range(12) if slot not in slots or not keys]
    assert torch.equal(kv[:, untouched], kept[:, untouched])
    for row in (0, 2):
        alone, own = run(OURS, [row])
        assert torch.equal(alone, q[row : row + 1])
        assert torch.equal(own[:, slots[row]], kv[:, slots[row]])


def test_a_pool_in_float16_holds_its_largest_number() -> None:
    rope = torch.ones(1, 1, 16), torch.zeros(1, 1, 16)
    kv = torch.zeros(2, 4, 16, dtype=torch.float16)
    OURS.rotate_store(torch.full((1, 3, 16), -1e6), rope, kv, torch.tensor([1]), HeadForm())
    assert torch.equal(kv[:, 1], torch.full((2, 16), -65504.0, dtype=torch.float16))


@pytest.mark.parametrize("activation", [*ACTIVATIONS, CLIPPED, *UNGATED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations(activation: str, dtype: torch.dtype) -> None:
    gate_up = (torch.randn(3, 2200) * 6).to(dtype)
    gate_up[0, :4] = torch.tensor([0.0, -0.0, 95.0, -95.0])  # exponentials overflow
    close(OURS.gated(gate_up, activation), STOCK.gated(gate_up, activation), near=1)
    assert_rows_alone(lambda rows: OURS.gated(rows, activation), gate_up)


def test_sums_have_one_order_on_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """It depends on constants, warps and addresses, which the interpreter does not see."""
    seen: list[object] = []

    def record(kernel: object, grid: tuple[int, ...], *args: object, **constants: object) -> None:
        addresses = [each.data_ptr() % 16 for each in args[:2] if isinstance(each, Tensor)]
        seen.append((kernel, constants, addresses))

    monkeypatch.setattr(gpu_layers, "launch", record)
    for rows in (1, 7):
        x = torch.randn(rows * 3 * 64 + 3)[3:].view(rows, 3, 64)
        OURS.add_norm(x[:, 0], x[:, 1], None, norm(64), torch.bfloat16)
        rope = torch.ones(rows, 1, 64), torch.zeros(rows, 1, 64)
        slots = torch.arange(rows)
        OURS.rotate_store(x, rope, torch.zeros(2, rows, 64), slots, HeadForm(norms=(norm(64), norm(64))))
    assert seen[:2] == seen[2:]
    assert not any(sum(addresses) for *_, addresses in seen)


def test_no_rows() -> None:
    launch({}, (0, 4))  # a device refuses to start no programs
    assert OURS.norm(torch.zeros(0, 8), norm(8), torch.float32).shape == (0, 8)
    assert OURS.gated(torch.zeros(0, 8), "silu").shape == (0, 4)


MODELS: dict[str, dict[str, object]] = {
    "plain": {},
    "with norms of heads and of outputs": {"qk_norm": True, "post_norms": True, "activation": "gelu_tanh"},
    "with gates, sinks and a window": {"gated_attention": True, "sinks": True, "windows": (4, None)},
    "with centred norms": {"centred_norms": True, "attention_softcap": 3.0},
    "with layer norms, and norms after the rotation": {
        **dict.fromkeys(("centred_norms", "norm_biases", "qk_norm", "qk_norm_last", "head_bias"), True),
        **{"activation": "plain_gelu", "positions": PositionsSpec(512, 2)},
    },
}


@pytest.mark.parametrize("kind", MODELS)
def test_passes_of_a_model(kind: str) -> None:
    """Prompts with trees in one pass have the logits of stock operations; a chain has those of its tree."""
    spec = adapted(TINY, **MODELS[kind])
    stock = Transformer(spec).eval().requires_grad_(False)
    ours = Transformer(spec, OURS).eval().requires_grad_(False)
    ours.load_state_dict(stock.state_dict())
    tree, chain = DraftTree(5), DraftTree(5)
    for draft in ([1, 2], [3, 4, 6]):
        tree.extend(draft)
    chain.extend([3, 4, 6])
    prompts = [Rows(np.arange(4), 0, np.array([3, 1]), tree), Rows(np.arange(4), 0, np.array([0, 2]), chain)]

    def logits(model: Transformer) -> Tensor:
        return model.run(model.pack(prompts, 8), model.new_cache(4, 8))[2]

    both = logits(ours)
    torch.testing.assert_close(both, logits(stock), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(both[3:6], both[-3:], rtol=1e-5, atol=1e-5)
