"""Damages a saved checkpoint, again and again: a restore raises, or gives what was saved, and nothing else.

A run of two steps is saved. Each case copies the newer step and damages one of its files: a flipped bit, a file cut
off, a block of zeros, a deleted file. Then it is restored, and compared with what was saved to the bit.

    python tests/support/corruption.py --cases 1000
"""

import collections
import json
import logging
import pathlib
import random
import shutil
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

import campaigns
import helpers
import jaxmp

KINDS = ("flip", "cut", "zeros", "delete")
POLICY = jaxmp.get_policy("bf16", keep_fp32=("norm",))
TX = jaxmp.mixed_precision(jaxmp.fused_adamw(1e-2, state_dtype=jnp.int8), POLICY, remainder_bits=16)
EXTRA = {"key": jax.random.key(3), "position": {"epoch": 2, "seen": np.int64(2**40), "rate": 0.5}}
METADATA = {"run": "a", "notes": [1, 2.5, None]}


def make_state():
    """(params, opt_state) after a step: params in 16 and 32 bits, moments in 8, remainders, counts."""
    rng = np.random.default_rng(0)
    params32 = {f"w{i}": jnp.asarray(rng.normal(size=(64, 64)), jnp.float32) for i in range(2)} | {"norm": jnp.ones(64)}

    @jax.jit
    def made(params32):
        params, opt_state = POLICY.cast_to_param(params32), TX.init(params32)
        return jaxmp.apply_gradients(TX, jax.tree.map(lambda x: x / 3, params), opt_state, params)

    jaxmp.get_loss_scale(())  # the gradients are made by hand
    return made(params32)


def saved_run(directory):
    """Saves steps 1 and 2 into `directory`; returns (params, opt_state)."""
    params, opt_state = make_state()
    with jaxmp.checkpoint.manager(directory, max_to_keep=None) as manager:
        for step in (1, 2):
            jaxmp.checkpoint.save(manager, step, params=params, opt_state=opt_state, extra=EXTRA, metadata=METADATA)
    return params, opt_state


def digest(tree):
    """What is compared: structure, dtypes and every bit."""
    raw = jax.tree.map(
        lambda x: jax.random.key_data(x) if jax.dtypes.issubdtype(_dtype(x), jax.dtypes.prng_key) else x, tree
    )
    return [(type(x).__name__, str(_dtype(x)), np.shape(x), np.asarray(x).tobytes()) for x in jax.tree.leaves(raw)]


def _dtype(x):
    return getattr(x, "dtype", np.result_type(type(x)) if isinstance(x, bool | int | float) else None)


def damage(file, kind, chance):
    """Damages one file; returns what was done, in words."""
    size = file.stat().st_size
    if kind == "delete":
        file.unlink()
        return "deleted"
    data = bytearray(file.read_bytes())
    at, words = chance.randrange(max(size, 1)), ""
    if kind == "cut":
        data, words = data[:at], f"cut to {at} of {size} bytes"
    elif kind == "zeros":
        length = chance.choice((1, 16, 256, 4096))
        data[at : at + length] = bytes(min(length, size - at))
        words = f"{length} zeros at {at} of {size}"
    else:
        bit = chance.randrange(8)
        if size:
            data[at] ^= 1 << bit
        words = f"bit {bit} of byte {at} of {size} flipped"
    file.write_bytes(data)
    return words


def run(directory, cases, seed=0):
    """Runs the cases; returns (how often each came out how, by kind; what was silently wrong)."""
    base = pathlib.Path(directory)
    params, opt_state = saved_run(base / "run")
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    expected = digest((params, opt_state, EXTRA))
    with jaxmp.checkpoint.manager(base / "run", read_only=True) as steps:
        about = jaxmp.checkpoint.read_metadata(steps, 2)
    shutil.copytree(base / "run" / "2", base / "whole")
    files = sorted(x.relative_to(base / "whole") for x in (base / "whole").rglob("*") if x.is_file())
    chance, counts, wrong, unnamed = random.Random(seed), collections.Counter(), [], []
    for case in helpers.shown(range(cases), "damages"):
        shutil.rmtree(base / "run" / "2", ignore_errors=True)
        shutil.copytree(base / "whole", base / "run" / "2")
        kind = KINDS[case % len(KINDS)]
        # One half hits any file, one half the files in proportion to their size, where the arrays are.
        sizes = [(base / "whole" / x).stat().st_size for x in files]
        (name,) = [chance.choice(files)] if chance.random() < 0.5 else chance.choices(files, sizes)
        what = f"{name}: {damage(base / 'run' / '2' / name, kind, chance)}"
        try:
            with jaxmp.checkpoint.manager(base / "run", read_only=True) as steps:
                restored = jaxmp.checkpoint.restore(steps, TX, params=like, extra=EXTRA, step=2)
                same = digest((restored.params, restored.opt_state, restored.extra)) == expected
                same = same and jaxmp.checkpoint.read_metadata(steps, 2) == about
            outcome = "restored as it was saved" if same else "silently wrong"
            if not same:
                wrong.append(what)
        except ValueError as e:
            outcome = "an error that names the other step"
            if "Other steps there: [1]" not in str(e):
                unnamed.append(f"{what}: {str(e)[:300]}")
                outcome = "another error"
        counts[f"{kind}: {outcome}"] += 1
    return counts, wrong, unnamed


def main():
    arguments = campaigns.parser_of(__doc__, "--cases", 1000).parse_args()
    logging.disable(logging.CRITICAL)  # Orbax and its threads log each failed read
    with tempfile.TemporaryDirectory() as directory:
        counts, wrong, unnamed = run(directory, arguments.cases, arguments.seed)
    record = {
        "cases": arguments.cases,
        "silently_wrong": len(wrong),
        "outcomes": dict(sorted(counts.items())),
        "wrong": wrong,
        "other_errors": unnamed[:10],
        "versions": campaigns.versions("orbax-checkpoint"),
        "command": f"python tests/support/corruption.py --cases {arguments.cases} --seed {arguments.seed}",
    }
    print(json.dumps(record, indent=2))
    campaigns.save(arguments.json, record)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
