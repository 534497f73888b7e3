"""When kernels answer, and when they leave the work to the plain path. On a GPU also: the same answer either way."""

import subprocess
import sys

import pytest
import torch

from vmoer.numerics import integrals, kernels, noise
from vmoer.numerics.gaussians import Cholesky, Diagonal, Factored, Gaussian, Scaled


def _posteriors(device: str, n: int = 24) -> list[Gaussian]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    return [
        Cholesky(normal(5, n), 0.3 * normal(5, n * (n + 1) // 2), 1.5),
        Diagonal(normal(5, n), 0.3 * normal(5, n)),
        Factored(normal(5, n), 0.3 * normal(5, n), 0.3 * normal(5, n, 4)),
        Factored(normal(5, n), 0.3 * normal(5, n), normal(5, n, 0)),
        Scaled(normal(5, n), normal(5).square(), torch.eye(n, device=device) + 0.1),
    ]


@pytest.mark.parametrize("q", _posteriors("cpu"), ids=lambda q: type(q).__name__)
def test_the_cpu_takes_the_plain_path(q: Gaussian) -> None:
    eps = noise.sobol_normal(8, q.noise_dim, 0)
    assert not kernels.available(q.mean_TN)
    assert kernels.log_expected_softmax(q, eps) is None
    assert kernels.expected_sigmoid_logit(q, eps) is None


def test_importing_vmoer_leaves_triton_alone() -> None:
    code = "import sys, vmoer, vmoer.numerics.kernels; assert 'vmoer.numerics.kernels.cholesky' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestOnGPU:
    @pytest.mark.parametrize(
        "q", _posteriors("cuda") if torch.cuda.is_available() else [], ids=lambda q: type(q).__name__
    )
    def test_fused_and_plain_agree(self, q: Gaussian) -> None:
        eps = noise.sobol_normal(32, q.noise_dim, 0).cuda()
        softmax, sigmoid = kernels.log_expected_softmax(q, eps), kernels.expected_sigmoid_logit(q, eps)
        assert softmax is not None
        assert sigmoid is not None
        kernels.enabled = False
        try:
            assert kernels.log_expected_softmax(q, eps) is None
            torch.testing.assert_close(softmax, integrals.log_expected_softmax(q, eps), rtol=0, atol=2e-3)
            torch.testing.assert_close(sigmoid, integrals.expected_sigmoid_logit(q, eps), rtol=0, atol=2e-3)
        finally:
            kernels.enabled = True

    def test_left_to_the_plain_path(self) -> None:
        q = _posteriors("cuda")[0]
        eps = noise.sobol_normal(8, 24, 0).cuda()
        assert isinstance(q, Cholesky)
        assert kernels.log_expected_softmax(q, None) is None
        assert kernels.log_expected_softmax(q, eps.expand(5, 8, 24)) is None
        assert kernels.log_expected_softmax(Cholesky(q.mean_TN, q.raw_TC.requires_grad_(True)), eps) is None
        assert kernels.log_expected_softmax(q.rows(0, 0), eps) is None
        assert kernels.log_expected_softmax(q, noise.sobol_normal(128, 24, 0).cuda()) is None

    @pytest.mark.parametrize(
        "q", _posteriors("cuda") if torch.cuda.is_available() else [], ids=lambda q: type(q).__name__
    )
    def test_compiles_into_one_graph_and_replays(self, q: Gaussian) -> None:
        eps = noise.sobol_normal(32, q.noise_dim, 0).cuda()
        eager = kernels.log_expected_softmax(q, eps)
        assert eager is not None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = kernels.log_expected_softmax(q, eps)
        assert captured is not None
        captured.fill_(float("nan"))
        graph.replay()
        assert torch.equal(captured, eager)
        kind, rest = q.__class__, _rest(q)
        compiled = torch.compile(lambda mean: kernels.log_expected_softmax(kind(mean, *rest), eps), fullgraph=True)
        torch.testing.assert_close(compiled(q.mean_TN), eager, rtol=1e-6, atol=1e-6)


def _rest(q: Gaussian) -> tuple[object, ...]:
    return tuple(value for name, value in q.__dict__.items() if name != "mean_TN")
