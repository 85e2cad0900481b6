"""Drawing tokens on the CPU kernels against the reference in MLX operations."""

import itertools
from collections.abc import Iterator

import mlx.core as mx
import pytest

from metalctl.kernels.cpu import library
from metalctl.kernels.sampling import reference
from tests.kernels.cpu_library import ISAS, each_isa


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from each_isa(request.param)


def column(values: list[float]) -> mx.array:
    return mx.array(values, mx.float32)[:, None]


@pytest.mark.parametrize("width", [7, 1000, 5003])
def test_the_same_tokens_as_the_reference(isa: str, width: int) -> None:
    settings = list(
        itertools.product([0.3, 1.0, 4.0], [1, 5, 40, width], [0.2, 0.9, 1.0], [0.0, 0.05, 1.0], [0.0, 0.37, 0.999])
    )
    settings = [(t, min(k, width), p, m, u) for t, k, p, m, u in settings]
    logits = 3 * mx.random.normal((len(settings), width), key=mx.random.key(width))
    logits[:, 3] = -mx.inf
    columns = [column([float(s[i]) for s in settings]) for i in range(5)]
    ours = library.draw()(logits, mx.concatenate(columns, axis=1))
    theirs = reference(logits, *columns, keeps_all=False)
    same = (ours == theirs).sum().item()
    assert same >= len(settings) - 2  # a sum may round across the number that is drawn
    assert not (ours == 3).any()


def test_ties_with_the_last_kept_are_kept(isa: str) -> None:
    logits = mx.array([[1.0, 5.0, 5.0, 5.0, 0.0]] * 64)
    uniform = [(i + 0.5) / 64 for i in range(64)]
    columns = [column([value] * 64) for value in (1.0, 2.0, 1.0, 0.0)] + [column(uniform)]
    tokens = library.draw()(logits, mx.concatenate(columns, axis=1)).tolist()
    assert set(tokens) == {1, 2, 3}
    assert tokens == reference(logits, *columns, keeps_all=False).tolist()


def test_draws_follow_the_distribution(isa: str) -> None:
    count = 4000
    logits = mx.broadcast_to(mx.log(mx.array([0.1, 0.2, 0.3, 0.4])), (count, 4))
    columns = [column([value] * count) for value in (1.0, 4.0, 1.0, 0.0)] + [column([i / count for i in range(count)])]
    tokens = library.draw()(logits, mx.concatenate(columns, axis=1))
    assert [(tokens == i).sum().item() for i in range(4)] == pytest.approx([400, 800, 1200, 1600], abs=2)
