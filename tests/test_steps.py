"""Networks of other people's making: what is seen of them, and what is refused, each of its kind."""
from collections import Counter

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F
from torchvision.models import MaxVit

from howvits.evaluation import evaluate
from howvits.models import create_model
from howvits.steps import find_steps, intervene, logits_of, observe

IMAGES = torch.randn(3, 3, 32, 32)


def seen(model, images=IMAGES, **kwargs):
    """Kinds and maps of the steps, each of which adds up."""
    found = Counter()

    def visit(step, stream, branch, output):
        close = getattr(F, step.activation) if step.activation else nn.Identity()
        assert torch.equal(close(stream + branch), output)
        assert output.shape == (len(images), *step.shape)
        found[step.kind, step.shape[1:]] += 1

    with torch.no_grad():
        logits = observe(model.eval(), images, visit, **kwargs)
        assert torch.equal(logits, logits_of(model(images)))
    return dict(found)


class Residual(nn.Module):
    """Two steps on 8 x 8 tokens of width 16."""

    def __init__(self, branch, join=torch.add):
        super().__init__()
        self.patch, self.branch, self.join, self.head = nn.Conv2d(3, 16, 4, 4), branch, join, nn.Linear(16, 10)

    def forward(self, x):
        x = self.patch(x).flatten(2).mT
        for _ in range(2): x = self.join(x, self.branch(x))
        return self.head(x.mean(1))


class Mixing(nn.Module):
    """A function of tokens (B, 64, 16) and of square weights."""

    def __init__(self, size, function):
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.randn(size, size) / 8), function

    def forward(self, x): return self.function(x, self.weight)


@pytest.mark.parametrize("size, function, kind", [
    (64, lambda x, w: w @ x, "mixer"),
    (16, lambda x, w: x @ w, "mlp"),
    (64, lambda x, w: torch.bmm(w.expand(len(x), -1, -1), x), "mixer"),
    (64, lambda x, w: torch.einsum("nm, bmc -> bnc", w, x), "mixer"),
    (64, lambda x, w: torch.einsum("...nc,nm->...mc", x, w), "mixer"),
    (16, lambda x, w: torch.einsum("bnc,cd", x, w).mT, "mlp"),  # the result's letters by the alphabet
    (64, lambda x, w: torch.tensordot(x, w, dims=([1], [0])).mT, "mixer"),
    (16, lambda x, w: torch.tensordot(x, w, dims=1), "mlp"),
    (1, lambda x, w: torch.fft.fft2(x).real, "mixer"),
    (1, lambda x, w: torch.fft.irfft(torch.fft.rfft(x, dim=1) * w, n=64, dim=1), "mixer"),
    (1, lambda x, w: torch.fft.fft(x).real, "mlp"),
    (64, lambda x, w: F.linear(x.mT, w).mT, "mixer"),
    (16, F.linear, "mlp"),
])
def test_positions_are_mixed_by_any_product_with_weights(size, function, kind):
    assert seen(Residual(Mixing(size, function))) == {(kind, (8, 8)): 2}


@pytest.mark.parametrize("join", [
    lambda x, f: x.add(f, alpha=0.5), lambda x, f: torch.add(f, x, alpha=2), lambda x, f: x.clone().add_(f, alpha=0.5), lambda x, f: torch.add(input=x, other=f),
], ids=["alpha", "scaled stream", "in place", "by keywords"])
def test_an_addition_may_scale(join):
    model, found = Residual(nn.Linear(16, 16), join).eval(), []
    with torch.no_grad():
        observe(model, IMAGES, lambda step, stream, branch, output: found.append((output - stream - branch).abs().max()))
        assert len(found) == 2 and max(found) < 1e-5
        with intervene(model, {0: "drop_branch", 1: "drop_branch"}): scale = (model(IMAGES) - model.head.bias) / (model.head(model.patch(IMAGES).flatten(2).mean(2)) - model.head.bias)
    assert torch.allclose(scale, scale[0, 0].round(), rtol=1e-3)  # 1, or 2 x 2 where the stream itself is doubled twice


@pytest.mark.parametrize("name, join", {
    "add": lambda x, f: torch.add(x, f, out=torch.empty_like(x)), "sum": lambda x, f: torch.stack([x, f]).sum(0), "lerp": lambda x, f: torch.lerp(x, f, 0.5),
    "addcmul": lambda x, f: torch.addcmul(x, f, torch.tensor(0.5)), "sub": lambda x, f: x - (-f)}.items())
def test_a_sum_in_other_words_is_named(name, join):
    with pytest.raises(ValueError, match=f"maps are joined by {name}, as in .*, write a \\+ b"): find_steps(Residual(nn.Linear(16, 16), join), IMAGES)


class TokensFirst(nn.Module):
    """A ViT whose tokens are (N, B, C), as PyTorch's own layers want them and CLIP has them."""

    def __init__(self, apart=1):
        super().__init__()
        self.apart, self.patch, self.head = nn.Parameter(torch.randn(apart, 1, 16)), nn.Conv2d(3, 16, 8, 8), nn.Linear(16, 10)
        self.places = nn.Parameter(torch.randn(16 + apart, 1, 16))
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, norm_first=True), 2, enable_nested_tensor=False)

    def forward(self, x):
        x = self.patch(x).flatten(2).permute(2, 0, 1)
        x = torch.cat([self.apart.expand(-1, x.shape[1], -1), x]) + self.places
        return self.head(self.encoder(x).mean(0))


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("apart", [0, 1, 5])
def test_tokens_may_come_before_the_batch(batch, apart):
    model, images = TokensFirst(apart), torch.randn(batch, 3, 32, 32)
    assert seen(model, images) == {("msa", (4, 4)): 2, ("mlp", (4, 4)): 2}
    layout, streams = find_steps(model, images)[0].layout, []
    with torch.no_grad(): observe(model, images, lambda step, stream, *_: streams.append(stream), raw=True)
    tokens = streams[0]
    assert torch.equal(layout.prefix(tokens), tokens[:apart].transpose(0, 1))
    assert torch.equal(layout.map(tokens).flatten(2), tokens[apart:].permute(1, 2, 0))


@pytest.mark.parametrize("grid", [None, (4, 4)])
def test_registers_may_stand_behind_the_patches(grid):
    class Behind(TokensFirst):
        def forward(self, x):
            x = self.patch(x).flatten(2).permute(2, 0, 1)
            return self.head(self.encoder(torch.cat([x, self.apart.expand(-1, x.shape[1], -1)]) + self.places).mean(0))

    model, streams = Behind(4), []
    with torch.no_grad(): observe(model, IMAGES, lambda step, stream, *_: streams.append(stream), raw=True, grid=grid)
    layout = find_steps(model, IMAGES, grid=grid)[0].layout
    assert (layout.start, layout.end) == (0, 4)
    assert torch.equal(layout.map(streams[0]).flatten(2), streams[0][:16].permute(1, 2, 0)) and torch.equal(layout.prefix(streams[0]), streams[0][16:].transpose(0, 1))


@pytest.mark.parametrize("size, window", [(56, 7), (24, 3), (24, 4), (24, 6), (28, 7), (28, 4), (40, 5)])
def test_windows_and_grids_of_any_size_are_put_back(size, window):
    model, images = MaxVit((4 * size, 4 * size), 16, window, [16], [2], 8, 0.0, num_classes=10).eval(), torch.randn(2, 3, 4 * size, 4 * size)
    assert seen(model, images) == {("conv", (size, size)): 2, ("msa", (size, size)): 4, ("mlp", (size, size)): 4}
    maps, results = [], []
    for layer in model.modules():
        if type(layer).__name__ == "PartitionAttentionLayer": layer.register_forward_hook(lambda module, args, result: results.append(result.clone()))
    with torch.no_grad(): observe(model, images, lambda step, stream, branch, output: maps.append(output.clone()) if step.kind == "mlp" else None)
    assert len(maps) == 4 and all(map(torch.equal, maps, results))


class Reversible(nn.Module):
    """Two halves of the channels that are added to in turn, each by what the other has become."""

    def __init__(self, depth=3):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 10)
        self.f, self.g = (nn.ModuleList(nn.Conv2d(4, 4, size, padding=size // 2) for _ in range(depth)) for size in (3, 1))

    def forward(self, x):
        a, b = self.stem(x).chunk(2, 1)
        for f, g in zip(self.f, self.g):
            a = a + f(F.relu(b))
            b = b + g(F.relu(a))
        return self.head(torch.cat([a, b], 1).mean((2, 3)))


def test_streams_may_take_turns():
    model = Reversible()
    assert seen(model) == {("conv", (32, 32)): 3, ("mlp", (32, 32)): 3}
    steps = find_steps(model, IMAGES)
    assert [(s.name, s.stream) for s in steps] == [(f"{branch}.{i}", stream) for i in range(3) for branch, stream in (("f", 0), ("g", 1))]


class Switched(nn.Module):
    """Adds elsewhere when its switch is turned."""

    def __init__(self):
        super().__init__()
        self.on, self.f, self.g = True, nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 1)

    def forward(self, x):
        x = self.f(x)
        return ((x + self.f(x)) if self.on else (self.g(x) + x)).mean((2, 3))


def test_steps_are_found_anew_when_a_switch_is_turned():
    model = Switched()
    assert seen(model) == {("conv", (32, 32)): 1}
    model.on = False
    assert seen(model) == {("mlp", (32, 32)): 1}
    assert not find_steps(model, IMAGES)[0].stream_first


class Tuple(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x): return self.f(x), None


def test_a_named_module_may_return_a_tuple():
    model, maps = nn.Sequential(Tuple()), []
    model.forward = lambda x: model[0](x)[0].mean((2, 3))
    observe(model, IMAGES, lambda step, stream, branch, output: maps.append(output), modules="0")
    assert torch.equal(maps[0], model[0].f(IMAGES))


@pytest.mark.parametrize("wrap", [lambda y: y, lambda y: (y, None), lambda y: [y], lambda y: {"logits": y}, lambda y: type("Output", (), {"logits": y})()])
def test_logits_are_found_in_what_a_model_returns(wrap):
    class Wrapped(Residual):
        def forward(self, x): return wrap(super().forward(x))

    torch.manual_seed(0)
    model = Wrapped(nn.Linear(16, 16))
    data = [(IMAGES, torch.tensor([0, 1, 2]))]
    assert seen(model) == {("mlp", (8, 8)): 2} and evaluate(model, data)["n"] == 3


@pytest.mark.parametrize("spoil, sentence", {
    "a name": (lambda m: "vit", "howvits.create_model makes one of a name"),
    "TorchScript": (lambda m: torch.jit.trace(m.eval(), IMAGES), "The model is compiled by TorchScript"),
    "TorchScript inside": (lambda m: Residual(torch.jit.script(nn.Linear(16, 16))), "branch is compiled by TorchScript"),
}.values())
def test_what_cannot_be_watched_is_refused(spoil, sentence):
    with pytest.raises((TypeError, ValueError), match=sentence): find_steps(spoil(Residual(nn.Linear(16, 16))), IMAGES)


@pytest.mark.parametrize("images, kwargs, sentence", [
    (IMAGES[:0], {}, "batch of images is empty"), (IMAGES[0], {}, r"\(B, C, H, W\)"), (None, {}, "NoneType"), (IMAGES[:, :1], {}, "repeat the grey channel"),
    (IMAGES, {"grid": (4, 16)}, r"show their own, 8 x 8"), (IMAGES, {"grid": 8}, r"grid has to be \(height, width\)"), (IMAGES, {"modules": "layers.*"}, "No module of Residual named"),
])
def test_bad_input_is_one_sentence(images, kwargs, sentence):
    model = Residual(nn.Linear(16, 16))
    for call in (lambda: find_steps(model, images, **kwargs), lambda: observe(model, images, lambda *_: None, **kwargs)):
        with pytest.raises(ValueError, match=sentence) as error: call()
        assert "\n" not in str(error.value)


def test_the_first_convolution_need_not_be_registered_first():
    class Auxiliary(Residual):
        def __init__(self):
            super().__init__(nn.Linear(16, 16))
            self._modules = {"aside": nn.Conv2d(1, 4, 3), **self._modules}

    assert len(find_steps(Auxiliary(), IMAGES)) == 2


def test_watching_while_steps_are_shown_is_refused():
    model = Residual(nn.Linear(16, 16))
    with pytest.raises(RuntimeError, match="while steps are being shown"): observe(model, IMAGES, lambda *_: observe(model, IMAGES, lambda *_: None))
    assert seen(model) == {("mlp", (8, 8)): 2}


def test_a_model_that_was_compiled_and_called_before_is_still_seen():
    torch.compiler.reset()
    model = create_model("vit").eval()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        want = compiled(IMAGES)
        assert sum(seen(model).values()) == 12
        steps = []
        assert torch.equal(observe(compiled, IMAGES, lambda step, *_: steps.append(step.index)), want) and steps == list(range(12))
        with intervene(compiled, {0: "drop_branch"}): assert not torch.equal(compiled(IMAGES), want)
        assert torch.equal(compiled(IMAGES), want)


def test_distilled_networks_are_read_in_either_mode():
    model = timm.create_model("deit_tiny_distilled_patch16_224", num_classes=10)
    model.set_distilled_training(True)
    assert isinstance(model(torch.zeros(2, 3, 224, 224)), tuple)
    images = torch.randn(2, 3, 224, 224)
    assert [s.layout.start for s in find_steps(model, images)] == [2] * 24
    assert evaluate(model, [(images, torch.tensor([0, 9]), "a third item")])["n"] == 2 and model.training
