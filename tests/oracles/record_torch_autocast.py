"""Records which dtypes `torch.autocast("cuda")` gives: what tests/oracles/torch_autocast.json is made with.

    python record_torch_autocast.py        (torch 2.15.0; no GPU; the tests read the file and never run this)

Autocast for CUDA is a dispatch key: it looks at a tensor's device and dtype and casts before the operation runs. So it
needs no GPU. Fake tensors (`torch._subclasses.FakeTensorMode`) of device "cuda" pass through the same dispatcher as
real ones and carry shape and dtype alone; the state that `torch.autocast` refuses to set without CUDA is set directly.
`check` holds the recording against what is known: a linear layer gives float16, layer_norm float32.

The backward pass of fake CUDA tensors asks the driver for a context, so the dtypes of gradients are recorded from real
CPU tensors under `torch.autocast("cpu")`, whose lists differ; the file says so beside them.

The operations are those of the file: a name, an expression of a, b, c, ..., and the shapes of its arguments ("i": int64
in 0..1, "m": a mask); to record another one, write these three into it. Each is recorded for both autocast dtypes and
for arguments of 16 bits, of 32, mixed either way, of the other 16-bit dtype, and of 64 bits.
`MODELS`: layer by layer. Names of layers are those of tests/autocast_models.py.
"""

import json
import pathlib

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode

HALVES = {"f16": torch.float16, "bf16": torch.bfloat16}
FLOATS = HALVES | {"f32": torch.float32, "f64": torch.float64}
NAMES = {dtype: name for name, dtype in FLOATS.items()} | {torch.bool: "bool", torch.int64: "i64"}
FILE = pathlib.Path(__file__).with_name("torch_autocast.json")


class autocast:
    """`torch.autocast("cuda", dtype)` without its check for a driver."""

    def __init__(self, dtype):
        self.dtype = dtype

    def __enter__(self):
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", self.dtype)
        torch.autocast_increment_nesting()

    def __exit__(self, *_):
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled("cuda", False)


def name_of(x):
    if isinstance(x, tuple):
        return " ".join(name_of(y) for y in x)
    return NAMES[x.dtype if isinstance(x, torch.Tensor) else x]


def rows_of(lp, n):
    """The dtypes of `n` floating arguments that are tried under autocast to `lp`."""
    (other,) = set(HALVES) - {lp}
    rows = [[dtype] * n for dtype in (lp, "f32", other, "f64")]
    if n > 1:
        rows += [[lp, *["f32"] * (n - 1)], ["f32", *[lp] * (n - 1)]]
        rows += [["f64", *[lp] * (n - 1)], [other, *[lp] * (n - 1)]]
    return rows


def run(expression, shapes, dtypes):
    names, floats = iter("abcde"), iter(dtypes)
    arguments = {}
    for shape in shapes:
        if shape and shape[0] in ("i", "m"):
            kind, shape = shape
            arguments[kind] = torch.zeros(shape, dtype={"i": torch.int64, "m": torch.bool}[kind])
        else:
            arguments[next(names)] = torch.empty(shape, dtype=FLOATS[next(floats)])
    try:
        return name_of(eval(expression, {"torch": torch, "F": F}, arguments))
    except Exception as e:  # whatever an operation refuses with, is the record
        return "error: " + str(e).strip().splitlines()[0][:60]


def record_op(name, expression, shapes):
    floats = [shape for shape in shapes if not (shape and shape[0] in ("i", "m"))]
    cases = {}
    for lp, dtype in HALVES.items():
        rows = rows_of(lp, len(floats)) if floats else [[]]
        with autocast(dtype):
            cases[lp] = {" ".join(row): run(expression, shapes, row) for row in rows}
    return {"name": name, "torch": expression, "shapes": shapes, "cases": cases}


class Models:
    """Layer by layer, each model fills `seen`. Plain functions of parameters made on the spot."""

    def __init__(self):
        self.seen, self.parameters = {}, {}

    def see(self, name, x):
        self.seen[name] = x.dtype
        return x

    def layer(self, name, module, *args):
        module.requires_grad_(True)
        for key, p in module.named_parameters():
            self.parameters[f"{name}/{key}"] = p
        return self.see(name, module(*args))

    def loss(self, logits, labels):
        return self.see("loss", F.cross_entropy(logits, labels))

    def cnn(self):
        x = torch.rand(4, 1, 8, 8)
        x = self.layer("conv1", nn.Conv2d(1, 16, 3, padding=1), x)
        x = self.see("relu1", self.layer("bn1", nn.BatchNorm2d(16), x).relu())
        x = self.see("pool1", F.max_pool2d(x, 2))
        x = self.layer("conv2", nn.Conv2d(16, 32, 3, padding=1), x)
        x = self.see("relu2", self.layer("bn2", nn.BatchNorm2d(32), x).relu())
        x = self.see("pool2", x.mean((2, 3)))
        return self.loss(self.layer("head", nn.Linear(32, 10), x), torch.zeros(4, dtype=torch.int64))

    def transformer(self, width=32, heads=2, length=8):
        tokens = torch.zeros(4, length, dtype=torch.int64)
        x = self.layer("bytes", nn.Embedding(256, width), tokens)
        x = self.see("embed", x + self.layer("positions", nn.Embedding(length, width), torch.arange(length)))
        at = "block0/"
        y = self.layer(at + "norm1", nn.LayerNorm(width), x)
        qkv = self.layer(at + "qkv", nn.Linear(width, 3 * width), y)
        q, k, v = qkv.reshape(4, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        scores = self.see(at + "scores", torch.einsum("bhtd,bhsd->bhts", q, k) * (width // heads) ** -0.5)
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -1e4)
        weights = self.see(at + "softmax", scores.softmax(-1))
        y = self.see(at + "mixed", torch.einsum("bhts,bhsd->bhtd", weights, v))
        y = y.transpose(1, 2).reshape(4, length, width)
        x = self.see(at + "residual1", x + self.layer(at + "proj", nn.Linear(width, width), y))
        y = self.layer(at + "norm2", nn.LayerNorm(width), x)
        y = self.see(at + "gelu", F.gelu(self.layer(at + "up", nn.Linear(width, 4 * width), y), approximate="tanh"))
        x = self.see(at + "residual2", x + self.layer(at + "down", nn.Linear(4 * width, width), y))
        logits = self.layer("head", nn.Linear(width, 256), self.layer("norm", nn.LayerNorm(width), x))
        return self.loss(logits.reshape(-1, 256), tokens.reshape(-1))

    def lstm(self, width=32):
        x = torch.rand(4, 8, 8)
        h = c = torch.zeros(4, width)
        cell = nn.Linear(8 + width, 4 * width)
        for t in range(8):
            gates = self.layer("cell/gates", cell, torch.cat([x[:, t], h], -1))
            i, f, g, o = gates.chunk(4, -1)
            i = self.see("cell/sigmoid", i.sigmoid())
            c = self.see("cell/c", f.sigmoid() * c + i * self.see("cell/tanh", g.tanh()))
            h = self.see("cell/h", o.sigmoid() * c.tanh())
        return self.loss(self.layer("head", nn.Linear(width, 10), h), torch.zeros(4, dtype=torch.int64))

    def lstm_module(self, width=32):
        x = torch.rand(4, 8, 8)
        h = c = torch.zeros(4, width)
        cell = nn.LSTMCell(8, width)
        self.parameters |= {f"cell/{key}": p for key, p in cell.named_parameters()}
        for t in range(8):
            h, c = cell(x[:, t], (h, c))
        self.see("h", h), self.see("c", c)
        return self.loss(self.layer("head", nn.Linear(width, 10), h), torch.zeros(4, dtype=torch.int64))

    def moe(self, width=32, experts=4):
        x = self.see("relu", self.layer("embed", nn.Linear(64, width), torch.rand(16, 64)).relu())
        probs = self.see("softmax", self.layer("router", nn.Linear(width, experts, bias=False), x).softmax(-1))
        gates, chosen = probs.topk(2, -1)
        self.see("gates", gates)
        up, down = (torch.rand(s).requires_grad_() for s in ((experts, width, 64), (experts, 64, width)))
        self.parameters |= {"up": up, "down": down}
        one_hot = F.one_hot(chosen, experts).to(torch.float32)  # [N, 2, E]
        y = self.see("dispatched", torch.einsum("nke,nd->end", one_hot, x))
        y = self.see("gelu", F.gelu(self.see("up", torch.einsum("end,edf->enf", y, up)), approximate="tanh"))
        y = self.see("down", torch.einsum("enf,efd->end", y, down))
        combine = self.see("combine", (one_hot * gates[..., None]).sum(1))
        y = self.see("combined", torch.einsum("ne,end->nd", combine, y))
        x = self.layer("norm", nn.LayerNorm(width), self.see("residual", x + y))
        return self.loss(self.layer("head", nn.Linear(width, 10), x), torch.zeros(16, dtype=torch.int64))


MODELS = ("cnn", "transformer", "lstm", "lstm_module", "moe")


def dtypes(tensors):
    return {name: name_of(x) for name, x in tensors.items()}


def record_model(name):
    record = {}
    for lp, dtype in HALVES.items():
        with FakeTensorMode(), torch.device("cuda"), autocast(dtype):
            models = Models()
            getattr(models, name)()
        cpu = Models()
        with torch.autocast("cpu", dtype):
            loss = getattr(cpu, name)()
        loss.backward()
        assert cpu.parameters.keys() == models.parameters.keys()
        record[lp] = {
            "layers": dtypes(models.seen),
            "params": dtypes(models.parameters),
            "grads, on cpu": dtypes({key: p.grad for key, p in cpu.parameters.items()}),
        }
    return record


def check():
    """Whether CUDA's autocast acts on fake tensors at all, and none of it outside."""
    a, b = torch.empty(4, 8), torch.empty(8, 8)
    assert F.linear(a, b).dtype == torch.float32
    with autocast(torch.float16):
        y = F.linear(a, b)
        assert y.device.type == "cuda" and y.dtype == torch.float16
        assert F.layer_norm(y, (8,)).dtype == torch.float32


def main():
    with FakeTensorMode(), torch.device("cuda"):
        check()
        ops = [record_op(op["name"], op["torch"], op["shapes"]) for op in json.loads(FILE.read_text())["ops"]]
    record = {
        "source": {
            "package": "torch",
            "version": torch.__version__,
            "recorded": "CUDA autocast on fake CUDA tensors (torch._subclasses.FakeTensorMode), without a GPU; dtypes "
            "only; gradients of models: real CPU tensors under torch.autocast('cpu'); script: record_torch_autocast.py",
        },
        "cases": "autocast dtype: dtypes of a, b, c, ...: dtype of each result, or the error",
        "ops": ops,
        "models": {name: record_model(name) for name in MODELS},
    }
    text = json.dumps(record, separators=(",", ":")).replace('{"name"', '\n{"name"')
    FILE.write_text(text + "\n")


if __name__ == "__main__":
    main()
