from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from soothsay.train import losses
from soothsay.train.losses import Divergence, Likely, cross_entropy, distillation, likely

DIVERGENCES: list[Divergence] = ["forward-kl", "reverse-kl", "total-variation", "lk"]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "CHUNK", 7)


def rows(count: int, size: int, *, seed: int, grad: bool = False) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed)).requires_grad_(grad)


def distilled(
    x: Tensor, w: Tensor, y: Tensor, u: Tensor, divergence: Divergence = "forward-kl"
) -> list[Tensor]:
    """`distillation` with the teacher's rows in reverse order, and one row that is not used."""
    teacher = likely(torch.cat([y.flip(0), y[:1]]), u)
    return list(distillation(x, w, teacher, torch.arange(len(y)).flip(0), divergence))


def by_torch(q: Tensor, p: Tensor, divergence: Divergence) -> Tensor:
    """The definitions, in torch's own operations, on logits."""
    if divergence == "forward-kl":
        return F.kl_div(q.log_softmax(-1), p.log_softmax(-1), reduction="batchmean", log_target=True)
    if divergence == "reverse-kl":
        return F.kl_div(p.log_softmax(-1), q.log_softmax(-1), reduction="batchmean", log_target=True)
    if divergence == "total-variation":
        return (p.softmax(-1) - q.softmax(-1)).abs().sum(-1).mean() / 2
    accepted = torch.minimum(p.softmax(-1), q.softmax(-1)).sum(-1)
    share = torch.exp(-3 * accepted.detach())
    kl = F.kl_div(q.log_softmax(-1), p.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    return (share * kl + (1 - share) * (1 - accepted)).mean()


class TestCrossEntropy:
    def test_equals_torch_and_so_do_gradients(self) -> None:
        x, w = rows(30, 8, seed=0, grad=True), rows(50, 8, seed=1, grad=True)
        labels = torch.randint(50, (30,), generator=torch.Generator().manual_seed(2))
        ours, theirs = cross_entropy(x, w, labels), F.cross_entropy(x @ w.t(), labels)
        torch.testing.assert_close(ours, theirs)
        for a, b in zip(
            torch.autograd.grad(3 * ours, (x, w)), torch.autograd.grad(3 * theirs, (x, w)), strict=True
        ):
            torch.testing.assert_close(a, b)

    def test_no_rows_give_nothing(self) -> None:
        x = rows(0, 8, seed=0, grad=True)
        loss = cross_entropy(x, rows(50, 8, seed=1), torch.empty(0, dtype=torch.int64))
        loss.backward()  # type: ignore[no-untyped-call]
        assert loss == 0
        assert x.grad is not None


@pytest.mark.parametrize("divergence", DIVERGENCES)
class TestDistillation:
    def test_equals_torch_and_so_do_gradients(self, divergence: Divergence) -> None:
        x, w = rows(30, 8, seed=0, grad=True), rows(50, 8, seed=1, grad=True)
        y, u = rows(30, 12, seed=2) / 2, rows(50, 12, seed=3)
        ours, _ = distilled(x, w, y, u, divergence)
        theirs = by_torch(x @ w.t(), y @ u.t(), divergence)
        torch.testing.assert_close(ours, theirs)
        for a, b in zip(
            torch.autograd.grad(3 * ours, (x, w)), torch.autograd.grad(3 * theirs, (x, w)), strict=True
        ):
            torch.testing.assert_close(a, b)

    def test_is_nothing_to_oneself(self, divergence: Divergence) -> None:
        x, w = rows(9, 8, seed=0, grad=True), rows(50, 8, seed=1)
        loss, agreement = distilled(x, w, x.detach(), w, divergence)
        (gradient,) = torch.autograd.grad(loss, x)
        assert abs(loss.item()) < 1e-5
        assert agreement == 1
        if divergence not in (
            "total-variation",
            "lk",
        ):  # theirs is a rounding's sign
            assert gradient.abs().max() < 1e-5

    def test_a_frozen_head_needs_no_gradient(self, divergence: Divergence) -> None:
        x, w = rows(9, 8, seed=0, grad=True), rows(50, 8, seed=1)
        distilled(x, w, rows(9, 8, seed=2), w, divergence)[0].backward()  # type: ignore[no-untyped-call]
        assert w.grad is None
        assert x.grad is not None


def test_agreement_counts_rows_with_the_same_likeliest_token() -> None:
    w = torch.eye(4)
    ours = torch.tensor([[9.0, 0, 0, 0], [0, 9.0, 0, 0], [0, 0, 9.0, 0], [0, 0, 0, 9.0]])
    theirs = torch.tensor([[5.0, 0, 0, 1], [0, 5.0, 0, 0], [0, 0, 1.0, 2.0], [1.0, 0, 0, 5.0]])
    assert distilled(ours, w, theirs, w)[1] == 0.75


class TestLikely:
    def test_has_the_likeliest_tokens_of_the_whole_vocabulary(self) -> None:
        y, u = rows(20, 8, seed=2), rows(200, 8, seed=3)
        made, p = likely(y, u), (y @ u.t()).softmax(-1)
        best, tokens = p.topk(64)
        assert torch.equal(made.tokens, tokens)
        torch.testing.assert_close(made.probabilities, best)

    def test_a_row_weighs_what_the_lists_share_is(self) -> None:
        """Against the definition: tokens outside of a list teach nothing, and are never right."""
        x, w = rows(20, 8, seed=0, grad=True), rows(6, 8, seed=1, grad=True)
        y, u = rows(20, 8, seed=2), rows(10, 8, seed=3)
        kept = torch.tensor([0, 2, 3, 5, 7, 9])
        places = torch.full((10,), -1)
        places[kept] = torch.arange(6)
        loss, agreement = distillation(x, w, likely(y, u).listed(places), torch.arange(20))
        p, log_q = (y @ u.t()).softmax(-1), (x @ w.t()).log_softmax(-1)
        expected = (p[:, kept] * (p[:, kept].log() - log_q)).sum(-1).mean()
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(*(torch.autograd.grad(one, x)[0] for one in (loss, expected)))
        assert agreement == (kept[log_q.argmax(-1)] == p.argmax(-1)).float().mean()


@pytest.mark.parametrize("size", [1, 5, 63, 64, 65, 1000, 4_095, 4_097, 50_257])
def test_a_teacher_keeps_its_likeliest_tokens(size: int) -> None:
    logits = rows(9, size, seed=size) * 4
    kept, (values, _) = Likely.of(logits), logits.softmax(-1).topk(min(64, size))
    torch.testing.assert_close(kept.probabilities, values)
    torch.testing.assert_close(logits.softmax(-1).gather(1, kept.tokens), kept.probabilities)


def test_a_teacher_keeps_the_likeliest_tokens_that_stand_side_by_side() -> None:
    logits = rows(3, 10_000, seed=1)
    logits[0, 4_000:4_100] += 20  # in one part of the row
    logits[1, 9_990:] += 20  # in the last part, which is shorter
    kept = Likely.of(logits)
    assert [{*own} for own in kept.tokens.tolist()] == [{*own} for own in logits.topk(64).indices.tolist()]
