"""The five largest Hessian eigenvalues of mini-batches of 16: `howvits.hessian` against its peers, in turn.

Every contestant gets the same loss (NLL + l2), the same batches and the plain attention that has second derivatives. PyHessian stops by its own rule; eigsh
runs at its default tolerance and at 1e-3; eigenthings is given the smallest number of steps that reaches a residual of 1e-3, found beforehand and not counted.
What is wrong is how far the worst of the five eigenvalues is from those of Lanczos at a residual of 1e-6.

    pip install pyhessian==0.1 curvlinops-for-pytorch==3.0.1 hessian-eigenthings==1.0.0a5
    python tests/bench/hessian.py [--rounds 3] [--batches 4] [--threads N] [model ...]
"""
import argparse

import numpy as np
import pandas as pd
import torch
from timing import in_turn

from howvits.data import load_dataset
from howvits.evaluation import keep_memory
from howvits.hessian import HessianProduct, lanczos, measure_spectrum, twice_differentiable
from howvits.losses import curved_parameters, draw_batches, l2_term, soft_nll
from howvits.models import create_model
from howvits.training import RunConfig

MODELS, K, TOL, DECAY = ("vit", "resnet", "vit_ti", "resnet_50"), 5, 1e-3, 0.05


class Loss:
    "NLL + l2 of a model on one batch."

    def __init__(self, model, images, targets):
        self.model, self.images, self.targets = model, images, targets
        self.parameters, self.decay = curved_parameters(model, DECAY)

    def of_logits(self, logits, targets): return soft_nll(logits, targets) + l2_term(self.parameters, self.decay)

    def __call__(self, *_): return self.of_logits(self.model(self.images), self.targets)


def ours(losses):
    return measure_spectrum(losses[0].model, [(loss.images, loss.targets) for loss in losses], K, DECAY, TOL, progress=False).eigenvalue.to_numpy().reshape(-1, K)


def pyhessian(loss):
    from pyhessian import hessian
    with twice_differentiable(loss.model):
        loss.model.zero_grad()
        return hessian(loss.model, loss.of_logits, (loss.images, loss.targets), cuda=False).eigenvalues(maxIter=100, tol=TOL, top_n=K)[0]


def curvlinops(loss, tol):
    from curvlinops import HessianLinearOperator
    from scipy.sparse.linalg import aslinearoperator, eigsh
    from scipy.sparse import diags_array
    with twice_differentiable(loss.model):
        nll = HessianLinearOperator(loss.model, torch.nn.CrossEntropyLoss(), loss.parameters, [(loss.images, loss.targets)], check_deterministic=False)
        return eigsh(nll.to_scipy() + aslinearoperator(diags_array(loss.decay.numpy())), k=K, which="LM", tol=tol)[0].tolist()


def eigenthings(loss, steps):
    from hessian_eigenthings import HessianOperator, lanczos as their_lanczos
    with twice_differentiable(loss.model):
        operator = HessianOperator(loss.model, [None], loss)
        return their_lanczos(operator, k=K, max_iter=steps, tol=TOL, reorthogonalize=True, seed=0)


def lanczos_of(loss, **options):
    return lanczos(HessianProduct(loss.model, loss.images, loss.targets, loss.parameters, loss.decay), loss.decay, K, challenge=0, **options)


def compare(name, batches, rounds):
    config = RunConfig(name, dataset="fashion_mnist_mini", epochs=1, augment="weak", mixup=0.0, cutmix=0.0)
    torch.manual_seed(0)
    model = create_model(name, dataset="fashion_mnist_mini")
    losses = [Loss(model, *batch) for batch in draw_batches(load_dataset(config.dataset, "train", augment="weak"), config, count=batches)]
    steps = [lanczos_of(loss, tol=TOL)[3] for loss in losses]
    exact = np.sort([lanczos_of(loss, tol=1e-6, size=120)[0] for loss in losses])
    contestants = {
        "howvits": lambda: ours(losses),
        "pyhessian": lambda: [pyhessian(loss) for loss in losses],
        "curvlinops + eigsh": lambda: [curvlinops(loss, 0) for loss in losses],
        "curvlinops + eigsh, tol 1e-3": lambda: [curvlinops(loss, TOL) for loss in losses],
        "eigenthings": lambda: [eigenthings(loss, n).eigenvalues.tolist() for loss, n in zip(losses, steps)],
    }
    wrong = {who: np.max(abs(np.sort(find()) - exact) / abs(exact)) for who, find in contestants.items()}
    seconds = in_turn(contestants, rounds)
    return [dict(model=name, contestant=who, **{"seconds a batch": s / batches, "times ours": s / seconds["howvits"], "wrong by": wrong[who]}) for who, s in seconds.items()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    for name, default in (("rounds", 3), ("batches", 4), ("threads", torch.get_num_threads())): parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_memory()
    print(pd.DataFrame([row for name in options.models for row in compare(name, options.batches, options.rounds)]).to_string(index=False, float_format="{:.3g}".format))
